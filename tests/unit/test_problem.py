"""The memory model, against levels worked out by hand."""

from dataclasses import replace
from math import inf

import pytest

from elbowroom.plan.problem import (
    Choice,
    Item,
    Link,
    Option,
    Problem,
    Region,
    added_seconds,
    added_variance,
    keep_all,
    levels,
    stalls,
)
from elbowroom.plan.reasons import Reasons
from elbowroom.plan.solve.limits import Limits, fits, obeys

CODE = Option("code", 2, forward_s=0.5, backward_s=0.25, variance=0.1, exact=False)
AWAY = Option("offload", 0, link="host", ahead=1)
BITS = Option("bitmap", 1, values=False)
KEEP = Option("keep", 10)

# Three moments of forward, five of backward. Born at 0, read until 1, asked for at 5 and at 7.
ITEM = Item(10, 0, 1, ((5, 5), (7, 7)), 7, (KEEP, CODE, AWAY, BITS))
STEP = Problem((1,) * 8, tuple(map(float, range(8))), 3, 8.0, (ITEM,), (), {"host": Link(10, 5)})


def levels_of(option: int, problem: Problem = STEP, *recomputed: int) -> list[int]:
    rest = (0,) * (len(problem.items) - 1)
    return levels(problem, Choice((option, *rest), frozenset(recomputed))).tolist()


def test_kept() -> None:
    assert levels(STEP, keep_all(STEP)).tolist() == [11] * 8


def test_encoded_lies_beside_what_is_decoded() -> None:
    assert levels_of(1) == [13, 13, 3, 3, 3, 13, 3, 13]


def test_offloaded_is_back_ahead_of_its_need() -> None:
    assert levels_of(2) == [11, 11, 1, 1, 11, 11, 11, 11]


def test_held_until_the_end_of_the_step() -> None:
    late = replace(STEP, items=(replace(ITEM, needs=((5, 5),), freed=7),))
    assert levels_of(1, late) == [13, 13, 3, 3, 3, 13, 3, 3]


# A region with the item inside, of 4 bytes of workspace and 2 of inputs that are no items.
REGION = Region("block", (0,), (), 3.0, workspace=4, extra=2, born=0, start=4)


def test_recomputed() -> None:
    problem = replace(STEP, regions=(REGION,))
    #                                          extra only      start, with workspace
    assert levels_of(0, problem, 0) == [13, 13, 3, 3, 17, 11, 11, 11]
    assert levels_of(1, problem, 0) == levels_of(0, problem, 0)  # its option has no effect
    assert added_seconds(problem, Choice((1,), frozenset([0]))) == 3.0
    assert added_variance(problem, Choice((1,), frozenset([0]))) == 0.0


def test_nested_regions_each_have_their_start() -> None:
    other = Item(20, 1, 2, ((3, 3),), 3, (Option("keep", 20),))
    around = Region("block", (0, 1), (), 5.0, workspace=0, extra=0, born=0, start=3)
    within = replace(REGION, workspace=0, extra=0, start=5, within=0)
    problem = replace(STEP, items=(ITEM, other), regions=(around, within))
    assert levels_of(0, problem, 0) == [11, 31, 21, 31, 11, 11, 11, 11]
    assert levels_of(0, problem, 1) == [11, 31, 21, 21, 1, 11, 11, 11]
    assert not obeys(problem, Choice((0, 0), frozenset([0, 1])), Limits(99))


# A region that starts from the item, at moment 6 or earlier.
FROM = Region("next", (), (0,), 1.0, workspace=0, extra=0, born=1, start=6)


@pytest.mark.parametrize(
    ("start", "option", "expected"),
    [
        pytest.param(6, 2, [11, 11, 1, 1, 11, 11, 11, 11], id="between needs, back already"),
        pytest.param(3, 2, [11, 11, 11, 11, 11, 11, 11, 11], id="held until its next need"),
        pytest.param(6, 0, [11] * 8, id="kept"),
    ],
)
def test_an_input_is_whole_from_the_start_of_its_region(
    start: int, option: int, expected: list[int]
) -> None:
    problem = replace(STEP, regions=(replace(FROM, start=start),))
    assert levels_of(option, problem, 0) == expected


def test_an_input_is_not_freed_before_its_region_starts() -> None:
    early = replace(ITEM, needs=((3, 3),), freed=3)
    problem = replace(STEP, items=(early,), regions=(FROM,))
    assert levels_of(0, problem) == [11, 11, 11, 11, 1, 1, 1, 1]
    assert levels_of(0, problem, 0) == [11] * 7 + [1]
    assert levels_of(2, problem, 0) == [11, 11, 11, 11, 1, 11, 11, 1]


def test_two_regions_from_one_item_count_it_once() -> None:
    both = replace(STEP, regions=(FROM, replace(FROM, start=3)))
    assert levels_of(2, both, 0, 1) == [11] * 8


def test_what_may_be_chosen() -> None:
    problem = replace(STEP, regions=(FROM, REGION))
    lossy, bits = Choice((1,)), Choice((3,))
    assert obeys(problem, lossy, Limits(0, variance=0.1))
    assert not obeys(problem, lossy, Limits(0, variance=0.09))
    assert not obeys(problem, lossy, Limits(0, exact=True))
    assert obeys(problem, bits, Limits(0, exact=True))
    assert not fits(problem, bits, Limits(11, exact=True))
    for option, agrees in ((0, True), (1, False), (2, True), (3, False)):
        assert obeys(problem, Choice((option,), frozenset([0])), Limits(0)) is agrees
    assert not obeys(problem, Choice((0,), frozenset([0, 1])), Limits(0))  # its input is gone
    full = replace(STEP, links={"host": Link(10, 5, room=9)})
    assert not obeys(full, Choice((2,)), Limits(0))


def test_traffic_stalls_where_it_is_not_hidden() -> None:
    away = Choice((2,))
    assert stalls(STEP, away, "host") == (0.0, 0.0)  # 1 s out of 2, 2 s back of 2
    slow = replace(STEP, links={"host": Link(2, 1)})
    assert stalls(slow, away, "host") == (3.0, 8.0)  # 5 - 2, 10 - 2
    assert added_seconds(slow, away) == 11.0
    two = replace(slow, items=(ITEM, replace(ITEM, used=2, needs=((4, 4),), freed=4)))
    assert stalls(two, Choice((2, 2)), "host") == (8.0, 18.0)  # out 10 - 2, back 20 - 2
    sooner = replace(STEP, regions=(replace(FROM, start=4),))
    assert stalls(sooner, Choice((2,), frozenset([0])), "host") == (0.0, 1.0)
    assert added_seconds(STEP, Choice((1,))) == 0.75


FINE = Option("fine", 4, forward_s=1.0, variance=0.01, exact=False)
COARSE = Option("coarse", 1, forward_s=0.5, variance=0.3, exact=False)
TWO = replace(STEP, items=(replace(ITEM, options=(KEEP, CODE, FINE, COARSE)), ITEM))


@pytest.mark.parametrize("budget", [20, 22, 23, 24, 25, 27])
@pytest.mark.parametrize("variance", [0.15, 0.25, inf])
@pytest.mark.parametrize("chosen", range(4))
def test_a_reason_is_what_the_other_options_would_break(
    chosen: int, budget: int, variance: float
) -> None:
    found = Reasons(TWO, Choice((chosen, 1)), budget, variance).of_item(0)
    limits, options = Limits(budget, variance=variance), TWO.items[0].options
    others = sorted({*range(4)} - {chosen}, key=lambda n: options[n].cost_s)
    allowed = [n for n in others if fits(TWO, Choice((n, 1)), limits)]
    assert found.startswith(f"{options[others[0]].name}: ") is (others[0] not in allowed)
    nexts = [f"next: {options[n].name}" for n in allowed[:1]]
    assert [one for one in nexts if one in found] == nexts
    assert ("next" in found) is bool(allowed)
