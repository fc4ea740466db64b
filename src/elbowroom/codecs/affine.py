"""A scale and a shift by channel, which codecs apply in the pass that quantizes or dequantizes.

    x --affine--> y --encode--> codes --decode--> y~ --affine, then 0 where no bit--> x~

The input of a norm is encoded as (x - mean) * rstd, and decoded with the inverse of that map. Where
the output of the norm is rebuilt instead, the inverse and the norm's own map are composed (`then`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from elbowroom.kernels import ops

ABSENT = None, None, 1  # the arguments of an op without an affine map


class Affine(NamedTuple):
    """x * scale + shift: element i in memory order belongs to channel (i // inner) % C.

    scale, shift [C] float32, or [R, C]: a row for each of R equal shares of x.
    """

    scale: Tensor
    shift: Tensor
    inner: int

    @classmethod
    def identity(cls, device: torch.device) -> "Affine":
        return cls(torch.ones(1, device=device), torch.zeros(1, device=device), 1)

    def of(self, x: Tensor) -> Tensor:
        """x [N] -> its image [N], rounded to its dtype."""
        y = torch.empty_like(x)
        ops.affine(x, *self, None, y)
        return y

    def in_place(self, x: Tensor, bits: Tensor | None = None) -> None:
        """x [N] <- its image, and 0 where a bit of bits [ceil(N / 8)] is not set."""
        ops.affine(x, *self, bits, x)

    def then(self, other: "Affine") -> "Affine | None":
        """Returns other(self(x)) as one affine; None if neither's channels divide the other's."""
        if self.scale.dim() > 1 or other.scale.dim() > 1:
            return None
        fine = min((self, other), key=lambda affine: (affine.scale.numel() == 1, affine.inner))
        first, second = self._split_like(fine), other._split_like(fine)
        if first is None or second is None:
            return None
        scale = first.scale * second.scale
        return Affine(scale, first.shift * second.scale + second.shift, fine.inner)

    def _split_like(self, fine: "Affine") -> "Affine | None":
        """Returns the same affine in the channels of `fine`, or in one if this has one channel."""
        if self.scale.numel() == 1:  # `len` of a tensor goes through Python
            return self
        each, rest = divmod(self.inner, fine.inner)
        if rest or each * self.scale.numel() != fine.scale.numel():
            return None
        if each == 1:
            return self
        scale, shift = (part.repeat_interleave(each) for part in (self.scale, self.shift))
        return Affine(scale, shift, fine.inner)
