"""`Bands` and the DCT's weights as arrays, for the loops of `fdsr.py`."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from elbowroom.kernels.bands import PLANES, SIGNS, Bands, bands_of, cosines


class Tables(NamedTuple):
    """All that a block size and the levels of the bands decide."""

    block: int
    lanes: int
    cell: int
    coded: int
    bands: int
    gains: int  # where they lie in a group's payload
    rest: int  # where the residual does
    even: Any  # the left halves of the even rows of D, float32
    odd: Any
    even_t: Any
    odd_t: Any
    raster: Any  # [B * B] position -> row * B + column
    band: Any  # [B * B] position -> band
    edges: Any  # [bands + 1] the first position of each band
    pieces: Any  # where a band begins, or the residual, and the end
    runs: Any  # [runs, 5]: start, stop, levels, where its codes lie, and their bytes
    spans: Any  # [spans, 2]
    signs: Any  # [64] float32
    planes: Any  # [HASH_BITS, R] int32


@cache
def tables_of(block: int, levels: tuple[int, ...]) -> Tables:
    b: Bands = bands_of(block, levels)
    runs, end = [], 0
    for i, run in enumerate(b.runs):
        size = b.run_nbytes(i)
        runs.append([*run, end, size])
        end += size + (b.lanes // b.cell if i == 0 else 0)
    edges = np.searchsorted(b.band, range(b.band[-1] + 2))
    c, half = np.array(cosines(block), np.float32), block // 2
    even, odd = c[::2, : block - half].copy(), c[1::2, :half].copy()
    return Tables(
        block=block,
        lanes=b.lanes,
        cell=b.cell,
        coded=b.coded,
        bands=b.bands,
        gains=runs[0][4],
        rest=end,
        even=even,
        odd=odd,
        even_t=even.T.copy(),
        odd_t=odd.T.copy(),
        raster=np.array(b.order, np.uint64),
        band=np.array(b.band),
        edges=edges,
        pieces=np.union1d(edges[1:], [b.coded]),
        runs=np.array(runs),
        spans=np.array(b.spans, np.int64).reshape(-1, 2),
        signs=np.array(SIGNS, np.float32),
        planes=np.array(PLANES, np.int32)[:, b.coded : block**2].copy(),
    )
