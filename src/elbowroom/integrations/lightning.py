"""A budget for the Trainer of Lightning.

from elbowroom.integrations.lightning import Budget
trainer = Trainer(callbacks=[Budget("6 GiB")])
trainer.fit(module, data)
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from elbowroom.errors import PlanError
from elbowroom.fitting import Summary
from elbowroom.integrations.budgeted import Budgeted


class Budget(Callback):  # type: ignore[misc]  # of a library whose types are skipped
    """Callback that keeps the training of a LightningModule inside a memory budget.

        trainer = lightning.Trainer(callbacks=[Budget("6 GiB", exact=True)])

    Lightning calls `training_step`, which calls a network that is an attribute of the module. This
    network is fitted. A loss outside of it is not covered. The module's loggers get the peak of the
    network every `log_every_n_steps`. At the end, the network is released.
    """

    def __init__(self, budget: float | str, network: str | None = None, **settings: Any) -> None:
        """network: the attribute that `training_step` calls; None: the only child with parameters.

        budget, settings: those of `er.fit`: exact, noise, offload, min_nbytes, plan.
        """
        super().__init__()
        self._network = network
        self._budgeted = Budgeted(budget, settings)

    @property
    def summary(self) -> Summary | None:
        """Summary of the budget so far; None before the training has begun."""
        return self._budgeted.summary

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit the network."""
        self._budgeted.begin(_network(pl_module, self._network), trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the figures."""
        if trainer.loggers and (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            self._budgeted.log_to(trainer.loggers, trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release the network."""
        self._budgeted.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Release the network: the training has failed."""
        self._budgeted.end()


def _network(module: nn.Module, name: str | None) -> nn.Module:
    if name is not None:
        return module.get_submodule(name)
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    if len(children) != 1:
        found = ", ".join(n for n, c in module.named_children() if c in children) or "none"
        raise PlanError(
            f"{type(module).__name__} has {len(children)} children with parameters ({found}), and "
            'Budget fits one network; name the one that training_step calls, as in Budget("6 GiB", '
            'network="net"), or hold all in one nn.Module'
        )
    return children[0]
