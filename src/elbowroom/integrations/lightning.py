"""A budget for the Trainer of Lightning.

from elbowroom.integrations.lightning import Budget
trainer = Trainer(callbacks=[Budget("6 GiB")])
trainer.fit(module, data)
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from elbowroom.errors import PlanError
from elbowroom.fitting import Summary
from elbowroom.integrations.budgeted import Budgeted

_log = logging.getLogger("elbowroom")


class Budget(Callback):  # type: ignore[misc]  # of a library whose types are skipped
    """Callback that keeps the training of a LightningModule inside a memory budget.

        trainer = lightning.Trainer(callbacks=[Budget("6 GiB", exact=True)])
        Budget("6 GiB", network="generator")    # fits this network alone

    Lightning calls `training_step`, which calls networks that are attributes of the module. These
    networks are fitted. A loss outside of them is not covered. The module's loggers get their peak
    every `log_every_n_steps` (`logs=False`: never). At the end, the networks are released.
    """

    def __init__(
        self,
        budget: float | str,
        network: str | Sequence[str] | None = None,
        *,
        logs: bool = True,
        **settings: Any,
    ) -> None:
        """network: the attribute that `training_step` calls, or a list of several.

        Several share the budget. None: all children with parameters; of a `ModuleList` or a
        `ModuleDict`, the modules in it.

        budget, settings: those of `er.fit`: exact, noise, offload, min_nbytes, plan.

        logs: whether the module's loggers get the figures
        """
        super().__init__()
        self._logs = logs
        self._network = network
        self._budget, self._settings = budget, settings
        self._budgeted: dict[str, Budgeted] = {}  # by the name of its network
        self._is_checked = False

    @property
    def summary(self) -> Summary | None:
        """Summary of the budget so far; None before the training has begun.

        Of several networks, it is the one whose step takes the most.
        """
        highest = self._highest()
        return None if highest is None else highest.summary

    @property
    def summaries(self) -> dict[str, Summary]:
        """Summaries by the name of the network."""
        every = self._budgeted.items()
        return {name: one.summary for name, one in every if one.summary is not None}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit the networks."""
        networks = _networks(pl_module, self._network)
        for gone in self._budgeted.keys() - networks.keys():
            self._budgeted.pop(gone).end()
        self._is_checked = False
        for name, network in networks.items():
            one = self._budgeted.setdefault(name, Budgeted(self._budget, self._settings))
            one.begin(network, trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the figures; warn if the first batch has called no network."""
        if not self._is_checked:
            self._is_checked = True
            if not any(one.is_called for one in self._budgeted.values()):
                _log.warning(
                    "the budget has no effect: training_step did not call %s; name the networks "
                    'that it calls, as in Budget("6 GiB", network="net")',
                    ", ".join(self._budgeted),
                )
                for one in self._budgeted.values():
                    one.note_warned()
        is_due = (trainer.global_step + 1) % trainer.log_every_n_steps == 0
        if self._logs and trainer.loggers and is_due:
            highest = self._highest()
            if highest is not None:
                highest.log_to(trainer.loggers, trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release the networks, and log whether each has kept the budget."""
        every = self._finished()
        # Of children that nobody named, it is enough if some are called.
        warns = self._network is not None or not any(one.is_called for one in every)
        for one in every:
            one.end(warns)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Release the networks: the training has failed, which needs no other line."""
        for one in self._finished():
            one.release()

    def _finished(self) -> list[Budgeted]:
        """Ends the last step of all networks, which may share steps."""
        every = list(self._budgeted.values())
        for one in every:
            one.finish()
        return every

    def _highest(self) -> Budgeted | None:
        """Returns the network whose last measured step took the most."""
        for one in self._budgeted.values():
            one.look()
        return max(
            self._budgeted.values(),
            key=lambda one: (one.summary and one.summary.last_nbytes) or 0,
            default=None,
        )


def _networks(module: nn.Module, given: str | Sequence[str] | None) -> dict[str, nn.Module]:
    """Returns the networks to fit, by name."""
    if given is not None:
        names = [given] if isinstance(given, str) else list(given)
        return {name: module.get_submodule(name) for name in names}
    networks = dict(_children(module))
    if not networks:
        raise PlanError(
            f"{type(module).__name__} has no child with parameters; make the network that "
            "training_step calls an attribute of it"
        )
    return networks


def _children(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields the children with parameters; of containers that cannot be called, those in them."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _children(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            yield prefix + name, child
