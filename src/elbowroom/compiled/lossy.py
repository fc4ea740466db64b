"""Chooses codes for what a compiled step saves, where saving less does not reach the budget.

Exact codes go first. Then, if errors are allowed, floats are coded at the most bits that fit, of
the codecs that `codable.py` gives for each value. All of it is judged on the rewritten graph, with
encode and decode in it. Where codes would add more to the gradient's variance than they may
(`noise.py`), the largest values get finer ones, and what cannot be held so is no choice.

Where the user allows it, values leave the device's memory: with exact codes before any other is
tried, then beside codes, for what may have none. No bit changes, but on a CPU each byte takes far
longer than running a loop again (`cost.py`), so as few leave as the room needs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf

from torch import fx

from elbowroom.codecs import Codec
from elbowroom.compiled.codable import (
    FLOATS,
    MIN_NBYTES,
    backward_of,
    codes_of,
    fine,
    held_nbytes_of,
    ladder,
    may_be_coded,
    plain_nbytes_of,
    reading_in,
    takes,
)
from elbowroom.compiled.collect import Kind, elements_of, reached, tensors_of
from elbowroom.compiled.decide import Search, is_tensor, may_run_again, run_again, without
from elbowroom.compiled.joint import Joint, Step
from elbowroom.compiled.noise import ErrorReach
from elbowroom.compiled.readers import Extent
from elbowroom.compiled.rewrite import CodedValue, Rewriting, error_of

_MAX = 16  # values that might stay, once it is known that something has to leave
_MAX_BASES = 8
_SPARED = 0.75  # of the bytes of a value, by a code of a byte an element
_SMALL = 16  # elements of a reader for each of a statistic
_NEAR = 1.2  # of the room: what takes more is not emptied
_MIN_GAIN = 0.98  # of the seconds: coarser codes have to spare as much


@dataclass(frozen=True)
class Least:
    """The lowest peak that was found, and what stands there, by kind; in bytes."""

    nbytes: int
    parts: Mapping[str, int]


@dataclass(frozen=True)
class _CodedStep:
    """A step with codes. seconds: its own, plus the price of its variance."""

    seconds: float
    peak_nbytes: int
    saved_nbytes: int
    coded: list[CodedValue]
    base: Step
    parts: Mapping[str, int]  # of the peak


def code(
    search: Search,
    step: Step,
    room_nbytes: int,
    *,
    exact: bool | None,
    noise: float | None = None,
    held_nbytes: float = inf,
    offloads: bool = False,
    menu: Iterable[str] | None = None,
    fills: bool = False,
) -> tuple[Step | None, Least, float]:
    """Rewrite the graph with codes so that the step fits. Returns that step, if any does.

    And the lowest peak that was found, and the variance that the codes of the step are predicted to
    add to the gradient, as a share of that of mini-batches.

    step   the best without codes: its values and those of other choices are coded
    exact  True: exact codes only; None: the finest that fit; False: the first that are faster than
           the step without codes, if that fits. A variance of v is priced as v steps, since it
           takes as many more to average it out
    noise  the most that codes may add; None: as much as the room needs
    held_nbytes  the most that may be held between forward and backward, if that can be
    offloads  whether values may leave the device's memory
    menu   see `ladder`
    fills  whether codes hold as much besides as there is room for
    """
    reach = ErrorReach(search.joint, search.plain)
    least = Least(step.peak_nbytes, search.joint.parts_at_peak(step))
    bar = step.seconds if step.peak_nbytes <= room_nbytes else float("inf")
    found: list[_CodedStep] = []
    wide: list[_CodedStep] = []  # which hold more than they may
    high: list[_CodedStep] = []  # which take a little more than the room
    variants = () if exact else ladder(menu)
    leaving = [(variant, offloads) for variant in (*([None] if offloads else []), *variants)]
    for variant, leaves in [(None, False), *leaving]:
        bound = bar
        for base in sorted(_bases(search, step), key=lambda one: one.seconds):
            if base.seconds >= bound:  # codes do not make it faster
                continue
            coded = list(codes_of(search.joint, base, variant, leaves))
            if base.seconds + sum(map(search.joint.clock.coded, _lossy(coded))) >= bound:
                continue
            max_nbytes = max(room_nbytes, least.nbytes)
            chosen = _choice(search.joint, reach, base, coded, noise, variants, max_nbytes)
            if chosen is None:
                continue
            if chosen.peak_nbytes < least.nbytes:
                least = Least(chosen.peak_nbytes, chosen.parts)
            if chosen.peak_nbytes <= room_nbytes and chosen.seconds < bound:
                (found if chosen.saved_nbytes <= held_nbytes else wide).append(chosen)
                bound = min([bound, *(one.seconds for one in found[-1:])])
            elif room_nbytes < chosen.peak_nbytes <= _NEAR * room_nbytes:
                high.append(chosen)
        high = [one for one in high if one.seconds < bound]
        found += _emptied(search, reach, high, room_nbytes, held_nbytes, noise, variants)
        high = []
        if found and exact is not False:
            break
        bar = min([bar, *(_MIN_GAIN * one.seconds for one in found)])  # coarser codes must pay
    best = _best(found, wide)
    if best is None:
        return None, least, 0.0
    if fills:
        best = _filled(search, reach, best, room_nbytes, held_nbytes, noise, variants)
    rewritten, variance = _rewritten(search.joint, reach, best, room_nbytes, held_nbytes)
    return rewritten, least, variance


def _emptied(
    search: Search,
    reach: ErrorReach,
    starts: Sequence[_CodedStep],
    room_nbytes: int,
    held_nbytes: float,
    noise: float | None,
    variants: Sequence[Codec],
) -> Iterator[_CodedStep]:
    """Computes some coded values of the fastest start again, the fewest seconds a byte first.

    As few as make it fit; library calls may run again for them.
    """
    joint = search.joint
    start = min(starts, key=lambda one: one.seconds, default=None)
    codec = None if start is None else _coarsest(start)
    if start is None or codec is None:
        return
    leaves = any(one.codec is None for one in start.coded)
    found: list[tuple[float, int, set[fx.Node]]] = []
    for at, one in enumerate(start.coded):
        storage = joint.facts[one.replaced].storage
        views = {n for n in start.base.saved if joint.facts[n].storage is storage}
        freed = without(joint, set(start.base.saved), views, runs_calls=True)
        lower = None if freed is None or not one.is_lossy else search.judge(freed)
        if lower is not None:
            more_s = lower.seconds - start.base.seconds - joint.clock.coded(one.node)
            found.append((more_s / held_nbytes_of(one), at, views))
    order = [views for *_, views in sorted(found, key=lambda one: one[:2])]

    def without_some(count: int) -> _CodedStep | None:
        saved: set[fx.Node] | None = set(start.base.saved)
        for views in order[:count]:
            saved = None if saved is None else without(joint, saved, views & saved, runs_calls=True)
        base = None if saved is None else search.judge(saved)
        if base is None:
            return None
        coded = list(codes_of(joint, base, codec, leaves))
        made = _choice(joint, reach, base, coded, noise, variants, room_nbytes)
        fits = made is not None and made.peak_nbytes <= room_nbytes
        return made if fits and made is not None and made.saved_nbytes <= held_nbytes else None

    first, last = 1, len(order) + 1
    while first < last:
        middle = (first + last) // 2
        choice = without_some(middle)
        if choice is None:
            first = middle + 1
        else:
            last = middle
            yield choice


def _lossy(coded: Iterable[CodedValue]) -> Iterator[fx.Node]:
    """The values whose codes are neither masks nor indices, which loops may write by the way."""
    return (one.node for one in coded if one.is_lossy)


def _coarsest(choice: _CodedStep) -> Codec | None:
    """Returns the codec with the largest error that a choice has; None: all are exact."""
    used = [one.codec for one in choice.coded if one.codec is not None and one.is_lossy]
    return max(used, key=error_of, default=None)


def _rewritten(
    joint: Joint, reach: ErrorReach, best: _CodedStep, room_nbytes: int, held_nbytes: float
) -> tuple[Step | None, float]:
    """Rewrites the graph with as few codes as fit; returns its step and the codes' variance."""
    max_nbytes = max(held_nbytes, best.saved_nbytes)
    coded = _fewer(joint, best.base, best.coded, room_nbytes, max_nbytes)
    saved = {*best.base.saved, *(one.node for one in coded)}
    variance = reach.variance(best.base, coded)  # before nodes are replaced
    return joint.step(Rewriting(joint, saved, coded).saved), variance


def _choice(
    joint: Joint,
    reach: ErrorReach,
    base: Step,
    coded: list[CodedValue],
    noise: float | None,
    variants: Sequence[Codec],
    max_nbytes: int,
) -> _CodedStep | None:
    """Returns a step with these codes, or with finer ones if they would add too much noise.

    None: no codes are quiet enough, the graph cannot be rewritten with them, or they alone take
    more than `max_nbytes`.
    """
    quiet = _quiet(reach, base, coded, noise, variants)
    if quiet is None or _held_at_least(joint, base, quiet) > max_nbytes:
        return None
    with _tried(joint, base, quiet) as step:
        if step is None:
            return None
        parts = joint.parts_at_peak(step)
    seconds = step.seconds * (1 + reach.variance(base, quiet))
    return _CodedStep(seconds, step.peak_nbytes, step.saved_nbytes, quiet, base, parts)


def _best(found: Sequence[_CodedStep], wide: Sequence[_CodedStep]) -> _CodedStep | None:
    """Returns the fastest of `found`; if there is none, of those in `wide` that hold least."""
    if not found:
        fewest = min([one.saved_nbytes for one in wide], default=0)
        found = [one for one in wide if one.saved_nbytes == fewest]
    return min(found, key=lambda one: one.seconds, default=None)


def _filled(
    search: Search,
    reach: ErrorReach,
    best: _CodedStep,
    room_nbytes: int,
    held_nbytes: float,
    noise: float | None,
    variants: Sequence[Codec],
) -> _CodedStep:
    """Saves as many more values as fit in codes, the most seconds a byte of code first."""
    joint = search.joint
    codec = _coarsest(best)
    groups = [] if codec is None else _worth_codes(joint, best.base, codec)
    leaves = any(one.codec is None for one in best.coded)

    def with_more(count: int) -> _CodedStep | None:
        base = search.judge({*best.base.saved}.union(*groups[:count]))
        if base is None:
            return None
        coded = list(codes_of(joint, base, codec, leaves))
        made = _choice(joint, reach, base, coded, noise, variants, room_nbytes)
        if made is None or made.peak_nbytes > room_nbytes or made.saved_nbytes > held_nbytes:
            return None
        return made

    found, first, last = [best], 0, len(groups)
    while first < last:  # as many as fit, by bisection
        middle = (first + last + 1) // 2
        choice = with_more(middle)
        if choice is None:
            last = middle - 1
        else:
            first = middle
            found.append(choice)
    return min(found, key=lambda one: one.seconds)


def _quiet(
    reach: ErrorReach,
    base: Step,
    coded: list[CodedValue],
    noise: float | None,
    variants: Sequence[Codec],
) -> list[CodedValue] | None:
    """Gives the largest values finer codes, as few as keep the variance to `noise`.

    None: not even the finest do.
    """
    if noise is None or reach.variance(base, coded) <= noise:
        return coded
    order = sorted(range(len(coded)), key=lambda at: -reach.variance(base, [coded[at]]))
    for finer in reversed(variants):
        first, last = 0, len(order)
        while first < last:  # how many need this code, by bisection
            middle = (first + last) // 2
            raised = _raised(coded, order[:middle], finer)
            if reach.variance(base, raised) <= noise:
                last = middle
            else:
                first = middle + 1
        coded = _raised(coded, order[:first], finer)
        if reach.variance(base, coded) <= noise:
            return coded
    return None


def _raised(coded: Sequence[CodedValue], places: Sequence[int], finer: Codec) -> list[CodedValue]:
    """The codes, with one at these places that is at least as fine; exact ones stay."""
    chosen, error = set(places), error_of(finer)
    return [
        replace(one, codec=finer) if at in chosen and one.error > error else one
        for at, one in enumerate(coded)
    ]


def _held_at_least(joint: Joint, base: Step, coded: Sequence[CodedValue]) -> int:
    """Returns a bound of the bytes between forward and backward, which no peak can be below."""
    gone = {joint.facts[n].storage for one in coded for n in (one.node, one.replaced)}
    kept = {joint.facts[n].storage for n in base.saved} - gone - joint.outside
    return sum(joint.facts[s].nbytes for s in kept) + sum(map(held_nbytes_of, coded))


@contextmanager
def _tried(joint: Joint, base: Step, coded: Sequence[CodedValue]) -> Iterator[Step | None]:
    """Gives the step that a choice becomes with these codes, which are in the graph meanwhile."""
    if not coded:
        yield None
        return
    saved = {*base.saved, *(one.node for one in coded)}
    rewriting = Rewriting(joint, saved, coded, is_tentative=True)
    try:
        yield joint.step(rewriting.saved)
    finally:
        rewriting.undo()


def _fewer(
    joint: Joint, base: Step, coded: list[CodedValue], room_nbytes: int, held_nbytes: float = inf
) -> list[CodedValue]:
    """Removes codes of the largest values, as many as fit: each costs time and noise.

    So are values that would leave the device's memory.

    Exact codes stay: a comparison must not be made of a value that comes out of a code.
    """
    exact = [one for one in coded if one.codec is not None and one.codec.lossless]
    large = [one for one in coded if one not in exact]
    large.sort(key=lambda one: (-joint.facts[one.node].elements, joint.place[one.node]))

    def fits(coded: list[CodedValue]) -> bool:
        with _tried(joint, base, coded) as step:
            if step is None or step.peak_nbytes > room_nbytes:
                return False
            return step.saved_nbytes <= held_nbytes

    first, last = 0, len(large) - 1
    while first < last:
        middle = (first + last + 1) // 2
        if fits([*large[middle:], *exact]):
            first = middle
        else:
            last = middle - 1
    chosen = [*large[first:], *exact]
    for one in [one for one in chosen if one.codec is None][:_MAX]:  # each is far dearer
        fewer = [other for other in chosen if other is not one]
        if fewer and fits(fewer):
            chosen = fewer
    return chosen


def code_all(search: Search, codec: Codec | None, min_nbytes: int) -> tuple[Step, float]:
    """Code all that plain torch.compile would save and that may have a code. Returns that step.

    And the variance that this is predicted to add to the gradient.

    codec       None: exact codes only, which change no bit
    min_nbytes  values below are left alone
    """
    joint, plain = search.joint, search.plain
    coded = [one for one in codes_of(joint, plain, codec) if plain_nbytes_of(one) >= min_nbytes]
    if not coded:
        return plain, 0.0
    variance = ErrorReach(joint, plain).variance(plain, coded)
    rewriting = Rewriting(joint, {*plain.saved, *(one.node for one in coded)}, coded)
    step = joint.step(rewriting.saved)
    if step is None:
        rewriting.undo()
        return plain, 0.0
    return step, variance


def _bases(search: Search, step: Step) -> list[Step]:
    """Choices of saved values that are worth coding: no other is both faster and lower in peak."""
    front = _front(search.steps, lambda one: one.peak_nbytes)
    stride = max(1, -(-len(front) // _MAX_BASES))
    chosen = [*front[::stride], step, front[-1]]
    # What is saved counts less in codes, so that others may be as good.
    chosen += _front(search.steps, lambda one: one.peak_nbytes - _SPARED * one.saved_nbytes)[-2:]
    chosen += [_with_what_codes_hold(search, one) for one in (front[-1], step)]
    chosen = [_prepared(search, one) for one in chosen]
    return list({frozenset(one.saved): one for one in chosen}.values())


def _front(steps: Iterable[Step], height: Callable[[Step], float]) -> list[Step]:
    """Returns the steps of which no other is both faster and lower, the fastest first."""
    lowest, front = inf, []
    for one in sorted(steps, key=lambda one: (one.seconds, height(one))):
        if height(one) < lowest:
            lowest = height(one)
            front.append(one)
    return front


def _prepared(search: Search, step: Step) -> Step:
    """Returns the step as it is best coded; found once for all codecs that are tried."""

    def find() -> Step:
        return _without_cheap(search, _with_statistics(search, step))

    return search.joint.once(("prepared", step.saved), find)


def _with_statistics(search: Search, step: Step) -> Step:
    """Saves what is small beside its readers, as a norm's mean and the inverse of its root.

    With these a norm's input is read by sums and products alone, and may have a code.
    """
    facts, after = search.joint.facts, backward_of(search.joint, step)

    def is_small(node: fx.Node) -> bool:
        most = max((elements_of(user) for user in node.users if user in after), default=0)
        return is_tensor(node) and _SMALL * elements_of(node) <= most

    def is_reduced(node: fx.Node) -> bool:
        own = elements_of(node)
        found = reached([node], lambda one: [n for n in facts[one].inputs if elements_of(n) <= own])
        return any(facts[n].kind is Kind.REDUCTION for n in found)

    found = {n for n in step.again if is_small(n) and is_reduced(n)}
    return (search.judge({*step.saved, *found}) if found else None) or step


def _without_cheap(search: Search, step: Step) -> Step:
    """Computes again what may have no code, where that takes no longer than a code would.

    As a mask of attention, which loops make of numbers of tokens: with codes it is as large as all
    that a block saves.
    """
    joint = search.joint
    outputs = {joint.facts[n].storage for n in joint.forward_outputs}
    for node in step.saved:
        if not may_be_coded(joint, node, FLOATS, outputs) or not may_run_again(node):
            continue
        if reading_in(joint, step, node).use is not Extent.EXACT:
            continue
        views = {n for n in step.saved if joint.facts[n].storage is joint.facts[node].storage}
        freed = without(joint, set(step.saved), views)
        lower = None if freed is None else search.judge(freed)
        if lower is None or lower.saved_nbytes >= step.saved_nbytes:
            continue
        if lower.seconds <= step.seconds + joint.clock.coded(node):
            step = lower
    return step


def _with_what_codes_hold(search: Search, step: Step) -> Step:
    """Saves values that take longer to recompute than to code, unless they may have no code."""
    more = _worth_codes(search.joint, step)
    return search.judge({*step.saved}.union(*more)) or step


def _worth_codes(joint: Joint, step: Step, codec: Codec | None = None) -> list[set[fx.Node]]:
    """Groups that take longer to recompute than to code, the most seconds a byte of code first.

    codec  the code that values get which no function bends; None: one of a byte an element
    """
    outputs = {joint.facts[n].storage for n in joint.forward_outputs}

    def nbytes_of_code(node: fx.Node) -> float:
        if joint.facts[node].nbytes < MIN_NBYTES:
            return joint.facts[node].nbytes
        use = reading_in(joint, step, node).use
        if use is Extent.EXACT or not may_be_coded(joint, node, FLOATS, outputs):
            return inf
        if codec is None:
            return joint.facts[node].elements
        chosen = fine(codec) if use is Extent.CURVED else codec
        if chosen is None or not takes(chosen, tensors_of(node)[0]):
            return inf
        return held_nbytes_of(CodedValue(node, chosen))

    found: list[tuple[float, set[fx.Node]]] = []
    for rate, group in run_again(joint, step):
        spared = rate * sum(joint.facts[n].nbytes for n in group)
        spared -= sum(joint.clock.coded(n) for n in group)
        nbytes = sum(map(nbytes_of_code, group))
        if spared > 0 and nbytes < inf:
            found.append((spared / nbytes, group))
    return [group for _, group in sorted(found, key=lambda one: -one[0])]
