"""Tests that take seconds run in turns: a twelfth of them each half day, another one the next.

Three quarters of the processor time of a run were in 4 % of its tests. Those are listed in
`costs.json`, with the CPU seconds that each has taken, its processes included. A run of everything
takes one turn of `TURNS`; the hour (UTC) says which, or `--turn`, and the last lines of the run
tell. All of them run with `--all`, and where files or tests are named. A test that is not in the
list, as any new one, runs each time.

Turns take about as long as one another, and each has its share of the cases of a function. Tests
that share what they make, such as a pair of processes, take the turn of their file, which the list
names in their place.

    ./scripts/test --costs FILE        # measures the tests of a file, and writes them into the list
    ./scripts/test --all --costs FILE  # all cases, too; drops names that no test of the file has
    ./scripts/test --all --costs       # all tests
"""

import json
import resource
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

TURNS = 12
MIN_S = 0.5
COSTS = Path(__file__).with_name("costs.json")
_TURN_S = 12 * 3600


def costs() -> dict[str, float]:
    """CPU seconds of tests, by their ids, and of files whose tests take their turn together."""
    found: dict[str, float] = json.loads(COSTS.read_text())
    return found


def current() -> int:
    """The turn of this half of the day, which begins at midnight or at noon in UTC."""
    return int(time.time() // _TURN_S) % TURNS


def turns(costs: Mapping[str, float]) -> dict[str, int]:
    """The turn of each test, or file, of `costs`.

    The dearest is first. Each goes where the fewest cases of its function are, and of such turns
    into the one that takes the fewest seconds.
    """
    seconds, cases = [0.0] * TURNS, Counter[tuple[str, int]]()
    found = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        function = name.partition("[")[0]
        found[name] = turn = min(range(TURNS), key=lambda t: (cases[function, t], seconds[t]))
        cases[function, turn] += 1
        seconds[turn] += costs[name]
    return found


def turn_of_each(ids: Iterable[str]) -> dict[str, int]:
    """The turn of each of these tests that has one."""
    known = turns(costs())
    its_turn = {id: known.get(id, known.get(_file(id))) for id in ids}
    return {id: turn for id, turn in its_turn.items() if turn is not None}


def cpu_s() -> float:
    """Seconds of processors that this process and those that it has waited for have taken."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def by_file(measured: Mapping[str, float]) -> Counter[str]:
    """CPU seconds of files, of those of their tests."""
    found = Counter[str]()
    for id, cost_s in measured.items():
        found[_file(id)] += cost_s
    return found


def _file(id: str) -> str:
    return id.partition("::")[0]


def renewed(
    costs: Mapping[str, float], measured: Mapping[str, float], *, whole: bool = False
) -> dict[str, float]:
    """The list after a run in which these tests took so many CPU seconds.

    A test that did not run keeps its entry. A test leaves the list below half of `MIN_S`, so that
    one that takes about as long does not come and go.

    whole: all tests of the files ran, so that an entry of another name in them is of no test
    """
    together = {name for name in costs if "::" not in name}
    taken: Counter[str] = Counter()
    for id, cost_s in measured.items():
        taken[file if (file := _file(id)) in together else id] += cost_s
    ran = {_file(id) for id in measured} if whole else set()
    found = {name: cost_s for name, cost_s in costs.items() if _file(name) not in ran}
    for name, cost_s in taken.items():
        found.pop(name, None)
        if cost_s >= (MIN_S / 2 if name in costs else MIN_S):
            found[name] = round(cost_s, 1)
    return found


def write(costs: Mapping[str, float]) -> None:
    """One line a test, in the order of their ids."""
    COSTS.write_text(json.dumps(dict(sorted(costs.items())), indent=0) + "\n")
