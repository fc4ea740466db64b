"""What `fit` says of steps and plans, by the logger "elbowroom"."""

import logging

from elbowroom.fitting.options import Terms
from elbowroom.plan.plan import Plan
from elbowroom.units import show_nbytes

_log = logging.getLogger("elbowroom")


def say_measured(terms: Terms, plan: Plan, peak_nbytes: int) -> None:
    """Prediction and measurement, side by side; a warning where the step was above the budget."""
    _log.log(
        logging.WARNING if peak_nbytes > terms.budget_nbytes else logging.INFO,
        "budget %s: peak predicted %s, measured %s",
        *map(show_nbytes, (terms.budget_nbytes, plan.peak, peak_nbytes)),
    )


def warn_stray(terms: Terms, *, learns: bool) -> None:
    """A step holds more than those that were learned from."""
    _log.warning(
        "budget %s: this step saves more than those before it, and may need more than the budget; "
        "%s",
        show_nbytes(terms.budget_nbytes),
        "it is learned from anew" if learns else "so may others from now on",
    )


def warn_outside(terms: Terms, peak_nbytes: int, seen_nbytes: int) -> None:
    """Steps stay above the budget, and little of what they take is saved where `fit` can see it."""
    _log.warning(
        "budget %s: steps take %s, and no plan brings them below: of what they save, %s was saved "
        "before forward returned, which is all that fit can change. A model that returns a "
        "generator, or layers that run outside of model(...), are covered by er.saving(...) around "
        "the loss, too",
        *map(show_nbytes, (terms.budget_nbytes, peak_nbytes, seen_nbytes)),
    )


def warn_above(terms: Terms, peak_nbytes: int, why: str) -> None:
    """Steps stay above the budget. why: what they do, in words."""
    _log.warning(
        "budget %s: steps take %s, and go on so: they %s. Give budget=%d, or halve the batch",
        *map(show_nbytes, (terms.budget_nbytes, peak_nbytes)),
        why,
        peak_nbytes,
    )


def warn_smallest(terms: Terms, least_nbytes: int) -> None:
    """No plan holds by what others were wrong by. least_nbytes: the least that one took."""
    _log.warning(
        "budget %s: no plan has kept to it yet (%s was the least measured), so the smallest are "
        "tried, a step each, which may be above it, too",
        *map(show_nbytes, (terms.budget_nbytes, least_nbytes)),
    )


def warn_runs_again(terms: Terms) -> None:
    """Say that recurrent layers run again, since no plan fits what they save: bits change."""
    _log.warning(
        "budget %s: no plan fits what the recurrent layers save, so they run forward again in "
        "backward, a stretch of time after the other; gradients differ from plain by rounding "
        "alone. exact=True refuses the budget instead",
        show_nbytes(terms.budget_nbytes),
    )


def warn_uncorrected(terms: Terms, least_nbytes: int, rung: str) -> None:
    """No plan holds, however often it is made again. least_nbytes: what the best of them took."""
    _log.warning(
        "budget %s: no plan kept to it (%s was the least measured), so all tensors are at rung "
        "'%s' now; of all that was tried, what took least stays",
        *map(show_nbytes, (terms.budget_nbytes, least_nbytes)),
        rung,
    )


def warn_given(terms: Terms, plan: Plan) -> None:
    """A plan that was given is of no use."""
    unknown = sum(plan.strangers.values())
    _log.warning(
        "budget %s: the plan that was given %s; another one is made",
        show_nbytes(terms.budget_nbytes),
        f"does not know {unknown} of the tensors of this step" if unknown else "does not fit",
    )


def warn_unexpected(terms: Terms, plan: Plan | None) -> None:
    """A forward that was not planned for: this step may need more than the budget."""
    needs = "more than the budget" if plan is None else show_nbytes(plan.peak)
    _log.warning(
        "budget %s: this step runs its model once more before backward, which was not planned for, "
        "and may need %s; from the next one on all its forwards are planned as one",
        show_nbytes(terms.budget_nbytes),
        needs,
    )
