"""Calls of modules in a replay: one that is recomputed in backward saves its inputs alone.

While its forward runs, no function mode is open if nothing is done with what it calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from elbowroom.runtime import modules
from elbowroom.runtime.arguments import Arguments
from elbowroom.runtime.recompute import recomputed
from elbowroom.runtime.repeats import unobserved, why_another, why_not_again
from elbowroom.runtime.replay.compiled import Act, Hold
from elbowroom.runtime.replay.held import ForwardRecord
from elbowroom.runtime.replay.script import Script
from elbowroom.runtime.saving import Saving
from elbowroom.runtime.waiting import end_waiting

if TYPE_CHECKING:
    from elbowroom.runtime.replay.replay import Replay

_disabled = torch._C.DisableTorchFunction


class ReplayedModuleCalls(ABC):
    """Base class of a replay, with what it does as a module is called."""

    script: Script
    record: ForwardRecord
    saving: Saving | None
    _at: int
    _holds: tuple[Hold | None, ...] | None
    _saved: int
    _is_inside: bool  # an op runs, so that no function mode is asked
    _gets_inputs: bool  # a recomputed module saves its inputs

    @abstractmethod
    def _act(self) -> Act:
        """Returns the next act."""

    @abstractmethod
    def _diverge(self) -> None:
        """Examines the rest of a forward that differs from its script."""

    @abstractmethod
    def is_innermost(self) -> bool:
        """Returns whether our hooks are the innermost ones."""

    def _called(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls a module, which may be recomputed in backward."""
        if self.saving is not None:
            return self.saving.calls(module, call, args, kwargs)
        act = self._act()
        if act.module is None or act.module() is not module:
            return call(*args, **kwargs)
        end_waiting()
        arguments = Arguments(args, kwargs)
        fits = torch.is_grad_enabled() and self.is_innermost()
        bits: list[Any] | None = [] if self.may_begin_again else None
        if not fits or why_not_again(module, call, arguments, bits):
            self._diverge()
            return self._called(module, call, args, kwargs)
        self._at += 1
        with _disabled():  # our own calls are not ops of the model
            for late in act.before:
                late(cast("Replay", self))
        outer = self._holds, self._saved, self._is_inside
        self._holds, self._saved, self._gets_inputs = act.holds, 0, True

        def begin() -> None:
            self._gets_inputs = False
            holds = act.holds if self.saving is None else None
            if holds is not None and self._saved != len(holds):
                self._diverge()
            self._holds, self._saved, self._is_inside = outer

        inside = act.inside

        def ended(saves: int) -> None:
            nonlocal inside
            inside = None if inside == saves else inside

        try:
            with nullcontext() if inside is None else unobserved():
                given = args, kwargs, arguments, begin, ended, None, self.record.fingerprints
                out = recomputed(module, call, *given, is_exact=self.script.compiled.is_exact)
        finally:
            self._gets_inputs = False
            self._holds, self._saved, self._is_inside = outer
        if inside is not None:  # its second run will hold more, or less
            self._diverge()
        if bits and (why := why_another(module, out, bits)):
            self._diverge()
            assert self.saving is not None
            self.saving.keep_out(module, modules.name_of(module), why)
        return out

    @property
    def may_begin_again(self) -> bool:
        """True if a module that turns out not to be repeatable lets the forward begin again."""
        return False
