"""The head and its loss, a chunk of tokens at a time: the logits are never held.

    z = x W^T + b    [chunk, V]      loss_i = lse(z_i) - (1 - s) z_i[t_i] - s mean(z_i)
    g = softmax(z) - (1 - s) onehot(t) - s / V
    dx = g W         dW = sum over chunks of g^T x

s is label_smoothing. Plain torch holds the logits and their log-softmax, about 10 bytes for each of
tokens x V. Here x and lse (4 bytes a token) are saved, and backward computes each chunk's logits
again: a third more products of the head. The other way, gradients computed in forward and stored,
saves that third, but needs x's gradient before the scale is known that it is multiplied by: with
reduction "none" there is no single one, and in fp16 a gradient that GradScaler has not scaled yet
underflows.

Softmax, sums and dW are in fp32 whatever the dtype of x, products in the dtype of x: as torch does
under autocast. (Facts: Cut Cross-Entropy, arXiv 2411.09009; Liger, arXiv 2410.10989.)
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elbowroom.errors import ModuleError
from elbowroom.nn._autograd import apply, autocast_dtype, refuse_twice, without_autocast

_LOGITS, _MIN = 2**23, 256  # of one chunk: 32 MiB in fp32, but no fewer tokens
_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """Computes `F.cross_entropy(F.linear(x, weight, bias), target, ...)` without all logits.

    x       [..., D]
    weight  [V, D]
    bias    [V], or None
    target  [...] int64: classes, or ignore_index
    chunk   the number of tokens whose logits are in memory at a time; None: as many as take 32 MiB
            of fp32, and at least 256

    Returns a scalar, or [...] for reduction "none", in fp32 for bf16 and fp16. As in torch, the
    mean over zero tokens is NaN, with zero gradients. Raises ModuleError for shapes, dtypes or
    settings that do not match. Under autocast, x and weight are cast as by F.linear.

    Class weights `w` [V] can be applied to the losses of reduction "none", where no target is
    ignored: `(losses * w[target]).sum() / w[target].sum()`.
    """
    _check(x, weight, target, bias, reduction, label_smoothing, chunk)
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight = x.to(dtype), weight.to(dtype)
    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    size = chunk or max(_MIN, _LOGITS // max(1, len(weight)))
    with without_autocast(x):
        settings = ignore_index, float(label_smoothing), size
        losses: Tensor = apply(_LinearCrossEntropy, rows, weight, bias, labels, *settings)[0]
        if reduction == "none":
            return losses.view(target.shape)
        total: Tensor = losses.sum()
        return total if reduction == "sum" else total / (labels != ignore_index).sum()


def _check(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    reduction: str,
    label_smoothing: float,
    chunk: int | None,
) -> None:
    fits = weight.dim() == 2 and x.dim() > 0 and x.shape[-1] == weight.shape[1]
    if (
        not fits
        or target.shape != x.shape[:-1]
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        shapes = [None if t is None else tuple(t.shape) for t in (x, weight, target, bias)]
        raise ModuleError(
            "linear_cross_entropy takes x [..., D], weight [V, D], target [...] and bias [V]; got "
            f"x {shapes[0]}, weight {shapes[1]}, target {shapes[2]}, bias {shapes[3]}."
        )
    if target.dtype is not torch.int64 or not x.is_floating_point():
        raise ModuleError(
            "linear_cross_entropy takes floats and int64 classes; got "
            f"{_name(x)} and {_name(target)}. Class probabilities need F.cross_entropy."
        )
    _check_kinds(x, weight, target, bias)
    if reduction not in _REDUCTIONS or not 0 <= label_smoothing <= 1:
        raise ModuleError(
            f"linear_cross_entropy: reduction={reduction!r}, label_smoothing={label_smoothing!r} "
            f"is not possible; reduction is one of {', '.join(_REDUCTIONS)}, the other 0 to 1."
        )
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise ModuleError(f"chunk={chunk!r} is not possible; it is a number of tokens, or None.")


def _check_kinds(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    """Raises ModuleError for tensors of several devices, or floats of several dtypes."""
    devices = {str(t.device) for t in (x, weight, target, bias) if t is not None}
    if len(devices) > 1:
        raise ModuleError(
            "linear_cross_entropy takes tensors of one device; got "
            f"{' and '.join(sorted(devices))}. Bring them together by .to(x.device)."
        )
    if x.dtype is not weight.dtype and autocast_dtype(x) is None:
        raise ModuleError(
            f"linear_cross_entropy takes x and weight of one dtype; got {_name(x)} and "
            f"{_name(weight)}. Cast one of them, or train under torch.autocast."
        )


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


class _LinearCrossEntropy(torch.autograd.Function):
    """rows [N, D], weight [V, D], bias [V], labels [N] -> losses [N], lse [N]: fp32, or wider."""

    @staticmethod
    def forward(
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignore_index: int,
        smoothing: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(rows.dtype, torch.float32)
        losses = torch.empty(len(rows), dtype=wide, device=rows.device)
        lse = torch.empty_like(losses)
        for at in range(0, len(rows), chunk):
            part = slice(at, at + chunk)
            z = _logits(rows[part], weight, bias, wide)
            used = labels[part] != ignore_index
            lse[part] = z.logsumexp(1)
            picked = z.gather(1, _safe(labels[part], used)).squeeze(1)
            loss = lse[part] - (1 - smoothing) * picked
            if smoothing:
                loss -= smoothing * z.mean(1)
            losses[part] = loss.where(used, 0.0)
            del z  # before the next chunk makes its own
        return losses, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        rows, weight, bias, labels, *ctx.settings = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(rows, weight, bias, labels, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_twice(
            "linear_cross_entropy", "Use F.cross_entropy(F.linear(x, weight, bias), target)."
        )
        rows, weight, bias, labels, lse = ctx.saved_tensors
        ignore_index, smoothing, chunk = ctx.settings
        for_rows, for_weight, for_bias = ctx.needs_input_grad[:3]
        d_rows = torch.empty_like(rows) if for_rows else None
        d_weight = torch.zeros_like(weight, dtype=lse.dtype) if for_weight else None
        d_bias = torch.zeros_like(bias, dtype=lse.dtype) if for_bias else None
        for at in range(0, len(rows), chunk):
            part = slice(at, at + chunk)
            g = _logits(rows[part], weight, bias, lse.dtype).sub_(lse[part, None]).exp_()
            used = labels[part] != ignore_index
            if smoothing:
                g -= smoothing / len(weight)
            ones = torch.full_like(g[:, :1], smoothing - 1)
            g.scatter_add_(1, _safe(labels[part], used), ones)
            g *= grads[0][part].where(used, 0.0)[:, None]
            narrow = g.to(rows.dtype)
            if d_rows is not None:
                torch.mm(narrow, weight, out=d_rows[part])
            if d_weight is not None:
                _add_product(d_weight, narrow.T, rows[part])
            if d_bias is not None:
                d_bias += g.sum(0)
            del g, narrow  # before the next chunk makes its own
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        return d_rows, d_weight, None if d_bias is None else d_bias.to(bias.dtype), *(None,) * 4


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Total += a b; without a product of its own where all have one dtype."""
    if total.dtype is a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, wide: torch.dtype) -> Tensor:
    """[chunk, V] in fp32 (or wider), in memory of their own."""
    z = (rows @ weight.T).to(wide)
    return z if bias is None else z.add_(bias)


def _safe(labels: Tensor, used: Tensor) -> Tensor:
    """Returns labels with class 0 for what is ignored: [chunk, 1]."""
    return labels.where(used, 0)[:, None]


class LinearCrossEntropy(nn.Linear):
    """Linear layer and cross entropy in one module, which never stores all logits.

        head = er.nn.LinearCrossEntropy(768, 50257, bias=False)
        loss = head(x, target)          # x [..., 768], target [...]
        logits = head(x)                # without a target: a linear layer

    Keys are those of nn.Linear. The settings are those of `linear_cross_entropy`.
    """

    def __init__(
        self,
        in_features: int,
        classes: int,
        bias: bool = True,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        chunk: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, classes, bias, device=device, dtype=dtype)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.chunk = label_smoothing, chunk

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        """Returns the loss, or the logits [..., V] without a target."""
        if target is None:
            return F.linear(x, self.weight, self.bias)
        return linear_cross_entropy(
            *(x, self.weight, target, self.bias),
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            chunk=self.chunk,
        )
