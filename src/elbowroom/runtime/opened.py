"""Runs torch's functions that are written in Python so that the ops inside them are seen.

A TorchFunctionMode sees such a function as one call, because its first lines dispatch it to the
mode, which is off while it handles the call. So the tensors of ops inside it (linear, softmax,
dropout, attention) would be saved by an unknown op. Here its body runs with the mode on: as a copy
of the function whose globals make these first lines skip the dispatch.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_ASKING = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _nobody(*_: Any) -> bool:
    return False


def _opened(func: Callable[..., Any]) -> Callable[..., Any]:
    assert isinstance(func, FunctionType)
    inside = dict(func.__globals__)  # as of now: later replacements there are not seen
    inside |= dict.fromkeys(_ASKING, _nobody)
    copy = FunctionType(func.__code__, inside, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_FUNCTIONS = {F.multi_head_attention_forward: _opened(F.multi_head_attention_forward)}
NAMES = frozenset(func.__name__ for func in _FUNCTIONS)


def opened(func: Callable[..., Any], mode: TorchFunctionMode) -> Callable[..., Any] | None:
    """Returns a function that runs `func` with the mode seeing its calls; None if it cannot.

    It can for the functions of torch that are written in Python and listed here.
    """
    body = _FUNCTIONS.get(func)
    if body is None:
        return None

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return body(*args, **kwargs)

    return run
