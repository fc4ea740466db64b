"""Choice of the tier that serves a tensor.

One file a process and directory, one side stream and one set of slabs a device; they live as long
as the process.
"""

import os
import tempfile

import torch
from torch import Tensor

from elbowroom.plan import Offload
from elbowroom.runtime.tiers.base import Tier
from elbowroom.runtime.tiers.copier import CudaCopier
from elbowroom.runtime.tiers.file import FileTier
from elbowroom.runtime.tiers.host import HostTier
from elbowroom.runtime.tiers.slabs import Slabs
from elbowroom.runtime.tiers.staged import StagedTier

_FILES: dict[str, FileTier] = {}
_HOSTS: dict[torch.device, HostTier] = {}


def tier_for(action: Offload, x: Tensor) -> Tier | str:
    """The tier that takes x, or why none does."""
    kind = action.tier or ("host" if x.is_cuda else "file")
    if kind == "host" and not x.is_cuda:
        return "it is in host memory already: er.saving('offload', tier='file') moves it to a file"
    tier: Tier
    if kind == "host":
        tier = host_tier(x.device)
    else:
        tier = file_tier(action.directory)
        if x.is_cuda:
            tier = StagedTier(host_tier(x.device).copier, tier)
    tier.say_trouble()
    return tier.refusal or tier


def file_tier(directory: str | None = None) -> FileTier:
    """Returns the tier of this directory."""
    path = os.path.realpath(directory or tempfile.gettempdir())
    if path not in _FILES:
        _FILES[path] = FileTier(path)
    return _FILES[path]


def host_tier(device: torch.device) -> HostTier:
    """Returns the tier of this CUDA device.

    All devices together may pin half of the host's memory.
    """
    if device not in _HOSTS:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        slabs = Slabs(memory // 2 // torch.cuda.device_count())
        _HOSTS[device] = HostTier(CudaCopier(device), slabs)
    return _HOSTS[device]


os.register_at_fork(after_in_child=_FILES.clear)  # what the parent's tickets need, they hold
