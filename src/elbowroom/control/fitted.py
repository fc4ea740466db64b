"""One forward of a fitted model: it follows its plan, or its rung, and climbs if it must."""

from types import TracebackType
from typing import Protocol

from elbowroom.plan.action import Action
from elbowroom.plan.ladder import Rung, SavedStorage, site_nbytes
from elbowroom.plan.site import Site
from elbowroom.runtime.context import Context
from elbowroom.runtime.hooks import Saving
from elbowroom.runtime.observer import Recorder


class Fit(Protocol):
    """What a forward asks of the controller of its model."""

    rungs: tuple[Rung, ...]
    rung: int
    min_nbytes: int
    context: Context

    @property
    def planned(self) -> Rung | None: ...
    @property
    def recompute(self) -> frozenset[str]: ...
    def allowed_nbytes(self, largest_nbytes: int) -> int: ...
    def surely_allowed_nbytes(self) -> int: ...
    def forward_ended(self, saving: "FittedSaving") -> None: ...


class FittedSaving(Saving):
    """A context whose setting climbs the ladder while it runs, where what is held nears the budget.

    rung        where on the ladder it is
    climbed     whether it has left the plan, or the rung that it began with
    impossible  even the strictest rung holds too much: the forward only counts to its end
    too_much    it would have had to climb, and may not: likewise
    storages    what was saved, once the context is closed
    """

    def __init__(
        self,
        fit: Fit,
        recorder: Recorder | None = None,
        *,
        may_climb: bool = True,
        counts: bool = False,
    ) -> None:
        """may_climb: else it only counts, from where it would have to. counts: from the start."""
        super().__init__(
            self._decide_site,
            min_nbytes=fit.min_nbytes,
            context=fit.context,
            recorder=recorder,
            recompute=fit.recompute,
        )
        self.rung = fit.rung
        self.climbed = False
        self.impossible = False
        self.too_much = counts
        self._may_climb = may_climb
        self.largest_nbytes = 0
        self.storages: list[SavedStorage] = []
        self._fit = fit

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.storages = [
            SavedStorage(slot.entry.before_nbytes, tuple(slot.sites), slot.asked_exact)
            for slot in self._identity.slots()
        ]
        super().__exit__(kind, error, trace)
        if kind is None:
            self._fit.forward_ended(self)

    @property
    def setting(self) -> Rung:
        """What decides now."""
        planned = None if self.climbed else self._fit.planned
        return self._fit.rungs[self.rung] if planned is None else planned

    def _decide_site(self, site: Site) -> Action:
        self.largest_nbytes = max(self.largest_nbytes, site.nbytes)
        allowed = self._fit.allowed_nbytes(self.largest_nbytes)
        rungs = self._fit.rungs
        while (
            not self.too_much
            and self.rung < len(rungs) - 1
            and self.ledger.held_nbytes + site_nbytes(self.setting, site) > allowed
        ):
            self.too_much = not self._may_climb
            if self._may_climb:
                # No rung but the strictest is sure to hold less than a plan.
                planned = self._fit.planned is not None
                self.rung = len(rungs) - 1 if planned else self.rung + 1
                self.climbed = True
                self.tighten(rungs[self.rung].policy)
        if self.impossible or self.ledger.held_nbytes > self._fit.surely_allowed_nbytes():
            self.impossible = True
            self.too_much = self.too_much or not self._may_climb
        if self.impossible or self.too_much:
            self.drop_everything()
        return self.setting.policy(site)
