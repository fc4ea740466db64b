"""The meter of one training: which steps are watched, and what was learned from them."""

import logging
from collections import Counter
from typing import Any

from elbowroom.measure.error_report import ErrorReport
from elbowroom.measure.noise import NoiseTable
from elbowroom.measure.watching import StepWatch, Variants
from elbowroom.plan import SiteName
from elbowroom.runtime.observer import Watch

_log = logging.getLogger("elbowroom.measure")
_LONGEST = 64  # steps of a first run
_PATIENCE = 3  # steps in which no op is probed for the first time (some check closed forms)


class NoiseMeter:
    """The observer of one training. `table` is what it knows.

    every, run  a run of `run` watched steps begins at every `every`-th step. The first run is twice
                as long, and goes on until all ops that can be probed have been, 64 steps at most.
                Errors are read in the last step of a run, and in all steps of the first run. The
                other steps only show how gradients vary, so codes do not change within a run.
    probes      ops that are probed in such a step
    variants    codecs to try on a sample of each held tensor
    """

    def __init__(
        self, every: int = 50, run: int = 4, probes: int = 2, variants: Variants | None = None
    ) -> None:
        self.every, self.run, self.probes, self.variants = every, run, probes, variants
        self.table = NoiseTable()
        self.step = 0
        self._first, self._unprobed = 2 * run, (0, 0)  # steps of the first run; how many, and when
        self.probed: Counter[SiteName] = Counter()
        self._watch: StepWatch | None = None
        self._without_backward = 0  # watched steps that had no backward before the next

    def begin(self) -> Watch | None:
        """Begins a forward, and takes in what the one before has found."""
        self.harvest()
        if self._is_watched(self.step):
            full = self._is_full(self.step)
            self._watch = StepWatch(self.table, self.probed, self.probes, self.variants, full=full)
        self.step += 1
        return self._watch

    def harvest(self) -> None:
        """Takes in what the last watched step has found. Its backward must be over."""
        watch, self._watch = self._watch, None
        if watch is not None:
            held, readings = watch.deliver()
            is_new = self.table.take(held, readings)
            self._go_on_probing()
            added = self.table.added_last if is_new else None
            if self._is_full(self.step - 1) and not readings:
                added = 0.0  # nothing lossy was read
            self.table.gradient.end_step(last=not self._is_watched(self.step), added=added)
            self._warn_of_order(watch)

    def _warn_of_order(self, watch: StepWatch) -> None:
        """Logs, once, that nothing can be learned, because backwards run in another order."""
        self._without_backward += watch.lacks_backward
        if self._without_backward and self.step == self._first and not self.table.gradient.draws:
            _log.warning(
                "of the first %d steps, %d had no backward before the next context began, and no "
                "three in a row had one: what codes add and how mini-batches vary stays unknown, "
                "and settings stay where they are. Run backward of each forward before the next "
                "one, and forwards without backward outside of er.saving or under torch.no_grad()",
                self.step,
                self._without_backward,
            )

    @property
    def is_past_first_run(self) -> bool:
        """True if all that can be probed has had its turn, or the first run its length."""
        return self.step > self._first

    def error_report(self) -> ErrorReport:
        """Returns what the codes of the last watched step add, and what was known before."""
        self.harvest()
        return ErrorReport.of(self.table)

    def state_dict(self) -> dict[str, Any]:
        """Returns all that a checkpoint needs to go on watching as if nothing had happened."""
        self.harvest()
        return {
            "step": self.step,
            "first": [self._first, *self._unprobed],
            "probed": [[*name, count] for name, count in self.probed.items()],
            "table": self.table.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state from `state_dict()`."""
        self._watch, self.step = None, state["step"]
        self._first, *unprobed = state["first"]
        self._unprobed = unprobed[0], unprobed[1]
        self.probed = Counter({SiteName(m, op, nth): n for m, op, nth, n in state["probed"]})
        self.table.load_state_dict(state["table"])

    def _go_on_probing(self) -> None:
        """Makes the first run longer as long as probes come to ops that none has seen."""
        unprobed = self.table.unprobed
        if unprobed != self._unprobed[0]:
            self._unprobed = unprobed, self.step
        moves = self._unprobed[1] > self.step - _PATIENCE
        if unprobed and moves and self.probes and self.step == self._first < _LONGEST:
            self._first += 1

    def _is_full(self, step: int) -> bool:
        return step < self._first or step % self.every == min(self.run, self.every) - 1

    def _is_watched(self, step: int) -> bool:
        return step < self._first or step % self.every < self.run
