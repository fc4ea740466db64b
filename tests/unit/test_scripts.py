"""Which script the next forward replays, with stand-ins for scripts: their numbers of rows."""

import gc
from dataclasses import dataclass

import pytest
from torch import nn

from elbowroom.runtime.replay import scripts as module
from elbowroom.runtime.replay.scripts import Forward, Scripts


@dataclass(eq=False)
class Stub:
    """A script of forwards with these numbers of rows, and of one kind."""

    rows: frozenset[int]
    kind: str = "a"

    @property
    def sizes(self) -> int:
        return len(self.rows) - 1


def _generalized(one: Stub, other: Stub) -> Stub | None:
    return Stub(one.rows | other.rows, one.kind) if one.kind == other.kind else None


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "generalized", _generalized)


def of(rows: int, kind: str = "a") -> Stub:
    return Stub(frozenset([rows]), kind)


def forward(rows: int, at: int = 0) -> Forward:
    return Forward(at, ("x", rows), rows)


def rows_of(found: tuple[Stub, ...]) -> list[list[int]]:
    return [sorted(one.rows) for one in found]


def test_known_inputs_find_their_own_script_before_a_shared_one() -> None:
    scripts = Scripts(most=16, most_unwritten=4)
    for rows in (4, 8):
        assert scripts.lacks(forward(rows))
        scripts.add(of(rows), forward(rows))
    assert rows_of(scripts.begin(forward(4))) == [[4], [4, 8]]
    assert rows_of(scripts.begin(forward(6))) == rows_of(scripts.begin(forward(8))) == [[4, 8]]
    assert scripts.begin(forward(9)) == ()  # larger ones might have more done to them
    assert scripts.begin(forward(6, at=1)) == ()


def test_a_shared_script_serves_no_inputs_that_it_failed() -> None:
    scripts = Scripts(most=16, most_unwritten=4)
    for rows in (4, 8):
        scripts.add(of(rows), forward(rows))
    (shared,) = scripts.begin(forward(5))
    scripts.was_left(shared, forward(5))
    assert scripts.begin(forward(5)) == ()
    assert scripts.begin(forward(6)) == (shared,)
    scripts.add(of(5), forward(5))  # from which it is written, too
    assert rows_of(scripts.begin(forward(5))) == [[4, 5, 8]]


def test_unknown_inputs_may_be_those_of_all_scripts_and_share_one_that_was_left() -> None:
    scripts = Scripts(most=8, most_unwritten=8)
    one, other = of(4), of(8)
    scripts.add(one)
    scripts.add(other)  # the first may come again, which is faster
    assert scripts.begin() == (other, one)
    scripts.was_followed(one)
    assert scripts.begin() == (one, other)
    scripts.was_left(one)
    scripts.add(of(5))
    assert rows_of(scripts.begin()) == [[4, 5], [8]]


def test_many_scripts_of_unknown_inputs_become_one() -> None:
    scripts = Scripts(most=8, most_unwritten=8)
    for rows in range(4):
        scripts.add(of(rows))
    assert len(scripts.begin()) == 4
    scripts.add(of(9, "b"))
    scripts.add(of(7))
    assert max(map(len, rows_of(scripts.begin()))) == 2
    assert len(scripts.begin()) == 5


@pytest.mark.parametrize("known", [True, False])
def test_the_oldest_script_is_forgotten(known: bool) -> None:
    scripts = Scripts(most=3, most_unwritten=4)
    for rows in range(5):
        here = (forward(rows, at=1),) if known else ()
        scripts.add(of(rows, str(rows)), *here)
    found = [scripts.begin(forward(rows, at=1)) for rows in range(5)] if known else scripts.begin()
    assert len([one for one in found if one]) == 3


def test_from_time_to_time_a_forward_is_examined_and_recorded_again() -> None:
    scripts = Scripts(most=8, most_unwritten=4)
    scripts.add(of(4), forward(4))
    scripts.add(of(5, "b"), forward(5, at=1))
    examined = 0
    for _ in range(600):
        if not scripts.begin(forward(4)):
            examined += 1
            assert scripts.lacks(forward(4))
            assert not scripts.lacks(forward(5, at=1))
            scripts.add(of(4), forward(4))
    assert examined == 2


def test_a_loop_that_runs_longer_is_examined() -> None:
    scripts = Scripts(most=8, most_unwritten=4)
    scripts.add(of(4), forward(4))
    scripts.has_run(100, forward(4))
    assert scripts.begin(forward(4))
    scripts.has_run(200, forward(4))
    assert not scripts.begin(forward(4))


def test_forwards_that_leave_their_scripts_are_recorded_no_more() -> None:
    scripts = Scripts(most=8, most_unwritten=4)
    for n in range(4):
        assert scripts.wanted
        scripts.add(of(n, str(n)))
        scripts.was_left(scripts.begin()[0])
    assert not scripts.wanted
    scripts = Scripts(most=8, most_unwritten=4)
    for n in range(8):  # each of which has paid before
        scripts.add(of(n, str(n)))
        found = [scripts.begin() for _ in range(8)]
        scripts.was_left(found[0][0])
    assert scripts.wanted


def test_a_script_is_forgotten_with_an_owner_of_its_parameters() -> None:
    scripts = Scripts(most=8, most_unwritten=8)
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    scripts.add(of(1, "b"), owners=[one])
    scripts.add(of(2), owners=[one, other])
    scripts.was_left(scripts.begin()[0])
    del other
    gc.collect()
    assert [script.kind for script in scripts.begin()] == ["b"]
    del one
    gc.collect()
    assert not scripts.begin()
    assert not scripts._left
