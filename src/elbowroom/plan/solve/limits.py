"""The limits of a choice, besides giving every item an option.

1. The peak is at most the budget.
2. Of two nested regions, or of two that hold the same item, at most one is recomputed.
3. What a recomputed region starts from is inside no recomputed region, and held by an option that
   the region takes.
4. The end of a link has room for all that travels there.
5. The variance of lossy options is at most what is allowed; where only exact ones are, all are.

`keep_all` breaks at most the first.
"""

from dataclasses import dataclass
from math import inf

from elbowroom.plan.problem import (
    Choice,
    Option,
    Problem,
    added_variance,
    held_options,
    levels,
    recomputed_items,
)

_ROUNDING = 1 + 1e-9  # sums of floats, in another order


@dataclass(frozen=True)
class Limits:
    """Bytes at every moment; variance, as a share of that of mini-batches; exact options only."""

    budget: int
    variance: float = inf
    exact: bool = False

    def allow(self, option: Option) -> bool:
        """Returns whether an option may be chosen if all others are exact."""
        if self.exact and not option.exact:
            return False
        return self.allow_variance(option.variance)

    def allow_variance(self, variance: float) -> bool:
        """Returns whether so much variance may be added in all."""
        return variance <= self.variance * _ROUNDING


def peak(problem: Problem, choice: Choice) -> int:
    """The most bytes held at any moment."""
    return int(levels(problem, choice).max(initial=0))


def obeys(problem: Problem, choice: Choice, limits: Limits) -> bool:
    """Returns whether a choice obeys rules 2 to 5: all but the peak."""
    held = held_options(problem, choice)
    return (
        all(option.exact or not limits.exact for _, option in held)
        and limits.allow_variance(added_variance(problem, choice))
        and not any(
            away_nbytes(problem, held, name) > link.room
            for name, link in problem.links.items()
            if link.room is not None
        )
        and regions_agree(problem, choice)
    )


def fits(problem: Problem, choice: Choice, limits: Limits) -> bool:
    """Returns whether the choice keeps all rules, the budget included."""
    return obeys(problem, choice, limits) and peak(problem, choice) <= limits.budget


def away_nbytes(problem: Problem, held: list[tuple[int, Option]], name: str) -> int:
    """Bytes that lie at the end of a link."""
    return sum(problem.items[i].travels(option) for i, option in held if option.link == name)


def regions_agree(problem: Problem, choice: Choice) -> bool:
    """Returns whether a choice obeys rules 2 and 3."""
    gone = recomputed_items(problem, choice.recomputed)
    chosen = [problem.regions[r] for r in choice.recomputed]
    return (
        len(gone) == sum(len(region.inside) for region in chosen)
        and not any(choice.recomputed & set(outer(problem, r)) for r in choice.recomputed)
        and all(
            i not in gone and region.takes(problem.items[i].options[choice.options[i]])
            for region in chosen
            for i in region.inputs
        )
    )


def outer(problem: Problem, region: int) -> list[int]:
    """The regions around a region, the nearest first."""
    around = []
    while (region := problem.regions[region].within) >= 0:
        around.append(region)
    return around
