"""Chooses codes for what a compiled step saves, where saving less does not reach the budget.

Exact codes go first: a bool that backward asks for takes a byte an element, and one bit says the
same; an index takes eight, and two say the same of a dimension of 30000 (`indices.py`). Then, if
errors are allowed, floats are coded at the most bits that fit: 8, 4, 2. Of all registered codecs
that have a form for graphs, the one of that width with the least error is taken (`ladder`): dither
with 256, 16 and 4 levels, unless a codec of another package is better. What a function bends (exp,
GELU) keeps fine codes, and what backward cannot take with an error stays exact (`readers.py`). All
of it is judged on the rewritten graph, with encode and decode in it. Where codes would add more to
the gradient's variance than they may (`noise.py`), the largest values get finer ones, and what
cannot be held so is no choice.

Where the user allows it, values leave the device's memory: with exact codes before any other is
tried, then beside codes, for what may have none. No bit changes, but on a CPU each byte takes far
longer than running a loop again (`cost.py`), so as few leave as the room needs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, prod

import torch
from torch import fx

from elbowroom.codecs import Codec, Facts, Narrow, codec_class, codecs
from elbowroom.codecs.facts import NOTHING
from elbowroom.codecs.names import setting_named
from elbowroom.codecs.quality import broken_promise, quality_of
from elbowroom.compiled.collect import (
    Kind,
    elements_of,
    known_size,
    nbytes_of,
    reached,
    tensors_of,
)
from elbowroom.compiled.decide import (
    Search,
    has_both_layouts,
    is_tensor,
    may_run_again,
    run_again,
    without,
)
from elbowroom.compiled.exponents import FLOOR, LIMIT
from elbowroom.compiled.indices import range_of
from elbowroom.compiled.joint import Joint, Step
from elbowroom.compiled.noise import Reach
from elbowroom.compiled.readers import Reading, Use, reading_of
from elbowroom.compiled.rewrite import Coded, Rewriting, error_of

_WIDTHS = (8, 4, 2)  # bits of codes that are weighed, half a bit of metadata not counted
_FINE = 1e-3  # squared error that a bent value may have
_MIN_NBYTES = 32768
_MIN_AWAY = 65536  # bytes: smaller values are not worth a file
_MAX = 16  # values that might stay, once it is known that something has to leave
_MAX_BASES = 8
_SMALL = 16  # elements of a reader for each of a statistic
_NEAR = 1.2  # of the room: what takes more is not emptied
_MIN_GAIN = 0.98  # of the seconds: coarser codes have to spare as much
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32)


def ladder(menu: Iterable[str] | None = None) -> tuple[Codec, ...]:
    """The codecs that plans weigh, from fine to coarse: of each width the one of least error.

    menu  names of settings to choose from; None: all that are registered, but unbiased ones alone:
          an error that does not average out cannot be counted as noise
    """
    if menu is None:
        known = [one for id in codecs() for one in codec_class(id).settings() if serves(one)]
        kept = [one for one in known if not broken_promise(one)]
        known = [one for one in kept if quality_of(one, maps=True).unbiased]
    else:
        known = list(filter(serves, map(setting_named, menu)))
    found: dict[Codec, None] = {}
    for width in _WIDTHS:
        fitting = [one for one in known if quality_of(one, maps=True).bits < width + 0.5]
        found |= dict.fromkeys(sorted(fitting, key=error_of)[:1])
    if not found and known:  # all of them are wide
        found[min(known, key=error_of)] = None
    return tuple(found)


def serves(codec: Codec) -> bool:
    """Returns whether a codec can hold floats of which nothing is known, in a graph."""
    return not codec.lossless and codec.graph_form(NOTHING) is not None


def fine(codec: Codec) -> Codec | None:
    """Returns the codec, or the finest setting of it, for values that a function bends.

    None: they stay as they are.
    """
    if error_of(codec) <= _FINE:
        return codec
    finest = min(filter(serves, type(codec).settings()), key=error_of, default=None)
    return None if finest is None or error_of(finest) > _FINE else finest


@dataclass(frozen=True)
class _Choice:
    """A step with codes. seconds: its own, plus the price of its variance."""

    seconds: float
    peak_nbytes: int
    saved_nbytes: int
    coded: list[Coded]
    base: Step


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
) -> tuple[Step | None, int, float]:
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
    reach = Reach(search.joint, search.plain)
    least = step.peak_nbytes
    bar = step.seconds if step.peak_nbytes <= room_nbytes else float("inf")
    found: list[_Choice] = []
    wide: list[_Choice] = []  # which hold more than they may
    high: list[_Choice] = []  # which take a little more than the room
    variants = () if exact else ladder(menu)
    leaving = [(variant, offloads) for variant in (*([None] if offloads else []), *variants)]
    for variant, leaves in [(None, False), *leaving]:
        bound = bar
        for base in sorted(_bases(search, step), key=lambda one: one.seconds):
            if base.seconds >= bound:  # codes do not make it faster
                continue
            coded = list(_coded(search.joint, base, variant, leaves))
            max_nbytes = max(room_nbytes, least)
            chosen = _choice(search.joint, reach, base, coded, noise, variants, max_nbytes)
            if chosen is None:
                continue
            least = min(least, chosen.peak_nbytes)
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
    reach: Reach,
    starts: Sequence[_Choice],
    room_nbytes: int,
    held_nbytes: float,
    noise: float | None,
    variants: Sequence[Codec],
) -> Iterator[_Choice]:
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
            found.append((more_s / _held_nbytes(one), at, views))
    order = [views for *_, views in sorted(found, key=lambda one: one[:2])]

    def without_some(count: int) -> _Choice | None:
        saved: set[fx.Node] | None = set(start.base.saved)
        for views in order[:count]:
            saved = None if saved is None else without(joint, saved, views & saved, runs_calls=True)
        base = None if saved is None else search.judge(saved)
        if base is None:
            return None
        coded = list(_coded(joint, base, codec, leaves))
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


def _coarsest(choice: _Choice) -> Codec | None:
    """Returns the codec with the largest error that a choice has; None: all are exact."""
    used = [one.codec for one in choice.coded if one.codec is not None and one.is_lossy]
    return max(used, key=error_of, default=None)


def _rewritten(
    joint: Joint, reach: Reach, best: _Choice, room_nbytes: int, held_nbytes: float
) -> tuple[Step | None, float]:
    """Rewrites the graph with as few codes as fit; returns its step and the codes' variance."""
    max_nbytes = max(held_nbytes, best.saved_nbytes)
    coded = _fewer(joint, best.base, best.coded, room_nbytes, max_nbytes)
    saved = {*best.base.saved, *(one.node for one in coded)}
    variance = reach.variance(best.base, coded)  # before nodes are replaced
    return joint.step(Rewriting(joint, saved, coded).saved), variance


def _choice(
    joint: Joint,
    reach: Reach,
    base: Step,
    coded: list[Coded],
    noise: float | None,
    variants: Sequence[Codec],
    max_nbytes: int,
) -> _Choice | None:
    """Returns a step with these codes, or with finer ones if they would add too much noise.

    None: no codes are quiet enough, the graph cannot be rewritten with them, or they alone take
    more than `max_nbytes`.
    """
    quiet = _quiet(reach, base, coded, noise, variants)
    if quiet is None or _held_at_least(joint, base, quiet) > max_nbytes:
        return None
    step = _judged(joint, base, quiet)
    if step is None:
        return None
    seconds = step.seconds * (1 + reach.variance(base, quiet))
    return _Choice(seconds, step.peak_nbytes, step.saved_nbytes, quiet, base)


def _best(found: Sequence[_Choice], wide: Sequence[_Choice]) -> _Choice | None:
    """Returns the fastest of `found`; if there is none, of those in `wide` that hold least."""
    if not found:
        fewest = min([one.saved_nbytes for one in wide], default=0)
        found = [one for one in wide if one.saved_nbytes == fewest]
    return min(found, key=lambda one: one.seconds, default=None)


def _filled(
    search: Search,
    reach: Reach,
    best: _Choice,
    room_nbytes: int,
    held_nbytes: float,
    noise: float | None,
    variants: Sequence[Codec],
) -> _Choice:
    """Saves as many more values as fit in codes, the most seconds a byte of code first."""
    joint = search.joint
    codec = _coarsest(best)
    groups = [] if codec is None else _worth_codes(joint, best.base, codec)
    leaves = any(one.codec is None for one in best.coded)

    def with_more(count: int) -> _Choice | None:
        base = search.judge({*best.base.saved}.union(*groups[:count]))
        if base is None:
            return None
        coded = list(_coded(joint, base, codec, leaves))
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
    reach: Reach,
    base: Step,
    coded: list[Coded],
    noise: float | None,
    variants: Sequence[Codec],
) -> list[Coded] | None:
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


def _raised(coded: Sequence[Coded], places: Sequence[int], finer: Codec) -> list[Coded]:
    """The codes, with one at these places that is at least as fine; exact ones stay."""
    chosen, error = set(places), error_of(finer)
    return [
        replace(one, codec=finer) if at in chosen and one.error > error else one
        for at, one in enumerate(coded)
    ]


def _held_at_least(joint: Joint, base: Step, coded: Sequence[Coded]) -> int:
    """Returns a bound of the bytes between forward and backward, which no peak can be below."""
    gone = {joint.facts[n].storage for one in coded for n in (one.node, one.replaced)}
    kept = {joint.facts[n].storage for n in base.saved} - gone - joint.outside
    return sum(joint.facts[s].nbytes for s in kept) + sum(map(_held_nbytes, coded))


def _held_nbytes(one: Coded) -> int:
    """Bytes of the buffers of a code."""
    if one.codec is None:
        return 0
    value = tensors_of(one.node)[0]
    return _encoded_nbytes(one.codec, tuple(map(known_size, value.shape)), value.dtype, one.facts)


@lru_cache(maxsize=4096)
def _encoded_nbytes(
    codec: Codec, shape: tuple[int, ...], dtype: torch.dtype, facts: Facts = NOTHING
) -> int:
    return codec.encoded_nbytes(shape, dtype, facts)


def _judged(joint: Joint, base: Step, coded: Sequence[Coded]) -> Step | None:
    """Returns the step that a choice becomes with these codes; the graph is left as it is."""
    if not coded:
        return None
    saved = {*base.saved, *(one.node for one in coded)}
    rewriting = Rewriting(joint, saved, coded, is_tentative=True)
    step = joint.step(rewriting.saved)
    rewriting.undo()
    return step


def _fewer(
    joint: Joint, base: Step, coded: list[Coded], room_nbytes: int, held_nbytes: float = inf
) -> list[Coded]:
    """Removes codes of the largest values, as many as fit: each costs time and noise.

    So are values that would leave the device's memory.

    Exact codes stay: a comparison must not be made of a value that comes out of a code.
    """
    exact = [one for one in coded if one.codec is not None and one.codec.lossless]
    large = [one for one in coded if one not in exact]
    large.sort(key=lambda one: (-joint.facts[one.node].elements, joint.place[one.node]))

    def fits(coded: list[Coded]) -> bool:
        step = _judged(joint, base, coded)
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
    coded = [one for one in _coded(joint, plain, codec) if _plain_nbytes(one) >= min_nbytes]
    if not coded:
        return plain, 0.0
    variance = Reach(joint, plain).variance(plain, coded)
    rewriting = Rewriting(joint, {*plain.saved, *(one.node for one in coded)}, coded)
    step = joint.step(rewriting.saved)
    if step is None:
        rewriting.undo()
        return plain, 0.0
    return step, variance


def _plain_nbytes(one: Coded) -> int:
    """The bytes that eager PyTorch would hold: a comparison counts as its operand."""
    value = tensors_of(one.node)[0]
    itemsize = 4 if value.dtype is torch.bool else value.dtype.itemsize
    return known_size(value.numel()) * itemsize


def _bases(search: Search, step: Step) -> list[Step]:
    """Choices of saved values that are worth coding: no other is both faster and lower in peak."""
    lowest, front = float("inf"), []
    for one in sorted(search.steps, key=lambda one: (one.seconds, one.peak_nbytes)):
        if one.peak_nbytes < lowest:
            lowest = one.peak_nbytes
            front.append(one)
    stride = max(1, -(-len(front) // _MAX_BASES))
    chosen = [*front[::stride], step, front[-1]]
    chosen += [_with_what_codes_hold(search, one) for one in (front[-1], step)]
    chosen = [_without_cheap(search, _with_statistics(search, one)) for one in chosen]
    return list({frozenset(one.saved): one for one in chosen}.values())


def _with_statistics(search: Search, step: Step) -> Step:
    """Saves what is small beside its readers, as a norm's mean and the inverse of its root.

    With these a norm's input is read by sums and products alone, and may have a code.
    """
    facts, after = search.joint.facts, search.joint.parts(step.saved)[1]

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
    joint, gradients = search.joint, search.joint.gradients()
    outputs = {joint.facts[n].storage for n in joint.forward_outputs}
    for node in step.saved:
        after = joint.parts(step.saved)[1]
        if not _may_be_coded(joint, node, _FLOATS, outputs) or not may_run_again(node):
            continue
        if reading_of(node, after, gradients).use is not Use.EXACT:
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
    after, gradients = joint.parts(step.saved)[1], joint.gradients()
    outputs = {joint.facts[n].storage for n in joint.forward_outputs}

    def nbytes_of_code(node: fx.Node) -> float:
        if joint.facts[node].nbytes < _MIN_NBYTES:
            return joint.facts[node].nbytes
        use = reading_of(node, after, gradients).use
        if use is Use.EXACT or not _may_be_coded(joint, node, _FLOATS, outputs):
            return inf
        if codec is None:
            return joint.facts[node].elements
        chosen = fine(codec) if use is Use.CURVED else codec
        if chosen is None or not _takes(chosen, tensors_of(node)[0]):
            return inf
        return _held_nbytes(Coded(node, chosen))

    found: list[tuple[float, set[fx.Node]]] = []
    for rate, group in run_again(joint, step):
        spared = rate * sum(joint.facts[n].nbytes for n in group)
        spared -= sum(joint.clock.coded(n) for n in group)
        nbytes = sum(map(nbytes_of_code, group))
        if spared > 0 and nbytes < inf:
            found.append((spared / nbytes, group))
    return [group for _, group in sorted(found, key=lambda one: -one[0])]


def _coded(joint: Joint, step: Step, codec: Codec | None, leaves: bool = False) -> Iterator[Coded]:
    """The codes of one choice. codec None: exact ones only; leaves: all else goes elsewhere."""
    _, after = joint.parts(step.saved)
    outputs = {joint.facts[n].storage for n in joint.forward_outputs}
    masks = {n for n in step.saved if _may_be_coded(joint, n, (torch.bool,), outputs)}
    away = {n: Coded(n, None) for n in step.saved if leaves and _may_leave(joint, step, n, outputs)}
    found = list(_coded_indices(joint, step, after, outputs))
    if codec is not None:
        for one, compared in _coded_floats(joint, step, codec, after, outputs):
            found.append(one)
            masks.update(compared)
    held = {one.replaced for one in found}
    yield from found
    yield from (one for n, one in away.items() if n not in masks | held)
    yield from (Coded.mask(n) for n in sorted(masks, key=joint.place.__getitem__))


def _coded_indices(
    joint: Joint, step: Step, after: set[fx.Node], outputs: set[fx.Node]
) -> Iterator[Coded]:
    """Integers in as few bytes as hold their range."""
    for node in step.saved:
        if not _may_be_coded(joint, node, _INTEGERS, outputs):
            continue
        known, dtype = range_of(node, after), tensors_of(node)[0].dtype
        if known is not None and Narrow().encoded_nbytes((1,), dtype, known) < dtype.itemsize:
            yield Coded(node, Narrow(), known)


def _coded_floats(
    joint: Joint, step: Step, codec: Codec, after: set[fx.Node], outputs: set[fx.Node]
) -> Iterator[tuple[Coded, list[fx.Node]]]:
    """Floats whose readers tolerate an error, each with the comparisons of it, as bits.

    Parts of one storage, as q, k and v may be, have codes where all of them may: its memory is free
    then.
    """
    gradients = joint.gradients()
    parts: dict[fx.Node, list[fx.Node]] = {}
    for node in step.saved:
        parts.setdefault(joint.facts[node].storage, []).append(node)
    for storage, nodes in parts.items():
        if len(nodes) > 1 and sum(map(nbytes_of, nodes)) > joint.facts[storage].nbytes:
            continue
        found = [_coded_float(joint, n, codec, after, gradients, outputs) for n in nodes]
        if all(found):
            yield from (one for coded in found for one in coded)


def _coded_float(
    joint: Joint,
    node: fx.Node,
    codec: Codec,
    after: set[fx.Node],
    gradients: set[fx.Node],
    outputs: set[fx.Node],
) -> list[tuple[Coded, list[fx.Node]]]:
    """The codes of one value; none where it stays as it is."""
    if not _may_be_coded(joint, node, _FLOATS, outputs):
        return []
    reading = reading_of(node, after, gradients)
    bits = [n for n in reading.compared if n not in gradients]
    if reading.use is Use.EXACT or len(bits) < len(reading.compared):
        return []
    if not all(_may_be_coded(joint, n, (torch.bool,), outputs) for n in bits):
        return []
    if reading.log_probabilities or reading.saturated or reading.slope:
        instead = _coded_instead(joint, node, reading, codec, outputs)
        return [(one, bits) for one in instead]
    chosen = fine(codec) if reading.use is Use.CURVED else codec
    if chosen is None or not _takes(chosen, tensors_of(node)[0]):
        return []
    return [(Coded(node, chosen), bits)]


def _coded_instead(
    joint: Joint, value: fx.Node, reading: Reading, codec: Codec, outputs: set[fx.Node]
) -> list[Coded]:
    """Codes of what stands in for a value, as log-probabilities do for logits.

    None where one of them may have none.
    """
    chosen = fine(codec)
    nodes = reading.log_probabilities or reading.saturated or reading.slope
    floor = FLOOR if reading.log_probabilities else -LIMIT if reading.saturated else None
    ceiling = LIMIT if reading.saturated else None
    if chosen is None or not all(_may_be_coded(joint, n, _FLOATS, outputs) for n in nodes):
        return []
    if not all(_takes(chosen, tensors_of(n)[0]) for n in nodes):
        return []
    return [Coded(n, chosen, floor=floor, ceiling=ceiling, source=value) for n in nodes]


def _takes(codec: Codec, value: torch.Tensor) -> bool:
    """Returns whether a codec holds values of this dtype and size in a graph, in fewer bytes."""
    form = codec.graph_form(NOTHING)
    if form is None or value.dtype not in codec.dtypes:
        return False
    if not form.any_size and any(isinstance(size, torch.SymInt) for size in value.shape):
        return False
    shape = tuple(map(known_size, value.shape))
    return _encoded_nbytes(codec, shape, value.dtype) < prod(shape) * value.dtype.itemsize


def _may_be_coded(
    joint: Joint, node: fx.Node, dtypes: tuple[torch.dtype, ...], outputs: set[fx.Node]
) -> bool:
    """Returns whether a code of a saved value frees its memory; that of inputs is the caller's."""
    storage = joint.facts[node].storage
    if not is_tensor(node) or node.op != "call_function" or storage in outputs | joint.outside:
        return False
    value = tensors_of(node)[0]
    if value.dtype not in dtypes or any(map(_is_unknown, value.shape)):
        return False
    return known_size(value.numel()) * value.dtype.itemsize >= _MIN_NBYTES // (
        1 if value.dtype.is_floating_point else 4
    )


def _may_leave(joint: Joint, step: Step, node: fx.Node, outputs: set[fx.Node]) -> bool:
    """Returns whether a saved value may go elsewhere, and its memory is free once it has gone."""
    storage = joint.facts[node].storage
    if not is_tensor(node) or node.op != "call_function" or storage in outputs | joint.outside:
        return False
    value = tensors_of(node)[0]
    if any(map(_is_unknown, value.shape)) or (joint.is_channels_last and has_both_layouts(value)):
        return False
    views = sum(joint.facts[n].storage is storage for n in step.saved)
    nbytes = known_size(value.numel()) * value.dtype.itemsize
    return views == 1 and _MIN_AWAY <= nbytes <= joint.facts[storage].nbytes


def _is_unknown(size: int | torch.SymInt) -> bool:
    """Returns whether a size is known only when the program runs, as after `nonzero`."""
    return isinstance(size, torch.SymInt) and getattr(size.node, "hint", None) is None
