"""The reasons of a plan: what another option for one storage would have done to the plan.

All other choices stay as they are. With an option that costs less, the peak or the noise would be
above what is allowed. The next best option that is allowed costs more, in seconds and in those that
its noise is worth.
"""

from collections.abc import Iterator
from dataclasses import replace

from elbowroom.plan.problem import (
    Choice,
    Option,
    Problem,
    added_variance,
    levels,
    option_spans,
    region_starts,
    summed,
)
from elbowroom.units import show_nbytes, show_seconds

_MAX = 4  # options that are tried for the next best
_ALIKE = 1 + 1e-9


class Reasons:
    """The reasons for one choice.

    budget    bytes that its peak may have
    variance  that it may add, as a share of that of mini-batches; inf: no limit
    """

    def __init__(self, problem: Problem, choice: Choice, budget: int, variance: float) -> None:
        self._problem, self._choice = problem, choice
        self._budget, self._variance = budget, variance
        self._starts = region_starts(problem, choice.recomputed)
        self._level = levels(problem, choice)
        self._noise = added_variance(problem, choice)

    def of_item(self, i: int) -> str:
        """Returns what the cheapest other option would break, and what the next best would cost."""
        item, chosen = self._problem.items[i], self._choice.options[i]
        others = [n for n in range(len(item.options)) if n != chosen]
        others.sort(key=lambda n: item.options[n].cost_s)
        words = list(self._words(i, others, item.options[chosen]))
        return "; ".join(words)

    def _words(self, i: int, others: list[int], chosen: Option) -> Iterator[str]:
        item = self._problem.items[i]
        options = item.options
        if chosen.link and chosen.travels is not None:
            yield f"{show_nbytes(chosen.travels)} travel in place of {show_nbytes(item.nbytes)}"
        for n in others[:1]:
            if broken := self._broken_by(i, n):
                yield f"{options[n].name}: {broken}"
        for n in others[:_MAX]:
            if not self._broken_by(i, n):
                yield f"next: {_figures(options[n], chosen)}"
                return

    def _broken_by(self, i: int, n: int) -> str:
        """Returns by how much another option would be above what is allowed, or ""."""
        item, chosen = self._problem.items[i], self._choice.options[i]
        starts, moments = self._starts.get(i, ()), len(self._level)
        level = self._level + summed(option_spans(item, n, starts), moments)
        level -= summed(option_spans(item, chosen, starts), moments)
        above = int(level.max()) - self._budget
        if above > 0:
            return f"{show_nbytes(above)} above the budget"
        noise = self._noise - item.options[chosen].variance + item.options[n].variance
        if noise > self._variance * _ALIKE:
            return f"noise {noise:.1e} in all, {self._variance:g} is allowed"
        return ""

    def of_region(self, r: int) -> str:
        """Returns by how much the plan would be above the budget if all of a module were kept."""
        options = list(self._choice.options)
        for i in self._problem.regions[r].inside:
            options[i] = 0
        kept = replace(
            self._choice, options=tuple(options), recomputed=self._choice.recomputed - {r}
        )
        above = int(levels(self._problem, kept).max()) - self._budget
        return f"kept: {show_nbytes(above)} above the budget" if above > 0 else ""


def _figures(option: Option, chosen: Option) -> str:
    """Returns an option's name, and its bytes, seconds and noise where these are not the same."""
    seconds = option.forward_s + option.backward_s
    reasons = []
    if option.nbytes != chosen.nbytes:
        reasons.append(show_nbytes(option.nbytes))
    if seconds:
        reasons.append(show_seconds(seconds))
    if option.variance:
        reasons.append(f"noise {option.variance:.1e}")
    return f"{option.name} ({', '.join(reasons)})" if reasons else option.name
