"""Models that share a step: a generator and the discriminator that judges what it has made.

    fake = G(z)                                   the step of G begins
    (loss(D(real)) + loss(D(fake.detach()))).backward(); od.step()
    loss(D(fake)).backward(); og.step()           G's graph is gone: the step is over

A forward of one fitted model that begins while a graph of another one waits for its backward is a
guest in that one's step. So there is one ledger, one measurement and one plan of all that is held
at one time, and its memory is that of both models. A backward that has not come to all graphs of
the step does not end it. A forward that begins while no graph waits begins a step of its own model,
and the measurements of other models' steps are over then.

After such a backward a forward goes on with the step if its model is a guest, or if its input has
been made by a graph. Otherwise (G(z) once more, while the old images are still there) the host has
begun another step.

Models share steps only with equal options (one budget), on one device and thread, in one process of
one, and without plans that were given, which know of one model each.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elbowroom.fitting.forward import FittedSaving
from elbowroom.fitting.forward_modes import ForwardModes
from elbowroom.fitting.model_state import ModelState
from elbowroom.fitting.options import FitOptions
from elbowroom.fitting.plan_cache import PlanCache
from elbowroom.fitting.planner import Planner
from elbowroom.fitting.replayed import ReplayedForward
from elbowroom.fitting.signature import Signature, signature_of
from elbowroom.plan.plan import Plan
from elbowroom.runtime import modules
from elbowroom.runtime.attach import Given
from elbowroom.runtime.ledger import Tally

next_forward = partial(next, count(1))  # numbers the forwards of all models that are fitted
_models: "weakref.WeakSet[SharesSteps]" = weakref.WeakSet()


class OpenStep:
    """The graphs that the forwards of a step have made.

    runs        one of its forwards runs
    has_guests  some were of another model
    """

    def __init__(self) -> None:
        self._graphs: list[tuple[int, Tally]] = []
        self._thread = 0
        self.runs = self.has_guests = False

    def begin(self) -> None:
        """Begins another step."""
        self._graphs.clear()
        self.has_guests = False

    def follow(self, out: Any, last: FittedSaving | ReplayedForward | None, nth: int) -> None:
        """Follows the graph of the nth forward's results.

        last: what is held for it
        """
        if isinstance(last, ReplayedForward):
            graph = last.ledger
        else:
            graph = Tally(0, 0)
            graph.follow(out)
        self._graphs.append((nth, graph))
        self._thread = threading.get_ident()

    @property
    def waiting(self) -> frozenset[int]:
        """The numbers of the forwards whose graphs no backward has come to."""
        return frozenset(nth for nth, graph in self._graphs if graph.waits)

    @property
    def waits(self) -> bool:
        """True if a backward is still to come to one of the graphs."""
        return any(graph.waits for _, graph in self._graphs)

    @property
    def may_take_in(self) -> bool:
        """True if a forward of another model would go on with the step."""
        if self.runs or self._thread != threading.get_ident():
            return False
        return self.waits and torch._C._current_graph_task_id() == -1 and not _is_distributed()


class SharesSteps(ForwardModes, ABC):
    """Runs the forwards of one fitted model, whose steps other models may share.

    asked           options, with the user's budget
    ran_at          number of its last forward, counted over all models; 0: none yet
    expects_others  other models will be fitted that may share steps with it
    """

    ran_at = 0
    expects_others = False
    _host: "weakref.ref[SharesSteps] | None" = None

    def __init__(self, model_state: ModelState, options: FitOptions, plan: Plan | None) -> None:
        """plan: the plan of the first step."""
        super().__init__(model_state, options)
        self.asked = options
        self._open_step = OpenStep()
        self._plan_cache = PlanCache(options, model_state, self.context, plan)
        _models.add(self)

    def planner_of_largest(self) -> Planner:
        """Returns the planner of the largest calls that are learned; of equal ones, the last."""
        learned = [one for one in self._plan_cache if one.settled or one.plan is not None]
        return max(reversed(learned), key=lambda one: one.numel, default=self.planner)

    @abstractmethod
    def _go_on(
        self,
        model: nn.Module,
        forward: Callable[[], Any],
        signature: Signature,
        before: FittedSaving | ReplayedForward,
        given: Given,
    ) -> Any:
        """Runs another forward in the same step (`calls.py`)."""

    @abstractmethod
    def _failures(self) -> AbstractContextManager[None]:
        """Says what a refusal leaves out, and learns from an error that says there is no memory."""

    def _learn_with_guests(self) -> None:
        """Learns anew what steps need; their forwards stay known."""
        self._plan_cache.forget(but=self.planner)
        if self.planner.state.is_learned:
            self.planner.calls.grew = True

    def _tell_hosts(self) -> None:
        """Lets models in whose steps this one is a guest learn anew what steps need."""
        for one in list(_models):
            if one.model_state.has_guest(self.model_state):
                one._learn_with_guests()

    def _end_other_steps(self) -> None:
        """Ends the steps of other models, where these are over: what follows is of this one."""
        for one in [] if self._neighbors.is_alone else list(_models):
            if one is not self:
                one.end_step()

    def _may_resume(self, given: Given) -> bool:
        """Returns whether a forward of the model itself goes on with a step that others share."""
        if not self._open_step.has_guests or self._last is None or not _is_made_of_graph(given):
            return False
        return self._open_step.waits and self.planner.calls.may_go_on

    def _find_host(self) -> "SharesSteps | None":
        """Returns the fitted model whose step a forward of this one goes on with."""
        if self._plan_cache.was_given or self._open_step.waits:
            return None
        hosts = (one for one in list(_models) if one is not self and one._may_take_in(self))
        return max(hosts, default=None, key=lambda one: one.ran_at)

    @property
    def host(self) -> "SharesSteps | None":
        """The controller of the model in whose step this one ran last; None: it runs its own."""
        return None if self._host is None else self._host()

    @property
    def is_guest(self) -> bool:
        """True if all forwards of the model were parts of other models' steps."""
        return self.host is not None and not self.context.step

    @property
    def _leaves_room(self) -> bool:
        """True if other models may share the step that begins, and none has been known to."""
        if self.model_state.has_guests or self._plan_cache.was_given or self._closed:
            return False
        others = [one for one in list(_models) if one is not self and not one._closed]
        return self.expects_others or any(
            one.asked == self.asked and one.model_state.device == self.model_state.device
            for one in others
        )

    def _may_take_in(self, guest: "SharesSteps") -> bool:
        alike = self.asked == guest.asked and not (self._plan_cache.was_given or self._closed)
        if not alike or self._last is None or not self._open_step.may_take_in:
            return False
        same_device = self.model_state.device == guest.model_state.device
        return same_device and self.planner.calls.may_go_on

    def _run_guest(
        self, guest: "SharesSteps", model: nn.Module, forward: Callable[[], Any], given: Given
    ) -> Any:
        """Runs a forward of another fitted model as one more forward of the step."""
        last = self._last
        assert last is not None
        self.ran_at, guest._host = next_forward(), weakref.ref(self)
        self._open_step.has_guests = True
        if self.model_state.join(guest.model_state):
            self._joined(guest)
        title = self.model_state.title_of(guest.model_state)
        own = signature_of(model, *given)
        signature = replace(own, structure=(title, own.structure))
        with self._failures(), modules.titled(title):
            out = self._go_on(model, forward, signature, last, given)
        self._open_step.follow(out, self._last, self.planner.calls.at)
        self._outputs.note(out)
        return out

    def _joined(self, guest: "SharesSteps") -> None:
        """Counts the memory of a model that was not in a step of this one before."""
        self._stop()  # it has begun with what this model holds alone
        co_resident_nbytes = self.planner.memory.co_resident_nbytes
        if self._neighbors.takes_turns_with(guest._neighbors):
            co_resident_nbytes = max(co_resident_nbytes - guest.model_state.nbytes, 0)
        outputs_nbytes = self.planner.memory.outputs_nbytes
        memory = self.model_state.memory().with_co_resident(co_resident_nbytes)
        self.planner.join(replace(memory, outputs_nbytes=outputs_nbytes))
        self._learn_with_guests()


def _is_made_of_graph(given: object) -> bool:
    """Returns whether some input has a graph that backward will go on into."""
    return any(isinstance(x, Tensor) and x.grad_fn is not None for x in tree_leaves(given))


def _is_distributed() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()
