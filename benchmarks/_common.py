"""What every benchmark shares: its arguments, its facts, its result as JSON and as a table.

    result = {name, claim, command, date, n, settings, device, versions, environment,
              rows: raw numbers,
              table: {head, rows} as printed,
              targets: [{target, measured, met}],
              notes}

`report.py` writes benchmarks/results/README.md from these files and nothing else, so what is
printed, stored and published is one thing. A file is replaced whole or not at all. A run with
`--quick` proves that a script works; its numbers mean nothing, and go to benchmarks/results/quick/,
which git ignores. No script sets OMP_WAIT_POLICY or its like; what is set stands in `environment`.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr otherwise

import numba
import numpy
import torch

import elbowroom
from elbowroom.measure import Paired

RESULTS = Path(__file__).parent / "results"
INSTALL = "pip install -c constraints.txt -r benchmarks/requirements.txt"
_SWITCHES = ("OMP_", "KMP_", "GOMP_", "MKL_", "NUMBA_", "MALLOC_", "LD_PRELOAD", "ONEDNN_")
_START_S = time.perf_counter()


def arguments(doc: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have; `defaults` set theirs."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: tiny and meaningless")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (2)")
    parser.add_argument("--out", type=_file, help="the JSON file (default: in benchmarks/results/)")
    parser.set_defaults(**defaults)
    return parser


def _file(text: str) -> Path:
    if (path := Path(text)).is_dir():  # said now, not after the last step
        raise argparse.ArgumentTypeError(f"{text} is a folder, not a JSON file")
    return path


def out_path(options: argparse.Namespace, name: str) -> Path:
    """Where the result goes; a quick run never lands among the real ones."""
    folder = RESULTS / "quick" if options.quick else RESULTS
    return options.out or folder / f"{name}.json"


def facts() -> dict[str, Any]:
    """Device, versions and switches of this process, and what the machine was doing before."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": _command(),
        "device": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "load_1min": round(os.getloadavg()[0], 2),
        },
        "threads": torch.get_num_threads(),
        "versions": {
            "elbowroom": elbowroom.__version__,
            "commit": _commit(),
            "torch": torch.__version__,
            "numba": numba.__version__,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_SWITCHES)},
    }


def _command() -> str:
    script = Path(sys.argv[0]).stem
    return " ".join(["./scripts/bench", script, *sys.argv[1:]])


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    """The commit, with "+" if files differ from it; "unknown" outside of a checkout."""
    git = ["git", "-C", str(RESULTS.parent)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        changes = subprocess.run(
            [*git, "status", "--porcelain", "../src", "."], capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    if commit.returncode != 0:
        return "unknown"
    sources = [line for line in changes.stdout.splitlines() if "results/" not in line]
    return commit.stdout.strip() + ("+" if sources else "")


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Replace the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    unfinished.replace(path)


def target(text: str, measured: str, met: bool) -> dict[str, Any]:
    """One line of "what was wanted, what came, whether that is enough"."""
    return {"target": text, "measured": measured, "met": bool(met)}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that reads well raw and rendered; all columns but the first stand right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]

    def drawn(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([first, *rest])} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([drawn(head), drawn(rule), *map(drawn, rows)])


def show(result: dict[str, Any]) -> None:
    """Print the table and the targets."""
    print(f"\n{result['name']}: {result['claim']}\n")
    print(markdown(result["table"]["head"], result["table"]["rows"]))
    for line in result["targets"]:
        print(f"\n{'met    ' if line['met'] else 'NOT MET'}  {line['target']}")
        print(f"         {line['measured']}")


def finish(result: dict[str, Any], path: Path) -> None:
    """Write the JSON, print the table, say where it went."""
    write_json(path, result)
    show(result)
    print(f"\n{path}", file=sys.stderr)


def tell(text: str) -> None:
    """A line of progress on stderr, with the seconds since the start."""
    print(f"[{time.perf_counter() - _START_S:5.0f} s] {text}", file=sys.stderr, flush=True)


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f}"


def times(pairs: Paired) -> str:
    """1.04 (1.02..1.07): the median ratio and its quartiles."""
    low, high = pairs.ratio_iqr
    return f"{pairs.ratio:.3f} ({low:.3f}..{high:.3f})"


def paired_dict(pairs: Paired) -> dict[str, Any]:
    """Everything that was clocked, with its median ratio."""
    return {
        "pairs": pairs.n,
        "a_s": [round(s, 5) for s in pairs.a_s],
        "b_s": [round(s, 5) for s in pairs.b_s],
        "median_a_s": pairs.median_a_s,
        "median_b_s": pairs.median_b_s,
        "ratio": pairs.ratio,
        "ratio_quartiles": list(pairs.ratio_iqr),
    }
