"""A step that must not wait for a GPU, on a CPU: what would make the host wait raises.

`pretended` takes tensors in host memory for ones of a device: the host asks for the memory of codes
before it knows their sizes, looks at no value, and hears of sizes later.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from elbowroom.codecs.compact import Coders
from elbowroom.kernels import fakes
from elbowroom.runtime import capacities, late
from elbowroom.runtime.capacities import Capacities
from elbowroom.runtime.context import PROCESS

WAITS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select")
_ASKS = ("tolist", "cpu", "item", "__bool__", "__int__", "__float__", "__index__")


class NoWaiting(TorchDispatchMode):
    """Raises at what would make the host wait for a GPU."""

    inside = 0  # ops that run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert func._schema.name.removeprefix("aten::") not in WAITS, func
        assert "device" not in (kwargs or {}) or "copy" not in func._schema.name, func
        if "index" in func._schema.name:  # by a mask: as many as are set
            indices = args[1] if isinstance(args[1], list | tuple) else ()
            masks = [i for i in indices if isinstance(i, Tensor) and i.dtype is torch.bool]
            assert not masks, func
        self.inside += 1  # what serves a CPU may look
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.inside -= 1


@contextmanager
def no_waiting(*, asks: bool = True) -> Iterator[None]:
    """Inside, what would make the host wait raises.

    asks: also what of a tensor in host memory no dispatch sees, such as `tolist`
    """
    with pytest.MonkeyPatch.context() as patch, NoWaiting() as mode:
        for name in _ASKS if asks else ():
            patch.setattr(Tensor, name, _refusing(name, mode))
        yield


def _refusing(name: str, mode: NoWaiting) -> Any:
    original = getattr(Tensor, name)

    def asked(*args: Any, **kwargs: Any) -> Any:
        assert mode.inside, f"Tensor.{name} in a step that must not wait"
        return original(*args, **kwargs)

    return asked


class Numbers(TorchDispatchMode):
    """Writes down every op with all of its arguments that are no tensors.

    A CUDA graph launches kernels again with the numbers that they were captured with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "profiler":
            self.found.append((str(func), _without_tensors(args), _without_tensors(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _without_tensors(given: Any) -> Any:
    if isinstance(given, Tensor | torch.UntypedStorage):
        return "a tensor"
    if isinstance(given, list | tuple):
        return [_without_tensors(x) for x in given]
    if isinstance(given, dict):
        return {key: _without_tensors(x) for key, x in given.items()}
    return given


class Late:
    """An event that is found done only so many questions later."""

    def __init__(self, questions: int) -> None:
        self.questions = questions

    def query(self) -> bool:
        self.questions -= 1
        return self.questions < 0

    def synchronize(self) -> None:
        self.questions = 0


@contextmanager
def pretended(questions: int = 3) -> Iterator[None]:
    """Inside, host memory is a device's. questions: until a copy is found done."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PROCESS, "capacities", Capacities())
        patch.setattr(PROCESS, "coders", Coders())
        patch.setattr(capacities, "_POOLS", {})
        patch.setattr(fakes, "READ_AT_ONCE", set())
        patch.setattr(late, "pinned", lambda n: torch.empty(n, dtype=torch.uint8))
        patch.setattr(late, "event", lambda device: Late(questions))
        yield
