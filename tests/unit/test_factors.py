"""Factors of prices by measured steps, and which plan is tried and kept: tables without PyTorch."""

import pytest

from elbowroom.fitting.headroom import Headroom
from elbowroom.fitting.timings import Timing, fastest, next_tried
from elbowroom.plan.factors import (
    CLASSES,
    CODES,
    LINKS,
    MODULES,
    REBUILDS,
    STEP,
    TENSORS,
    TimedStep,
    factors_of,
)
from fit_table.values import Plan, chosen


def of(measured_s, **paid):
    """Return a step of which plain autograd takes 1 s."""
    return TimedStep({STEP: 1.0, **paid}, measured_s)


def test_nothing_measured_changes_nothing():
    assert factors_of([]) == dict.fromkeys(CLASSES, 1.0)


def test_what_was_right_stays():
    found = factors_of([of(1.3, codes=0.2, modules=0.1), of(1.2, codes=0.2)])
    assert found == pytest.approx(dict.fromkeys(CLASSES, 1.0))


@pytest.mark.parametrize("name", [CODES, TENSORS, REBUILDS, MODULES, LINKS])
def test_one_step_makes_dearer_what_it_pays(name):
    """Shrunk: of 0.3 s that were not predicted, a part is the step's own, and some is chance."""
    found = factors_of([of(1.6, **{name: 0.3})])
    assert 1.3 < found[name] < 1.5
    assert 1.1 < found[STEP] < 1.3
    assert 1 + 0.3 * found[name] + found[STEP] - 1 == pytest.approx(1.6, rel=0.02)
    (rest,) = {round(found[other], 9) for other in CLASSES if other not in (name, STEP)}
    assert 1.1 < rest < 0.5 * (1 + found[name])


def test_what_is_paid_more_of_is_made_dearer():
    found = factors_of([of(1.6, codes=0.3, modules=0.1)])
    assert found[CODES] - 1 > 1.3 * (found[MODULES] - 1) > 1.3 * (found[LINKS] - 1) > 0.1


def test_several_steps_tell_classes_apart():
    """Codes take twice what was predicted, modules half, and the step itself is right."""
    steps = [of(1.45, codes=0.2, modules=0.1), of(1.8, codes=0.4), of(1.2, modules=0.4)]
    found = factors_of(steps)
    assert found[CODES] == pytest.approx(2, abs=0.3)
    assert found[MODULES] == pytest.approx(0.5, abs=0.2)
    assert found[STEP] == pytest.approx(1, abs=0.1)
    assert found[CODES] > 3 * found[MODULES]


def test_the_step_itself_is_known_less_where_its_backward_is_an_estimate():
    steps = [of(1.5, codes=0.1)]
    known, rough = factors_of(steps), factors_of(steps, rough=True)
    assert rough[STEP] > known[STEP] > 1.3
    assert known[CODES] > rough[CODES]


def test_factors_have_an_end():
    assert factors_of([of(9.0, codes=0.9)])[CODES] == 4
    assert factors_of([of(0.2, codes=0.9)])[CODES] == 0.25


def plan(name, seconds, noise=0.0):
    return chosen(Plan(name, seconds=seconds, noise=noise, recompute=frozenset({name})))


A, B, C, D = plan("a", 1.2), plan("b", 1.1), plan("c", 1.3), plan("d", 1.25)


def timed(*pairs):
    return tuple(Timing(one, seconds, Headroom()) for one, seconds in pairs)


@pytest.mark.parametrize(
    ("timings", "best"),
    [
        (timed((A, 1.4)), A),
        (timed((A, 1.4), (B, 1.37)), A),  # which may be chance
        (timed((A, 1.4), (B, 1.35)), B),
        (timed((A, 1.4), (B, 1.5), (C, 1.3)), C),
        (timed((A, 1.4), (plan("noisy", 1.1, noise=0.3), 1.2)), A),
    ],
)
def test_the_fastest_stays(timings, best):
    assert fastest(timings).chosen is best


@pytest.mark.parametrize(
    ("timings", "plans", "tried"),
    [
        (timed((A, 1.2)), [], None),
        (timed((A, 1.2)), [A], None),  # it does the same
        (timed((A, 1.2)), [A, D, B], B),
        (timed((A, 1.2)), [D], D),  # predicted a little slower: predictions are not so sure
        (timed((A, 1.2)), [C], None),
        (timed((A, 1.4)), [C], C),
        (timed((A, 1.4), (B, 1.3)), [B, D, C], D),
        (timed((A, 1.4), (B, 1.3), (D, 1.3)), [C], None),  # enough were tried
        (timed((A, 1.2)), [plan("noisy", 1.0, noise=0.3)], None),
    ],
)
def test_what_is_tried_next(timings, plans, tried):
    assert next_tried(timings, plans) is tried
