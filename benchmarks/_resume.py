"""What benchmarks of paired trainings share: a run that was stopped goes on; bounds of means.

bound = mean(d) -+ t(0.95, n - 1) * sd(d) / sqrt(n),   d: differences of the pairs
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

from scipy.stats import t as student


def earlier(path: Path, settings: dict[str, Any], versions: dict[str, Any]) -> dict[str, Any]:
    """The result of an earlier run with the same settings and versions; empty if there is none.

    Raises SystemExit if it was made otherwise, or cannot be read.
    """
    if not path.exists():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        differing = _differing(found["settings"], settings) + _differing(
            found["versions"], versions
        )
    except (ValueError, KeyError) as error:
        raise SystemExit(f"cannot read {path}: {error!r}; remove it, or use --fresh") from error
    if differing:
        raise SystemExit(
            f"{path} was made otherwise ({'; '.join(differing)}): --fresh begins anew, "
            "--out FILE writes elsewhere"
        )
    return found


def _differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Where b, of now, is not a; the commit may differ, and is the last one's."""
    names = sorted({**a, **b}.keys() - {"commit"})
    return [f"{n}: {a.get(n)}, now {b.get(n)}" for n in names if a.get(n) != b.get(n)]


def margin(differences: Sequence[float]) -> float:
    """From the mean of two or more to its one-sided 95 % bound: t(0.95, n - 1) * sd / sqrt(n)."""
    n = len(differences)
    return float(student.ppf(0.95, n - 1)) * stdev(differences) / n**0.5
