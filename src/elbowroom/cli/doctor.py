"""`elbowroom doctor`: what this machine has, and what that means for elbowroom."""

import importlib.metadata
import importlib.util
import os
import platform

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elbowroom.cli.polite import polite


@polite
def doctor() -> None:
    """Say what this machine has, and what that means for elbowroom."""
    table = Table("what", "found", "what it means")
    for row in (*_packages(), _device(), _threads(), _memory()):
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def _packages() -> list[tuple[str, str, str]]:
    """The packages that kernels and planner stand on; a missing one is looked up, not imported."""
    meanings = {
        "elbowroom": "",
        "torch": "tested with 2.13; 2.11 is the least",
        "numpy": "",
        "numba": "the fast kernels on a CPU; without it plain torch serves",
        "scipy": "the planner's solver",
        "triton": "the kernels on a GPU; not needed without one",
    }
    return [("Python", platform.python_version(), "3.11 is the least")] + [
        (name, _version(name), meaning) for name, meaning in meanings.items()
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed" if importlib.util.find_spec(package) is None else "not packaged"


def _device() -> tuple[str, str, str]:
    if not torch.cuda.is_available():
        return "GPU", "none", "everything runs on the CPU"
    properties = torch.cuda.get_device_properties(0)
    size = f"{properties.total_memory / 2**30:.1f} GiB"
    return "GPU", f"{properties.name}, {size}", "Triton's kernels serve tensors there"


def _threads() -> tuple[str, str, str]:
    import torch

    found = f"torch uses {torch.get_num_threads()} of {os.cpu_count()} cores"
    return "threads", found, "numba's kernels follow torch.set_num_threads()"


def _memory() -> tuple[str, str, str]:
    libc = " ".join(platform.libc_ver()).strip() or "unknown"
    threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_")
    if "glibc" not in libc:
        return "memory", libc, "measure with er.peak, not with the process's size"
    if threshold:
        return (
            "memory",
            f"{libc}, mmap threshold {threshold}",
            "freed tensors go back to the system",
        )
    return (
        "memory",
        f"{libc}, its defaults",
        "freed tensors stay with the process, so RSS says nothing about a peak: measure with "
        "er.peak, or set MALLOC_MMAP_THRESHOLD_=131072 (slower) to make RSS follow",
    )
