"""Tells the memory, in bytes, that this process may have: a budget of 0.8 is a share of it.

    cuda  all of the device's memory
    cpu   the least of RAM, the limits of the process's cgroup and of those above it, and its
          rlimits of data and address space

What others use at the moment is not taken off, so that a share means the same at any time.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch
from torch import nn

from elbowroom.errors import PlanError
from elbowroom.units import Share, parse_budget


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of the first parameter; the CPU if there is none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def budget_nbytes(budget: float | str, device: torch.device | str) -> int:
    """Returns a budget in bytes. device: whose memory it is a share of, if it is one.

    Raises UnknownField for a budget that cannot be read, and PlanError for a share of a device
    whose memory is not known here.
    """
    asked = parse_budget(budget)
    if isinstance(asked, Share):
        return int(asked.fraction * memory_nbytes(device))
    return asked


def memory_nbytes(device: torch.device | str) -> int:
    """Returns the bytes that this process may have of this machine's memory, or of its GPU's.

    Raises PlanError for a device that this machine does not have, or whose memory is not known.
    """
    kind = str(device).partition(":")[0]
    if kind == "cpu":
        return min([_ram_nbytes(), *_rlimits(), *cgroup_limits()])
    if kind == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    raise PlanError(
        f"a share of the memory of '{device}' is not known on this machine; give the budget in "
        'bytes, as in budget="6 GiB"'
    )


def cgroup_limits(root: Path = Path("/")) -> Iterator[int]:
    """Returns memory.max (v2) and memory.limit_in_bytes (v1), bytes. root: of /proc and /sys."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's; what is mounted is then the container's own.
        group = PurePosixPath(path.lstrip("/"))
        for one in (group, *group.parents):
            yield from _limit(mount / one / name)


def _limit(path: Path) -> Iterator[int]:
    """Yields the number in a file; none for "max", or where there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return
    if text.isdigit():
        yield int(text)


def _ram_nbytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _rlimits() -> Iterator[int]:
    try:
        import resource
    except ImportError:  # no POSIX
        return
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            yield soft
