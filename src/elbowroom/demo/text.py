"""Text that every machine has: the sources of Python's own standard library, as bytes.

    corpus = the *.py files below the stdlib folder, by path, each followed by one zero byte, cut at
    a size

`site-packages` is left out, or the corpus would be whatever happens to be installed; so are the
test suites, which are mostly tables. It changes with the version of Python, so the origin names
that version and the number of bytes.
"""

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from elbowroom.errors import DataError

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_TEST_FRACTION = 0.05  # of the bytes, held out
_MIN_NBYTES = 200_000  # below this there is nothing to learn, and the held-out part is too small


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes held out, both [N] uint8, and a line on where they came from."""

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
