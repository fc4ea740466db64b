"""A partial solution: what a move would free and cost, and whether it may be made."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elbowroom.plan.problem import (
    Choice,
    Option,
    Problem,
    Span,
    added_variance,
    held_options,
    lateness,
    levels,
    option_spans,
    region_spans,
    region_variance,
)
from elbowroom.plan.solve.limits import Limits, outer

_Traffic = dict[tuple[str, int], tuple[int, list[int]] | None]
_NO_STEPS = np.zeros(0, np.int64), np.zeros(0, np.int64)


class Move(NamedTuple):
    """New options of some items, and the regions that are recomputed from then on."""

    options: dict[int, int]
    recomputed: frozenset[int]


Key = tuple[str, int, int]  # of a move of a walk: "region" or "option", and which one (`greedy`)


@dataclass
class Effect:
    """The changes that a move makes.

    steps     (moments, bytes) from `first` on: so many moments in which the level changes alike
    seconds   added to the step
    variance  added
    traffic   (link, item): the bytes that travel, and the starts of the regions it is an input of;
              None: it travels no more
    shared    by how many more options each of the problem's shared seconds is named
    """

    seconds: float
    variance: float
    traffic: _Traffic
    first: int = 0
    steps: tuple[NDArray[np.int64], NDArray[np.int64]] = _NO_STEPS
    shared: dict[int, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> NDArray[np.int64]:
        """Bytes [moments] from `first` on."""
        moments, nbytes = self.steps
        return np.repeat(nbytes, moments)


class PartialSolution:
    """A choice that obeys all limits but the budget, and stays so."""

    def __init__(self, problem: Problem, limits: Limits, choice: Choice) -> None:
        self.problem, self.limits = problem, limits
        self.options, self.recomputed = list(choice.options), choice.recomputed
        self.level = levels(problem, choice)
        self.variance = added_variance(problem, choice)
        self._traffic: dict[str, dict[int, tuple[int, list[int]]]] = {
            name: {} for name in problem.links
        }
        for i, option in held_options(problem, choice):
            if option.link:
                travels = problem.items[i].travels(option)
                self._traffic[option.link][i] = travels, self._starts(i, self.recomputed)
        self._named = [0] * len(problem.shared_s)  # by how many options
        for _, option in held_options(problem, choice):
            for n in option.shared:
                self._named[n] += 1
        self._stall_s = {name: self._stalls(name, {}) for name in problem.links}
        self._made = 0  # moves
        # After so many moves, by item, and by region behind them.
        self._changed = np.zeros(len(problem.items) + len(problem.regions), np.int64)
        self._effects: dict[Key, tuple[int, Effect | None]] = {}  # each after so many moves
        self._find_excess()

    def keep_within(self, limits: Limits) -> None:
        """Goes on within other limits."""
        self.limits = limits
        self._effects.clear()
        self._find_excess()

    @property
    def choice(self) -> Choice:
        """The choice as it stands."""
        return Choice(tuple(self.options), self.recomputed)

    @property
    def excess(self) -> int:
        """Bytes over the budget, summed over all moments."""
        return int(self._excess[-1])

    def gone(self, i: int) -> bool:
        """Returns whether an item is inside a recomputed region."""
        return self._within_any(i, self.recomputed)

    def hold(self, i: int, option: int) -> Move:
        """Returns the move that holds an item by another option."""
        return Move({i: option}, self.recomputed)

    def recompute(self, r: int) -> Move:
        """Returns the move that recomputes a region, in place of those that exclude it.

        The region starts from what holds an input, or else from the smallest code that may, or from
        the input itself.
        """
        region = self.problem.regions[r]
        recomputed = (self.recomputed - self._excluded(r)) | {r}
        inputs = [i for i in region.inputs if not region.takes(self._option(i))]
        return Move(dict.fromkeys(inputs, 0), recomputed)

    def _excluded(self, r: int) -> set[int]:
        """Returns the regions that are not recomputed beside a region, and the region itself."""
        inside = {o for i in self.problem.regions[r].inside for o in self.regions_with[i]}
        return inside.union(outer(self.problem, r), self._within[r])

    def recompute_from_codes(self, r: int) -> Move:
        """Returns the move that recomputes a region from the smallest codes that it takes."""
        region, move = self.problem.regions[r], self.recompute(r)
        for i in region.inputs:
            options = self.problem.items[i].options
            codes = [
                a
                for a, option in enumerate(options)
                if option.levels >= region.levels and self._agrees(i, a, move.recomputed)
            ]
            if codes:
                move.options[i] = min(codes, key=lambda a: options[a].nbytes)
        return move

    def run_once(self, r: int) -> Move:
        """Returns the move that holds what is inside a region again."""
        return Move({}, self.recomputed - {r})

    def effect_of(self, key: Key, move: Callable[[], Move]) -> Effect | None:
        """Returns the effect of a walk's move; that of before if no move has changed it since.

        A walk asks for the same moves again and again, since what they free depends on all others.
        """
        known = self._effects.get(key)
        if known is not None and not self._has_changed(key, known[0]):
            effect = known[1]
            is_allowed = effect is None or self._may_add(effect.variance)
            return effect if is_allowed else None
        effect = self.effect(move())
        self._effects[key] = self._made, effect
        return effect

    def _has_changed(self, key: Key, made: int) -> bool:
        """Returns whether what the effect of a move depends on has changed after so many moves."""
        kind, index, _ = key
        if kind == "option":
            return bool(self._changed[index] > made)
        return bool(self._changed[self._around(index)].max() > made)

    def _around(self, r: int) -> NDArray[np.int64]:
        """Returns a region, those that it excludes, and the items that they hold or start from.

        As in `_changed`.
        """
        if r not in self._near:
            near: set[int] = set()
            for other in {r, *self._excluded(r)}:
                region = self.problem.regions[other]
                near.update((*region.inside, *region.inputs, len(self.problem.items) + other))
            self._near[r] = np.array(sorted(near), np.int64)
        return self._near[r]

    def _note_changes(self, move: Move, effect: Effect) -> None:
        """Notes the regions and items whose moves may have other effects once a move is made."""
        self._made += 1
        if effect.traffic or effect.shared:
            self._changed[:] = self._made
            return
        regions = {r for i in move.options for r in self._coded_from.get(i, ())}
        changed = {*move.options, *(i for r in regions for i in self.problem.regions[r].inputs)}
        for r in move.recomputed ^ self.recomputed:
            region = self.problem.regions[r]
            changed.update((*region.inside, *region.inputs, len(self.problem.items) + r))
        self._changed[list(changed)] = self._made

    def effect(self, move: Move) -> Effect | None:
        """Returns the effect of a move; None if it breaks a limit other than the budget."""
        if move.recomputed is self.recomputed and len(move.options) == 1:
            ((i, option),) = move.options.items()
            if not self.gone(i):
                return self._effect_of_holding(i, option)
        turned = [self.problem.regions[r] for r in sorted(move.recomputed ^ self.recomputed)]
        items = {*move.options, *(i for region in turned for i in (*region.inside, *region.inputs))}
        spans: list[Span] = []
        effect = Effect(0.0, 0.0, {})
        for signed, recomputed, options in (
            (-1, self.recomputed, {}),
            (1, move.recomputed, move.options),
        ):
            for r in sorted(recomputed & (move.recomputed ^ self.recomputed)):
                effect.seconds += signed * self.problem.regions[r].seconds
                spans += _signed(region_spans(self.problem, self.problem.regions[r]), signed)
            self._add_noise(effect, recomputed, options, items, signed)
            for i in sorted(items):
                option = options.get(i, self.options[i])
                if signed > 0 and not self._agrees(i, option, recomputed):
                    return None
                if not self._within_any(i, recomputed):
                    spans += _signed(self._hold(effect, i, option, recomputed, signed), signed)
        if not self._sides_hold(effect):
            return None
        self._add_shared(effect)
        effect.seconds += sum(
            self._stalls(name, effect.traffic) - self._stall_s[name]
            for name in {name for name, _ in effect.traffic}
        )
        return _with_bytes(effect, spans)

    def _effect_of_holding(self, i: int, option: int) -> Effect | None:
        """Returns the effect of holding one item by another option; None if a limit forbids it."""
        if not self._agrees(i, option, self.recomputed):
            return None
        effect = Effect(0.0, 0.0, {})
        if i in self._coded_from:
            self._add_noise(effect, self.recomputed, {}, (i,), -1)
            self._add_noise(effect, self.recomputed, {i: option}, (i,), 1)
        spans = [*_signed(self._hold(effect, i, self.options[i], self.recomputed, -1), -1)]
        spans += self._hold(effect, i, option, self.recomputed, 1)
        if not self._sides_hold(effect):
            return None
        self._add_shared(effect)
        for name in {name for name, _ in effect.traffic}:
            effect.seconds += self._stalls(name, effect.traffic) - self._stall_s[name]
        return _with_bytes(effect, spans)

    def _add_noise(
        self,
        effect: Effect,
        recomputed: frozenset[int],
        options: dict[int, int],
        items: Collection[int],
        sign: int,
    ) -> None:
        """Counts what regions add that start from any of these items, as codes."""
        for r in sorted({r for i in items for r in self._coded_from.get(i, ()) if r in recomputed}):
            region = self.problem.regions[r]
            held = {i: options.get(i, self.options[i]) for i in region.inputs}
            if all(region.takes(self.problem.items[i].options[a]) for i, a in held.items()):
                variance = region_variance(self.problem, region, held)
                effect.variance += sign * variance
                effect.seconds += sign * variance * region.noise_s

    def _add_shared(self, effect: Effect) -> None:
        """Counts shared seconds that nothing named before, less those that nothing names now."""
        for n, more in effect.shared.items():
            after = (self._named[n] + more > 0) - (self._named[n] > 0)
            effect.seconds += after * self.problem.shared_s[n]

    def _hold(
        self, effect: Effect, i: int, option: int, recomputed: frozenset[int], sign: int
    ) -> list[Span]:
        """Counts what an option of an item adds, or no longer adds; gives its spans."""
        item, chosen = self.problem.items[i], self.problem.items[i].options[option]
        starts = self._starts(i, recomputed)
        effect.seconds += sign * chosen.cost_s
        effect.variance += sign * chosen.variance
        for n in chosen.shared:
            effect.shared[n] = effect.shared.get(n, 0) + sign
        if chosen.link:
            effect.traffic[chosen.link, i] = (item.travels(chosen), starts) if sign > 0 else None
        return option_spans(item, option, starts) if starts else self.problem.spans(i, option)

    def _agrees(self, i: int, option: int, recomputed: frozenset[int]) -> bool:
        """Returns whether an item may be held so, or inside, beside these regions."""
        from_it = [r for r in self._regions_from.get(i, ()) if r in recomputed]
        if self._within_any(i, recomputed):
            return not from_it
        chosen = self.problem.items[i].options[option]
        if self.limits.exact and not chosen.exact:
            return False
        return all(self.problem.regions[r].takes(chosen) for r in from_it)

    def in_excess(self) -> Callable[[int], bool]:
        """Returns a function of an item: whether it is held while more than the budget is."""
        over = np.concatenate([[0], np.cumsum(self._above > 0)])

        def is_held_there(i: int) -> bool:
            item = self.problem.items[i]
            freed = max(item.freed, *self._starts(i, self.recomputed), item.freed)
            return bool(over[freed + 1] > over[item.born])

        return is_held_there

    def freed(self, effect: Effect) -> int:
        """Returns by how much an effect lowers the excess."""
        changes = effect.nbytes
        first, after = effect.first, effect.first + len(changes)
        changes += self._above[first:after]
        left = np.maximum(changes, 0, out=changes).sum()
        return int(self._excess[after] - self._excess[first] - left)

    def _find_excess(self) -> None:
        """Finds out by how much each moment is above the budget, and the sums of what is."""
        self._above = self.level - self.limits.budget
        self._excess = np.concatenate([[0], np.cumsum(np.maximum(self._above, 0))])

    def make(self, move: Move, effect: Effect) -> None:
        """Makes a move, whose effect is known."""
        self._note_changes(move, effect)
        for i, option in move.options.items():
            self.options[i] = option
        self.recomputed = move.recomputed
        changes = effect.nbytes
        self.level[effect.first : effect.first + len(changes)] += changes
        self._find_excess()
        self.variance += effect.variance
        for n, more in effect.shared.items():
            self._named[n] += more
        for name in self._traffic:
            self._traffic[name] = self._travelling(name, effect.traffic)
            self._stall_s[name] = self._stalls(name, {})

    @cached_property
    def regions_with(self) -> dict[int, list[int]]:
        """Returns, for each item, the regions that it is inside of."""
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
    def _coded_from(self) -> dict[int, list[int]]:
        """Returns, for each item, the regions that may start from a code of it."""
        coded = {r for r, region in enumerate(self.problem.regions) if region.levels < inf}
        return {i: found for i, of in self._regions_from.items() if (found := [*coded & {*of}])}

    @cached_property
    def _near(self) -> dict[int, NDArray[np.int64]]:
        return {}

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

    def _sides_hold(self, effect: Effect) -> bool:
        if not self._may_add(effect.variance):
            return False
        return all(self._has_room(name, effect.traffic) for name in {n for n, _ in effect.traffic})

    def _may_add(self, variance: float) -> bool:
        return not variance > 0 or self.limits.allow_variance(self.variance + variance)

    def _has_room(self, name: str, traffic: _Traffic) -> bool:
        room = self.problem.links[name].room
        if room is None:
            return True
        return sum(nbytes for nbytes, _ in self._travelling(name, traffic).values()) <= room

    def _travelling(self, name: str, traffic: _Traffic) -> dict[int, tuple[int, list[int]]]:
        """The items that travel a link after a change, as in `Effect.traffic`."""
        travelling = dict(self._traffic[name])
        for (link, i), how in traffic.items():
            if link == name:
                travelling.pop(i, None)
                if how is not None:
                    travelling[i] = how
        return travelling

    def _stalls(self, name: str, traffic: _Traffic) -> float:
        moved = self._travelling(name, traffic).items()
        return sum(
            lateness(self.problem, name, [(self.problem.items[i], *how) for i, how in moved])
        )

    def _within_any(self, i: int, recomputed: frozenset[int]) -> bool:
        return i in self.regions_with and not recomputed.isdisjoint(self.regions_with[i])


def _signed(spans: Iterable[Span], sign: int) -> Iterator[Span]:
    return ((first, last, sign * nbytes) for first, last, nbytes in spans)


def _with_bytes(effect: Effect, spans: list[Span]) -> Effect:
    steps: dict[int, int] = {}  # what begins there, less what ended just before
    for first, last, nbytes in spans:
        if first <= last:
            steps[first] = steps.get(first, 0) + nbytes
            steps[last + 1] = steps.get(last + 1, 0) - nbytes
    moments = sorted(moment for moment, step in steps.items() if step)
    if moments:
        effect.first = moments[0]
        held = list(accumulate(steps[moment] for moment in moments[:-1]))
        effect.steps = np.diff(moments), np.array(held, np.int64)
    return effect
