"""Figures of the decision for a compiled region, and the error for one that cannot fit."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from elbowroom.errors import BudgetTooSmall
from elbowroom.units import show_at_least, show_nbytes

OTHERS = "what other regions may hold then"


@dataclass(frozen=True)
class HeldAtBackward:
    """Memory in use as backward of a planned graph begins, apart from parameters and inputs.

    fixed_nbytes  of outputs and their gradients, which stay until the end of backward
    saved         by the name of each saved value: the name of its memory, and the bytes of that
    """

    fixed_nbytes: int = 0
    saved: Mapping[str, tuple[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """Decision for one compiled region; all figures are estimates, in bytes.

    peak_nbytes         of forward and backward, gradients included, parameters and inputs not
    saved_nbytes        held between forward and backward
    forward_nbytes      the peak of forward, without what stands beside it
    plain_nbytes        the peak of plain torch.compile
    plain_saved_nbytes  what plain torch.compile would hold
    inputs_nbytes       of parameters, buffers and other inputs that the region reads
    recomputed          number of ops that backward recomputes
    is_lossy            whether codes add errors
    is_plain            whether all is as in plain torch.compile
    fuses_alike         whether bits depend on which loops are fused
    is_uncertain        whether sums may run in another order than in plain torch.compile
    is_tailed           whether rows must end as in plain torch.compile's code (`tails.py`)
    noise               variance that codes add to the gradient, as a share of that of mini-batches
    away_nbytes         held in a file or in host memory between forward and backward
    held                what backward begins with, by name
    """

    peak_nbytes: int
    saved_nbytes: int
    plain_nbytes: int
    inputs_nbytes: int
    recomputed: int
    plain_saved_nbytes: int = 0
    forward_nbytes: int = 0
    is_lossy: bool = False
    is_plain: bool = True
    fuses_alike: bool = False
    is_uncertain: bool = False
    is_tailed: bool = False
    noise: float = 0.0
    away_nbytes: int = 0
    held: HeldAtBackward = field(default_factory=HeldAtBackward, compare=False, repr=False)


def too_small(
    budget_nbytes: int, least_nbytes: int, parts: Mapping[str, int], noise: float | None
) -> BudgetTooSmall:
    """Returns the error for a budget below what a compiled region needs.

    parts: what needs the memory, in bytes; with `OTHERS` where a step has several regions, of which
    some may not have been compiled yet. noise: the most that its codes may add; None: no limit
    """
    held = ", ".join(f"{name} {show_nbytes(size)}" for name, size in parts.items() if size)
    within = "" if noise is None else f" with noise={noise:g}"
    later = " Regions that are compiled later may need more." if OTHERS in parts else ""
    more = "" if noise is None else "allow more noise, "
    return BudgetTooSmall(
        f"budget {show_nbytes(budget_nbytes)} is below the {show_nbytes(least_nbytes)} that this "
        f"compiled region needs at least{within}: {held}. Give {show_at_least(least_nbytes)}, "
        f"{more}or halve the batch.{later}",
        least_nbytes=least_nbytes,
        parts=parts,
    )


_PREFIX = "elbowroom_"
_FIGURES = [f.name for f in fields(Decision) if f.compare]
_UNIT = {"noise": 1e-9}  # counters hold whole numbers


def store(decision: Decision, peak_nbytes: int | None, *, is_backward: bool) -> None:
    """Stores a decision with the graph that is compiled, and the peak of its code if known.

    A region's figures are stored with its forward graph; both graphs store their peak.

    A graph that comes from the cache was planned when it was stored, and no partitioner runs for
    it. But Inductor stores with each graph by how much its counters grew while it was compiled, and
    adds as much when it loads the graph. So the figures are added to these counters while a graph
    is compiled; `Loaded` reads them. Where a version of torch stores no counters, or stores whole
    regions (`bundled_autograd_cache`), nothing is known.
    """
    counters = _counters()
    counters[f"{_PREFIX}{'backward' if is_backward else 'forward'}"] += peak_nbytes or 0
    if is_backward:
        return
    counters[f"{_PREFIX}decisions"] += 1
    for name in _FIGURES:
        counters[_PREFIX + name] += round(getattr(decision, name) / _UNIT.get(name, 1))


def stored_peak(*, is_backward: bool) -> int:
    """Returns the sum of what was stored, with graphs compiled or loaded until now, as peaks."""
    return int(_counters()[f"{_PREFIX}{'backward' if is_backward else 'forward'}"])


class Loaded:
    """Context that reads what was stored with the graphs compiled or loaded inside of it.

    decision     of the region; None where none, or more than one, is known
    peak_nbytes  the highest of the code of its graphs; 0 where it was not looked at
    is_complete  whether the code of both was looked at
    """

    decision: Decision | None = None
    peak_nbytes = 0
    is_complete = False

    def __enter__(self) -> "Loaded":
        self._before = dict(_counters())
        return self

    def __exit__(self, *_: object) -> None:
        after = _counters()
        found = {
            name.removeprefix(_PREFIX): count - self._before.get(name, 0)
            for name, count in after.items()
            if name.startswith(_PREFIX)
        }
        if found.get("decisions") != 1:
            return
        peaks = found.get("forward", 0), found.get("backward", 0)
        self.peak_nbytes, self.is_complete = max(peaks), min(peaks) > 0
        self.decision = Decision(**{name: _figure(name, found.get(name, 0)) for name in _FIGURES})


def _figure(name: str, count: int) -> Any:
    if name.startswith("is_") or name == "fuses_alike":
        return bool(count)
    return count * _UNIT[name] if name in _UNIT else count


def _counters() -> Any:
    """Inductor's counters, by name."""
    from torch._dynamo.utils import counters

    return counters["inductor"]
