"""Layout of a transform code of maps: arithmetic that all backends share, on plain ints.

A map is cut into tiles of B x B; tiles are numbered plane by plane (a plane is one channel of one
sample), row by row. A *group* is `lanes` tiles in that order, about 2048 elements, and beyond the
last tile its lanes repeat it. A tile has B * B coefficients; position p orders them by band
l = i + j, then by row. Positions that follow one another with the same levels are a *run*.

    payload of a group, one after the other
        run 0         lanes codes of position 0, the mean
        gains         a byte for each `cell` tiles
        run 1, 2, ..  codes of their positions x lanes, packed together (layout.py)
        kept          lanes / 8 bytes, where fewer than all tiles have a residual
        words, norms  a byte each for every kept tile

Coefficients whose band has no levels are the residual; they lie at the end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import cos, pi, sqrt
from typing import NamedTuple

from elbowroom.kernels.layout import codes_nbytes

BLOCKS = (8, 7, 4)
HASH_BITS = 8
WORDS = 1 << HASH_BITS
LAST_BAND = 7  # bands from here on share one weight
UNITS = 8192.0  # statistics are taken of coefficients as integers, in units of absmax / UNITS
LIMIT = 2.0**120  # beyond it a sum of coefficients might overflow: taken as not finite
FIRST_GAIN = 1872  # gain code k > 0 is the float32 whose bits are (k + 1872) << 19: 2^-10 to 62


class LevelRange(NamedTuple):
    """Positions start..stop-1, all with `levels`."""

    start: int
    stop: int
    levels: int


@dataclass(frozen=True)
class Bands:
    """Layout that follows from a block size and the levels of the bands.

    No tuple, not even a named one: Triton 3.8 takes a kernel's constants that are tuples for tuples
    of its own, which have neither these methods nor `index` and `count`.
    """

    block: int
    lanes: int
    cell: int
    order: tuple[int, ...]  # position -> row * block + column
    band: tuple[int, ...]  # position -> min(row + column, LAST_BAND)
    runs: tuple[LevelRange, ...]  # run 0 is the mean
    coded: int  # the residual is positions coded..block^2-1

    @property
    def bands(self) -> int:
        """The number of bands with coded coefficients, which have a weight each; 0 is the mean."""
        return self.band[self.coded - 1]

    @property
    def rest(self) -> int:
        """Coefficients of the residual."""
        return self.block**2 - self.coded

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """All that are mixed, in turn: see `mixed`."""
        return tuple(span for run in self.runs[1:] for span in mixed(run))

    def run_nbytes(self, i: int) -> int:
        """Bytes of a run's codes."""
        start, stop, levels = self.runs[i]
        return codes_nbytes(levels, (stop - start) * self.lanes)

    def nbytes(self, kept: int) -> int:
        """Bytes of payload of a group, of which `kept` tiles have a residual (0: no reuse)."""
        codes = sum(self.run_nbytes(i) for i in range(len(self.runs)))
        bitmap = self.lanes // 8 if 0 < kept < self.lanes else 0
        return codes + self.lanes // self.cell + bitmap + 2 * kept

    def scales(self, kept: int) -> int:
        """Scales of a group: two of the mean, one a coded band, one of the residual."""
        return 2 + self.bands + (kept > 0)


@cache
def bands_of(block: int, levels: tuple[int, ...]) -> Bands:
    """levels by band, the last one repeated; 0 for bands that are not coded (at the end only)."""
    places = sorted((i + j, i, j) for i in range(block) for j in range(block))
    at = [levels[min(band, len(levels) - 1)] for band, _, _ in places]
    runs = [LevelRange(0, 1, at[0])]
    for p in range(1, block**2):
        if not at[p]:
            break
        if at[p] == runs[-1].levels and len(runs) > 1:
            runs[-1] = runs[-1]._replace(stop=p + 1)
        else:
            runs.append(LevelRange(p, p + 1, at[p]))
    return Bands(
        block=block,
        lanes=128 if block == 4 else 32,
        cell=4 if block == 4 else 1,
        order=tuple(i * block + j for _, i, j in places),
        band=tuple(min(band, LAST_BAND) for band, _, _ in places),
        runs=tuple(runs),
        coded=runs[-1].stop,
    )


def best_block(rows: int, columns: int) -> int:
    """The largest tile that pads a map by at most an eighth, else the one that pads it least."""
    area = {b: -(-rows // b) * -(-columns // b) * b * b for b in BLOCKS}
    for b in BLOCKS:
        if 8 * area[b] <= 9 * rows * columns:
            return b
    return min(BLOCKS, key=lambda b: area[b])


def tiles_of(maps: Sequence[int], block: int) -> int:
    """Tiles of all planes; maps is outer, rows, columns, inner."""
    outer, rows, columns, inner = maps
    return outer * inner * -(-rows // block) * -(-columns // block)


@cache
def cosines(block: int) -> tuple[tuple[float, ...], ...]:
    """The orthonormal DCT-II [block, block], row i the i-th cosine."""
    return tuple(
        tuple(
            sqrt((1 + (i > 0)) / block) * cos(pi * (2 * j + 1) * i / (2 * block))
            for j in range(block)
        )
        for i in range(block)
    )


def mixed(run: LevelRange) -> Iterator[tuple[int, int]]:
    """The spans (start, size) of a run that are mixed in turn, sizes powers of two: all of it."""
    n = run.stop - run.start
    size = 1 << (n.bit_length() - 1)
    yield run.start, size
    if size < n:
        yield run.stop - size, size


def _word(i: int) -> int:
    """A fixed 32-bit word for each i: see `mix` in reference/noise.py."""
    x = (i * 0x9E3779B9 + 0x7F4A7C15) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


# A sign for each position, turned before a run is mixed, and the planes of the hash: sums of four
# bytes, which are nearly normal. Constants of the format.
SIGNS = tuple(1.0 - 2.0 * (_word(p) & 1) for p in range(64))
PLANES = tuple(
    tuple((sum(_word(1000 + 64 * h + p).to_bytes(4, "little")) - 510) // 4 for p in range(64))
    for h in range(HASH_BITS)
)
