"""The gradients of fused attention from q, k and v alone, without its result or logsumexp (CPU).

    p = softmax(f q k^T + mask)    dv = p^T g    dp = g v^T    ds = p (dp - sum(p dp))
    dq = f ds k                    dk = f ds^T q

torch's own backward asks for the result and the logsumexp of each row, so forward has to run again
first, where these are not held. But some whole rows of the weights fit into a cache, and all of the
above can be computed of them at once: five products of matrices, where both runs take nine.

q, k, v, g of (batch, heads, tokens, width), causal, one thread, thread CPU ms (AVX-512, torch
2.13): forward run again and torch's backward, torch's backward alone, and this:

    (32, 4,  128, 16)    7.1,  4.5,  5.7        (4, 4,  512, 32)   22.3, 15.7, 11.0
    ( 8, 12, 128, 64)   17.1, 11.8, 11.1        (2, 8, 1024, 64)    124,   89,   70
"""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

_ROWS = 64  # queries of a head at once
_WEIGHTS = 1 << 15, 1 << 17  # elements of p at once: from here, to here if q has twice as many
_DTYPES = torch.float32, torch.float64


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
        """True if `gradients` can compute the gradients: of wide floats on a CPU."""
        q, k, v, mask, *_ = self
        if any(x.dim() != 4 or x.dtype is not q.dtype for x in (q, k, v)):
            return False
        if mask is not None and mask.dtype not in (torch.bool, q.dtype):
            return False
        B, H, *_ = q.shape
        alike = k.shape[:2] == v.shape[:2] and k.shape[0] == B and H % k.shape[1] == 0
        return alike and q.dtype in _DTYPES and q.device.type == "cpu"

    @property
    def factor(self) -> float:
        """The factor of q k^T."""
        return 1 / sqrt(self.q.shape[-1]) if self.scale is None else self.scale


Three = tuple[Tensor, Tensor, Tensor]


def gradients(given: AttentionArguments, grad: Tensor, into: Three | None = None) -> Three:
    """The gradients of q, k and v; grad [B, H, T, F].

    into: what they are written to; None: fresh memory with the strides of q, k and v
    """
    q, k, v, mask, *_ = given
    (B, H, T, _), (_, G, S, _) = q.shape, k.shape
    found = into or (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    of_q, of_k, of_v = found
    hidden = None if mask is None else _hidden_rows(mask)
    seen = _seen(given)
    mask = None if mask is None else mask.expand(B, H, T, S)
    hidden = None if hidden is None else hidden.expand(B, H, T, 1)
    of_batch, of_heads = _at_once(B, H, T, q.shape[3], G, S)
    if of_batch >= B and of_heads >= G == H:  # all of it: no part is cut, summed or put in place
        some = _flat(q), _flat(k), _flat(v), _flat(grad)
        of_all = _of_heads(given, some, (mask, hidden), seen, None)
        for whole, all_of_it in zip(found, of_all, strict=True):
            whole.copy_(all_of_it.view(whole.shape))
        return found
    for b in range(0, B, of_batch):
        for h in range(0, G, of_heads):
            part = slice(b, b + of_batch), slice(h, h + of_heads)
            keys, values = _flat(k[part]), _flat(v[part])
            sums = torch.zeros_like(keys), torch.zeros_like(values)
            for i in range(H // G):
                own = part[0], slice(h * (H // G) + i, (h + of_heads) * (H // G), H // G)
                some = _flat(q[own]), keys, values, _flat(grad[own])
                masked = [None if x is None else x[own] for x in (mask, hidden)]
                dq = _of_heads(given, some, masked, seen, sums)[0]  # nothing else stays alive
                of_q[own] = dq.view(of_q[own].shape)
                del some, dq  # before the next ones are made
            for whole, total in zip((of_k, of_v), sums, strict=True):
                whole[part] = total.view(whole[part].shape)
            del keys, values, sums, total
    return found


def _at_once(B: int, H: int, T: int, E: int, G: int, S: int) -> tuple[int, int]:
    """Returns how many samples, and how many heads of k and v, are computed at once."""
    least, most = _WEIGHTS
    heads = min(max(B * H * T * E // 2, least), most) // max(1, min(T, _ROWS) * S)
    return min(B, max(1, heads // G)), min(G, max(1, heads))


def workspace_nbytes(q: Sequence[int], k: Sequence[int], v: Sequence[int], itemsize: int) -> int:
    """Bytes that `gradients` takes beside its results, of q, k and v of these shapes."""
    (B, H, T, E), (_, G, S, F) = q, (*k[:3], v[3])
    samples, heads = _at_once(B, H, T, E, G, S)
    weights = 2 * min(T, _ROWS) * S
    each = weights + S * (E + F) + T * E
    if samples > 1:  # their heads do not lie in order
        each += (S + T) * (E + F)
    return itemsize * samples * heads * each


def _flat(x: Tensor) -> Tensor:
    """x [b, h, ...] as [b * h, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _of_heads(
    given: AttentionArguments,
    some: tuple[Tensor, ...],
    masked: Sequence[Tensor | None],
    seen_keys: Sequence[int],
    sums: tuple[Tensor, Tensor] | None,
) -> Three:
    """The gradients of q, k and v of some heads.

    some: q [n, T, E], k [n, S, E], v [n, S, F], g [n, T, F]
    masked: a mask [b, h, T, S], n = b h, and the rows of which it leaves nothing [b, h, T, 1]
    seen_keys: of each run of `_ROWS` queries, how many keys it may see
    sums: what the gradients of k and v are added to; None: to fresh memory
    """
    mask, hidden = masked
    q, k, v, g = some
    T, f = q.shape[1], given.factor
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(k), torch.zeros_like(v)) if sums is None else sums
    k_t, v_t = k.transpose(1, 2), v.transpose(1, 2)
    future = None
    if given.is_causal:
        rows = min(T, _ROWS)
        future = torch.full((rows, rows), -torch.inf, dtype=q.dtype).triu_(1)
    for first, seen in zip(range(0, T, _ROWS), seen_keys, strict=True):
        last = min(first + _ROWS, T)
        some_q, some_g, some_dq = (_cut(x, 1, first, last) for x in (q, g, dq))
        p = q.new_empty(q.shape[0], last - first, seen)
        torch.baddbmm(p, some_q, _cut(k_t, 2, 0, seen), beta=0, alpha=f, out=p)
        if future is not None and seen > first:
            hides = _cut(_cut(future, 0, 0, last - first), 1, 0, seen - first)
            _cut(p, 2, first, seen).add_(hides)
        if mask is not None:
            _hide(p, mask[..., first:last, :seen])
        torch._softmax(p, -1, False, out=p)
        if hidden is not None:
            p.view(*hidden.shape[:2], -1, seen).masked_fill_(hidden[..., first:last, :], 0.0)
        ds = torch.bmm(some_g, _cut(v_t, 2, 0, seen))
        _cut(dv, 1, 0, seen).baddbmm_(p.transpose(1, 2), some_g)
        torch._softmax_backward_data(ds, p, -1, p.dtype, grad_input=ds)
        torch.baddbmm(some_dq, ds, _cut(k, 1, 0, seen), beta=0, alpha=f, out=some_dq)
        _cut(dk, 1, 0, seen).baddbmm_(ds.transpose(1, 2), some_q, alpha=f)
        del p, ds
    return dq, dk, dv


def _cut(x: Tensor, dim: int, first: int, last: int) -> Tensor:
    """Returns elements first .. last of a dimension: x itself, without a view, if these are all."""
    return x if last - first == x.shape[dim] else x.narrow(dim, first, last - first)


def _hidden_rows(mask: Tensor) -> Tensor | None:
    """The rows of a mask [..., T, S] that hide everything, [..., T, 1]; None: there are none.

    Attention gives them a result of 0.
    """
    is_hidden = mask.logical_not() if mask.dtype is torch.bool else mask == -torch.inf
    rows = is_hidden.all(-1, keepdim=True)
    return rows if bool(rows.any()) else None


def _seen(given: AttentionArguments) -> list[int]:
    """The number of keys that each run of `_ROWS` queries may see; those behind have a weight of 0.

    Of masks, the largest negative number hides as infinity does, but for rows that it fills.
    """
    mask, T, S = given.mask, given.q.shape[2], given.k.shape[2]
    ends = [min(first + _ROWS, T) for first in range(0, T, _ROWS)]
    if mask is None:
        return [min(S, end) if given.is_causal else S for end in ends]
    sees = mask
    if mask.dtype is not torch.bool:
        sees = mask > torch.finfo(mask.dtype).min / 2
        is_filled = sees.any(-1, keepdim=True).logical_not_()
        if bool(is_filled.any()):  # what follows took a twentieth of all gradients (8 x 256^2)
            sees |= is_filled & (mask > -torch.inf)
    each = sees.flatten(0, -3).any(0) if sees.dim() > 2 else sees
    each = each.expand(T, S)
    found = [each[end - 1 - (end - 1) % _ROWS : end].any(0).nonzero() for end in ends]
    return [int(columns[-1]) + 1 if len(columns) else 1 for columns in found]


def _hide(logits: Tensor, mask: Tensor) -> None:
    """Puts a mask [b, h, t, s] on logits [n, t, s]."""
    by_head = logits.view(mask.shape)
    if mask.dtype is torch.bool:
        by_head.masked_fill_(mask.logical_not(), -torch.inf)
    else:
        by_head += mask
