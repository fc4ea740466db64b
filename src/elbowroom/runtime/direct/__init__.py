"""Backward on codes and bits: some ops need no restored tensor.

    op           what is held        backward reads
    relu         a bit an element    the bits
    dropout      a bit an element    the bits (CPU)
    batch_norm   a dithered code     the code, a tile at a time (CPU)
    layer_norm   a dithered code     what is decoded, which becomes the gradient row by row (CPU)
    gelu, silu   any code            what is decoded, which becomes the gradient
    conv*d       anything            a few samples at a time (CPU; not in exact mode)
    attention    any code            q, k, v restored: the op runs again (attention/)
    cross_entropy  logits, or a code of log-probabilities: some rows, which become the gradient
    softmax      8-bit floats       what is decoded, whose rows add up to 1 again
    clamp        a bit an element    the bits, restored: what lies between its limits
    scatter_reduce a bit an element  the bits, restored: which elements are the extreme
    prelu        anything, and bits  the bits, and what is decoded, in a sum
    mul          anything            each factor where its product will be, one by one (CPU)
    lstm, gru    input and states    what is decoded, from which forward runs again (CPU; likewise)
    index_select the index           the index: rows wait for a sum over them (gathered.py)

A restored tensor is written once and read once or twice, by an op that does little with it; on a
CPU its memory is often fresh, too, and costs more than decoding. So inside a context these ops run
as a node of ours: forward is torch's own kernel, backward reads the bits or the code. Where that is
not possible (the saved tensor is kept, backward runs with `create_graph`, or the gradient has other
strides) the node restores the tensor, and calls torch's own backward.

This is not done where other code reads the saved tensors: under other hooks (checkpointing counts
the tensors), in a step that is profiled, in tracing and transforms, under another function mode,
with a subclass among the arguments. Attention on the math path is replaced in every step, also in
one that is profiled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._device import DeviceContext

from elbowroom.plan.site import Reads
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.direct.activations import gelu, silu
from elbowroom.runtime.direct.attention import (
    adds_nothing_up,
    attention,
    fits_attention,
    is_unfused,
)
from elbowroom.runtime.direct.batch_norm import batch_norm, fits_batch_norm
from elbowroom.runtime.direct.clamp import clamp, clamp_max, clamp_min, fits_clamp
from elbowroom.runtime.direct.convolution import convolution, fits_convolution
from elbowroom.runtime.direct.cross_entropy import (
    coded_cross_entropy,
    cross_entropy,
    fits_cross_entropy,
)
from elbowroom.runtime.direct.dropout import dropout, fits_dropout
from elbowroom.runtime.direct.extremes import fits_extremes
from elbowroom.runtime.direct.layer_norm import fits_layer_norm, layer_norm
from elbowroom.runtime.direct.product import fits_product, product
from elbowroom.runtime.direct.recurrent import STRETCHES, fits_recurrent, recurrent
from elbowroom.runtime.direct.relu import fits_prelu, fits_relu, prelu, relu, relu_
from elbowroom.runtime.direct.softmax import fits_softmax, softmax
from elbowroom.runtime.extremes import scatter_reduce, scatter_reduce_
from elbowroom.runtime.gathered import gather_later
from elbowroom.runtime.storage import PLAIN, untouchable
from elbowroom.runtime.transforms import is_transformed
from elbowroom.runtime.waiting import may_wait


@dataclass(frozen=True)
class Direct:
    """Op with a backward that reads what is held.

    run    the replacement of the function, with the same arguments
    reads  what its backward reads
    fits   whether `run` can, from a call's arguments and its input
    exact  given exact tensors, it gives the bits of torch's own
    always it is used in profiled steps, too: it saves other tensors than torch's op
    again  it saves other tensors than torch's op, and recomputes forward: contexts that follow a
           profiled step do not use it
    any_first  `fits` alone decides: its first argument may require no gradient, and have any layout
    coded  the replacement of `run` where its saved tensors may get lossy codes; in_parts: it saves
           them in parts
    late   its result has no memory yet: only contexts whose room is short use it
    swaps  it saves another tensor in place of its input, which may have any layout: contexts that
           follow a profiled step do not use it either
    """

    run: Callable[..., Any]
    reads: Reads
    fits: Callable[[Call, Tensor], bool]
    exact: bool = True
    always: bool = False
    again: bool = False
    swaps: bool = False
    late: bool = False
    any_first: bool = False
    coded: Callable[..., Any] | None = None
    in_parts: bool = False


def _gathers(call: Call, x: Tensor) -> bool:
    fits = len(call.args) + len(call.kwargs) == 3
    return fits and may_wait(call.arg(1, "dim"), call.arg(2, "index"), x)


def rows_nbytes(call: Call) -> int:
    """Bytes of the rows that a call gathers; it is one that may return rows that wait."""
    x, index = call.args[0], call.arg(2, "index")
    nbytes: int = len(index) * x.shape[1:].numel() * x.itemsize
    return nbytes


def _always(call: Call, x: Tensor) -> bool:
    return True


def _not_in_place(call: Call, x: Tensor) -> bool:
    return not call.arg(1, "inplace", False)


_RELU, _RELU_ = (Direct(run, Reads.BITS, fits_relu) for run in (relu, relu_))
# A fused kernel saves few additional bytes: not worth the time in an exact context.
_FUSED = Direct(attention, Reads.RESTORED, _always, exact=False)
_UNFUSED = Direct(attention, Reads.RESTORED, _always, always=True)
_CONVOLUTION = Direct(convolution, Reads.SAMPLES, fits_convolution, exact=False)
# An exact context holds x, and rebuilds the next op's input from it.
_CLAMP, _CLAMP_MIN, _CLAMP_MAX = (
    Direct(run, Reads.RESTORED, fits_clamp, exact=False, swaps=True)
    for run in (clamp, clamp_min, clamp_max)
)
_PRELU = Direct(prelu, Reads.RESTORED, fits_prelu, exact=False, swaps=True)
_SOFTMAX = Direct(softmax, Reads.RESTORED, fits_softmax)
_PRODUCT = Direct(product, Reads.PLACE, fits_product, always=True)
_EXTREMES, _EXTREMES_ = (
    Direct(run, Reads.RESTORED, fits_extremes, always=True, any_first=True)
    for run in (scatter_reduce, scatter_reduce_)
)
_ROWS = Direct(gather_later, Reads.RESTORED, _gathers, always=True, any_first=True, late=True)
_OPS: dict[Callable[..., Any], Direct] = {
    F.relu: _RELU,
    torch.relu: _RELU,
    torch.relu_: _RELU_,
    Tensor.relu: _RELU,
    Tensor.relu_: _RELU_,
    F.batch_norm: Direct(batch_norm, Reads.CODE, fits_batch_norm),
    F.layer_norm: Direct(layer_norm, Reads.GRADIENT, fits_layer_norm),
    F.dropout: Direct(dropout, Reads.BITS, fits_dropout),
    F.cross_entropy: Direct(
        cross_entropy,
        Reads.ROWS,
        fits_cross_entropy,
        always=True,
        coded=coded_cross_entropy,
        in_parts=True,
    ),
    **dict.fromkeys((torch.prelu, Tensor.prelu, F.prelu), _PRELU),
    F.gelu: Direct(gelu, Reads.GRADIENT, _always),
    F.silu: Direct(silu, Reads.GRADIENT, _not_in_place),
    **dict.fromkeys((torch.clamp, Tensor.clamp, torch.clip, Tensor.clip), _CLAMP),
    **dict.fromkeys((torch.clamp_min, Tensor.clamp_min), _CLAMP_MIN),
    **dict.fromkeys((torch.clamp_max, Tensor.clamp_max), _CLAMP_MAX),
    **dict.fromkeys((torch.mul, Tensor.mul, torch.multiply, Tensor.multiply), _PRODUCT),
    **dict.fromkeys((torch.softmax, Tensor.softmax, F.softmax), _SOFTMAX),
    **dict.fromkeys((torch.scatter_reduce, Tensor.scatter_reduce), _EXTREMES),
    Tensor.scatter_reduce_: _EXTREMES_,
    **dict.fromkeys((torch.index_select, Tensor.index_select), _ROWS),
    F.conv1d: _CONVOLUTION,
    F.conv2d: _CONVOLUTION,
    F.conv3d: _CONVOLUTION,
    **{
        op: Direct(
            recurrent(op, 1),
            Reads.RESTORED,
            fits_recurrent,
            exact=False,
            again=True,
            any_first=True,
            coded=recurrent(op, STRETCHES),
        )
        for op in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
    },
}


REPLACED = frozenset((*_OPS, F.scaled_dot_product_attention))


def direct_of(call: Call) -> Direct | None:
    """Returns our node for this call of one of the `REPLACED` functions, if there is one.

    It reads metadata only, so it works with stand-ins.
    """
    if call.func is F.scaled_dot_product_attention:
        if not (_are_plain(call) and fits_attention(call)):
            return None
        return _UNFUSED if is_unfused(call) and adds_nothing_up(call) else _FUSED
    found = _OPS.get(call.func)
    if found is None or not _are_plain(call):
        return None
    x = call.first
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    ready = found.any_first or (x.requires_grad and (found.swaps or _is_in_order(x)))
    return found if ready and found.fits(call, x) else None


def _is_in_order(x: Tensor) -> bool:
    """Returns whether the gradient of x is likely to have its strides.

    The gradient of a permuted tensor seldom has.
    """
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return x.is_contiguous() or (last is not None and x.is_contiguous(memory_format=last))


def may_run(call: Call, direct: Direct) -> bool:
    """Returns whether one of our nodes may replace this call."""
    if not torch.is_grad_enabled() or is_transformed() or is_overridden():
        return False
    first = call.args[0] if call.args else call.kwargs.get("input", call.kwargs.get("query"))
    return type(first) is Tensor or (direct.always and type(first) in PLAIN)


def _are_plain(call: Call) -> bool:
    # No function for each argument: this is asked in every step, of every op that has a node here.
    tensors = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
    return not any(map(untouchable, tensors))


def is_overridden() -> bool:
    """Returns whether another function mode than ours would see the call, too."""
    depth = torch._C._len_torch_function_stack()
    at = torch._C._get_function_stack_at
    return depth > 0 and any(type(at(i)) is not DeviceContext for i in range(depth))
