"""Keeping a model's training under a budget of bytes: start safe, measure, relax, watch.

    held before a step   weights, buffers, persistent gradients, optimizer states   counted
  + saved for backward   what the ledger holds                                      counted, chosen
  + transients           workspaces, restored tensors, fresh gradients              measured:
  <= budget                                                                         peak - the rest

1. The first forward starts at the safest exact rung of the ladder (`plan/ladder.py`). Transients
   are not known yet; one tensor of the largest size is set aside for them. If what is held comes
   closer to the budget than that, forward climbs to a stricter rung on the spot, and encodes what
   it has kept so far: lossy codes only where the budget needs them.
2. That step is measured by the allocator. With its transients known, the mildest rung that fits is
   taken, and measured again; if that was too hopeful, the next stricter one is taken for good.
3. From then on every forward is watched in the same way: a larger batch than before climbs for
   that step.

A budget that no allowed rung meets raises BudgetTooSmall with the least that would do: in forward,
as soon as it is certain, or at the beginning of the step after the one that was measured. A forward
that is refused counts to its end without holding anything.
"""

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elbowroom.errors import BudgetTooSmall
from elbowroom.measure.interval import Interval
from elbowroom.plan.action import Action
from elbowroom.plan.ladder import (
    EXACT_RUNGS,
    LOSSY_RUNGS,
    Rung,
    SavedStorage,
    choose,
    held_nbytes,
    site_nbytes,
)
from elbowroom.plan.site import Site
from elbowroom.runtime.context import Context
from elbowroom.runtime.hooks import Saving
from elbowroom.units import show_nbytes

_log = logging.getLogger("elbowroom")
_GENEROUS = 12  # so many largest tensors cover the transients of a step that was not measured yet
_SAFEST_EXACT = 1  # index of "exact" in every ladder


class Fitting:
    """The controller of one fitted model. It is called at every forward."""

    def __init__(
        self,
        model: nn.Module,
        budget_nbytes: int,
        optimizer: Optimizer | None,
        *,
        exact: bool | None,
        min_nbytes: int,
    ) -> None:
        self._interval: Interval | None = None
        self._model = weakref.ref(model)
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self.budget_nbytes = budget_nbytes
        self.min_nbytes = min_nbytes
        self.rungs: tuple[Rung, ...] = EXACT_RUNGS if exact else EXACT_RUNGS + LOSSY_RUNGS
        self.rung = _SAFEST_EXACT
        self.static_nbytes = 0  # held before this step
        self._unborn_nbytes = 0  # gradients and optimizer states that it will create
        self.context = Context()
        self.peak_nbytes: int | None = None  # of the last measured step, everything included
        self._transient_nbytes: int | None = None
        self._measured_from = 0  # static bytes when the interval began
        self._settled = False
        self._said = -1
        self._last: FittedSaving | None = None

    def __call__(self) -> "FittedSaving":
        """A context for the forward that begins now."""
        self.context.begin_step()
        self.static_nbytes = storage_nbytes(self._static())
        self._unborn_nbytes = self._count_unborn()
        self._learn()
        if not self._settled and self._interval is None:
            self._measured_from = self.static_nbytes
            self._interval = Interval.start(self.static_nbytes, self._device())
        return FittedSaving(self)

    def allowed_nbytes(self, largest_nbytes: int) -> int:
        """What may be held for backward; as long as nothing is measured, a guess for the rest."""
        free = self.budget_nbytes - self.static_nbytes
        return free - (largest_nbytes if self._transient_nbytes is None else self._transient_nbytes)

    def surely_allowed_nbytes(self) -> int:
        """The same without guesses.

        More than this cannot be held, or the optimizer's states would not fit.
        """
        free = self.budget_nbytes - self.static_nbytes
        return -1 if self._unborn_nbytes > free else free - (self._transient_nbytes or 0)

    def forward_ended(self, saving: "FittedSaving") -> None:
        """Note what this forward saved; say what was chosen; refuse a budget that cannot be met."""
        if saving.impossible:
            self._refuse(saving)
        self._last = saving
        self.rung = saving.rung if self._transient_nbytes is None else self.rung
        self._say(saving.rung)

    def close(self) -> None:
        """End a measurement that runs. The model is not fitted any more."""
        if self._interval is not None and self._interval.close():
            self._interval = None
        self._settled = True

    def __del__(self) -> None:
        self.close()  # the model died while a step was measured: the profiler must not run on

    def _learn(self) -> None:
        """At the beginning of a step: what did the last one need?"""
        last, self._last = self._last, None
        if last is None or self._settled or self._interval is None:
            return
        peak = self._interval.stop()
        self._interval = None
        if peak is not None:
            self._relax(last, peak)

    def _relax(self, last: "FittedSaving", peak_nbytes: int) -> None:
        first = self._transient_nbytes is None
        born_nbytes = max(0, self.static_nbytes - self._measured_from)  # the optimizer's states
        self.peak_nbytes = peak_nbytes
        self._transient_nbytes = max(
            0, peak_nbytes - self._measured_from - last.ledger.after_nbytes
        )
        found = self._mildest(last, fits=peak_nbytes + born_nbytes <= self.budget_nbytes)
        if found is None and (peak_nbytes > self.budget_nbytes or not born_nbytes):
            self._refuse(last)
            return
        # Not sure yet, because states were made in this step: the same rung again, measured.
        self.rung = last.rung if found is None else found if first else max(found, self.rung)
        self._settled = found is not None and (not first or found == last.rung) and not born_nbytes

    def _mildest(self, last: "FittedSaving", *, fits: bool) -> int | None:
        """The mildest rung by estimate, or that of the last step, which has been seen to fit."""
        found = choose(self.rungs, last.storages, self.allowed_nbytes(0))
        if fits and (found is None or found > last.rung):
            return last.rung
        return found

    def _refuse(self, saving: "FittedSaving") -> None:
        step = saving.storages
        least_rung = min(self.rungs, key=lambda rung: held_nbytes(rung, step))
        saved = held_nbytes(least_rung, step)
        other, kind = self._transient_nbytes, "measured"
        if other is None:  # a guess must be named generously
            other, kind = self._unborn_nbytes + _GENEROUS * saving.largest_nbytes, "estimated"
        least = self.static_nbytes + saved + other
        parts = ", ".join(
            f"{name} {show_nbytes(size)}" for name, size in self._parts(saved, other) if size
        )
        lossy_helps = held_nbytes(LOSSY_RUNGS[-1], step) < saved
        more = "Allow lossy codes with exact=None, or h" if lossy_helps else "H"
        raise BudgetTooSmall(
            f"budget {show_nbytes(self.budget_nbytes)} is below the {show_nbytes(least)} that this "
            f"step needs at rung '{least_rung.name}' ({kind}): {parts}. "
            f"{more}alve the batch, or give budget={least}.",
            least_nbytes=least,
        )

    def _parts(self, saved_nbytes: int, other_nbytes: int) -> list[tuple[str, int]]:
        model = self._model()
        weights = [] if model is None else [*model.parameters(), *model.buffers()]
        weight_nbytes = storage_nbytes(weights)
        rest = self.static_nbytes - weight_nbytes
        return [
            ("weights", weight_nbytes),
            ("gradients and optimizer states", rest),
            ("saved for backward", saved_nbytes),
            ("transients and what the first step will create", other_nbytes),
        ]

    def _static(self) -> list[Tensor]:
        model = self._model()
        optimizer = None if self._optimizer is None else self._optimizer()
        parameters = [] if model is None else list(model.parameters())
        tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        tensors += [] if model is None else list(model.buffers())
        states = [] if optimizer is None else list(optimizer.state.values())
        return tensors + [
            value for state in states for value in state.values() if isinstance(value, Tensor)
        ]

    def _count_unborn(self) -> int:
        """Bytes of the gradients and optimizer states that the first step will create.

        Two fp32 states a parameter, unless the class says less.
        """
        model = self._model()
        trainable = [] if model is None else [p for p in model.parameters() if p.requires_grad]
        gradients = sum(p.numel() * p.element_size() for p in trainable if p.grad is None)
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None or optimizer.state:
            return gradients
        momentum_free = isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults.get(
            "momentum"
        )
        states = 0 if momentum_free else 1 if isinstance(optimizer, torch.optim.SGD) else 2
        return gradients + states * sum(4 * p.numel() for p in trainable)

    def _device(self) -> torch.device:
        model = self._model()
        first = None if model is None else next(iter(model.parameters()), None)
        return torch.device("cpu") if first is None else first.device

    def _say(self, rung: int) -> None:
        """One line when the rung changes.

        At WARNING, which Python shows by default, when it is lossy.
        """
        if rung == self._said:
            return
        self._said = rung
        chosen = self.rungs[rung]
        kind = "exact" if chosen.exact else "lossy, because the exact rungs do not fit"
        level = logging.INFO if chosen.exact else logging.WARNING
        _log.log(
            level,
            "budget %s: saved tensors at rung '%s' (%s)",
            show_nbytes(self.budget_nbytes),
            chosen.name,
            kind,
        )


class FittedSaving(Saving):
    """One forward of a fitted model: climbs the ladder while it runs, if it must."""

    def __init__(self, fitting: Fitting) -> None:
        super().__init__(self._decide_site, min_nbytes=fitting.min_nbytes, context=fitting.context)
        self.rung = fitting.rung
        self.impossible = False
        self.largest_nbytes = 0
        self.storages: list[SavedStorage] = []
        self._fitting = fitting

    def __exit__(self, *error: Any) -> None:
        self.storages = [
            SavedStorage(slot.entry.before_nbytes, tuple(slot.sites), slot.asked_exact)
            for slot in self._identity.slots()
        ]
        super().__exit__(*error)
        self._fitting.forward_ended(self)

    def _decide_site(self, site: Site) -> Action:
        self.largest_nbytes = max(self.largest_nbytes, site.nbytes)
        allowed = self._fitting.allowed_nbytes(self.largest_nbytes)
        rungs = self._fitting.rungs
        while (
            self.rung < len(rungs) - 1
            and self.ledger.held_nbytes + site_nbytes(rungs[self.rung], site) > allowed
        ):
            self.rung += 1
            self.tighten(rungs[self.rung].policy)
        if self.impossible or self.ledger.held_nbytes > self._fitting.surely_allowed_nbytes():
            self.impossible = True
            self.drop_everything()
        return rungs[self.rung].policy(site)


def storage_nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages under these tensors, each counted once."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in tensors
        if t.layout is torch.strided
    }
    return sum(storages.values())
