"""Memory measurements of the steps of one fitted model, and the lines that are logged about them.

One measurement runs at a time, from a step's first forward to the next step.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from elbowroom.fitting.co_resident import Neighbors
from elbowroom.fitting.foreign_hooks import ForeignHooks
from elbowroom.fitting.forward import FittedSaving
from elbowroom.fitting.measurement import Measurement
from elbowroom.fitting.messages import (
    say_setting,
    say_settings_vary,
    warn_blind,
    warn_inside,
    warn_later,
)
from elbowroom.fitting.model_state import ModelState
from elbowroom.fitting.options import FitOptions, MemoryState
from elbowroom.fitting.planner import Planner
from elbowroom.fitting.previous_outputs import PreviousOutputs
from elbowroom.fitting.replayed import ReplayedForward
from elbowroom.fitting.state import FitState
from elbowroom.measure.background import Background
from elbowroom.measure.interval import Interval
from elbowroom.plan.presets import Preset, held_nbytes
from elbowroom.plan.rehearsal import SAFE
from elbowroom.runtime.context import Context
from elbowroom.runtime.ledger import Tally

if TYPE_CHECKING:
    from elbowroom.fitting.forward import FittedSaving
    from elbowroom.fitting.options import FitOptions, MemoryState


@dataclass(frozen=True)
class Foreseen:
    """The peak of a step at a setting, estimated.

    is_whole  the forward had ended; else what it had not saved yet is not counted
    """

    setting: Preset
    nbytes: int
    is_whole: bool


def foresee(
    saving: "FittedSaving", options: "FitOptions", memory: "MemoryState", *, is_whole: bool
) -> list[Foreseen]:
    """Returns an estimate for each setting that the options allow, the mildest first.

        resident bytes + gradients and states to come + what the setting holds
        + transients, not measured: as many largest tensors as a first step reserves

    This is an upper bound in most cases. A plan, which is made from a whole step, may take less.

    memory: as the step began
    """
    largest = max((one.nbytes for one in saving.storages), default=0)
    stands = memory.static_nbytes + memory.unallocated_nbytes + SAFE * largest
    return [
        Foreseen(preset, stands + held_nbytes(preset, saving.storages), is_whole)
        for preset in options.presets
    ]


_AMPLE = 0.25  # of the budget
_MOST_SETTINGS = 8  # lines about the setting of a kind of forward
_OTHER_NBYTES = 32 << 20  # less than this a process takes for Python itself
HOOKS = "hooks"  # the setting of a step in which the program's own hooks hold what is saved


class Extra(Enum):
    """Measurements that no plan needs, and how many of them are made at most."""

    EVALUATION = 0, 16  # forwards without gradients within settled steps
    LATE = 1, 16  # settled steps, to measure one if none was until then
    FOREIGN = 2, 4  # steps with the program's own hooks

    @property
    def most(self) -> int:
        return self.value[1]


class MeasuredSteps:
    """Measurements of a model's steps, whatever kinds of forwards these have.

    planner         the `Planner` that the last forward followed
    peak_nbytes     the peak of the last measured step, everything included
    peak_setting    the setting of that step: "plan", the name of a preset, or "hooks"
    highest_nbytes  the highest of all measured peaks
    options         the budget is smaller than the user's once memory has run out
    is_exact        the last forward held no lossy code
    was_exact       no forward so far has held one
    ran_backward    a backward has asked for what a forward had saved
    """

    _step: Measurement | None = None

    def __init__(self, model_state: ModelState, options: FitOptions) -> None:
        self.model_state, self.options = model_state, options
        self.context = Context(keeps_bits=options.exact is not False)
        self.context.drops_codecs, self.context.taken = True, set()
        self.planner = Planner(options, model_state, self.context)
        self.peak_nbytes: int | None = None
        self.peak_setting = ""
        self.highest_nbytes: int | None = None
        self.is_exact = self.was_exact = True
        self.ran_backward = False
        self._last: FittedSaving | ReplayedForward | None = None
        self._opened: FittedSaving | ReplayedForward | None = None  # the last context
        self._neighbors = Neighbors(model_state)
        self._outputs = PreviousOutputs()
        self._said: set[Hashable] = set()  # lines that are logged once
        self._skips_measuring = False  # the next step is measured of a model that runs inside
        self._extra: Counter[Extra] = Counter()  # how many there were
        self._foreign = ForeignHooks()
        self._in_use_nbytes = inf  # at the end of forwards in which nothing was examined, at least

    def _context(
        self, *, may_climb: bool = True, after: FittedSaving | None = None
    ) -> FittedSaving:
        recorder = None if self._step is None else self._step.recorder
        opened = self.planner.context_of(recorder, may_climb=may_climb, after=after)
        self._opened = opened
        self._neighbors.opened(opened.ledger)
        return opened

    def _memory(self) -> MemoryState:
        """Returns the memory as a step begins.

        States that the step will create get a format that fits.
        """
        memory = self.model_state.memory()
        if self.model_state.states.make_room(self.options, memory):
            memory = self.model_state.memory()
        co_resident_nbytes, outputs_nbytes = self._neighbors.nbytes, 0
        if not self._neighbors.waits:  # outputs of a graph that waits are among what it holds
            outputs_nbytes = self._outputs.nbytes(self.model_state.tensors)
        return replace(memory.with_co_resident(co_resident_nbytes), outputs_nbytes=outputs_nbytes)

    def _ended(self, saving: FittedSaving) -> None:
        """Records the end of a forward whose graph holds saved tensors."""
        self.planner.forward_ended(saving)
        self._last = saving
        self._note_setting(saving)

    def passes(self, forward: Callable[[], Any]) -> Any:
        """Runs a forward that records no gradients, such as an evaluation.

        One that runs while a settled step waits for its backward was in no measured step.
        """
        self.end_step()
        last = self._last
        inside = last is not None and last.waits and self._step is None
        if not inside or self._closed or self._has_ample_room:
            return forward()
        if not self._may_measure(Extra.EVALUATION):
            return forward()
        running = Interval.start(
            self.model_state.nbytes + self._neighbors.nbytes, self.model_state.device
        )
        try:
            return forward()
        finally:
            peak = None if running is None else running.stop()
            if peak is not None and peak > self.options.budget_nbytes:
                self._extra[Extra.EVALUATION] = Extra.EVALUATION.most  # it is said once
                warn_inside(self.options, peak)

    def end_step(self) -> None:
        """Ends the measurement of the last step, unless its backward is still to come."""
        if self._step is None:
            return
        over = self._last is not None and self._last.is_over
        if over or (self._foreign.graph is not None and not self._foreign.waits):
            self._step.end()

    def _learn(self) -> None:
        """Ends the measurement of the last step, as a step begins, and learns what it needed."""
        self._note_backward()
        last, self._last = self._last, None
        step, self._step = self._step, None
        graph, self._foreign.graph = self._foreign.graph, None
        if step is None:
            return
        if graph is not None:
            self._end_foreign_step(step, graph)
            return
        step.end()
        self._note_later(step)
        if last is None or self._closed or isinstance(last, ReplayedForward):
            return
        planner = self.planner
        # A rehearsal of a model inside has ended it, which would happen in each step.
        self._skips_measuring = step.peak is None and self._neighbors.others_learn
        if step.peak is not None:
            self._note_highest(step.peak)
            if planner.plan is None or not step.makes_states:  # else it is no later step's
                self._note_peak(step.peak, last)
        planner.learn(
            last, step, self.model_state.memory(), others_learn=self._neighbors.others_learn
        )

    def _measure(self, given: object = ()) -> None:
        """Starts to measure the step that begins, if there is something to learn from it.

        given: its inputs; backward through inputs that another model has made belongs to that model
        """
        state = self.planner.state
        if self._closed or self._step is not None:
            return
        if self._skips_measuring:
            self._skips_measuring = False
            return
        if not (state.wants_measuring or self._is_unknown(state)):
            return
        leaves = tree_leaves(given) if self._neighbors.is_inside else []
        until = [x for x in leaves if isinstance(x, Tensor)]
        self._step = Measurement.start(
            self.model_state,
            state.memory,
            writes=state.wants_writing,
            outputs=self._outputs.alive() if state.memory.outputs_nbytes else (),
            until=until,
        )
        waits = Background.running is not None  # backward is another model's; measure after it
        blind = self._step is None and self.highest_nbytes is None
        if blind and not waits and self._is_first(warn_blind):
            warn_blind(self.options)

    def _begin_foreign_step(self) -> None:
        """Begins a step in which the program's own hooks hold what is saved, or goes on with it."""
        if self._foreign.waits:
            return
        if self._last is not None and self._last.waits:
            self.interrupt()  # a part of this step was held by us
        self._learn()
        self.context.begin_step()
        if not self._closed and self._may_measure(Extra.FOREIGN):
            self._step = Measurement.start(self.model_state, self._memory(), writes=False)

    def _end_foreign_step(self, step: Measurement, graph: Tally) -> None:
        """Ends the measurement of such a step, unless its backward is still to come."""
        if graph.waits:
            step.close()
            return
        step.end()
        if step.peak is not None:
            self.peak_nbytes, self.peak_setting = step.peak, HOOKS
            self._note_highest(step.peak)

    @property
    def setting(self) -> str:
        """The current setting of steps."""
        return self.planner.setting if self._foreign.graph is None else HOOKS

    def _is_unknown(self, state: FitState) -> bool:
        """Returns whether steps have settled that could not be measured."""
        known = self.peak_nbytes is not None and not state.is_blind
        return state.settled and not known and self._may_measure(Extra.LATE)

    def _may_measure(self, extra: Extra) -> bool:
        """Returns whether another such measurement is made, which is counted."""
        if self._extra[extra] >= extra.most:
            return False
        self._extra[extra] += 1
        return True

    def _is_first(self, line: Hashable) -> bool:
        """Returns whether a line that is logged once is still to be logged."""
        is_first = line not in self._said
        self._said.add(line)
        return is_first

    def _note_setting(self, saving: FittedSaving | ReplayedForward) -> None:
        chosen, rounds = saving.setting, self.context.rounds
        self.is_exact = chosen.exact and not rounds
        self.was_exact = self.was_exact and self.is_exact
        said = replace(chosen, exact=False) if rounds and chosen.exact else chosen
        self._say(said, rounds=rounds and chosen.exact)

    def _note_peak(self, peak_nbytes: int, last: FittedSaving | ReplayedForward) -> None:
        self.peak_nbytes, self.peak_setting = peak_nbytes, last.setting.name
        self._note_highest(peak_nbytes)

    def _note_highest(self, peak_nbytes: int) -> None:
        self.highest_nbytes = max(peak_nbytes, self.highest_nbytes or 0)

    def _note_later(self, step: Measurement) -> None:
        """Warns, once, if what the program did after the optimizer's step is above the budget.

        What other fitted models do meanwhile is measured of these.
        """
        is_above = step.later_nbytes > self.options.budget_nbytes >= (step.peak or inf)
        if is_above and self._neighbors.is_alone and self._is_first(warn_later):
            warn_later(self.options, step.later_nbytes)

    def _note_backward(self) -> None:
        last = self._last
        self.ran_backward |= isinstance(last, FittedSaving) and last.ledger.backward_began

    @property
    def _has_ample_room(self) -> bool:
        """True if steps are so small that they need not be compared with each other."""
        highest = self.highest_nbytes
        return highest is not None and highest <= _AMPLE * self.options.budget_nbytes

    def _note_in_use(self, nbytes: int) -> None:
        """Has the next forward examined if much more is in use after this one than after others.

        It tells what it holds, if that is why. The program may have taken the memory as well.
        """
        least_nbytes = self._in_use_nbytes
        if nbytes - least_nbytes > max(_AMPLE * self.options.budget_nbytes, _OTHER_NBYTES):
            self.planner.forget_scripts()
            least_nbytes = nbytes
        self._in_use_nbytes = min(least_nbytes, nbytes)

    def foreseen(self) -> list[Foreseen]:
        """Returns what a step like the last one would take at each setting, by its forward alone.

        Empty if nothing was examined.
        """
        opened = self._opened
        if not isinstance(opened, FittedSaving) or not opened.storages:
            return []
        is_whole = opened is self._last
        return foresee(opened, self.options, self.planner.memory, is_whole=is_whole)

    def finish(self) -> None:
        """Ends the training: its last step counts as measured, if none with its setting was."""
        self._note_backward()
        last, step = self._last, self._step
        if step is not None and self._foreign.graph is not None:
            self._step = None
            self._end_foreign_step(step, self._foreign.graph)
        elif step is not None and last is not None and self.peak_setting != self.planner.setting:
            step.end()
            if step.peak is not None:
                self._note_peak(step.peak, last)
        self.close()

    def close(self) -> None:
        """Ends a measurement that runs, since the model is not fitted any more."""
        self.interrupt()
        self.model_state.is_fitted = False
        self._neighbors.leave()

    @property
    def _closed(self) -> bool:
        return not self.model_state.is_fitted

    def interrupt(self) -> None:
        """Discards the running measurement: what follows is no training step."""
        self._stop()
        self._last = None

    def _stop(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.close()

    def __del__(self) -> None:
        self._stop()  # the model was freed during a measurement: the profiler must be stopped

    def _say(self, chosen: Preset, *, rounds: bool) -> None:
        """Logs one line when the setting of a kind of forward changes, some times at most.

        A program that takes another path in each step may change it in each. rounds: see
        `say_setting`.
        """
        planner = self.planner
        if planner.said == (chosen.name, chosen.exact) or planner.settings_said > _MOST_SETTINGS:
            return
        planner.said = chosen.name, chosen.exact
        planner.settings_said += 1
        if planner.settings_said > _MOST_SETTINGS:
            say_settings_vary(self.options)
            return
        say_setting(
            self.options,
            chosen,
            rounds=rounds,
            was_lossy=say_setting in self._said,
            estimated=planner.state.is_estimated,
            given=planner.state.follows_given,
        )
        if not (chosen.exact or rounds):
            self._said.add(say_setting)
