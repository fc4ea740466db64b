"""Memory in a file, for what a compiled step saves and what leaves a CPU's memory meanwhile.

    in_file(flat) -> tensor of the same bytes, mapped from a file without a name

No allocator counts it: its pages are the system's cache of that file, which it takes back when it
needs memory. File and pages end with the tensor, which autograd holds between forward and backward
as it holds any other. The file lies where `tempfile` puts its own (TMPDIR), which should be on a
disk. Where it cannot be written, the bytes stay in memory, and the logger "elbowroom" says so once.
"""

import logging
import mmap
import os
import sys
import tempfile
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from elbowroom.files import bytes_of, is_in_memory, open_unlinked

_log = logging.getLogger("elbowroom")
# Python 3.12 keeps a descriptor open for each mapping; where these run out, bytes stay in memory.
_UNTRACKED: Any = {"trackfd": False} if sys.version_info >= (3, 13) else {}


class _Mapping(mmap.mmap):
    """A file in memory. Its tensor holds it, and it ends with that."""


_mapped: WeakValueDictionary[int, _Mapping] = WeakValueDictionary()  # by address


def in_file(flat: Tensor) -> Tensor:
    """Returns the bytes of a flat uint8 tensor on a CPU in a file of their own."""
    nbytes = flat.numel()
    if not nbytes:
        return flat.clone()
    directory = tempfile.gettempdir()
    try:
        descriptor = open_unlinked(directory)
        try:
            if is_in_memory(descriptor):
                _say(f"{directory} is in memory itself (tmpfs)")
            _write(descriptor, bytes_of(flat))
            mapping = _Mapping(descriptor, nbytes, **_UNTRACKED)
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError) as error:
        _say(f"no file could be written in {directory} ({error})")
        return flat.clone()
    out = torch.frombuffer(mapping, dtype=torch.uint8)
    _mapped[out.data_ptr()] = mapping
    return out


def is_away(x: Tensor) -> bool:
    """Returns whether memory of a compiled region's saved tensor is that of a file or pinned."""
    if x.device.type != "cpu":
        return False
    return x.untyped_storage().data_ptr() in _mapped or x.is_pinned()


def _write(descriptor: int, buffer: memoryview) -> None:
    at = 0
    while at < len(buffer):  # one call writes 2 GiB at most
        at += os.write(descriptor, buffer[at:])


@cache
def _say(reason: str) -> None:
    _log.warning(
        "offload frees no memory: %s. Set TMPDIR to a directory on a disk that has space.", reason
    )
