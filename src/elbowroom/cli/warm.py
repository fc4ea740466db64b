"""`--warm`: restarts the process with glibc settings that keep freed memory in the process."""

import os
import platform
import sys

from elbowroom.errors import UnknownField

# In pages of 2 MiB: fewer to fault in, fewer fragments.
WARM = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": str(64 << 20),
    "THP_MEM_ALLOC_ENABLE": "1",
}


def has_glibc() -> bool:
    """Returns whether this process uses glibc's malloc, to which these settings apply."""
    return "glibc" in platform.libc_ver()[0]


def start_warm() -> None:
    """Restarts this process with its own command under `WARM`, unless it has these settings.

    Settings that the environment has already stay as they are.

    Raises UnknownField if the process does not use glibc.
    """
    if not has_glibc():
        raise UnknownField("--warm sets glibc's malloc, which is not used here; leave it out")
    if not WARM.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**WARM, **os.environ})
