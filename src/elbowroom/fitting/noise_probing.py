"""What it takes to look at the codes of a plan, and what is said of what they add."""

import logging

from elbowroom.fitting.options import Terms
from elbowroom.plan.plan import Plan
from elbowroom.units import show_nbytes

_log = logging.getLogger("elbowroom")
_LARGEST_TENSORS = 5  # that a watched step takes beside what it holds, or a little more
_UNNOTICED = 0.1  # of mini-batch variance


def room_nbytes(plan: Plan) -> int:
    """Bytes that a watched step may take beyond this plan's.

    Looking at a tensor takes it once more, and an op that is probed runs again in backward.
    """
    return _LARGEST_TENSORS * plan.largest_nbytes


def say_unknown(terms: Terms, why: str) -> None:
    """What codes add is not known: at WARNING where a limit was asked for."""
    _log.log(
        logging.INFO if terms.noise is None else logging.WARNING,
        "budget %s: what codes add to the gradient is not measured, because %s; a larger budget, "
        "or a smaller batch, would show it",
        show_nbytes(terms.budget_nbytes),
        why,
    )


def say_noise(terms: Terms, plan: Plan) -> None:
    """What codes add: at WARNING where that is more than training would not notice."""
    _log.log(
        logging.INFO if plan.noise <= _UNNOTICED else logging.WARNING,
        "budget %s: codes add %.3g %% of what mini-batches vary by anyway (estimated, after %d "
        "watched steps)",
        show_nbytes(terms.budget_nbytes),
        100 * plan.noise,
        plan.watched,
    )
