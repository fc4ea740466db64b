"""Whether a module gives the same when it runs again: tried before it is recomputed at all.

What it reads is given back to it as far as it can be seen (`recompute.py`). The rest would be
another in backward, and gradients silently wrong: a list that it changes, the clock, a generator
that nobody sees. So its first calls run twice more, holding nothing, and what they give must have
the same bits. That reads values, for once: on a GPU each trial waits for it. Code that is the same
by chance in all of them is not found out.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elbowroom.runtime.recompute import State, tensors_in

TRIED = 2  # calls
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_left: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()  # -1: it failed


def repeats(
    module: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:
    """Whether call(*args, **kwargs), of this module, may be left to a second run in backward."""
    left = _left.get(module, TRIED)
    if left > 0:
        same = _is_same_twice(module, call, args, kwargs)
        left = _left[module] = left - 1 if same else -1
    return left >= 0


class Unrepeatable(Exception):
    """A module that was to be recomputed is not to be: the forward has to begin again."""


class _NothingHeld(Exception):
    """Backward inside of a trial."""


def _is_same_twice(
    module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    state = State(module)
    state.take()
    inputs = tensors_in(tree_leaves((args, kwargs)))
    devices = sorted({x.get_device() for x in inputs if x.is_cuda})
    given = []
    try:
        for _ in range(2):
            with torch.random.fork_rng(devices), state.again(), _holding_nothing():
                given.append(_bits_of(call(*args, **kwargs)))
    except _NothingHeld:
        return True  # it cannot be tried; what may be recomputed is for the plan to say
    return given[0] == given[1]


def _holding_nothing() -> torch.autograd.graph.saved_tensors_hooks:
    """With gradients, as in the real run: what autocast casts without them would be used there."""

    def unpack(_: None) -> Tensor:
        raise _NothingHeld

    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, unpack)


def _bits_of(out: Any) -> list[Any]:
    """A digest of what a module gives: of each tensor's bits, and where they stand."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return [_digest(leaf) for leaf in tree_leaves(out)]


def _digest(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, int | float | str) else type(leaf)
    if leaf.layout is not torch.strided or leaf.is_quantized:
        return leaf.shape, leaf.dtype
    x = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    bits = x.view(_INTEGERS[x.element_size()])
    sums = []
    for dim in range(bits.dim()):
        others = [d for d in range(bits.dim()) if d != dim]
        line = bits.sum(others, dtype=torch.int64) if others else bits.to(torch.int64)
        places = torch.arange(1, line.numel() + 1, device=line.device)
        sums.append((line * places).sum())
    return leaf.shape, leaf.dtype, torch.stack(sums or [bits.to(torch.int64)]).tolist()
