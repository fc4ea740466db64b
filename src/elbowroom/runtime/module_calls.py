"""Calls of modules inside a context: one may run again in backward, and its call may be recorded.

A module that a plan names holds its inputs alone. It is called as usual where it could not run
again: inside a checkpoint, if it is sharded, or if a second run would differ from the first.
"""

import logging
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn

from elbowroom.plan.site import RECOMPUTE
from elbowroom.runtime import modules
from elbowroom.runtime.arguments import Arguments
from elbowroom.runtime.changing import ParametersAsRead
from elbowroom.runtime.consumers import Call, Consumers
from elbowroom.runtime.context import Context
from elbowroom.runtime.observer import Listener, Recorder
from elbowroom.runtime.recompute import recomputed
from elbowroom.runtime.repeats import why_another, why_not_again
from elbowroom.runtime.serving import Serving
from elbowroom.runtime.slot import Slot
from elbowroom.runtime.sources import Sources, waits_for_copy
from elbowroom.runtime.storage import storage_nbytes
from elbowroom.runtime.waiting import end_waiting

_log = logging.getLogger("elbowroom")
_kept_out: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # models for which that was logged


class ModuleCalls(ABC):
    """Base class of contexts, with what they do as a module is called.

    recompute  names of modules whose forward runs again in backward
    ran_again  those that were called, and the most tensors that each has saved in a call
    """

    context: Context
    recorder: Recorder | None
    recompute: Container[str]
    ran_again: Counter[str]
    min_nbytes: int
    _consumers: Consumers | None
    _listener: Listener
    _serving: Serving
    _sources: Sources
    _region: str  # whose inputs are being saved
    _reading: list[ParametersAsRead]  # of modules that run again

    @abstractmethod
    def is_exact(self) -> bool:
        """Returns whether no code adds errors."""

    @abstractmethod
    def _is_innermost(self) -> bool:
        """Returns whether this context gets what is saved now: its hooks are the innermost."""

    def calls(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls a module, which may be recomputed in backward; its call may be recorded."""
        name, consumers = modules.name_of(module), self._consumers
        if name not in self.recompute or consumers is None or not torch.is_grad_enabled():
            if self.recorder is not None:
                return self.recorder.module(module, call, args, kwargs, self._source_of)
            return call(*args, **kwargs)
        if not self._is_innermost():  # inside a checkpoint of the user, or of ours
            return call(*args, **kwargs)
        end_waiting()
        arguments = Arguments(args, kwargs)
        sharded = modules.is_sharded(module)
        bits: list[Any] | None = [] if self._may_begin_again else None
        why = modules.SHARDED if sharded else why_not_again(module, call, arguments, bits)
        if why:
            self.keep_out(module, name, why)
            return call(*args, **kwargs)
        self._listener.begins_region(module)
        self._serving.waiting.end_all()
        with torch._C.DisableTorchFunction():  # our own calls are not ops of the model
            self._serving.pieces.end()
            outer, region = consumers.call, Call(recomputed, args, kwargs, name=RECOMPUTE)

        def begin() -> None:
            if self._region:
                self._listener.region_saved()
            consumers.call, self._region = outer, ""

        consumers.call, self._region = region, name
        self._listener.saves()

        def ended(saves: int) -> None:
            self.ran_again |= Counter({name: saves})
            self._listener.region_ended(saves)

        try:
            given = args, kwargs, arguments, begin, ended, self._reading
            out = recomputed(module, call, *given, is_exact=self.is_exact())
        finally:
            begin()
        if bits and (why := why_another(module, out, bits)):
            self.keep_out(module, name, why)
        return out

    @property
    def _may_begin_again(self) -> bool:
        """True if `keep_out` ends the forward, and lets it begin again."""
        return False

    def keep_out(self, module: nn.Module, name: str, why: str) -> None:
        """Warns that a module cannot be recomputed, and holds its saved tensors."""
        if module not in _kept_out:
            _kept_out.add(module)
            _log.warning(
                "module '%s' is not recomputed: %s. What it saves is held, or made smaller in "
                "other ways, and takes more of the budget",
                name,
                why,
            )
        self.context.learn_unrepeatable(name)

    def _source_of(self, x: Tensor) -> Slot | None:
        if storage_nbytes(x) < self.min_nbytes:
            return None  # kept, whatever its possible sources
        origin = self._sources.origin(x)
        if origin is None or origin.recipe is None or waits_for_copy(origin.recipe):
            return None
        ready = origin.ready()
        return None if ready is None or not ready.exact else ready.sole_source
