"""Layout of codes: arithmetic that all backends share, on plain ints.

A flat tensor is cut into *tiles* of 2048 elements (the last one shorter), a tile into *groups* of
`group_size`. A tile's codes are packed together, planar: with `k` codes in a byte, byte j of n
holds the codes of elements j, j + n, j + 2n, ..., so that a vector unit packs and unpacks whole
rows without a shuffle.

    levels      2    3    4    5,6    8       16   32      64      128         256
    codes/byte  8    5    4    3      4 + 8   2    2 + 8   2 + 4   2 + 4 + 8   1

a + b means two segments, high bits first. Other numbers of levels take the width of the next power
of two. 3 levels cost 1.6 bits where log2 3 is 1.585.
"""

from typing import NamedTuple

from torch import Tensor

TILE = 2048
BLOCK = 32  # of `comet`: elements that share a width
GROUP_SIZES = (32, 64, 128, 256)
FOLDS = (1, 4, 8, 16)  # of `sided`: how many lower values share a code
RADIX = {3: 5, 5: 3, 6: 3}  # levels -> codes in a byte, written in base `levels`


class Segment(NamedTuple):
    """One run of packed bytes.

    `per` codes in a byte, each `width` bits wide, taken from bit `shift` of the code.
    """

    per: int
    width: int
    shift: int


def code_bits(levels: int) -> int:
    """Bits of a code in 0..levels-1: 4 -> 2, 5 -> 3."""
    return max(1, (levels - 1).bit_length())


def segments(levels: int) -> tuple[Segment, ...]:
    """The segments of a code that is not in RADIX, low bits last.

    8 levels -> 2 bits (shift 1), then 1 bit (shift 0).
    """
    bits, found = code_bits(levels), []
    for width in (8, 4, 2, 1):
        if bits >= width:
            bits -= width
            found.append(Segment(8 // width, width, bits))
    return tuple(found)


def codes_nbytes(levels: int, n: int) -> int:
    """Bytes of n packed codes of one tile."""
    if levels in RADIX:
        return -(-n // RADIX[levels])
    return sum(-(-n // segment.per) for segment in segments(levels))


def runs(levels: int) -> int:
    """Runs of bytes that the codes of a tile are stored in: 8 levels take two."""
    return 1 if levels in RADIX else len(segments(levels))


def tiles(numel: int) -> int:
    """Tiles of a flat tensor."""
    return -(-numel // TILE)


def groups(numel: int, group_size: int) -> int:
    """Groups of a flat tensor; no group crosses a tile because every group size divides TILE."""
    return -(-numel // group_size)


def blocks(numel: int) -> int:
    """Blocks of a flat tensor."""
    return -(-numel // BLOCK)


def width_nbytes(k: int, width: int) -> int:
    """Bytes of k codes of `width` bits each."""
    return -(-k * width // 8)


def packed_nbytes(levels: int, numel: int) -> int:
    """Bytes of all packed codes of a flat tensor of `numel` elements."""
    full, rest = numel // TILE, numel % TILE  # not divmod: torch.compile passes a symbolic integer
    return full * codes_nbytes(levels, TILE) + codes_nbytes(levels, rest)


def drop_below(p: float) -> int:
    """The 32-bit word that dropout's words are held against: those below it are dropped."""
    return min(round(p * 2**32), 2**32 - 1)


def nonzero_tile_nbytes(levels: int, group_size: int) -> int:
    """Bytes that the payload of no tile of `nonzero` exceeds."""
    return codes_nbytes(levels, TILE) + 2 * groups(TILE, group_size)


def sided_tile_nbytes(upper: int, lower: int, group_size: int, fold: int) -> int:
    """Bytes that the payload of no tile of `sided` exceeds (see `codecs/sided.py`)."""
    cuts = max(runs(upper), runs(lower))
    ranges = 2 * (groups(TILE, group_size) + (1 if fold == 1 else 2))
    return codes_nbytes(max(upper, lower), TILE) + cuts + ranges


def check_payload(payload: Tensor, nbytes: int, *, goes_on: bool = False) -> None:
    """Raises ValueError unless a payload of variable size is as long as its bitmap calls for.

    goes_on: nbytes is that of a first part only.
    """
    if payload.numel() < nbytes or (payload.numel() > nbytes and not goes_on):
        raise ValueError(
            f"expected {nbytes} bytes of payload, as the bitmap says; got {payload.numel()}"
        )


def check_kept(kept: Tensor, count: int, *, exact: bool) -> None:
    """Raises ValueError if fewer elements are held than a bitmap says; if exact, also if more."""
    if kept.numel() < count or (exact and kept.numel() > count):
        raise ValueError(f"expected {count} non-zeros, as the bitmap says; got {kept.numel()}")
