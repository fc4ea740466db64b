"""Writing a file so that it is always the old one or the whole new one, never a part.

    .NAME.PID.part beside it -> its bytes are on the disk -> it takes the name -> the name is

A process that is killed between leaves the file that was there, and `.NAME.PID.part`, which may be
deleted.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch


def save_checkpoint(checkpoint: Any, path: str | Path) -> None:
    """`torch.save`, of which a crash in the middle leaves the file that was there.

        er.save_checkpoint({"model": model.state_dict(), "opt": opt.state_dict()}, "last.pt")
        checkpoint = torch.load("last.pt")

    Room for both files is needed for as long as it lasts. Folders that are missing are made. Raises
    OSError, and what torch.save raises. For one file of each process: torch.distributed.checkpoint.
    """
    with replacing(path) as file:
        torch.save(checkpoint, file)


def write_text(text: str, path: str | Path) -> None:
    """Replace a file by this text; a link stays one. Raises OSError."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write into, which takes the place of `path` when the block ends without an error.

    What is no file (a device, a pipe) is written into. Folders that are missing are made. Raises
    OSError.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = beside(path)
    try:
        with partial.open("wb") as file:
            if path.exists():
                shutil.copymode(path, partial)  # a private file stays private
            yield file
            file.flush()
            os.fsync(file.fileno())  # or the new name could be on the disk before the bytes are
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Syncs a folder, so that a new name is on the disk.

    Systems that cannot are left to do so when they do.
    """
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def beside(path: Path) -> Path:
    """Returns the path that this process writes to before it replaces `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")
