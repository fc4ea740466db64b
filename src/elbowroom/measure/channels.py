"""Finds what the noise of an error e of a norm's input x is proportional to.

The weight's gradient, sum dY xhat, gets sum_c D_c v_c / s_c of it, where D_c is the sum of
dY^2 over a channel, s_c the variance of x there, and v_c the mean of e^2. dx gets

    w / sqrt(s) / N (xhat sum dY e / sqrt(s)  +  e sum dY xhat / sqrt(s))

and goes on to all layers below; its first term is proportional to the sum above. So the ratio of
what a probe measures to this sum differs by a few times between the norms of a network; with
|e|^2 |dY|^2 in its place it would differ by thousands.

For values that a ReLU sets to zero and that have a coarse code (`codecs/sided.py`), e is large and
dY mostly 0, so that only the second term is left. It is counted as a part of its own, which stays
when the codes of the other values change. The formulas are those of batch norm; for group norm, s
is taken over the batch, too.
"""

import torch
from torch import Tensor

CHANNEL_NORMS = ("batch_norm", "group_norm")


def channel_errors(error: Tensor, x: Tensor, upper: Tensor | None, rstd: Tensor | None) -> Tensor:
    """Returns v / s [2, C] of an error of x, both [N, C, ...]: of the upper code and of the lower.

    upper  1 where that is held, else 0; None: there is one code. `error` is overwritten then
    rstd   1 / sqrt(s) [C], if it is known
    """
    each = x.numel() / x.shape[1]
    both, lower = _squares(error), torch.zeros(x.shape[1], device=x.device)
    upper_mean = both / each
    if upper is not None:
        count = upper.float().sum(_dims_without_channel(x)).clamp(min=1)
        fine = _squares(error.mul_(upper))
        upper_mean, lower = fine / count, (both - fine).clamp(min=0) / each
    if rstd is None:
        spread = x.float().var(_dims_without_channel(x), correction=0)
        rstd = spread.clamp(min=torch.finfo(torch.float32).tiny).rsqrt()
    return torch.stack([upper_mean, lower]) * rstd.float().square()


def channel_noise(errors: Tensor, grad: Tensor) -> Tensor:
    """Returns sum_c D_c v_c / s_c of both parts [2].

    errors: v / s [2, C]; grad: dY [N, C, ...]
    """
    return errors @ _squares(grad)


def _squares(x: Tensor) -> Tensor:
    """The sum of squares of each channel [C], without a copy of x."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=_dims_without_channel(x), dtype=torch.float32)
    return norms.square()


def _dims_without_channel(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]
