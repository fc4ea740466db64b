"""Linear layers that compute in 8-bit floats, and save their input in them.

    x8, w8 = E4M3 of x, W        one scale a tensor: its largest absolute value / 448
    y  = x8 W8^T                 forward saves x8 (1 byte an element); x itself is not saved
    g8 = E5M2 of g
    dx = g8 W8        dW = g8^T x8

Layers that read the same x (q, k and v; gate and up) share one x8, if autograd has made x: what it
has not made, as a buffer that each batch is read into, may change unseen (`x.data`, a NumPy view),
and without gradients nothing is saved that could be shared. Weights stay as they are and are
rounded at each use. A product runs in `torch._scaled_mm` on a GPU of compute capability 8.9 or
more, where all its sizes are multiples of 16; elsewhere it is *emulated*: the same codes,
multiplied in fp32, which is slow and proves numbers, not speed. Rounding is to nearest; a NaN or an
Inf makes the whole result NaN. (Facts: COAT, arXiv 2410.19313; FP8 formats, arXiv 2209.05433.)
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from elbowroom.nn._autograd import apply, autocast_dtype, refuse_twice, without_autocast
from elbowroom.nn.swap import Replaced, replace_classes

M = TypeVar("M", bound=nn.Module)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_LEAST = 1e-30


def fp8(model: nn.Module, *, keep: Iterable[str] = ()) -> Replaced:
    """Let the linear layers of `model` compute in FP8, in place.

        print(er.nn.fp8(model, keep=["lm_head"]))

    keep  names of modules that stay as they are, with all inside: the head, usually

    Weights, keys and optimizers stay; `er.nn.revert(model)` undoes it. Returns what was replaced,
    and says whether products run in FP8 on this device or are emulated.
    """
    note = f"products are {backend(next(iter(model.parameters()), torch.empty(0)).device)}"
    return replace_classes(model, {nn.Linear: Fp8Linear}, keep=keep, note=note)


def backend(device: torch.device) -> str:
    """The backend that computes on the weights' device: "scaled_mm" or "emulated"."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return "emulated"
    return "scaled_mm"


class Fp8Linear(nn.Linear):
    """torch's Linear, in FP8: same weights and keys."""

    @property
    def backend(self) -> str:
        """The backend that computes on the weights' device: "scaled_mm" or "emulated"."""
        return backend(self.weight.device)

    def forward(self, input: Tensor) -> Tensor:
        """Input [..., in_features] -> [..., out_features]."""
        dtype = autocast_dtype(input)
        if input.numel() == 0 or not input.is_floating_point():
            return super().forward(input)
        codes = _shared.codes_of(input)
        with without_autocast(input):
            args = input, self.weight, self.bias, *codes, dtype or input.dtype
            out: Tensor = apply(_Fp8Linear, *args)
        return out


class _Fp8Linear(torch.autograd.Function):
    """x [..., K], weight [N, K], bias [N], x8 [..., K] and its scale -> [..., N]."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x8: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        w8, w_scale = quantize(weight, E4M3)
        y = product(x8.reshape(-1, x8.shape[-1]), w8.t(), scale, w_scale, dtype)
        y = y if bias is None else y.add_(bias)
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, x8, scale, _ = inputs
        ctx.dtype, ctx.shape = x.dtype, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(weight, x8 if weight.requires_grad else None, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_twice("Fp8Linear")
        weight, x8, scale = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        g = grads[0].reshape(-1, len(weight))
        g8, g_scale = quantize(g, E5M2)
        dx = dw = None
        if for_x:
            w8, w_scale = quantize(weight, E4M3)
            dx = product(g8, w8, g_scale, w_scale, ctx.dtype).view(ctx.shape)
        if for_weight:
            dw = product(g8.t(), x8.reshape(-1, x8.shape[-1]), g_scale, scale, weight.dtype)
        db = g.sum(0, dtype=ctx.bias_dtype) if for_bias else None
        return dx, dw, db, None, None, None


def quantize(x: Tensor, to: torch.dtype) -> tuple[Tensor, Tensor]:
    """x -> codes of its shape in the float8 dtype `to`, scale [] fp32: x~ = codes * scale."""
    largest = torch.finfo(to).max
    x = x.detach()
    scale = x.abs().amax().float().clamp(min=_LEAST) / largest
    return (x / scale).clamp_(-largest, largest).to(to), scale


def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a [m, k] b [k, n], both float8 -> [m, n] of `dtype`; sums are in fp32."""
    sixteens = all(size % 16 == 0 for size in (*a.shape, b.shape[1]))
    if backend(a.device) == "scaled_mm" and sixteens:
        # The hardware wants rows of a and columns of b in one run of memory.
        a, b = a.contiguous(), b.t().contiguous().t()
        out: Tensor = torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=dtype)
        return out
    return ((a.float() @ b.float()) * (a_scale * b_scale)).to(dtype)


class _Shared(threading.local):
    """The codes of the last input that autograd has made, while that lives and is unchanged."""

    def __init__(self) -> None:
        self.x: weakref.ref[Tensor] | None = None
        self.version = 0
        self.codes: tuple[Tensor, Tensor] | None = None

    def codes_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x8 of x's shape, and its scale."""
        if not torch.is_grad_enabled() or x.grad_fn is None:
            return quantize(x, E4M3)  # its version may be silent, or not exist (inference_mode)
        known = None if self.x is None else self.x()
        if self.codes is None or known is not x or self.version != x._version:
            self.codes = quantize(x, E4M3)
            self.x, self.version = weakref.ref(x, self._forget), x._version
        return self.codes

    def _forget(self, died: weakref.ref[Tensor]) -> None:
        if died is self.x:
            self.x = self.codes = None


_shared = _Shared()
