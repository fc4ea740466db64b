"""Forwards of a fitted model that replay a script, without examining ops (`runtime/replay`).

A step may have several forwards. As long as all of them replay, each counts its own bytes. A
forward that is examined starts from the bytes that earlier ones hold, as if they had been examined.
"""

from elbowroom.fitting.forward import Fit, FittedSaving
from elbowroom.plan.presets import Preset
from elbowroom.runtime.ledger import Entry, Tally
from elbowroom.runtime.replay.replay import Replay
from elbowroom.runtime.replay.script import Script
from elbowroom.runtime.saving import Saving

_AT_ONCE = 3  # bytes that stand in backward for each that is saved: a larger tensor's gradients


class ReplayedSaving(Replay):
    """Context that replays a script, and examines the rest of a forward that differs from it.

    rest   the context that examines it
    entry  the bytes held until then, in the ledger of `rest`
    """

    bounded = lasts = True

    def __init__(self, fit: Fit, script: Script, after: "ReplayedForward | None" = None) -> None:
        super().__init__(script, fit.context)
        self._fit, self._after = fit, after
        room_nbytes = fit.surely_allowed_nbytes() - script.held_nbytes
        if after is not None:
            room_nbytes -= after.held_nbytes
        self.spare = int(max(room_nbytes, 0) / (_AT_ONCE * script.nbytes_each))
        self.rest: FittedSaving | None = None
        self.entry: Entry | None = None

    @property
    def may_begin_again(self) -> bool:
        return self._fit.redoes

    def look(self) -> Saving:
        """Returns a context that may climb, in which the bytes that are held already count."""
        after = None if self._after is None else self._after.begun()
        self.rest, (before, held) = FittedSaving(self._fit, after=after), self.so_far
        more = int(self.surplus * self.script.nbytes_each)
        self.entry = self.rest.ledger.open("", "replayed", "", before + more)
        self.entry.hold(held + more)
        if self.surplus > self.spare:  # what is held already can be made no smaller
            self.rest.diverge()
        return self.rest


class ReplayedForward:
    """Forward that replayed a script, after its end: the bytes of its graph, until backward.

    setting  the setting of its script
    after    the forward before it in the same step
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
    def held_nbytes(self) -> int:
        """Bytes that it and those before it hold now."""
        before = 0 if self._after is None else self._after.held_nbytes
        return before + self.ledger.held_nbytes

    @property
    def backward_began(self) -> bool:
        """True if a backward of the step has begun since this forward."""
        return not self.ledger.waits or self._count_over() > self._over

    @property
    def waits(self) -> bool:
        """True if its backward is still to come, or that of one before it."""
        return self.ledger.held_nbytes > 0 or (self._after is not None and self._after.waits)

    @property
    def waits_again(self) -> bool:
        """True if a backward has come to one of them with create_graph=True, and none since."""
        before = self._after is not None and self._after.waits_again
        return before or self.ledger.waits_again

    @property
    def is_over(self) -> bool:
        """True if nothing is held any more."""
        return not self.waits

    def begun(self) -> FittedSaving:
        """Returns a context with which the same step continues with another forward."""
        saving = FittedSaving(self._fit)
        saving.goes_on_from(self._script.calls)
        one: ReplayedForward | None = self
        while one is not None:
            one.ledger.move_to(saving.ledger)
            one = one._after
        return saving
