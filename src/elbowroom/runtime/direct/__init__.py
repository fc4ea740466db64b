"""Backward on what is held: some ops need no restored tensor.

    op           what is held        backward reads
    relu         a bit an element    the bits
    dropout      a bit an element    the bits (CPU)
    batch_norm   a dithered code     the code, a tile at a time (CPU)
    layer_norm   a dithered code     what is decoded, which becomes the gradient row by row (CPU)
    gelu, silu   any code            what is decoded, which becomes the gradient

A restored tensor is written once and read once or twice, by an op that does little with it; on a
CPU its memory is often fresh, too, and costs more than decoding. So inside a context these ops run
as a node of ours: forward by the very kernel of torch, backward on the bits or the code. Where that
is not possible (what was saved is kept, is asked for with `create_graph`, has other strides than
the gradient) the node restores it, and calls torch's own backward.

It is not done where others read what an op saves: under somebody else's hooks (checkpointing counts
the tensors), in a step that is written down, in tracing and transforms, under somebody else's
function mode, with a subclass among the arguments.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._device import DeviceContext

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.direct.activations import gelu, silu
from elbowroom.runtime.direct.batch_norm import batch_norm
from elbowroom.runtime.direct.dropout import dropout
from elbowroom.runtime.direct.layer_norm import layer_norm
from elbowroom.runtime.direct.relu import relu, relu_
from elbowroom.runtime.identity import untouchable

_OPS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.relu: relu,
    torch.relu: relu,
    torch.relu_: relu_,
    Tensor.relu: relu,
    Tensor.relu_: relu_,
    F.batch_norm: batch_norm,
    F.layer_norm: layer_norm,
    F.dropout: dropout,
    F.gelu: gelu,
    F.silu: silu,
}


def direct(call: Call) -> Callable[..., Any]:
    """The function to run for this call: its own, or one with a backward on what is held."""
    found = _OPS.get(call.func)
    if found is None or not torch.is_grad_enabled() or _is_transformed() or _is_overridden():
        return call.func
    x = call.arg(0, "input")
    if type(x) is not Tensor or not x.requires_grad or not x.is_floating_point():
        return call.func
    return found if all(map(_is_plain, (*call.args, *call.kwargs.values()))) else call.func


def _is_plain(argument: Any) -> bool:
    return not isinstance(argument, Tensor) or not untouchable(argument)


def _is_transformed() -> bool:
    """Whether forward is traced, mapped, or differentiated forwards: our nodes cannot be."""
    return (
        torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def _is_overridden() -> bool:
    """Whether somebody else's function mode wants to see the call, too."""
    modes = range(torch._C._len_torch_function_stack())
    return any(type(torch._C._get_function_stack_at(i)) is not DeviceContext for i in modes)
