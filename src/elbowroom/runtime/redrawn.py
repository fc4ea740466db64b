"""Measurement, in examined steps, of what codes add to the gradient where backward reads them.

A code's step follows the range of its group, but the gradient may live where the saved value is
small, as behind exp(-100 d^2): then g x~ is mostly error. No table tells that, as g is known in
backward only. So before a node of an examined step runs, it runs on a sample of its elements, with
noise that is drawn again:

    x~       what a code holds, which the node reads
    x~'      x~ encoded and decoded again: as far from x~ as that is from x
    share    |node(g, x~') - node(g, x~)|^2 / |node(g, x~)|^2, of each code and each result

A node can be called, so this needs no formula, and what is rebuilt from a code is drawn again with
it. If the share of a code is above `MOST`, and above `_TIMES` its share of values that g does not
depend on (a plan may have chosen few levels), it is finer from the next step on: it has as many
levels as would make its share an eighth of that, by the square of the step; where 256 do not
suffice, the tensor is kept, or a float of 16 bits of it. A warning says so, as the gradient of this
step is wrong. Public models have 0.02 at most (16 levels; docs/log.md).

It is measured where errors go on element by element: in products and in smooth functions. In a sum
over many elements they average out. What the next nodes let through of a result, as a clamp does,
may be mostly error although the result is not: so it is measured behind them, too (`_Carried`).
Where few elements make up most of a result, as of a product, a sample may tell three times its
share: a code is withdrawn by `_CONFIRMING` samples together.

It takes no room that plans would have to know of: samples are freed before the node itself runs. Of
a code alone, a few parts are decoded. What is rebuilt, or lies in memory in another order, is
restored once more, as the node will do; meanwhile only a sample of single elements is held.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from elbowroom.codecs import Cast, Dither
from elbowroom.codecs.names import setting_name
from elbowroom.codecs.quality import error_of_dither, quality_of
from elbowroom.plan import Need
from elbowroom.plan.precision_floor import LEVELS
from elbowroom.plan.site import Formula, HalfSuffices, LevelsSuffice, Site, key_of
from elbowroom.runtime.context import Context
from elbowroom.runtime.drawn_again import Sample, SampledValues, code_of, upstream
from elbowroom.runtime.handles import EncodeHandle
from elbowroom.runtime.kept import Deferred, Substitute
from elbowroom.runtime.modules import outermost
from elbowroom.runtime.saturated import LateWarnings
from elbowroom.runtime.second_pass import second_pass
from elbowroom.runtime.slot import Slot, View

MOST = 0.05
_TOO_COARSE = f"its error is more than {MOST:.0%} of the gradient that is computed with it"
_ENOUGH = 8.0  # times less than MOST: what a finer code should add
_READ = frozenset((Formula.PRODUCT, Formula.CURVED, Formula.TAIL))
_PRODUCTS = ("MulBackward0", "_ProductBackward")  # grad times each factor
_TIMES = 4.0
_MAX_CARRIED = 1024  # elements of a result that is followed
_MAX_FOLLOWED = 6  # ops that a result goes on through
# Nodes that work element by element, and may let through but a part, or enlarge it.
_CARRIES = frozenset(
    (
        *("abs", "add", "clamp", "clampmax", "clampmin", "div", "elu", "exp", "exp2", "expm1"),
        *("gelu", "hardshrink", "hardsigmoid", "hardtanh", "leakyrelu", "log", "log1p", "mul"),
        *("neg", "pow", "product", "reciprocal", "relu", "rsqrt", "rsub", "sigmoid", "silu"),
        *("softplus", "softshrink", "sqrt", "sub", "tanh", "threshold", "where"),
    )
)
_CONFIRMING = 8  # samples in all that a code must be found wrong by
_APART = 0x9E37  # between the seeds of these
_EVERY = 8  # of so many examined forwards of a model, a code is measured in the first
_Results = Sequence[Tensor | None]
_looks: "weakref.WeakKeyDictionary[object, dict[object, int]]" = weakref.WeakKeyDictionary()


class Redrawn:
    """The measurement of one examined forward, and of its backward."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.late_warnings = LateWarnings()
        self._nodes = set[int]()
        self._turns: dict[object, bool] = {}

    def reads(self, node: Node, number: int, saved: Iterable[Deferred], formula: Formula) -> None:
        """Notes that a node, of this number, has saved a tensor that may have a lossy code.

        saved: all that it has saved, and perhaps what others have
        """
        if formula not in _READ or number in self._nodes:
            return
        self._nodes.add(number)
        held = [weakref.ref(one) for one in saved if one.node == number]
        node.register_prehook(_NodeReading(self, held, outermost()).before)

    def takes_turn(self, model: nn.Module | None, root: Slot) -> bool:
        """Returns whether a code is measured in this forward: a program may replay none."""
        looks, key = self._looks(model), _key_of(root)
        if key not in self._turns:
            before = looks.get(key, 0)
            self._turns[key] = before % _EVERY == 0
            if before:
                looks[key] = before + 1
        return self._turns[key]

    def has_found(self, model: nn.Module | None, root: Slot) -> None:
        """Notes that a code could be measured, as its gradient was not 0."""
        self._looks(model).setdefault(_key_of(root), 1)

    def _looks(self, model: nn.Module | None) -> dict[object, int]:
        """Returns how often each code was to be measured, by those that learn of it."""
        context = self.context
        return _looks.setdefault(context if context.learns or model is None else model, {})


class _NodeReading:
    """The reading of one node, which measures how wrong codes make its results; holds no tensor."""

    def __init__(
        self, forward: Redrawn, held: list[weakref.ref[Deferred]], model: nn.Module | None
    ) -> None:
        self._forward, self._held = forward, held
        self._model = None if model is None else weakref.ref(model)
        self._is_done = False

    def before(self, grads: Sequence[Tensor | None]) -> None:
        """Compares what the node gives with what it would give for other draws of the noise."""
        grad = grads[0] if len(grads) == 1 else None
        if self._is_done or second_pass.runs or grad is None or not grad.is_floating_point():
            return
        self._is_done = True
        with torch.no_grad(), torch._C.DisableTorchFunction(), suppress(RuntimeError):
            self._measure(grad)  # what does not work element by element raises one, of torch

    def _measure(self, grad: Tensor) -> None:
        saved = [one for ref in self._held if (one := ref()) is not None]
        coded = {
            one: view
            for one in saved
            if isinstance(view := one.held, View) and _bears_error(view, grad)
        }
        model, views = None if self._model is None else self._model(), coded.values()
        roots = dict.fromkeys(root for view in views for root in _roots(view.slot))
        dithers = {
            root: codec
            for root in roots
            if not any(_is_shared_by_views(root, view.slot) for view in views)
            and self._forward.takes_turn(model, root)
            and (codec := _dither_of(root)) is not None
        }
        if not dithers:
            return
        sample, made, others = self._drawn(saved, coded, dithers, grad)
        for root, codec in dithers.items():
            measured = _energies(made, others[root])
            if _share(measured) > 0:
                self._forward.has_found(model, root)
            most = max(MOST, _TIMES * error_of_dither(codec.levels))
            if _share(measured) > most:  # few elements may make up most of a sample: ask others
                for nth in range(1, _CONFIRMING):
                    _, again, drawn = self._drawn(saved, coded, {root: codec}, grad, nth)
                    measured += _energies(again, drawn[root])
            keep = partial(self._make_finer, root.sites[-1], codec.levels)
            if _share(measured) > most:
                keep(_share(measured))
                continue
            carried = _Carried(sample, keep)
            for x, y, whole in zip(made, others[root], measured, strict=True):
                if x is not None and y is not None:
                    x, y = _thinned(x), _thinned(y)
                    # Few elements may have more noise than all: by as much, what goes on has, too.
                    more = _share(_energies([x], [y])) / (_share(whole[None]) or inf)
                    carried.follow(_node(), x, y, most * max(1.0, more), _MAX_FOLLOWED)

    def _drawn(
        self,
        saved: Iterable[Deferred],
        coded: Mapping[Deferred, View],
        dithers: Mapping[Slot, Dither],
        grad: Tensor,
        nth: int = 0,
    ) -> tuple["Sample", _Results, dict[Slot, _Results]]:
        """Returns the nth sample, what the node makes of it, and with other noise of each code."""
        seed, node = self._forward.context.count + _APART * nth, _node()
        values = SampledValues.of(coded.values(), grad.shape, seed)
        own, others = values.read(dithers)
        sample = values.sample
        given = {}
        if node.name() not in _PRODUCTS:
            given = {one: sample.taken(one.restore()) for one in saved if one not in coded}
        grad = sample.taken(grad)

        def run(read: list[Tensor]) -> _Results:
            return _run(node, grad, given, dict(zip(coded, read, strict=True)))

        return sample, run(own), {root: run(others[root]) for root in dithers}

    def _make_finer(self, site: Site, levels: int, share: float) -> None:
        """Gives the tensors of a site a finer code from the next step on, or keeps them."""
        model, why = None if self._model is None else self._model(), reason(levels, share)
        if self._forward.context.learn_limit(model, key_of(site), why):
            self._forward.late_warnings.warn(site.consumer, site.module, why)


def reason(levels: int, share: float) -> str:
    """Returns why, and how much, a code of so many levels that adds this share has to be finer."""
    wanted = 1 + (levels - 1) * sqrt(share * _ENOUGH / MOST)
    enough = next((n for n in LEVELS if n >= wanted and n > levels), 0)
    return LevelsSuffice(_TOO_COARSE, enough) if enough else HalfSuffices(_TOO_COARSE)


def _thinned(x: Tensor) -> Tensor:
    """Returns some of a sample: these are held while nodes run, in memory that no plan knows of."""
    flat = x.reshape(-1)
    return flat[:: -(-flat.numel() // _MAX_CARRIED) or 1].clone()


class _Carried:
    """Measures noise again behind the ops that a result goes on through, element by element.

    These may let through but a part of it, as a clamp does, or enlarge a part. What they do to an
    element is what they do to its gradient, which is known once they have run: so nothing is run
    for this. A sum of several gradients is not followed.
    """

    def __init__(self, sample: Sample, keep: Callable[[float], None]) -> None:
        """keep: called once, with the share, if noise is above `most` of what is let through."""
        self._sample, self._keep = sample, keep
        self._is_kept = False

    def follow(self, node: Any, made: Tensor, other: Tensor, most: float, steps: int) -> None:
        """Follows a result of a node, and what it would have been with other noise."""
        for below, _ in node.next_functions:
            name = "" if below is None else below.name().partition("Backward")[0]
            if steps and name.lstrip("_").lower() in _CARRIES:
                self._await(below, made, other, most, steps - 1)

    def _await(self, node: Any, made: Tensor, other: Tensor, most: float, steps: int) -> None:
        def ran(grads_in: Sequence[Tensor | None], grads_out: Sequence[Tensor | None]) -> None:
            handle.remove()
            with torch.no_grad(), torch._C.DisableTorchFunction(), suppress(RuntimeError):
                if not self._is_kept and not second_pass.runs:
                    self._go_on(node, made, other, most, steps, grads_in, grads_out)

        handle = node.register_hook(ran)

    def _go_on(
        self,
        node: Any,
        made: Tensor,
        other: Tensor,
        most: float,
        steps: int,
        grads_in: Sequence[Tensor | None],
        grads_out: Sequence[Tensor | None],
    ) -> None:
        shape, grad = self._sample.shape, grads_out[0]
        if grad is None or tuple(grad.shape) != shape:
            return
        grad = _thinned(self._sample.taken(grad))
        if not torch.allclose(grad, made, rtol=1e-3):  # of another result, or a sum
            return
        for passed in grads_in:
            if passed is None or tuple(passed.shape) != shape:
                continue
            passed = _thinned(self._sample.taken(passed))
            noise = torch.where(grad == 0, 0, (other - made) * (passed / grad))
            if (share := _share(_energies([passed], [passed + noise]))) > most:
                self._is_kept = True
                self._keep(share)
                return
            self.follow(node, passed, passed + noise, most, steps)


def _bears_error(view: View, grad: Tensor) -> bool:
    """Returns whether what a view reads has an error, element by element of a gradient."""
    shape = view.geometry.shape
    if view.need is not Need.LOSSY or view.slot.exact or len(shape) > grad.dim():
        return False
    return all(n in (1, of) for n, of in zip(reversed(shape), reversed(grad.shape), strict=False))


def _node() -> Any:
    """Returns the node whose hook this is in."""
    return torch._C._current_autograd_node()


def _run(
    node: Any, grad: Tensor, given: dict[Deferred, Tensor], coded: dict[Deferred, Tensor]
) -> list[Tensor | None]:
    """Returns what the node makes of a gradient and of these values in place of its own."""
    if node.name() in _PRODUCTS:
        return [grad * x for x in coded.values()]
    values = {**given, **coded}
    before = [(one, one.held) for one in values]
    try:
        for one, x in values.items():
            one.held = Substitute(x)
        made = node(grad)
    finally:
        for one, held in before:
            one.held = held
    return list(made) if isinstance(made, tuple) else [made]


def _roots(slot: Slot) -> Iterator[Slot]:
    """Yields the slots of the codes that a slot is decoded or rebuilt from."""
    for one in upstream(slot):
        held = one.value
        is_lossy = isinstance(held, EncodeHandle) and not held.exact and bool(one.sites)
        if is_lossy and code_of(one).original() is None:
            yield one


def _is_shared_by_views(root: Slot, read: Slot) -> bool:
    """Returns whether what a code stands for was restored for many views, which will all read it.

    With other noise it would be held once more. The first view that was restored has measured it.
    """
    return any(
        one.has_many_views and one.whole is not None and root in upstream(one)
        for one in upstream(read)
    )


def _key_of(root: Slot) -> object:
    return key_of(root.sites[-1]), setting_name(code_of(root).codec)


def _dither_of(slot: Slot) -> Dither | None:
    """Returns the dither whose error is that of a slot's code; None: that is relative, or unknown.

    A code by stochastic rounding would not change what is one of its levels already.
    """
    codec = code_of(slot).codec
    if isinstance(codec, Dither):
        return codec
    if isinstance(codec, Cast):
        return None
    try:
        levels = round(quality_of(codec, maps=len(slot.base.shape) >= 4).levels)
    except Exception:  # of a codec of another package, which need not have a hash even
        return None
    return Dither(levels=min(max(levels, 2), 256), group_size=getattr(codec, "group_size", 64))


def _energies(own: _Results, other: _Results) -> Tensor:
    """Returns |noise|^2 and |result|^2 of each result, [results, 2]; 0 of what was not measured."""
    found = torch.zeros(len(own), 2, dtype=torch.float64)
    for place, (x, y) in enumerate(zip(own, other, strict=True)):
        if x is not None and y is not None:
            found[place, 0] = (x.double() - y.double()).square().sum()
            found[place, 1] = x.double().square().sum()
    return found


def _share(energies: Tensor) -> float:
    """Returns the largest share of a result that is noise; 0 if nothing was measured.

    That is of a gradient that is 0, or not finite itself. Where only the other noise gives what is
    not finite, the share is infinite.
    """
    most = 0.0
    for noise, size in energies.tolist():
        if 0.0 < size < inf:
            most = max(most, noise / size if noise < inf else inf)
    return most
