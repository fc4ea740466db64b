"""`elbowroom doctor`: what this machine has, and what that means for elbowroom."""

import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import elbowroom as er
from elbowroom.cli.mistakes import says_mistakes
from elbowroom.cli.precompile import compile_ahead
from elbowroom.cli.warm import WARM, has_glibc
from elbowroom.units import show_nbytes

_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_PROBE = 1 << 20  # bytes
_DEAR = 2.0  # times the time of memory that has been used
_LARGE = 64 << 20  # bytes: glibc takes a tensor of 32 MiB and more from the kernel each time


Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="First compile all kernels, for the CPU and a GPU. This takes a minute or two, once.",
    ),
]


@says_mistakes
def doctor(compile: Compile = False) -> None:
    """Show what this machine has, and what that means for elbowroom."""
    if compile:
        compile_ahead()
    table = Table("what", "found", "what it means")
    for row in (*_packages(), _device(), *_fragments(), _threads(), _memory(), *_pages(), _peaks()):
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def _packages() -> list[tuple[str, str, str]]:
    """Returns a row for each package that is used; packages are looked up, not imported."""
    meanings = {
        "elbowroom": "",
        "torch": "tested with 2.13, 2.14 and 2.15; needs 2.11 or later",
        "numpy": "",
        "numba": "the fast kernels on a CPU; without it, plain torch runs",
        "scipy": "the planner's solver",
        "triton": "the kernels on a GPU; not needed without one",
    }
    return [("Python", platform.python_version(), "needs 3.11 or later")] + [
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
    return "GPU", f"{properties.name}, {size}", "Triton kernels run there"


def _fragments() -> list[tuple[str, str, str]]:
    """Returns what the CUDA allocator does with gaps; empty without CUDA."""
    if not torch.cuda.is_available():
        return []
    settings = [os.environ.get(name, "") for name in _ALLOCATOR_SETTINGS]
    found = ", ".join(filter(None, settings)) or "the allocator's defaults"
    if "expandable_segments:True" in found:
        meaning = "segments grow, so a new mix of sizes leaves few gaps"
    else:
        meaning = (
            "another mix of sizes leaves gaps that count as reserved, beyond the budget; set "
            f"{_ALLOCATOR_SETTINGS[0]}=expandable_segments:True before python starts"
        )
    return [("fragmentation", found, meaning)]


def _threads() -> tuple[str, str, str]:
    found = f"torch uses {torch.get_num_threads()} of {os.cpu_count()} cores"
    return "threads", found, "numba's kernels follow torch.set_num_threads()"


def _memory() -> tuple[str, str, str]:
    libc = " ".join(platform.libc_ver()).strip() or "unknown"
    threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_")
    kept = "MALLOC_MMAP_MAX_"
    if not has_glibc():
        return "memory", libc, "measure with er.peak, not with the process's size"
    if os.environ.get(kept) == WARM[kept]:
        found = f"{libc}, {kept}={WARM[kept]}"
        return "memory", found, "all freed tensors stay with the process: measure with er.peak"
    if threshold:
        found = f"{libc}, mmap threshold {threshold}"
        return "memory", found, "freed tensors go back to the system"
    return (
        "memory",
        f"{libc}, its defaults",
        "freed tensors stay with the process, so RSS says nothing about a peak: measure with "
        "er.peak, or, to look at it once, set MALLOC_MMAP_THRESHOLD_=131072 (slower)",
    )


def _pages() -> list[tuple[str, str, str]]:
    """Returns how slow new memory is, compared with reused memory; empty without glibc."""
    if not has_glibc():
        return []
    fresh_s = min(_clocked(lambda: torch.zeros(_LARGE, dtype=torch.uint8)) for _ in range(3))
    used = torch.zeros(_LARGE, dtype=torch.uint8)
    used_s = min(_clocked(used.zero_) for _ in range(3))
    ratio = fresh_s / used_s
    found = (
        f"to fill a new tensor of {show_nbytes(_LARGE)} takes {ratio:.1f} times as long as to fill "
        "one whose memory was used before"
    )
    if ratio < _DEAR:
        return [("fresh memory", found, "large tensors cost no additional time")]
    settings = " ".join(f"{name}={value}" for name, value in WARM.items())
    meaning = (
        "steps with tensors of 32 MiB and more may take 1.5 times as long, since the system gives "
        "their memory anew each time; use elbowroom run --warm, or start python with "
        f"{settings}, under which freed memory stays in the process (RSS grows)"
    )
    return [("fresh memory", found, meaning)]


def _clocked(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def _peaks() -> tuple[str, str, str]:
    """Says whether PyTorch's profiler sees a megabyte come and go."""
    try:
        seen = er.peak(lambda: torch.zeros(_PROBE, dtype=torch.uint8), device="cpu")
    except RuntimeError as error:
        return "CPU peaks", "cannot be measured", f"fit guesses on a CPU: {error}"
    if seen != _PROBE:
        found = f"measured {show_nbytes(seen)} of {show_nbytes(_PROBE)}"
        return "CPU peaks", found, "fit, run and profile cannot be trusted on this CPU"
    return (
        "CPU peaks",
        "measured to the byte",
        "er.peak and fit count what PyTorch's allocator reports on the main thread",
    )
