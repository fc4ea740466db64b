"""LayerNorm and RMSNorm that save their output instead of their input.

    y = weight * n + bias      n = (x - mean) * rstd      (RMSNorm: mean = 0, no bias)

Backward needs n, rstd and weight, and n = (y - bias) / weight. The layer behind the norm saves y
anyway, so that the norm saves one number a row, and x, which nobody else saves where a residual
goes by, is freed. n comes back with y's rounding: relative error 2^-9 in bf16, times
1 + abs(bias / weight).

Where a weight is near 0 (below 1e-3) or a bias more than 8 times its weight, n cannot be had from
y, and x is saved, as torch does. Whether that is so is examined in each forward on a CPU; on a GPU
when the parameters' versions have changed: one sync for each norm and optimizer step. (What writes
to `p.data` changes no version: there convert again.) (Idea: MS-norm, arXiv 2406.16282, which merges
the weight into the next layer instead.)
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elbowroom.errors import ModuleError
from elbowroom.kernels.fakes import has_values
from elbowroom.nn._autograd import apply, autocast_dtype, refuse_twice
from elbowroom.nn.swap import name_of
from elbowroom.runtime.storage import PLAIN

_MIN, _MAX = 1e-3, 8.0


def can_invert(weight: Tensor, bias: Tensor | None) -> bool:
    """Returns whether n can be had from y: reads the values of both."""
    size = weight.detach().abs()
    fits = (size >= _MIN).all()
    if bias is not None:
        fits &= (bias.detach().abs() <= _MAX * size).all()
    return bool(fits)


class _SavedOutput:
    """Cache of whether n can be had from y, by the versions of a norm's parameters on a GPU."""

    def __init__(self) -> None:
        self.seen: tuple[Any, ...] | None = None
        self.fits = False

    def ask(self, weight: Tensor, bias: Tensor | None) -> bool:
        if not has_values(weight):
            return True  # a dry run, or the meta device: as a norm is at its birth
        if weight.device.type == "cpu":
            return can_invert(weight, bias)
        now = tuple(
            None if each is None else (each.data_ptr(), each._version) for each in (weight, bias)
        )
        if now != self.seen:
            self.seen, self.fits = now, can_invert(weight, bias)
        return self.fits


class _Norm(torch.autograd.Function):
    """x, weight [D], bias [D] -> y, rstd [rows, 1] fp32. `centered`: LayerNorm, else RMSNorm."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool, name: str
    ) -> tuple[Tensor, Tensor]:
        shape = weight.shape
        if centered:
            y, _, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
            return y, rstd
        wide = torch.promote_types(x.dtype, torch.float32)
        dims = tuple(range(-len(shape), 0))
        norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=wide)
        return F.rms_norm(x, shape, weight, eps), (norm.square() / shape.numel() + eps).rsqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, weight, bias, _, ctx.centered, ctx.module = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[0], weight, bias, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_twice("LayerNorm" if ctx.centered else "RMSNorm")
        y, weight, bias, rstd = _saved(ctx)
        wide = torch.promote_types(y.dtype, torch.float32)
        g, n, rstd = grads[0].to(wide), y.to(wide, copy=True), rstd.to(wide)
        n = (n if bias is None else n.sub_(bias)).div_(weight)
        dims, rows = tuple(range(-weight.dim(), 0)), tuple(range(y.dim() - weight.dim()))
        d_weight = _summed(g * n, rows).to(weight.dtype)
        d_bias = None if bias is None else _summed(g, rows).to(bias.dtype)
        g = g * weight
        dx = g - n * (g * n).mean(dims, keepdim=True)
        if ctx.centered:
            dx -= g.mean(dims, keepdim=True)
        return (dx * rstd).to(y.dtype), d_weight, d_bias, None, None, None


def _saved(ctx: Any) -> tuple[Tensor, ...]:
    """Returns ctx.saved_tensors.

    Raises ModuleError, which names the cure, after a change in place, which torch's norms allow.
    """
    try:
        found: tuple[Tensor, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        what = f"er.nn.{'LayerNorm' if ctx.centered else 'RMSNorm'}"
        raise ModuleError(
            f"{what}{f' {ctx.module!r}' if ctx.module else ''} has saved its output, and that was "
            "modified by an inplace operation before backward (or its weight was). Let that make "
            "a new tensor, as nn.ReLU(inplace=False) does, or leave this norm to torch: "
            f"er.nn.revert(model), er.convert(model, keep=[{ctx.module or 'its name'!r}])."
        ) from error
    return found


def _summed(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x summed over these dimensions; torch takes none to mean all."""
    return x.sum(dims) if dims else x


def _applies(x: Tensor, weight: Tensor | None) -> bool:
    """Returns whether y may stand for x: gradients are recorded, and one dtype throughout."""
    if not torch.is_grad_enabled() or not x.requires_grad or not x.is_floating_point():
        return False
    if autocast_dtype(x) is not None:
        return False  # autocast gives norms fp32, and the next layer a copy: nothing is shared
    return weight is not None and weight.dtype is x.dtype and x.numel() > 0 and type(x) in PLAIN


class LayerNorm(nn.LayerNorm):
    """LayerNorm that saves its output. Weights, keys and output bits are those of torch's."""

    def forward(self, input: Tensor) -> Tensor:
        """Computes the norm of input [..., *normalized_shape]."""
        if _applies(input, self.weight) and _saved_output(self).ask(self.weight, self.bias):
            args = input, self.weight, self.bias, self.eps, True, name_of(self)
            y: Tensor = apply(_Norm, *args)[0]
            return y
        return super().forward(input)


class RMSNorm(nn.RMSNorm):
    """RMSNorm that saves its output. Weights and keys are those of torch's.

    Its output has the same bits as torch's without gradients. With gradients, torch's own consists
    of other ops on a CPU, and may round differently in bf16 and fp16.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Computes the norm of x [..., *normalized_shape]."""
        if _applies(x, self.weight) and _saved_output(self).ask(self.weight, None):
            # Without an eps torch takes that of the dtype it sums in: float32's for halves.
            wide = torch.promote_types(x.dtype, torch.float32)
            eps = torch.finfo(wide).eps if self.eps is None else self.eps
            y: Tensor = apply(_Norm, x, self.weight, None, eps, False, name_of(self))[0]
            return y
        return super().forward(x)


def _saved_output(norm: nn.Module) -> _SavedOutput:
    """Returns what is remembered for a norm: made when first asked for, by a converted one too."""
    found: _SavedOutput | None = norm.__dict__.get("_saved_output")
    if found is None:
        found = norm.__dict__["_saved_output"] = _SavedOutput()
    return found
