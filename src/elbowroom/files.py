"""Writing a file so that it is always the old one or the whole new one, never a part."""

import os
from pathlib import Path


def write_text(text: str, path: str | Path) -> None:
    """Write aside, then replace; into what is no file (a device, a pipe), write.

    Folders that are missing are made; a link stays one. Raises OSError.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = beside(path)
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def beside(path: Path) -> Path:
    """Where this process writes before it replaces."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")
