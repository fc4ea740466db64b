"""Gradients of attention from q, k and v alone, by autograd's formulas.

p = softmax(f q k^T + mask)    dv = p^T g    dp = g v^T    ds = p (dp - sum(p dp))
dq = f ds k                    dk = f ds^T q

A row of the mask that hides everything has weights of 0.
"""

import torch
from torch import Tensor


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    factor: float,
    of_q: Tensor,
    of_k: Tensor,
    of_v: Tensor,
) -> None:
    """q [B, H, T, E], k [B, G, S, E], v [B, G, S, F], grad [B, H, T, F] -> of_q, of_k, of_v.

    A head of k and v serves H / G successive ones of q. mask: bool or float, [B, H, T, S] or what
    expands to that.
    """
    (B, H, T, _), (_, G, S, _) = q.shape, k.shape
    x, y, z, g = (one.double() for one in (q, k, v, grad))
    y, z = (one.repeat_interleave(H // G, 1) for one in (y, z))
    logits = factor * x @ y.mT
    if is_causal:
        logits = logits.masked_fill(
            torch.ones(T, S, dtype=torch.bool, device=q.device).tril().logical_not(), -torch.inf
        )
    if mask is not None and mask.dtype is torch.bool:
        logits = logits.masked_fill(mask.logical_not(), -torch.inf)
    elif mask is not None:
        logits = (logits.float() + mask).double()  # the least finite number takes all of a logit
    hidden = (logits == -torch.inf).all(-1, keepdim=True)
    p = logits.softmax(-1).masked_fill(hidden, 0)
    dp = g @ z.mT
    ds = factor * p * (dp - (p * dp).sum(-1, keepdim=True))
    of_q.copy_(ds @ y)
    of_k.copy_((ds.mT @ x).view(B, G, H // G, S, -1).sum(2))
    of_v.copy_((p.mT @ g).view(B, G, H // G, S, -1).sum(2))
