"""How long the rows of each head are, and how wide a step of their code would be.

of head (b, h) and its rows x_t, t < T:

length_t = |x_t|^2     range_t = (max(x_t) - min(x_t))^2     w_t = (length_t / max length)^3

and the means of length and of range, first weighted by w, then over all rows alike. If heads share
steps, range_t is the largest one of token t in any head of b. A head of zeros has equal weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def head_spread(
    x: Tensor, width: int, sizes: Sequence[int], strides: Sequence[int], shares: bool
) -> Tensor:
    """x [n], with rows of `width` at b, h, t . strides, [B, H, T] of sizes -> [4, B, H] float32.

    All four are NaN of a head in which a length is not finite.
    """
    rows = x.as_strided((*sizes, width), (*strides, 1), x.storage_offset()).double()
    length, ranges = rows.square().sum(-1), rows.amax(-1) - rows.amin(-1)
    if shares:
        ranges = ranges.amax(1, keepdim=True).expand(ranges.shape)
    ranges = ranges.square()
    weights = (length / length.amax(-1, keepdim=True)).pow(3).nan_to_num(1.0)
    weights /= weights.sum(-1, keepdim=True)
    found = [part for w in (weights, None) for part in (_mean(length, w), _mean(ranges, w))]
    bad = length.float().isfinite().all(-1).logical_not()
    return torch.stack(found).masked_fill_(bad, torch.nan).float()


def _mean(x: Tensor, weights: Tensor | None) -> Tensor:
    return x.mean(-1) if weights is None else (x * weights).sum(-1)
