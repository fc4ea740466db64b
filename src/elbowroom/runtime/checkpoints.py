"""Inputs that the user's torch.utils.checkpoint saves, of a piece of forward.

This piece runs again in backward from the restored inputs. From a decoded input it computes
consistent values, so their error is as smooth as the piece. But a function that must not get an
inexact input (a logarithm, a choice of experts, a test whose outcome decides on shapes) would give
wrong results, or fail. The functions that the piece calls are recorded in its first run; so its
inputs are kept until it has ended, and encoded then, if it called no other functions than those
listed here. Others do no harm on what no error can have reached (a table of angles or a mask that
is made inside): a coded input wants a gradient, and so does all that is made of it, until a call
makes something of it that wants none.

Modules that a plan runs again from codes of their inputs are such pieces, too (`recompute.py`).

Inputs that want no gradient (masks, positions) stay as they are. The older form of checkpoint,
use_reentrant=True, saves its inputs when it has run: they stay, too.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._pytree import tree_leaves

from elbowroom.plan.site import CHECKPOINT
from elbowroom.runtime.consumers import LENDS, TOLERANT, Call, is_functorch_wrapped
from elbowroom.runtime.nested import tensors_in
from elbowroom.runtime.storage import is_parameter

# Linear, smooth, or with a kink that an error rarely crosses; no poles, no choices.
SMOOTH = frozenset(
    (
        *TOLERANT,
        *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "rms_norm"),
        *("relu", "relu_", "relu6", "leaky_relu", "elu", "hardswish", "hardsigmoid", "mish"),
        *("tanh", "sigmoid", "logsigmoid", "softplus", "softmax", "log_softmax", "sin", "cos"),
        *("dropout", "dropout_", "alpha_dropout", "multi_head_attention_forward"),
        *("add", "add_", "__add__", "__iadd__", "__radd__", "sub", "sub_", "__sub__", "__isub__"),
        *("rsub", "__rsub__", "mul", "mul_", "__mul__", "__imul__", "__rmul__", "neg", "__neg__"),
        *("square", "mean", "sum", "einsum", "outer", "addcmul", "lerp", "lerp_"),
        *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "t"),
        *("contiguous", "clone", "expand", "expand_as", "squeeze", "unsqueeze", "repeat", "narrow"),
        *("repeat_interleave", "chunk", "split", "unbind", "cat", "stack", "select", "roll", "pad"),
        *("tensor_split", "unfold", "masked_fill", "masked_fill_", "zero_", "copy_", "view_as"),
        *("float", "bfloat16", "half", "double", "detach", "interpolate", "pixel_shuffle"),
        *("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool2d", "max_pool2d"),
        *("tensor", "arange", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like"),
        *("new_zeros", "new_ones", "new_full", "bernoulli_", "rand", "rand_like", "randn_like"),
        *("embedding", "::__get__", "__len__", "ndimension", "nelement", "element_size"),
    )
)
_POWERS, _CASTS = ("pow", "__pow__"), ("to", "type_as")
_DIVISIONS = ("div", "div_", "__truediv__", "__itruediv__")
_INDICES = (torch.int32, torch.int64)  # of bool would decide on shapes
_SAVERS = ("save_inputs", "_checkpoint_without_reentrant_generator")
_DEEPEST = 6  # frames between checkpoint and what it saves
_FILE = torch.utils.checkpoint.__file__


def checkpoint_call(x: Tensor) -> Call | None:
    """Returns a call that represents the checkpoint that saves x now; None: it is none."""
    frame = sys._getframe(1)
    for _ in range(_DEEPEST):
        code = frame.f_code
        if code.co_filename == _FILE and code.co_name in _SAVERS:
            return Call(torch.utils.checkpoint.checkpoint, (x,), {}, name=CHECKPOINT)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


class Pieces:
    """The piece of forward that runs now inside a checkpoint, and tensors `waiting` for its end."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[str], None]] = []
        self._names: set[str] = set()
        self._loses = False  # something was made of what wants a gradient, and wants none

    def wait(self, ended: Callable[[str], None]) -> None:
        """Calls `ended` when the piece has ended.

        Its argument is the reason why the inputs must stay as they are, or "".
        """
        self.waiting.append(ended)

    @property
    def has_begun(self) -> bool:
        """True if the piece has called any function."""
        return bool(self._names)

    def calls(self, call: Call) -> bool:
        """Notes a call of the piece; returns whether its arguments decide if it is smooth."""
        by_name = call.name in SMOOTH
        smooth = is_smooth(call) or not (self._loses or may_carry_error(call))
        self._names.add("" if smooth else call.name or "a function of no name")
        return smooth and not by_name

    def made(self, call: Call, out: Any) -> None:
        """Notes what a call of the piece has made."""
        self._loses = self._loses or loses_gradient(call, out)

    def end(self) -> None:
        """Ends the piece, and calls all that wait for its end."""
        rough = self._names - {""}
        why = f"its checkpoint calls '{min(rough)}', which may not tolerate errors" if rough else ""
        waiting = self.waiting
        self.clear()
        for ended in waiting:
            ended(why)

    def clear(self) -> None:
        """Drops all that waits."""
        self.waiting, self._names, self._loses = [], set(), False


def is_smooth(call: Call) -> bool:
    """Returns whether the function tolerates an error of its input."""
    return call.name in SMOOTH or _is_smooth(call)


def may_carry_error(call: Call) -> bool:
    """Returns whether an error of the piece's inputs may be in what the function reads.

    It is not, where no argument wants a gradient but parameters, if nothing in the piece has lost
    one before. Memory that is handed out to be filled, unseen, tells nothing.
    """
    given = call.tensors
    is_filled = call.name in LENDS or "empty" in call.name
    return not given or is_filled or any(map(_wants_gradient, given))


def loses_gradient(call: Call, out: Any) -> bool:
    """Returns whether the ended call has made a tensor that wants no gradient of one that does."""
    return any(not x.requires_grad for x in tensors_in(out)) and any(
        map(_wants_gradient, call.tensors)
    )


def _wants_gradient(x: Tensor) -> bool:
    if is_functorch_wrapped(x):  # inside vmap it does not tell
        return True
    return x.requires_grad and not is_parameter(x)


def _is_smooth(call: Call) -> bool:
    """Returns whether the function, by its numbers, tolerates an error of its input."""
    other = call.arg(1, "other")
    if call.name in _POWERS:
        exponent = call.arg(1, "exponent")
        return not isinstance(exponent, Tensor) and exponent in (1, 2, 3)
    if call.name == "rsqrt":  # whose pole is far from a mean of squares: one number a row
        x = call.first
        return isinstance(x, Tensor) and x.dim() > 0 and x.shape[-1] == 1
    if call.name == "new_empty":  # a number for each sample, which drop path fills; no kernel's out
        return all(size == 1 for size in tree_leaves(call.args[1:])[1:])
    if call.name in _DIVISIONS:
        return not isinstance(other, Tensor)
    if call.name in _CASTS:
        return not any(_is_whole(x) for x in (*call.args[1:], *call.kwargs.values()))
    indices = [x for x in tree_leaves(other) if isinstance(x, Tensor)]
    return call.name == "__getitem__" and all(x.dtype in _INDICES for x in indices)


def _is_whole(kind: Any) -> bool:
    """Returns whether `kind`, a dtype or a tensor, cannot hold fractions."""
    dtype = kind.dtype if isinstance(kind, Tensor) else kind
    return isinstance(dtype, torch.dtype) and not dtype.is_floating_point
