"""Of a large matrix of cases a sample runs each time, and all of them with `--all`.

A case with the mark `sampled` belongs to the matrix of its test function. Of a function that has
few, all run; of any other one in `SHARE`, or in as many as its mark says (`sampled(2)`), chosen so
that as many values of its parameters as possible occur: first each kernel, dtype and geometry once,
then pairs of them. Which cases those are depends on the ids alone (ties go by their CRC-32), so
every run and every process of `pytest -n` chooses the same. A parameter that is a dataclass counts
by its fields. A loop inside a test takes a part of its values by the fixture `some`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations
from typing import NamedTuple, Protocol, TypeVar
from zlib import crc32

SHARE = 5
FEW = 2

T = TypeVar("T")


class Some(Protocol):
    """The fixture `some` of `conftest.py`."""

    def __call__(self, values: Sequence[T], share: int = 2) -> Sequence[T]: ...


Value = tuple[str, str]  # of a parameter: its name and its value, as text


class Case(NamedTuple):
    """One case of a test function."""

    id: str
    function: str
    values: Mapping[str, str]
    share: int = SHARE


def sample(cases: Iterable[Case]) -> set[str]:
    """The ids of the cases that run each time."""
    by_function: defaultdict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_function[case.function].append(case)
    return {case.id for mine in by_function.values() for case in _sample(mine)}


def _sample(cases: Sequence[Case]) -> list[Case]:
    """Those of one function.

    Next is always the case with most values, and then most pairs of values, that no chosen case
    has. These numbers only fall as others are chosen, so they are counted again only for the case
    that would be next by its last count.
    """
    ordered = sorted(cases, key=lambda case: crc32(case.id.encode()))
    chosen: list[Case] = []
    values: set[Value] = set()
    pairs: set[tuple[Value, ...]] = set()
    waiting = [(-len(case.values), -len(_pairs(case)), n) for n, case in enumerate(ordered)]
    heapify(waiting)
    most = max(FEW, -(-len(cases) // min(case.share for case in cases)))
    while waiting and len(chosen) < most:
        case = ordered[n := waiting[0][2]]
        its_pairs = _pairs(case)
        now = -len(case.values.items() - values), -len(its_pairs - pairs), n
        if heapreplace(waiting, now) == now:
            heappop(waiting)
            chosen.append(case)
            values |= case.values.items()
            pairs |= its_pairs
    return chosen


def _pairs(case: Case) -> set[tuple[Value, ...]]:
    return set(combinations(sorted(case.values.items()), 2))
