"""Turning memory that codes have saved into a larger batch: a proposal, never a deed.

COMET raises the batch until the device is full. A larger batch is another training: its gradient
varies less, and the learning rate belongs to it. So this only computes and says; who trains
decides.

    batches = er.tools.BatchAdvisor(budget="6 GiB")
    batches.note(len(x), er.peak(step))
    print(batches.propose())
"""

from dataclasses import dataclass

from elbowroom.errors import PlanError
from elbowroom.units import parse_nbytes, show_nbytes

_MOST_AT_ONCE = 2  # a line through few points is not trusted further than this


@dataclass(frozen=True)
class BatchProposal:
    """A batch that should fit; `peak_nbytes` is estimated, unless it is the largest noted."""

    batch: int
    now: int
    peak_nbytes: int
    budget_nbytes: int

    def __str__(self) -> str:
        room = f"{show_nbytes(self.peak_nbytes)} of {show_nbytes(self.budget_nbytes)} (estimated)"
        if self.batch <= self.now:
            return f"batch {self.now} stays: a larger one would not fit; it takes {room}"
        times = self.batch / self.now
        return (
            f"batch {self.now} -> {self.batch} should fit: {room}. It is yours to take: by linear "
            f"scaling the learning rate goes with it ({times:.2f}x). Measure its peak and note it."
        )


class BatchAdvisor:
    """Notes peaks, and proposes the largest batch below a budget.

    budget    bytes, or "6 GiB"
    multiple  the batch is a multiple of this

    Raises ValueError for a budget that cannot be read.
    """

    def __init__(self, budget: int | str, *, multiple: int = 1) -> None:
        if not isinstance(multiple, int) or multiple < 1:
            raise PlanError(f"multiple={multiple!r} is not possible; it is an int of 1 or more")
        self.budget_nbytes = parse_nbytes(budget)
        self.multiple = multiple
        self._peaks: dict[int, int] = {}

    def note(self, batch: int, peak_nbytes: int) -> None:
        """A step with this batch had this peak, weights and states included. The larger counts."""
        if batch < 1 or peak_nbytes < 0:
            raise PlanError(f"a batch of {batch} with a peak of {peak_nbytes} bytes cannot be")
        self._peaks[batch] = max(peak_nbytes, self._peaks.get(batch, 0))

    def propose(self) -> BatchProposal:
        """The largest batch that should fit, at most twice the largest noted.

        From one batch alone all bytes count as growing with it, which promises too little; from two
        on a line is fitted, from its two largest. Raises PlanError before anything was noted.
        """
        if not self._peaks:
            raise PlanError("no batch was noted yet; call note(batch, er.peak(step)) first")
        now = max(self._peaks)
        fixed, each = self._line(now)
        fits = now
        if each > 0:
            fits = min(int((self.budget_nbytes - fixed) / each), _MOST_AT_ONCE * now)
        batch = max(fits // self.multiple * self.multiple, now)
        return BatchProposal(batch, now, int(fixed + each * batch), self.budget_nbytes)

    def _line(self, now: int) -> tuple[float, float]:
        """(bytes at no batch at all, bytes for each sample)."""
        before = max((batch for batch in self._peaks if batch < now), default=0)
        at_before = self._peaks.get(before, 0)
        each = max(0.0, (self._peaks[now] - at_before) / (now - before))
        return self._peaks[now] - each * now, each
