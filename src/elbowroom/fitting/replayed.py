"""Forwards of a fitted model that follow a script: nothing is looked at (`runtime/replay`)."""

from elbowroom.fitting.forward import Fit, FittedSaving
from elbowroom.plan.ladder import Rung
from elbowroom.runtime.hooks import Saving
from elbowroom.runtime.ledger import Entry, Tally
from elbowroom.runtime.replay.replay import Replay
from elbowroom.runtime.replay.script import Script


class ReplayedSaving(Replay):
    """A context that follows a script, and looks at what is left of a forward that is another one.

    rest   looks at it
    entry  what was held until then, in the ledger of that
    """

    def __init__(self, fit: Fit, script: Script) -> None:
        super().__init__(script, fit.context)
        self._fit = fit
        self.rest: FittedSaving | None = None
        self.entry: Entry | None = None

    def look(self) -> Saving:
        """Return a context that may climb, in which what is held already counts: about so much."""
        self.rest, share = FittedSaving(self._fit), self.share
        before, held = self.script.before_nbytes, self.script.held_nbytes
        self.entry = self.rest.ledger.open("", "replayed", "", int(share * before))
        self.entry.hold(int(share * held))
        return self.rest


class ReplayedForward:
    """A forward that was known, once it has ended: what its graph holds, as long as that waits.

    setting  what its script was written by
    """

    def __init__(self, fit: Fit, script: Script) -> None:
        plan = fit.plan
        rung = fit.terms.rungs[fit.rung]
        self.setting = rung if plan is None else Rung("plan", plan.look_up, plan.exact)
        self.ledger = Tally(script.held_nbytes, script.before_nbytes)
        self._fit = fit

    @property
    def waits(self) -> bool:
        """Return whether its backward is still to come."""
        return self.ledger.held_nbytes > 0

    @property
    def is_over(self) -> bool:
        """Return whether nothing is held any more."""
        return not self.waits

    def counted(self, saving: FittedSaving) -> FittedSaving:
        """Let a context count what this graph holds, until it is asked for it."""
        tally = self.ledger
        entry = saving.ledger.open("", "replayed", "", tally.before_nbytes)
        entry.hold(tally.after_nbytes)
        tally.when_over(entry.close)
        return saving

    def begun(self) -> FittedSaving:
        """Return a context after which the same step goes on with another forward."""
        return self.counted(FittedSaving(self._fit))
