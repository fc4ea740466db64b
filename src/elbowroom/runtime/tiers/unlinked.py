"""Reading and writing tensors by system calls, with a checksum."""

import os
from zlib import crc32

from torch import Tensor

from elbowroom.files import bytes_of as bytes_of
from elbowroom.files import is_in_memory as is_in_memory
from elbowroom.files import open_unlinked as open_unlinked

_CHUNK = 1 << 20  # one read and its checksum share the cache: 4.0 GiB/s, 3.3 with 8 MiB (EPYC)


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
