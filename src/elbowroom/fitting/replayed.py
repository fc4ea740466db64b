"""Forwards of a fitted model that follow a script: nothing is looked at (`runtime/replay`).

A step may have several. As long as all follow theirs, each counts what it holds for itself. One
that is looked at goes on from what those before it hold, as if they had been looked at.
"""

from elbowroom.fitting.forward import Fit, FittedSaving
from elbowroom.plan.presets import Preset
from elbowroom.runtime.hooks import Saving
from elbowroom.runtime.ledger import Entry, Tally
from elbowroom.runtime.replay.replay import Replay
from elbowroom.runtime.replay.script import Script


class ReplayedSaving(Replay):
    """Context that follows a script, and observes the rest of a forward that differs from it.

    rest   looks at it
    entry  what was held until then, in the ledger of that
    """

    bounded = True

    def __init__(self, fit: Fit, script: Script, after: "ReplayedForward | None" = None) -> None:
        super().__init__(script, fit.context)
        self._fit, self._after = fit, after
        self.rest: FittedSaving | None = None
        self.entry: Entry | None = None

    def look(self) -> Saving:
        """Returns a context that may climb, in which what is held already counts: about so much."""
        after = None if self._after is None else self._after.begun()
        self.rest, share = FittedSaving(self._fit, after=after), self.share
        before, held = self.script.before_nbytes, self.script.held_nbytes
        self.entry = self.rest.ledger.open("", "replayed", "", int(share * before))
        self.entry.hold(int(share * held))
        return self.rest


class ReplayedForward:
    """Forward that followed a script, once it has ended: what its graph holds, until backward.

    setting  what its script was written by
    after    the one before it in the same step
    """

    def __init__(self, fit: Fit, script: Script, after: "ReplayedForward | None" = None) -> None:
        plan = fit.plan
        preset = fit.options.presets[fit.preset]
        self.setting = preset if plan is None else Preset("plan", plan.look_up, plan.exact)
        self.ledger = Tally(script.held_nbytes, script.before_nbytes)
        self._fit, self._script, self._after = fit, script, after
        self._over = self._count_over()

    def _count_over(self) -> int:
        """Returns how many forwards before it nobody waits for any more."""
        before = self._after
        return 0 if before is None else before._count_over() + (not before.ledger.waits)

    @property
    def was_asked(self) -> bool:
        """True if a backward of the step has begun since this forward."""
        return not self.ledger.waits or self._count_over() > self._over

    @property
    def waits(self) -> bool:
        """True if its backward is still to come, or that of one before it."""
        return self.ledger.held_nbytes > 0 or (self._after is not None and self._after.waits)

    @property
    def is_over(self) -> bool:
        """True if nothing is held any more."""
        return not self.waits

    def begun(self) -> FittedSaving:
        """Returns a context after which the same step goes on with another forward."""
        saving = FittedSaving(self._fit)
        saving.goes_on_from(self._script.calls)
        one: ReplayedForward | None = self
        while one is not None:
            one.ledger.move_to(saving.ledger)
            one = one._after
        return saving
