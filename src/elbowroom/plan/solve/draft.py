"""A choice in the making: what a move would free and cost, and whether it may be made."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elbowroom.plan.problem import (
    Choice,
    Option,
    Problem,
    Span,
    levels,
    option_spans,
    region_spans,
    stalls,
    summed,
)
from elbowroom.plan.solve.limits import Limits, away_nbytes, outer


class Move(NamedTuple):
    """New options of some items, and the regions that are recomputed from then on."""

    options: dict[int, int]
    recomputed: frozenset[int]


@dataclass(frozen=True)
class Effect:
    """What a move changes: bytes [moments] from `first` on, and seconds; the sides afterwards."""

    first: int
    nbytes: NDArray[np.int64]
    seconds: float
    variance: float
    away: dict[str, int]


class Draft:
    """A choice that obeys all limits but the budget, and stays so."""

    def __init__(self, problem: Problem, limits: Limits, choice: Choice) -> None:
        self.problem, self.limits = problem, limits
        self.options, self.recomputed = list(choice.options), choice.recomputed
        self.level = levels(problem, choice)
        self._stall_s = self._stalls(choice)
        held = [(i, self._option(i)) for i in range(len(self.options)) if not self.gone(i)]
        self.variance = sum(option.variance for _, option in held)
        self._away = {name: away_nbytes(problem, held, name) for name in problem.links}

    @property
    def choice(self) -> Choice:
        """As it stands."""
        return Choice(tuple(self.options), self.recomputed)

    @property
    def excess(self) -> int:
        """Bytes over the budget, summed over all moments."""
        return self._over(self.level)

    def gone(self, i: int) -> bool:
        """Whether an item is inside a recomputed region."""
        return not self.recomputed.isdisjoint(self.regions_with.get(i, ()))

    def hold(self, i: int, option: int) -> Move:
        """To hold an item by another option."""
        return Move({i: option}, self.recomputed)

    def recompute(self, r: int) -> Move:
        """To recompute a region, in place of those that exclude it; its inputs are then kept."""
        region = self.problem.regions[r]
        inside = {o for i in region.inside for o in self.regions_with[i]}
        excluded = inside.union(outer(self.problem, r), self._within[r])
        inputs = [i for i in region.inputs if not self._option(i).reproduces]
        return Move(dict.fromkeys(inputs, 0), (self.recomputed - excluded) | {r})

    def run_once(self, r: int) -> Move:
        """To hold what is inside a region again."""
        return Move({}, self.recomputed - {r})

    def effect(self, move: Move) -> Effect | None:
        """What a move would do; None if it breaks a limit other than the budget."""
        turned = move.recomputed ^ self.recomputed
        regions = [self.problem.regions[r] for r in sorted(turned)]
        items = {*move.options, *(i for r in regions for i in (*r.inside, *r.inputs))}
        spans: list[Span] = []
        seconds, variance, away = 0.0, self.variance, dict(self._away)
        for r, region in zip(sorted(turned), regions, strict=True):
            sign = 1 if r in move.recomputed else -1
            seconds += sign * region.seconds
            spans += _signed(region_spans(self.problem, region), sign)
        for i in sorted(items):
            for sign, option, recomputed in (
                (-1, self.options[i], self.recomputed),
                (1, move.options.get(i, self.options[i]), move.recomputed),
            ):
                if recomputed.isdisjoint(self.regions_with.get(i, ())):
                    item, chosen = self.problem.items[i], self.problem.items[i].options[option]
                    starts = self._starts(i, recomputed)
                    if sign > 0 and (
                        not self._allows(chosen) or (starts and not chosen.reproduces)
                    ):
                        return None
                    spans += _signed(option_spans(item, option, starts), sign)
                    seconds += sign * (chosen.forward_s + chosen.backward_s)
                    variance += sign * chosen.variance
                    if chosen.link:
                        away[chosen.link] += sign * item.nbytes
                elif sign > 0 and self._starts(i, recomputed):
                    return None
        if not self._sides_hold(variance, away):
            return None
        if any(away[name] or self._away[name] for name in away):
            seconds += self._stalls(self._after(move)) - self._stall_s
        first = min((span[0] for span in spans), default=0)
        after = max((span[1] for span in spans), default=-1) + 1
        moved = [(f - first, last - first, nbytes) for f, last, nbytes in spans if f <= last]
        return Effect(first, summed(moved, max(after - first, 0)), seconds, variance, away)

    def freed(self, effect: Effect) -> int:
        """By how much an effect lowers the excess."""
        window = self.level[effect.first : effect.first + len(effect.nbytes)]
        return self._over(window) - self._over(window + effect.nbytes)

    def make(self, move: Move, effect: Effect) -> None:
        """Make a move, whose effect is known."""
        after = self._after(move)
        self.options, self.recomputed = list(after.options), after.recomputed
        self.level[effect.first : effect.first + len(effect.nbytes)] += effect.nbytes
        self.variance, self._away = effect.variance, effect.away
        self._stall_s = self._stalls(after)

    @cached_property
    def regions_with(self) -> dict[int, list[int]]:
        """For each item, the regions that it is inside of."""
        found: dict[int, list[int]] = {}
        for r, region in enumerate(self.problem.regions):
            for i in region.inside:
                found.setdefault(i, []).append(r)
        return found

    @cached_property
    def _regions_from(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for r, region in enumerate(self.problem.regions):
            for i in region.inputs:
                found.setdefault(i, []).append(r)
        return found

    @cached_property
    def _within(self) -> list[set[int]]:
        within: list[set[int]] = [set() for _ in self.problem.regions]
        for r in range(len(within)):
            for around in outer(self.problem, r):
                within[around].add(r)
        return within

    def _option(self, i: int) -> Option:
        return self.problem.items[i].options[self.options[i]]

    def _starts(self, i: int, recomputed: frozenset[int]) -> list[int]:
        regions = self._regions_from.get(i, ())
        return [self.problem.regions[r].start for r in regions if r in recomputed]

    def _allows(self, option: Option) -> bool:
        return option.exact or not self.limits.exact

    def _sides_hold(self, variance: float, away: dict[str, int]) -> bool:
        rooms = ((away[name], link.room) for name, link in self.problem.links.items())
        return (variance <= self.variance or self.limits.allow_variance(variance)) and all(
            room is None or nbytes <= room for nbytes, room in rooms
        )

    def _after(self, move: Move) -> Choice:
        options = list(self.options)
        for i, option in move.options.items():
            options[i] = option
        return Choice(tuple(options), move.recomputed)

    def _stalls(self, choice: Choice) -> float:
        return sum(sum(stalls(self.problem, choice, name)) for name in self.problem.links)

    def _over(self, level: NDArray[np.int64]) -> int:
        return int(np.maximum(level - self.limits.budget, 0).sum())


def _signed(spans: Iterable[Span], sign: int) -> Iterator[Span]:
    return ((first, last, sign * nbytes) for first, last, nbytes in spans)
