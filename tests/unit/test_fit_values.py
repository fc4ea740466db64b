"""What `fit` has learned, as values: the room of a forward, and the plans that were attempted."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.attempts import Attempts, Candidate, Chosen, KnownStep
from elbowroom.fitting.headroom import Headroom
from elbowroom.fitting.options import FitOptions, MemoryState
from elbowroom.fitting.planned import learn_anew
from elbowroom.fitting.planner_settings import PlannerSettings
from elbowroom.fitting.refusals import refusal
from elbowroom.fitting.signature import Signature
from elbowroom.fitting.state import FitState
from elbowroom.plan.plan import Plan

OPTIONS, MEMORY = FitOptions(1000), MemoryState(static_nbytes=300)
MEASURED = Headroom(transient_nbytes=50, guess_nbytes=70, seen_nbytes=9)


@pytest.mark.parametrize(
    ("after", "transient", "guess", "seen"),
    [
        (Headroom(), None, None, 0),
        (Headroom().learned(12.9), 12, None, 0),
        (Headroom().learned(-3), -3, None, 0),  # what is held may stand anyway, as inputs do
        (MEASURED.learned(80), 80, 70, 0),
        (MEASURED.grown(1.5), 75, 70, 0),  # what was seen was seen of a smaller call
        (MEASURED.forgotten(), None, 70, 0),  # a guess stays
        (Headroom().inherited(MEASURED), None, 50, 0),
        (MEASURED.inherited(Headroom()), 50, None, 9),
    ],
)
def test_what_is_known_of_transients(after, transient, guess, seen):
    assert after == Headroom(transient, guess, seen)
    assert MEASURED.fitting(800, 100) == Headroom(50, 70, 900, 800)
    assert (MEASURED.transient_nbytes, MEASURED.guess_nbytes, MEASURED.seen_nbytes) == (50, 70, 9)


@pytest.mark.parametrize(
    ("known", "memory", "allowed", "surely"),
    [
        (Headroom(), MEMORY, 600, 700),  # the guess of whoever asks, 100; none of it is certain
        (Headroom(guess_nbytes=40), MEMORY, 660, 700),
        (Headroom(guess_nbytes=400), MEMORY, 600, 700),  # the smaller of two guesses
        (Headroom(50), MEMORY, 650, 650),
        (Headroom(50, None, 980), MEMORY, 680, 680),  # a step that held as much has fit
        (Headroom(50, None, 800), MEMORY, 650, 650),
        # A parameter that gets no gradient is counted, too, so nothing is certain of gradients.
        (Headroom(50), MemoryState(300, unallocated_gradient_nbytes=701), 650, 650),
        (
            Headroom(50),
            MemoryState(300, unallocated_state_nbytes=701),
            650,
            -1,
        ),  # states do not fit
    ],
)
def test_what_a_forward_may_hold(known, memory, allowed, surely):
    assert known.allowed_nbytes(OPTIONS, memory, None, 100) == allowed
    assert known.surely_allowed_nbytes(OPTIONS, memory, None) == surely


@pytest.mark.parametrize(
    ("known", "most", "exceeded"),
    [
        (Headroom(), 2000, False),  # nothing is known
        (Headroom(50), 715, False),  # 300 are resident of 1000: what is held may vary by 1/64
        (Headroom(50), 716, True),
        (Headroom(-40), 755, False),  # so much of it are inputs, which stand anyway
        (Headroom(-40), 756, True),
        (Headroom(50, None, 1100), 815, False),  # a step that held as much has fit
        (Headroom(50, None, 1100), 816, True),
        (Headroom(50, None, 900), 715, False),
    ],
)
def test_when_what_a_forward_has_held_exceeds_the_budget(known, most, exceeded):
    assert known.is_exceeded(OPTIONS, MEMORY, most) is exceeded


@pytest.mark.parametrize(
    ("held", "left", "most", "surpassed"),
    [
        (800, 100, 550, False),  # 300 are resident: half of what was left
        (800, 100, 551, True),
        (800, 0, 515, False),  # what is held may vary by 1/64
        (800, 0, 516, True),
    ],
)
def test_when_a_forward_holds_so_much_more_than_the_measured_one(held, left, most, surpassed):
    assert Headroom(50).fitting(held, left).is_surpassed(OPTIONS, MEMORY, most) is surpassed
    assert not Headroom(50).is_surpassed(OPTIONS, MEMORY, most), "no step was measured"


def test_a_refusal_names_more_than_the_budget_that_a_forward_was_above():
    """What was held before a backward inside of forward is gone when the refusal is written."""
    saving = SimpleNamespace(
        storages=[], largest_nbytes=10, impossible=True, ledger=SimpleNamespace(max_nbytes=700)
    )
    refused = refusal(saving, OPTIONS, SimpleNamespace(weight_nbytes=300), MEMORY, 50)
    assert refused.least_nbytes == 300 + 700 + 50 > OPTIONS.budget_nbytes
    assert "exact=None" not in str(refused)  # lossy codes were allowed


def chosen(name, state="fp32"):
    """Return a choice that differs from others in the module that it runs again."""
    plan = Plan(1, 1, 1, 1.0, 1.0, True, "greedy", {}, frozenset([name]), ())
    return Chosen(Candidate(state, name), plan)  # of the profile nothing is asked


def made(profile, again):
    """Return the smallest plan of a profile, whose name stands in for it."""
    return chosen(f"{profile} {'again' if again else 'once'}")


def free(profile, again):
    """Return a bound of which nothing follows: all plans are made."""
    return 0


def names(attempts):
    return [next(iter(one.chosen.plan.recompute)) for one in attempts.smallest]


@pytest.mark.parametrize(
    ("known", "order"),
    [
        ([("written", False)], ["written again", "written once"]),
        # The one that can be written down comes first of an estimate's.
        ([("guess", True)], ["guess once", "guess again"]),
        # Once a step is written down, no estimate in which nothing runs again knows a smaller one.
        (
            [("written", False), ("guess", True)],
            ["written again", "written once", "guess again"],
        ),
        ([], []),
    ],
)
def test_the_order_in_which_smallest_plans_are_attempted(known, order):
    attempts = Attempts(tuple(KnownStep(name, rehearsed) for name, rehearsed in known))
    for name in order:
        attempts, found = attempts.next_smallest(made, free)
        assert found.chosen.plan.recompute == {name}
        assert attempts.known == ()
        attempts = attempts.after(found.chosen, 7)
    assert names(attempts) == order
    assert attempts.next_smallest(made, free)[1] is None


def test_no_estimate_is_followed_to_be_profiled_once_a_step_was():
    def made(profile, again):
        one = chosen(profile, state=f"{profile} {'again' if again else 'once'}")
        return one if again else replace(one, plan=replace(one.plan, recompute=frozenset()))

    guesses = tuple(KnownStep(name, from_rehearsal=True) for name in ("likely", "careful"))
    attempts, found = Attempts(guesses).next_smallest(made, free)
    assert found.chosen.candidate.state == "likely once"
    attempts = attempts.after(found.chosen, 7).knowing("written")
    left = []
    while (step := attempts.next_smallest(made, free))[1] is not None:
        attempts = step[0].after(step[1].chosen, 7)
        left.append(step[1].chosen.candidate.state)
    assert left == ["likely again", "careful again", "written again", "written once"]


def test_an_estimated_plan_whose_step_was_only_measured_is_followed_once_more_to_be_profiled():
    def once(profile, again):
        one = chosen(profile, state="" if again else "once")
        return one if again else replace(one, plan=replace(one.plan, recompute=frozenset()))

    guess = KnownStep("guess", from_rehearsal=True)
    attempts = Attempts((guess,)).after(once("guess", False), 7)  # it created optimizer states
    attempts, found = attempts.next_smallest(once, free)
    assert found.chosen.candidate.state == ""
    attempts, found = attempts.after(found.chosen, 7).next_smallest(once, free)
    assert found.chosen.candidate.state == "once"
    assert attempts.after(found.chosen, 7).next_smallest(once, free)[1] is None


def test_a_plan_that_should_take_much_more_than_another_waits():
    """Its forward would be refused, before the smaller one has been tried."""

    def sized(profile, again):
        one = made(profile, again)
        return replace(one, plan=replace(one.plan, peak=100 if again else 111))

    attempts = Attempts((KnownStep("guess", from_rehearsal=True),))
    attempts, found = attempts.next_smallest(sized, free)
    assert found.chosen.plan.recompute == {"guess again"}
    attempts, found = attempts.after(found.chosen, 7).next_smallest(sized, free)
    assert found.chosen.plan.recompute == {"guess once"}


def test_only_smallest_plans_are_made_that_may_be_near_the_least():
    """Each takes a search: half of a Mamba's settling were plans that were never followed."""
    peaks = {"likely once": 104, "likely again": 100, "careful once": 130, "careful again": 101}
    asked = []

    def sized(profile, again):
        one = made(profile, again)
        (name,) = one.plan.recompute
        asked.append(name)
        return replace(one, plan=replace(one.plan, peak=peaks[name]))

    def bound(profile, again):
        return peaks[f"{profile} {'again' if again else 'once'}"] - 1

    attempts = Attempts(
        tuple(KnownStep(name, from_rehearsal=True) for name in ("likely", "careful"))
    )
    attempts, found = attempts.next_smallest(sized, bound)
    assert (asked, found.chosen.plan.peak) == (["likely once"], 104)
    attempts, found = attempts.after(found.chosen, 7).next_smallest(sized, bound)
    assert (asked[1:], found.chosen.plan.peak) == (["likely again"], 100)
    attempts, found = attempts.after(found.chosen, 7).next_smallest(sized, bound)
    assert (asked[2:], found.chosen.plan.peak) == (["careful again"], 101)  # the other may wait
    attempts, found = attempts.after(found.chosen, 7).next_smallest(sized, bound)
    assert (asked[3:], found.chosen.plan.peak) == (["careful once"], 130)
    assert attempts.after(found.chosen, 7).next_smallest(sized, bound)[1] is None


def test_no_estimate_is_made_that_would_not_be_followed():
    asked = []

    def noted(profile, again):
        asked.append((profile, again))
        return made(profile, again)

    attempts = Attempts((KnownStep("guess", from_rehearsal=True),)).knowing("written")
    while (step := attempts.next_smallest(noted, free))[1] is not None:
        attempts = step[0].after(step[1].chosen, 7)
    assert asked == [("written", True), ("written", False), ("guess", True)]


def test_a_step_that_is_written_down_comes_before_what_was_estimated():
    attempts = Attempts((KnownStep("guess", from_rehearsal=True),)).knowing("written")
    assert [one.from_rehearsal for one in attempts.known] == [False, True]


def test_the_least_of_all_attempts_and_of_the_smallest_plans():
    attempts = Attempts()
    assert attempts.least is None
    assert attempts.least_of_smallest is None
    attempts, found = attempts.knowing("p").next_smallest(made, free)
    attempts = attempts.after(chosen("other"), 5).after(found.chosen, 9)
    assert attempts.least.peak_nbytes == 5
    assert attempts.least_of_smallest.peak_nbytes == 9
    # The same actions beside states of another format are another attempt.
    other = chosen("p again", "int8")
    assert attempts.after(other, 3).least_of_smallest.peak_nbytes == 9
    assert not attempts.taken[1].is_of(other)


def test_attempts_are_values():
    before = Attempts((KnownStep("p", from_rehearsal=False),))
    after, _ = before.next_smallest(made, free)
    assert (before.known, before.smallest) == ((KnownStep("p", from_rehearsal=False),), ())
    assert len(after.smallest) == 2
    assert after.next_smallest(lambda profile, again: None, free)[0].smallest == after.smallest


@pytest.mark.parametrize(("most", "margin"), [(50, 21), (20, 3), (2, 0)])
def test_a_plan_of_a_measured_step_leaves_as_much_free_as_it_can_of_three_margins(
    most, margin, monkeypatch
):
    made = SimpleNamespace(recompute=frozenset(), seconds=1.0, noise=0.0)

    def make(self, profile, margin, *, exact, recompute=True):
        if margin > most:
            raise BudgetTooSmall("no", least_nbytes=1000)
        margins.append(margin)
        return made

    margins: list[int] = []
    monkeypatch.setattr(PlannerSettings, "make", make)
    profile = SimpleNamespace(static=300, seconds=1.0)
    assert PlannerSettings(OPTIONS).exact_plan(profile) is made
    assert margins[-1] == margin


@pytest.mark.parametrize("comes_as_low", [False, True])
def test_the_smallest_plan_is_there_where_the_search_comes_as_low_only_once(
    comes_as_low, monkeypatch
):
    """The second search had other tensors set apart, and no plan: the budget was refused then."""

    @dataclass(frozen=True)
    class Made:
        peak: int
        seconds: float
        budget: int = 0

    def make(self, profile, margin, *, exact, recompute=True, takes_least=False):
        assert self.options.budget_nbytes == (1 if takes_least else 70)
        if not (takes_least or comes_as_low):
            raise BudgetTooSmall("no", least_nbytes=72)
        return Made(70, 2.0 if takes_least else 1.0)

    monkeypatch.setattr(PlannerSettings, "make", make)
    found = PlannerSettings(OPTIONS).smallest_plan("profile", exact=None)
    assert found == Made(70, 1.0 if comes_as_low else 2.0, OPTIONS.budget_nbytes)


def test_the_largest_call_alone_is_one_that_came():
    """Graphs of many nodes and of many edges: no graph has both, which was waited for."""
    nodes, edges = (Signature("", shapes) for shapes in (((9, 2), (3,)), ((4, 2), (15,))))
    small = Signature("", ((5, 2), (5,)))
    state = FitState(OPTIONS, MEMORY, Signature(None), Signature(None))
    for signature in (small, nodes, edges, small):
        state = state.with_call(signature)
    assert state.largest == nodes.joined(edges)
    assert state.most == edges
    state, _ = learn_anew(state)
    assert (state.largest, state.most) == (edges, None)
    assert state.covers(nodes)
    assert not state.covers(Signature("", ((4, 2), (16,))))
    assert state.with_call(nodes) is state
    assert replace(state, now=edges).wants_measuring
    assert not replace(state, now=edges).is_scaled
