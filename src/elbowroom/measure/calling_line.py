"""The line of the user's program that an op was called from."""

import os
import sys
import types
from functools import lru_cache
from pathlib import Path

import torch

_OURS = str(Path(__file__).parents[1]) + os.sep
_DEMO = os.path.join(_OURS, "demo") + os.sep  # a program like any other
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.__file__)
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def calling_line() -> str:
    """Returns "train.py:12", the innermost frame outside of torch, elbowroom and Python; or ""."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not is_of_a_library(path):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@lru_cache(4096)  # it is asked of each frame around each saved tensor
def is_of_a_library(path: str) -> bool:
    """Returns whether a file belongs to torch, to Python itself or to elbowroom."""
    if path.startswith("<"):
        return True
    if path.startswith(_OURS):
        return not path.startswith(_DEMO)
    if path.startswith(_LIBRARIES[0]):
        return True
    # Other packages lie below Python's own library, and their lines are worth knowing.
    return path.startswith(_LIBRARIES[1]) and not any(part in path for part in _PACKAGES)
