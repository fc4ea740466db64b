"""Which tier serves a tensor. One file a process and directory; it lives as long as the process."""

import os
import tempfile

from torch import Tensor

from elbowroom.plan import Offload
from elbowroom.runtime.tiers.base import Tier
from elbowroom.runtime.tiers.file import FileTier

_FILES: dict[str, FileTier] = {}


def tier_for(action: Offload, x: Tensor) -> Tier | str:
    """The tier that takes x, or why none does."""
    kind = action.tier or ("host" if x.is_cuda else "file")
    if kind == "host":
        return "it is in host memory already: er.saving('offload', tier='file') moves it to a file"
    tier = file_tier(action.directory)
    tier.say_trouble()
    return tier.refusal or tier


def file_tier(directory: str | None = None) -> FileTier:
    """The one of this directory."""
    path = os.path.realpath(directory or tempfile.gettempdir())
    if path not in _FILES:
        _FILES[path] = FileTier(path)
    return _FILES[path]


os.register_at_fork(after_in_child=_FILES.clear)  # what the parent's tickets need, they hold
