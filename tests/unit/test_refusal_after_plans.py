"""A forward that is refused names what plans took, where some were measured: a budget that does."""

from types import SimpleNamespace
from typing import Any

import pytest

from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.planning import Planning


@pytest.mark.parametrize(("taken", "named"), [(150, 150), (None, 120), (90, 120)])
def test_a_forward_that_is_refused_names_what_a_plan_took(taken: int | None, named: int) -> None:
    # BLOOM at 40 % was told the sum of what rungs hold and a plan's transients, which did not do.
    def error(nbytes: int) -> BudgetTooSmall:
        return BudgetTooSmall("", least_nbytes=nbytes)

    planning: Any = SimpleNamespace(
        terms=SimpleNamespace(budget_nbytes=100),
        _is_last_resort=False,
        _tried=SimpleNamespace(least=None if taken is None else SimpleNamespace(peak_nbytes=taken)),
        _measured_refusal=lambda least: error(least.peak_nbytes),
        _refusal=lambda saving: error(120),
    )
    saving: Any = SimpleNamespace(impossible=True)
    with pytest.raises(BudgetTooSmall) as refused:
        Planning.forward_ended(planning, saving)
    assert refused.value.least_nbytes == named
