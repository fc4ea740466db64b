"""Chooses the calls of a context that run as nodes of ours, by its policy and its codes."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from elbowroom.plan import Policy
from elbowroom.plan.plan import Plan
from elbowroom.plan.precision_floor import ATTENTION
from elbowroom.plan.site import Reads
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.context import Context
from elbowroom.runtime.direct import Direct, may_run
from elbowroom.runtime.observer import Recorder


class NodeChoice(ABC):
    """Base class of contexts, with the choice between torch's own op and our node for a call.

    rows_wait  large rows that are gathered are made when they are read, also if `context` does not
               say so
    """

    policy: Policy
    context: Context
    recorder: Recorder | None
    rows_wait: bool

    @property
    @abstractmethod
    def _module(self) -> str:
        """Name of the running module."""

    @abstractmethod
    def _is_innermost(self) -> bool:
        """Returns whether this context gets what is saved now: its hooks are the innermost."""

    @abstractmethod
    def _makes_again(self, x: Tensor) -> bool:
        """Returns whether exact tensors that are held make this one again."""

    def is_exact(self) -> bool:
        """Returns whether no code of the policy adds errors.

        A policy without this information counts as exact.
        """
        return bool(getattr(self.policy, "exact", True))

    def _run_of(self, call: Call, direct: Direct) -> Callable[..., Any]:
        """Returns the function to run for a call that a node of ours could replace."""
        call.reads = direct.reads
        call.would_rerun = call.name == ATTENTION
        if (
            not self._may_stand(direct, call)
            or not may_run(call, direct)
            or not self._is_innermost()
        ):
            return call.func
        call.reruns = call.would_rerun
        call.rounds = direct.always or not direct.exact
        if direct.late:
            self.context.waited_in.add(self._module)
        if direct.coded is None or self._keeps_bits(direct, call):
            return direct.run
        if direct.in_parts and not isinstance(self.policy, Plan) and self._makes_again(call.first):
            return direct.run
        if direct.in_parts:
            call.reads, call.in_parts = Reads.SAMPLES, True
        return direct.coded

    def _keeps_bits(self, direct: Direct, call: Call) -> bool:
        """Returns whether nothing that a node of ours saves for this call gets a lossy code."""
        if direct.again and self.context.runs_again:
            return self.context.keeps_bits
        return self.is_exact() or not (direct.again or self._encodes(call.name))

    def _encodes(self, consumer: str) -> bool:
        """Returns whether what this op of the running module saves may get a lossy code."""
        return not isinstance(self.policy, Plan) or self.policy.encodes(self._module, consumer)

    def _may_stand(self, direct: Direct, call: Call) -> bool:
        """Returns whether this node may be used in this context."""
        if direct.late:
            return self.rows_wait or self.context.rows_wait
        if direct.always:
            return True
        # Nodes that read a code gain nothing where none is lossy; those of ReLU and dropout read
        # bits.
        allowed = direct.reads is Reads.BITS or not self.is_exact()
        if direct.again and self.context.runs_again:
            return True
        if (direct.again or direct.swaps) and not getattr(self.policy, "again", False):
            return False
        if call.would_rerun:  # otherwise q and k could have no code
            return allowed and self._reruns_attention()
        return allowed and self.recorder is None

    def _reruns_attention(self) -> bool:
        """Returns whether an attention of the running module runs again in backward."""
        reruns = getattr(self.policy, "reruns_attention", True)
        return bool(reruns(self._module) if callable(reruns) else reruns)
