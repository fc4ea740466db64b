"""The gradients of fused attention from q, k and v alone, without its result or logsumexp (CPU).

torch's own backward asks for the result and the logsumexp of each row, so forward has to run again
first, where these are not held. But some whole rows of the weights fit into a cache, and all can be
computed of them at once (`reference/attention_backward.py`): five products of matrices, where both
runs take nine.

q, k, v, g of (batch, heads, tokens, width), one thread, thread CPU ms, least of 12 (Xeon with
AVX-512, torch 2.13): forward run again and torch's backward, torch's backward alone, and this:

                            causal                   all keys
    (32, 4,  128,  16)      7.5,   4.9,   4.3        7.3,   4.8,   5.4
    ( 8, 12, 128,  64)     17.7,  13.0,  12.1       16.6,  11.8,  13.9
    ( 4, 4,  512,  32)     18.5,  12.6,   8.9       17.9,  12.2,  15.9
    ( 2, 8, 1024,  64)      101,    71,    69        132,    93,   124
    ( 1, 8, 2048, 128)      313,   223,   309        489,   348,   570
"""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from elbowroom.kernels import ops


class AttentionArguments(NamedTuple):
    """Arguments of attention: q [B, H, T, E], k [B, G, S, E], v [B, G, S, F], without dropout.

    mask   one that wants no gradient, or None
    scale  factor of q k^T; None: 1 / sqrt(E)

    A head of k and v serves H / G successive ones of q.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None

    @property
    def fits(self) -> bool:
        """True if `gradients` can compute the gradients: of float32 on a CPU."""
        q, k, v, mask, *_ = self
        if any(x.dim() != 4 or x.dtype is not torch.float32 for x in (q, k, v)):
            return False
        if mask is not None and mask.dtype not in (torch.bool, torch.float32):
            return False
        B, H, *_ = q.shape
        alike = k.shape[:2] == v.shape[:2] and k.shape[0] == B and H % k.shape[1] == 0
        return alike and q.device.type == "cpu"

    @property
    def factor(self) -> float:
        """The factor of q k^T."""
        return 1 / sqrt(self.q.shape[-1]) if self.scale is None else self.scale


Three = tuple[Tensor, Tensor, Tensor]


def gradients(given: AttentionArguments, grad: Tensor, into: Three | None = None) -> Three:
    """The gradients of q, k and v; grad [B, H, T, F].

    into: what they are written to; None: fresh memory with the strides of q, k and v
    """
    q, k, v, mask, is_causal, _ = given
    found = into or (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    ops.attention_backward(q, k, v, grad, mask, is_causal, given.factor, *found)
    return found


def workspace_nbytes(k: Sequence[int], v: Sequence[int]) -> int:
    """Bytes that `gradients` takes beside its results, of k and v of these shapes."""
    B, G, S, E = k
    # Whole tiles, and so many queries at once: a test compares it with the kernel's own count.
    keys, of_k, of_v = (-(-n // 16) * 16 for n in (S, E, v[3]))
    each = keys * (3 * of_k + 2 * of_v) + 32 * (2 * keys + 2 * of_k + of_v)
    return 4 * each * min(B * G, torch.get_num_threads())
