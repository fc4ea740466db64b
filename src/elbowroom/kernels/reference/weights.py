"""bf16 weights in which small updates are not lost.

    nearest    w_b = bf16(w), ties to even: an update below half a step of bf16 is lost
    sr         w_b = the 16 upper bits of (bits of w + a uniform 16-bit integer): E[w_b] = w
    residual   w_b = bf16(w), e = 127 (w - w_b) / h as int8, with h half a step of bf16 at w_b;
               read back as w_b + h e / 127: 24 bits, |error| < h / 127

e is rounded stochastically, so that E[w~] = w: to nearest, an update below |w| / 65,000 is lost,
which is every one of a norm's weight of 1 at a learning rate of 1e-5. Its fraction is taken from
what the nearest integer is read back as, float32's rounding included: a weight that is stored again
unchanged keeps its value, and an update of one ulp of float32 survives on average.

h is 2^(exponent - 8), at least 2^-126. What is not finite stays as it is.
"""

import torch
from torch import Tensor

_SIGNLESS, _INFINITE = 0x7FFFFFFF, 0x7F800000


def weights_load(param: Tensor, residual: Tensor | None) -> Tensor:
    """param [N], residual [N] int8 or None -> float32 [N]."""
    w = param.float()
    if residual is None:
        return w
    half, _ = _half_step(w)
    return torch.where(w.isfinite(), _read_back(w, residual.float(), half), w)


def weights_store(
    w: Tensor, param: Tensor, residual: Tensor | None, how: str, u: Tensor | None
) -> None:
    """param, residual <- w float32 [N]; u [N] uniform in (0, 1), in units of 1 / 65536 and a half.

    u may be None for `nearest`, and for a dtype other than bfloat16, which has no other way.
    """
    if u is not None and how == "sr":
        bits = w.view(torch.int32)
        words = (u * 65536).to(torch.int32)
        rounded = (((bits + words) >> 16) << 16).view(torch.float32)
        w = torch.where((bits & _SIGNLESS) < _INFINITE, rounded, w)
    param.copy_(w)
    if residual is not None and u is not None:
        held = param.float()
        half, inverse = _half_step(held)
        near = (((w - held) * inverse).clamp(-1, 1) * 127).round()
        more = ((w - _read_back(held, near, half)) * inverse).clamp(-1, 1) * 127
        residual.copy_(torch.where(held.isfinite(), ((near + more) + u).floor(), 0.0))


def _read_back(held: Tensor, e: Tensor, half: Tensor) -> Tensor:
    """Returns the weight that is held with the residual e, float32."""
    return held + (e * (1 / 127)) * half


def _half_step(w: Tensor) -> tuple[Tensor, Tensor]:
    """h and 1 / h."""
    exponent = (((w.view(torch.int32) & _SIGNLESS) >> 23) - 8).clamp(min=1)
    return (exponent << 23).view(torch.float32), ((254 - exponent) << 23).view(torch.float32)
