"""A file that leaves nothing behind, and tensors as the buffers of system calls."""

import ctypes
import os
import tempfile
from pathlib import Path
from zlib import crc32

from torch import Tensor

_CHUNK = 1 << 20  # one read and its checksum share the cache: 4.0 GiB/s, 3.3 with 8 MiB (EPYC)
_IN_MEMORY = ("tmpfs", "ramfs")


def open_unlinked(directory: str) -> int:
    """A descriptor of a new file in `directory` that has no name: a crash leaves nothing."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError:
            if not os.path.isdir(directory):
                raise
    descriptor, path = tempfile.mkstemp(prefix="elbowroom-", dir=directory)  # mode 0600
    os.unlink(path)
    return descriptor


def is_in_memory(descriptor: int) -> bool:
    """Returns whether the file system of an open file lies in RAM."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return False
    for line in mounts.splitlines():
        fields, _, kind = line.partition(" - ")
        if fields.split(" ")[2] == number:
            return kind.split(" ")[0] in _IN_MEMORY
    return False


def bytes_of(flat: Tensor) -> memoryview:
    """The memory of a flat CPU tensor of bytes. It does not keep the tensor alive.

    Unlike `flat.numpy()`, which marks the storage as not resizable for as long as it lives.
    """
    return memoryview((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())).cast("B")


def write(descriptor: int, flat: Tensor, offset: int) -> int:
    """Write the bytes of `flat`, and give their checksum."""
    buffer, checksum, at = bytes_of(flat), 0, 0
    while at < len(buffer):
        part = buffer[at : at + _CHUNK]
        written = os.pwrite(descriptor, part, offset + at)
        checksum = crc32(part[:written], checksum)
        at += written
    return checksum


def read(descriptor: int, into: Tensor, offset: int) -> int:
    """Fill `into`, and give the checksum of what came. OSError where the file ends too early."""
    buffer, checksum, at = bytes_of(into), 0, 0
    while at < len(buffer):
        part = buffer[at : at + _CHUNK]
        got = os.preadv(descriptor, [part], offset + at)
        if not got:
            raise OSError(f"the file ends after {at} of {len(buffer)} bytes")
        checksum = crc32(part[:got], checksum)
        at += got
    return checksum
