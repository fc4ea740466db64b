"""Solvers on an estimated step: no whole search for gains that are smaller than its errors."""

import importlib
from dataclasses import replace

import pytest

from contract.test_solvers import binding_case
from elbowroom.plan.problem import cost
from elbowroom.plan.solve import fits, solve
from elbowroom.plan.solve.greedy import greedy

AUTO = importlib.import_module("elbowroom.plan.solve.auto")
ROUNDING = importlib.import_module("elbowroom.plan.solve.rounding")
NEAR, WORTH = 0.01, 0.005  # of the cost, of a step


@pytest.mark.parametrize("seed", range(40))
def test_a_rough_step_is_searched_once_at_most_and_gets_what_fits(seed, monkeypatch):
    searches = []
    whole = ROUNDING.whole

    def counted(model, moments, **settings):
        searches.append(settings)
        return whole(model, moments, **settings)

    monkeypatch.setattr(AUTO, "whole", counted)
    monkeypatch.setattr(ROUNDING, "whole", counted)
    problem, limits = binding_case(seed)
    fine, rough = replace(problem, is_rough=False), replace(problem, is_rough=True)
    walked = greedy(rough, limits)
    found = solve(rough, limits.budget, variance=limits.variance, exact=limits.exact)
    if walked is not None:
        assert len(searches) <= 1
        assert all(one["once"] for one in searches)
        assert found.feasible
        assert fits(rough, found.choice, limits)
        near_s = max(NEAR * cost(rough, walked), WORTH * rough.seconds)
        assert cost(rough, found.choice) <= cost(rough, walked) + near_s
    assert (
        found.feasible
        == solve(fine, limits.budget, variance=limits.variance, exact=limits.exact).feasible
    )


def test_a_rough_step_is_not_walked_through_where_rounding_is_near_the_bound(monkeypatch):
    walks = []
    monkeypatch.setattr(AUTO, "greedy", lambda *given: walks.append(given) or greedy(*given))
    near = 0
    for seed in range(20):
        problem, limits = binding_case(seed)
        rough = replace(problem, is_rough=True)
        relaxation = AUTO.relaxed(rough, limits)
        if relaxation is None:
            continue
        is_near = AUTO.is_near(relaxation, AUTO.rounded(relaxation))
        walks.clear()
        solve(rough, limits.budget, variance=limits.variance, exact=limits.exact)
        assert bool(walks) is not is_near
        near += is_near
    assert near
