"""A bitmap, and the elements that are not zero, untouched.

    x [N] --> bits [ceil(N / 8)] uint8, kept [nnz] of x's dtype     1/32 + density of float32's size

Lossless, NaN and -0.0 included (-0.0 counts as not zero). The size depends on the data: by itself,
the codec waits for a GPU to read it; in training it is given memory of a fixed size (`room.py`).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from elbowroom.codecs.affine import Affine
from elbowroom.codecs.base import FLOATS, Buffers, Codec, Encoded, Expected, Layout, Seed
from elbowroom.codecs.facts import Facts
from elbowroom.codecs.room import Space
from elbowroom.kernels import ops
from elbowroom.kernels.fakes import would_wait

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class SparseLossless(Codec):
    """Lossless: a bitmap and the non-zero elements. Smaller than x below 97 % density (float32)."""

    id: ClassVar[str] = "sparse_lossless"
    lossless: ClassVar[bool] = True
    takes_room: ClassVar[bool] = True
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (
        *FLOATS,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    )

    def _layout(self, n: int, dtype: torch.dtype, facts: Facts) -> Layout:
        return Expected(torch.uint8, (-(-n // 8),)), Expected(dtype, (n,), at_most=True)

    def _encode(self, flat: Tensor, seed: Seed, facts: Facts) -> Buffers | None:
        bits, kept = ops.sparse_pack(flat.view(_WORDS[flat.element_size()]))
        return bits, kept.view(flat.dtype)

    def _encode_into(
        self, flat: Tensor, seed: Seed, facts: Facts, affine: Affine | None, space: Space
    ) -> Buffers | None:
        flat = flat if affine is None else affine.of(flat)
        words = _WORDS[flat.element_size()]
        bits, kept = packed_into(flat.view(words), space)
        return bits, kept.view(flat.dtype)

    def _decode_into(self, encoded: Encoded, out: Tensor) -> None:
        unpack(encoded, out.view(_WORDS[out.element_size()]))


def packed_into(words: Tensor, space: Space) -> tuple[Tensor, Tensor]:
    """`ops.sparse_pack`, where the words that are not zero are written to memory that is given."""
    kept, spill = space.payload.view(words.dtype), space.spill.memory.view(words.dtype)
    return ops.sparse_pack_into(words, kept, spill, space.used), kept


def unpack(encoded: Encoded, words: Tensor) -> None:
    """Writes to words [N] those that the first two buffers of a code stand for."""
    bits, kept = encoded.buffers[0], encoded.buffers[1].view(words.dtype)
    if encoded.spill is None and would_wait(words):
        _check(encoded, bits, kept, words.numel())
    spill = kept[:0] if encoded.spill is None else encoded.spill.memory.view(words.dtype)
    try:
        ops.sparse_unpack(bits, kept, spill, words, encoded.spill is None)
    except ValueError as error:
        raise encoded.damaged(*str(error).removeprefix("expected ").split("; got ")) from None


def _check(encoded: Encoded, bits: Tensor, kept: Tensor, numel: int) -> None:
    """On a GPU no kernel compares the two."""
    present = torch.empty(numel, dtype=torch.bool, device=bits.device)
    ops.unpack_bits(bits, 1.0, present)
    n = int(present.count_nonzero())
    if n != len(kept):
        raise encoded.damaged(f"{n} non-zeros, as the bitmap says", str(len(kept)))
