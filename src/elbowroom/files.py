"""Writing a file so that it is always the complete old one or the complete new one.

    write .NAME.PID.part -> sync its bytes to the disk -> rename it to NAME -> sync the folder

If the process is killed before the rename, the old file stays, and `.NAME.PID.part` may be deleted.

`open_unlinked` makes files without a name, which disappear with the process.
"""

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

_IN_MEMORY = ("tmpfs", "ramfs")


def save_checkpoint(checkpoint: Any, path: str | Path) -> None:
    """Saves like `torch.save`, but a crash during saving leaves the previous file intact.

        er.save_checkpoint({"model": model.state_dict(), "opt": opt.state_dict()}, "last.pt")
        checkpoint = torch.load("last.pt")

    The disk needs space for both files until it is done. Missing folders are created. Raises
    OSError, and the errors of torch.save. To save from several processes into one checkpoint, use
    torch.distributed.checkpoint.
    """
    with replacing(path) as file:
        torch.save(checkpoint, file)


def write_text(text: str, path: str | Path) -> None:
    """Replaces the content of a file by this text; a link stays a link. Raises OSError."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Context manager with a file that replaces `path` if the block ends without an error.

    A device or a pipe is written to directly. Missing folders are created. Raises OSError.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    try:
        with partial.open("wb") as file:
            if path.exists():
                shutil.copymode(path, partial)  # a private file stays private
            yield file
            file.flush()
            os.fsync(file.fileno())  # or the new name could be on the disk before the bytes are
        partial.replace(path)
    except BaseException:  # an interrupt, too: it would leave a part of a file in the folder
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Syncs a folder, so that a new name is on the disk.

    A system without this call writes the folder when it does.
    """
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def partial_path(path: Path) -> Path:
    """Returns the path that this process writes to before it replaces `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


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
