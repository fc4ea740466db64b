"""Figures of a decision, which Inductor's cache stores with the code.

A graph that comes from the cache was planned when it was stored, and no partitioner runs for it.
But Inductor stores with each graph by how much its counters grew while it was compiled, and adds as
much when it loads the graph. So the figures are added to these counters while a graph is compiled:

    store(decision, peak)     by `Check`, as Inductor writes a forward or a backward graph
    with Loaded() as loaded:  around the compilation of a region; then
        loaded.decision       of a region from the cache

Where a version of torch stores no counters, or stores whole regions (`bundled_autograd_cache`),
nothing is known.
"""

from dataclasses import fields
from typing import Any

from elbowroom.compiled.decision import Decision

_PREFIX = "elbowroom_"
_FIGURES = [f.name for f in fields(Decision) if f.compare]
_UNIT = {"noise": 1e-9}  # counters hold whole numbers


def store(decision: Decision, peak_nbytes: int | None, *, is_backward: bool) -> None:
    """Stores a decision with the graph that is compiled, and the peak of its code if known.

    A region's figures are stored with its forward graph; both graphs store their peak.
    """
    counters = _counters()
    counters[f"{_PREFIX}{'backward' if is_backward else 'forward'}"] += peak_nbytes or 0
    if is_backward:
        return
    counters[f"{_PREFIX}decisions"] += 1
    for name in _FIGURES:
        counters[_PREFIX + name] += round(getattr(decision, name) / _UNIT.get(name, 1))


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
