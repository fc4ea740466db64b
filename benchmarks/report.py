"""The README of benchmarks/results/: a table a claim, from the JSON files beside it alone.

    ./scripts/bench report [--quick]

Losing rows stay, targets that were missed say so, and a benchmark without a result is listed as not
run. `--quick` reads and writes benchmarks/results/quick/, whose numbers mean nothing.
"""

import json
import sys
from pathlib import Path
from typing import Any

from _beside import claim
from _common import RESULTS, arguments, markdown

_FIRST = (
    "training-resnet18",
    "training-resnet50",
    "training-gpt",
    "accuracy",
    "noise",
    "coat_block",
    "nn_modules",
    "fp8-flow",
    "end-to-end",
    "public-models",
    "rate-distortion",
    "budgets",
    "largest-batch",
    "arena",
    "overhead",
    "steady-state",
    "planner",
    "optimizer-states",
    "small-parameters",
    "running-states",
    "loss-curves",
    "kernels",
)
_EXPECTED = {
    "training-resnet18": "training_resnet",
    "training-resnet50": "training_resnet50",
    "training-gpt": "training_gpt",
    "accuracy": "accuracy",
    "noise": "noise",
    "end-to-end": "end_to_end",
    "public-models": "public_models",
    "rate-distortion": "rate_distortion",
    "budgets-resnet18": "budgets",
    "budgets-gpt": "budgets --model gpt",
    "largest-batch-resnet50": "largest_batch",
    "largest-batch-resnet101": "largest_batch --model resnet101",
    "largest-batch-resnet50-warm": "largest_batch --warm",
    "largest-batch-resnet101-warm": "largest_batch --warm --model resnet101",
    "arena": "arena",
    "overhead": "overhead",
    "steady-state": "steady_state",
    "planner": "planner",
    "optimizer-states": "optimizer_states",
    "small-parameters": "small_parameters",
    "running-states": "running_states",
    "loss-curves": "loss_curves",
    "fp8-flow": "fp8_flow",
    "kernels": "kernels",
}
_INTRO = """# Measured

Made by `./scripts/bench report` from the JSON files in this folder; do not edit. Every figure was
measured, in the run that its section names; none is estimated. Ratios of time are medians over
interleaved pairs in one process, with their quartiles in brackets. Rows that lose stay in. The
files hold every single time.
"""


def main() -> None:
    options = arguments(__doc__).parse_args()
    folder = RESULTS / "quick" if options.quick else RESULTS
    path = options.out or folder / "README.md"
    results = sorted(map(_read, folder.glob("*.json")), key=_place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(readme(results))
    print(f"{path}: {len(results)} results", file=sys.stderr)


def _read(path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        missing = {"name", "claim", "command", "date", "n", "device", "versions", "table"} - set(
            result
        )
    except ValueError as error:
        raise SystemExit(f"{path} is no JSON: {error}; run its benchmark again") from error
    if missing:
        raise SystemExit(f"{path} lacks {', '.join(sorted(missing))}; run its benchmark again")
    result["name"] = path.stem  # of one benchmark there may be several, with other settings
    if result["name"].startswith("budgets"):
        plain = result["plain"]["static_nbytes"] + result["plain"]["peak_nbytes"]
        result["claim"] = claim(result["rows"], plain)
    return result


def _place(result: dict[str, Any]) -> tuple[int, str]:
    """Claims of the project first, in their order; then the rest by name."""
    name = result["name"]
    known = (i for i, first in enumerate(_FIRST) if name.startswith(first))
    return next(known, len(_FIRST)), name


def readme(results: list[dict[str, Any]]) -> str:
    """The whole page."""
    parts = [_INTRO]
    if targets := [(result, line) for result in results for line in result.get("targets", [])]:
        parts.append("## Targets\n\n" + _targets(targets) + "\n")
    parts += [_section(result) for result in results]
    names = [result["name"] for result in results]
    absent = [
        f"- {name}: `./scripts/bench {script}`"
        for name, script in _EXPECTED.items()
        if not any(found.startswith(name) for found in names)
    ]
    if absent:
        parts.append("## Not run\n\n" + "\n".join(absent) + "\n")
    return "\n".join(parts)


def _targets(lines: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    return "\n".join(
        f"- {'met' if line['met'] else '**not met**'}: {line['target']} "
        f"([{result['name']}](#{result['name']}))\n  - {line['measured']}"
        for result, line in lines
    )


def _section(result: dict[str, Any]) -> str:
    head, rows = result["table"]["head"], result["table"]["rows"]
    notes = "".join(f"\n{note}\n" for note in result.get("notes", []))
    table = markdown(list(map(_cell, head)), [list(map(_cell, row)) for row in rows])
    picture = f"![{result['claim']}]({result['plot']})\n\n" if "plot" in result else ""
    return (
        f"## {result['name']}\n\n{result['claim']}\n\n{picture}{table}\n{notes}\n{_facts(result)}"
    )


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|")


def _facts(result: dict[str, Any]) -> str:
    device, versions = result["device"], result["versions"]
    lines = [f"{name}: {value}" for name, value in result.get("settings", {}).items()]
    lines += [
        f"n: {result['n']}",
        f"device: {_device(device)}, {result.get('threads', '?')} threads",
        f"versions: {', '.join(f'{name} {version}' for name, version in versions.items())}",
    ]
    lines.append(f"date: {result['date']}")
    switches = [f"{name}={value} " for name, value in result.get("environment", {}).items()]
    lines.append(f"again: `{''.join(switches)}{result['command']}`")
    return "\n".join(f"- {line}" for line in lines) + "\n"


def _device(device: dict[str, Any]) -> str:
    gpu = f"{device['gpu']}, " if "gpu" in device else ""
    memory = f"{device['memory_nbytes'] / 2**30:.1f} GiB"
    load = f"load {device['load_1min']} before" if "load_1min" in device else ""
    return f"{gpu}{device['cpu']}, {device['cores']} cores, {memory}, {load}".rstrip(", ")


if __name__ == "__main__":
    main()
