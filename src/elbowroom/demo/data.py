"""The text of the demo (`Text`), and its images: a part of Fashion-MNIST, or all from a folder.

    packed file = xz( train images [12000, 28, 28] | labels [12000] | test images [3000, 28, 28]
                      | labels [3000] )

All bytes are uint8. Both parts hold equally many of each of the ten classes: the first ones of the
original set in its order. License (MIT) and origin lie beside the file; `scripts/make_demo_data.py`
made it.

A folder given by the user holds the four original IDX files, gzipped or not. IDX: two zero bytes, 8
for uint8, the number of dimensions d, then d sizes as big-endian uint32, then the values.
"""

import gzip
import lzma
import math
import struct
import sys
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from elbowroom.errors import DataError

PACKED = Path(__file__).parent / "data" / "fashion-mnist.xz"
PACKED_FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}
]
TRAIN_COUNT, TEST_COUNT, SIDE = 12_000, 3_000, 28
MEAN, STD = 0.286, 0.353  # of all training pixels, as shares of 255


@dataclass(frozen=True)
class Split:
    """Images [N, 28, 28] uint8 and their labels [N] int64, 0 to 9."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def pixels(self, index: Tensor | slice) -> Tensor:
        """The chosen images as normalized float32 [B, 1, 28, 28]."""
        return (self.images[index].unsqueeze(1).float() / 255 - MEAN) / STD


@dataclass(frozen=True)
class Images:
    """A training and a test split, and a line on where they came from."""

    train: Split
    test: Split
    origin: str


def load_images(folder: Path | None = None) -> Images:
    """The images in the package, or the full set in `folder` as IDX files. Raises DataError."""
    return _read_packed(PACKED) if folder is None else read_idx_folder(folder)


def _read_packed(path: Path) -> Images:
    expected = (TRAIN_COUNT + TEST_COUNT) * (SIDE * SIDE + 1)
    try:
        content = lzma.decompress(path.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise DataError(
            f"cannot read the demo's images in {path}: {error}. Expected the xz file that ships "
            "with elbowroom; reinstall it, or pass --data DIR with the IDX files of Fashion-MNIST"
        ) from error
    if len(content) != expected:
        raise DataError(
            f"{path} holds {len(content):,} bytes of images and labels; expected {expected:,}. "
            "Reinstall elbowroom, or pass --data DIR with the IDX files of Fashion-MNIST"
        )
    values = np.frombuffer(bytearray(content), np.uint8)
    train, test = np.split(values, [TRAIN_COUNT * (SIDE * SIDE + 1)])
    origin = f"Fashion-MNIST, {TRAIN_COUNT:,} + {TEST_COUNT:,} of 60,000 + 10,000 images"
    return Images(_split(train, TRAIN_COUNT), _split(test, TEST_COUNT), origin)


def _split(values: np.ndarray, count: int) -> Split:
    images = torch.from_numpy(values[: count * SIDE * SIDE]).view(count, SIDE, SIDE)
    return Split(images, torch.from_numpy(values[count * SIDE * SIDE :]).long())


def read_idx_folder(folder: Path) -> Images:
    """The four IDX files in `folder`, plain or gzipped. Raises DataError, which names the file."""
    if not folder.is_dir():
        raise DataError(f"no folder {folder}; expected one that holds train-images-idx3-ubyte[.gz]")
    train, test = (
        _pair(
            _read_idx(_find(folder, f"{name}-images-idx3-ubyte"), dimensions=3),
            _read_idx(_find(folder, f"{name}-labels-idx1-ubyte"), dimensions=1),
            folder / name,
        )
        for name in ("train", "t10k")
    )
    name = folder.resolve().name
    return Images(train, test, f"{len(train):,} + {len(test):,} images from {name}")


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    names = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
    found = ", ".join(names[:6]) or "nothing"
    raise DataError(f"no {name} or {name}.gz in {folder}; found {found}")


def _read_idx(path: Path, *, dimensions: int) -> np.ndarray:
    """The uint8 values of one IDX file in their shape."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}; expected an IDX file, gzipped") from error
    wanted = bytes([0, 0, 8, dimensions])
    header = 4 + 4 * dimensions
    if content[:4] == wanted and len(content) < header:
        raise DataError(
            f"{path} ends inside its header: expected {header} bytes of it, found {len(content)}"
        )
    if content[:4] != wanted:
        raise DataError(
            f"{path} is no IDX file of uint8 in {dimensions} dimensions: expected it to begin with "
            f"{wanted.hex(' ')}, found {content[:4].hex(' ') or 'nothing'}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) - header != math.prod(shape):
        raise DataError(
            f"{path} says it holds {shape}, that is {math.prod(shape):,} bytes of values; found "
            f"{len(content) - header:,}. Is it truncated?"
        )
    return np.frombuffer(bytearray(content), np.uint8, offset=header).reshape(shape)


def _pair(images: np.ndarray, labels: np.ndarray, name: Path) -> Split:
    """Images and labels that belong together, checked against what the models expect."""
    if len(images) != len(labels) or images.shape[1:] != (SIDE, SIDE) or len(labels) == 0:
        raise DataError(
            f"{name}-*: expected as many {SIDE}x{SIDE} images as labels; found images "
            f"{images.shape} and {len(labels)} labels"
        )
    if labels.max() > 9:
        raise DataError(f"{name}-labels: expected classes 0 to 9; found {labels.max()}")
    return Split(torch.from_numpy(images), torch.from_numpy(labels).long())


_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_TEST_FRACTION = 0.05  # of the bytes, held out
_MIN_NBYTES = 200_000  # below this there is nothing to learn, and the held-out part is too small


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes held out, both [N] uint8, and a line on where they came from.

        corpus = the *.py files below the stdlib folder, by path, each followed by one zero byte,
        cut at a size

    `site-packages` is left out, or the corpus would be whatever happens to be installed; so are the
    test suites, which are mostly tables. It changes with the version of Python, so the origin names
    that version and the number of bytes.
    """

    train: Tensor
    test: Tensor
    origin: str


def load_text(folder: Path | None = None, *, limit_nbytes: int = 4_000_000) -> Text:
    """Returns the corpus, cut at `limit_nbytes`; its last part is held out. Raises DataError.

    `folder=None` is the standard library of the running Python.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    content = _read(folder, limit_nbytes)
    if len(content) < _MIN_NBYTES:
        raise DataError(
            f"found {len(content):,} bytes of *.py below {folder}; the demo needs "
            f"{_MIN_NBYTES:,}. Is the standard library zipped here? Run the demo without --text"
        )
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    kept = len(tokens) - int(len(tokens) * _TEST_FRACTION)
    version = ".".join(map(str, sys.version_info[:3]))
    origin = f"sources of Python {version}'s standard library, {len(tokens):,} bytes"
    return Text(tokens[:kept], tokens[kept:], origin)


def _read(folder: Path, limit_nbytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    for path in sorted(folder.rglob("*.py")):
        if _SKIPPED.isdisjoint(path.relative_to(folder).parts) and path.is_file():
            try:
                parts.append(path.read_bytes() + b"\0")
            except OSError as error:
                raise DataError(f"cannot read {path}: {error}; expected a Python source") from error
            size += len(parts[-1])
            if size >= limit_nbytes:
                break
    return b"".join(parts)[:limit_nbytes]
