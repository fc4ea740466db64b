"""Error-bounded compressors of others, as codecs that only the benchmarks know.

    Sz3       pysz: prediction (or none), Huffman, ZSTD        arrays as maps lie in memory
    Zfp       zfpy: a block transform, fixed accuracy          rows of maps as a matrix
    Prequant  q = rint(x / (2 bound)), then blosc2: bitshuffle and ZSTD-1 or LZ4-5

`relative` is a fraction of max(x) - min(x): |x~ - x| <= relative * range. All round to the nearest:
no noise, and an error that depends on x. Bytes are held in tensors, so that torch's allocator
counts them. What is not installed is missing from `PEERS`, and `MISSING` says how to get it.
"""

from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np
import torch
from _common import INSTALL
from torch import Tensor

from elbowroom.codecs.base import Buffers, Codec, Encoded, Expected, Layout
from elbowroom.codecs.facts import Facts, Maps


@dataclass(frozen=True)
class Peer(Codec):
    """What the three have in common: a value-range relative bound, and bytes as they come."""

    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)
    package: ClassVar[str]  # on PyPI
    module: ClassVar[str]

    relative: float = 1e-2

    def _seen(self, shape: tuple[int, ...], stride: tuple[int, ...], facts: Facts) -> Facts:
        return replace(facts, maps=Maps.of(shape, stride))

    def _layout(self, n: int, dtype: torch.dtype, facts: Facts) -> Layout:
        most = Expected(torch.uint8, (8 * n + 65536,), at_most=True)  # no peer comes near
        return most, Expected(torch.float64, (1,))

    def _encode(self, flat: Tensor, seed: int, facts: Facts) -> Buffers | None:
        least, most = (float(end) for end in torch.aminmax(flat))
        bound = self.relative * (most - least)
        if not (0 < bound < float("inf")):
            return None
        compressed = self._compress(flat.numpy(), bound, facts.maps or Maps(1, 1, len(flat), 1))
        taken = np.frombuffer(compressed, dtype=np.uint8)
        held = torch.empty(len(taken), dtype=torch.uint8)
        held.numpy()[:] = taken
        return held, torch.tensor([bound], dtype=torch.float64)

    def _decode_into(self, encoded: Encoded, out: Tensor) -> None:
        held, bound = encoded.buffers
        maps = encoded.facts.maps or Maps(1, 1, len(out), 1)
        self._decompress(held.numpy(), float(bound), maps, out.numpy())

    def _compress(self, x: np.ndarray, bound: float, maps: Maps) -> Any:
        """x [N] float32 -> something with a buffer of bytes."""
        raise NotImplementedError

    def _decompress(self, held: np.ndarray, bound: float, maps: Maps, out: np.ndarray) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Sz3(Peer):
    """SZ3. algorithm: NOPRED (fast, keeps zeros) or INTERP_LORENZO (its default)."""

    id: ClassVar[str] = "sz3"
    package: ClassVar[str] = "pysz"
    module: ClassVar[str] = "pysz"

    algorithm: str = "NOPRED"

    def _compress(self, x: np.ndarray, bound: float, maps: Maps) -> Any:
        import pysz

        config = pysz.szConfig()
        config.errorBoundMode = pysz.szErrorBoundMode.ABS
        config.absErrorBound = bound
        config.cmprAlgo = getattr(pysz.szAlgorithm, self.algorithm)
        return pysz.sz.compress(x.reshape(_dims(maps)), config)[0]

    def _decompress(self, held: np.ndarray, bound: float, maps: Maps, out: np.ndarray) -> None:
        import pysz

        out[:] = pysz.sz.decompress(held, np.float32, _dims(maps))[0].reshape(-1)


@dataclass(frozen=True)
class Zfp(Peer):
    """The zfp array compressor in fixed-accuracy mode: its real error is far below the bound."""

    id: ClassVar[str] = "zfp"
    package: ClassVar[str] = "zfpy"
    module: ClassVar[str] = "zfpy"

    def _compress(self, x: np.ndarray, bound: float, maps: Maps) -> Any:
        import zfpy

        # Without edges between channels; one dimension less than the maps have, and denser.
        matrix = x.reshape(-1, maps.columns * maps.inner)
        return zfpy.compress_numpy(matrix, tolerance=bound)

    def _decompress(self, held: np.ndarray, bound: float, maps: Maps, out: np.ndarray) -> None:
        import zfpy

        out[:] = zfpy.decompress_numpy(held.tobytes()).reshape(-1)


@dataclass(frozen=True)
class Prequant(Peer):
    """Integers first, then blosc2. compressor: "zstd" (level 1) or "lz4" (level 5)."""

    id: ClassVar[str] = "prequant"
    package: ClassVar[str] = "blosc2"
    module: ClassVar[str] = "blosc2"

    compressor: str = "zstd"

    def _compress(self, x: np.ndarray, bound: float, maps: Maps) -> Any:
        import blosc2

        q = x * np.float32(0.5 / bound)
        q = np.rint(q, out=q).astype(_dtype(np.abs(q).max()))
        return blosc2.compress2(
            q,
            codec=blosc2.Codec.ZSTD if self.compressor == "zstd" else blosc2.Codec.LZ4,
            clevel=1 if self.compressor == "zstd" else 5,
            filters=[blosc2.Filter.BITSHUFFLE],
            typesize=q.itemsize,
            nthreads=torch.get_num_threads(),
        )

    def _decompress(self, held: np.ndarray, bound: float, maps: Maps, out: np.ndarray) -> None:
        import blosc2

        q = blosc2.decompress2(held, nthreads=torch.get_num_threads())
        dtype = {1: np.int8, 2: np.int16, 4: np.int32}[len(q) // len(out)]
        np.multiply(np.frombuffer(q, dtype=dtype), np.float32(2 * bound), out=out)


def _dims(maps: Maps) -> tuple[int, ...]:
    """The maps without dimensions of one element."""
    return tuple(size for size in maps if size > 1) or (1,)


def _dtype(largest: float) -> type:
    """The narrowest integer that holds -largest to largest."""
    kinds = (np.int8, np.int16, np.int32)
    return next(kind for kind in kinds if largest <= np.iinfo(kind).max)


def _installed(peer: type[Peer]) -> bool:
    try:
        import_module(peer.module)
    except ImportError:
        return False
    return True


_ALL: tuple[type[Peer], ...] = (Sz3, Zfp, Prequant)
PEERS = tuple(peer for peer in _ALL if _installed(peer))
MISSING = tuple(
    f"{peer.package} is not installed, so {peer.__name__} has no row: {INSTALL}"
    for peer in _ALL
    if peer not in PEERS
)
VERSIONS = {peer.package: version(peer.package) for peer in PEERS}
