"""Memory measurement of one step of a fitted model.

It runs from the first forward to the end of the optimizer's step. If no optimizer of the model
steps, it runs to the next step's forward.
"""

from collections.abc import Iterable

from torch import Tensor

from elbowroom.fitting.model_state import ModelState
from elbowroom.fitting.options import MemoryState
from elbowroom.measure.interval import Interval
from elbowroom.measure.recorder import StepRecorder
from elbowroom.measure.recording import Recording
from elbowroom.plan.profile import Profile


class Measurement:
    """Measurement of one step, which runs from `start` to `end` or `close`.

    memory    resident bytes as it began
    writes    moment by moment; else only the peak is wanted
    recorder  notified of saved tensors, if it writes
    peak      in bytes, once it has ended; None: this thread could not measure it
    profile   likewise, of a whole step that was profiled
    later_nbytes  as in `Interval`; 0 of a profiled step
    """

    def __init__(self, memory: MemoryState, running: Interval | Recording) -> None:
        self.memory = memory
        self.writes = isinstance(running, Recording)
        self.peak: int | None = None
        self.profile: Profile | None = None
        self.later_nbytes = 0
        self._running: Interval | Recording | None = running

    @classmethod
    def start(
        cls,
        model_state: ModelState,
        memory: MemoryState,
        *,
        writes: bool,
        outputs: Iterable[Tensor] = (),
        until: Iterable[Tensor] = (),
    ) -> "Measurement | None":
        """Starts a measurement and returns it; None if this cannot be measured now.

        outputs: those of earlier forwards that are held still, as `memory` counts them
        until: inputs that another fitted model has made; backward beyond them belongs to that model
        """
        running: Interval | Recording | None
        if writes:
            running = Recording.start(model_state.tensors(), model_state.device, outputs)
        else:
            stands = memory.static_nbytes + memory.outputs_nbytes
            passing = [*model_state.gradients(), *outputs]
            running = Interval.start(stands, model_state.device, passing)
        if running is None:
            return None
        running.until(until)
        running.until_updated(model_state.is_trained_by)
        return cls(memory, running)

    @property
    def recorder(self) -> StepRecorder | None:
        return self._running.recorder if isinstance(self._running, Recording) else None

    @property
    def makes_states(self) -> bool:
        """True if the optimizer had no states as the step began."""
        return self.memory.unallocated_state_nbytes > 0

    def end(self) -> None:
        """Ends the measurement, and reads its results. A second call does nothing."""
        running, self._running = self._running, None
        if isinstance(running, Recording):
            seen = running.finish()
            running.close()
            seen = seen and seen.shifted(self.memory.co_resident_nbytes)
            self.peak = None if seen is None else seen.peak
            self.profile = seen if running.has_backward else None
        elif running is not None:
            self.peak = running.stop()
            self.later_nbytes = running.later_nbytes

    def close(self) -> None:
        """Aborts the measurement; results that were read are kept."""
        running, self._running = self._running, None
        if running is not None:
            running.close()
