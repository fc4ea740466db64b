"""Predicts the gradient variance that codes add where no memory is left to measure it.

    share(site, levels) = error * reach / sampling / (levels - 1) ** 2
    error      squared error of a code of two levels, relative to the tensor: tried on a sample
    reach      variance that an error as large as the tensor would add, over |g|^2
    sampling   the variance of mini-batches / |g|^2 (`gradient_variance.py`)

Of an op that is linear in x, it is sum_t |dY_t|^2 |x_t|^2, the formula of `sensitivity.py` with x
in the place of its error. |dW|^2 would not do: the gradients of tokens add up in it, and errors do
not (0.03 to 8 times as much). Any other op passes an error on that is as large, relative to its
gradient, as that of what it reads; `Paths` says what arrives at the weights. A norm adds what its
own weights get, and passes on a twentieth, or a batch norm of N elements a channel what its own
gradients tell. With r the correlation of dY and xhat in a channel, and |dw|^2 that of its weight,

    dx = w / s (dY - mean dY - xhat mean(dY xhat))        passed on: r^2 = |dw|^2 / (N |dY|^2)

A smooth function passes on what the curve of it says, at some thousand values (`curvature.py`): a
GELU of values far below 1 is nearly linear, a twentieth, too.

The error is tried, since what is large beside how it varies has small errors for its size (results
of a ReLU behind a sum: a tenth of those of a normal tensor). Norms take the mean off, so the error
of what they read is that of a normal tensor, with a margin.

No tensor is held for it: one number each of some thousand tokens or places is until backward, and a
few elements of each weight's gradient are from step to step.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import Node

from elbowroom.codecs import Codec, Dither
from elbowroom.measure.curvature import curvature
from elbowroom.measure.gradient_variance import GradientVariance, Key
from elbowroom.measure.probe import RESULT, arguments, keys_of
from elbowroom.measure.sensitivity import PART, LinearForm, energy, form_of, is_weight
from elbowroom.measure.watching import call_values, one_by_one, parts_of, roots_of
from elbowroom.plan import Site, SiteName
from elbowroom.plan.precision_floor import ATTENTION
from elbowroom.plan.prices import levels_of
from elbowroom.plan.shares import PREDICTED, AddedVariance, NoiseShares, SiteShares
from elbowroom.plan.site import NORMS
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.observer import Use
from elbowroom.runtime.second_pass import second_pass
from elbowroom.runtime.slot import Slot

_MIN = 1e-6  # of |g|^2
_PLACES = 256  # of which numbers are held, for each op
_ENTRIES = 64  # of the gradient of each parameter
_BELOW_NORM = 0.05  # of the error of what a norm reads goes on below, relative to its gradient
_MARGIN = 1.2  # of what is predicted to be added
# Of what plans choose by: they encode where the prediction is lowest, so of what they choose it is
# too low. A ResNet-50 had 1.6 times the noise that its plan was made for.
CHOSEN = 2.0
_ERROR = _MARGIN * 1.85  # squared error of a code of two levels, relative to a normal tensor
_TRIED = Dither(levels=16)
_RUNS, _RUN = 16, 256  # of elements on which it is tried
_LEAST_ERROR = _ERROR / 32  # a sample may miss what varies
_PRODUCTS = frozenset(
    ("mul", "__mul__", "__rmul__", "multiply", "matmul", "__matmul__", "mm", "bmm", ATTENTION)
)


@dataclass
class _ReachedOp:
    """An op that reads tensors which may carry errors, or weights.

    sources  the sites of these, and the node whose gradient has none of their error, or -1; and
             which part of the size of what is read each of them has, times the relative error
    folded   of the tensor that it reads beside its weight, if it is linear in that, and of the
             errors that a code of two levels would make of it
    mean     of its squares, if it is not
    curved   part of that error, relative to its gradient, that it passes on; None: all of it
    node     the number of its last node in the graph
    nodes    the numbers of all of them
    scale    of a batch norm: the key of its weight and N, elements of a channel
    closed   variance that errors as large as the tensor, and those of the code, add to the
             gradient of the weight
    weights  the keys of weights, and whether each is a vector
    """

    form: LinearForm | None = None
    is_norm: bool = False
    scale: tuple[Key, float] | None = None
    sources: dict[tuple[SiteName, int], Tensor | float] = field(default_factory=dict)
    folded: tuple[Tensor, Tensor] | None = None
    mean: Tensor | None = None
    curved: Tensor | None = None
    node: int = -1
    nodes: frozenset[int] = frozenset()
    closed: tuple[Tensor, Tensor] | None = None
    weights: tuple[tuple[Key, bool], ...] = ()


def watch_nbytes(shapes: Sequence[tuple[int, ...]]) -> int:
    """Returns about the bytes that a watched step holds more, where such tensors are saved.

    That is two numbers each of their places, of a few steps the entries of as many gradients, and
    a part of one tensor, its code and what that is decoded to.
    """
    places = sum(min(prod(shape[:-1]), 2 * _PLACES) for shape in shapes)
    return 4 * (2 * places + 3 * _ENTRIES * len(shapes) + 4 * PART)


class ReachWatch:
    """One forward: which weights the errors of which tensors come to."""

    def __init__(self, gradient: GradientVariance) -> None:
        self._gradient = gradient
        self._paths = Paths()
        self._ops: list[_ReachedOp] = []
        self._current: tuple[Call, _ReachedOp] | None = None  # until the call has ended
        self._waiting: weakref.WeakKeyDictionary[Slot, list[tuple[_ReachedOp, int]]] = (
            weakref.WeakKeyDictionary()
        )
        self._codes: dict[SiteName, float] = {}
        self._sizes: weakref.WeakKeyDictionary[Slot, Tensor] = weakref.WeakKeyDictionary()
        self._errors: weakref.WeakKeyDictionary[Slot, Tensor | float] = weakref.WeakKeyDictionary()

    @torch.no_grad()
    def saved(self, use: Use, x: Tensor) -> None:
        if self._current is None or self._current[0] is not use.call:
            self._current = (
                use.call,
                _ReachedOp(form_of(use.call, most=_PLACES), use.call.name in NORMS),
            )
        op = self._current[1]
        if op.form is not None and op.folded is None:
            of = _errors_by(use.view.slot, x)
            op.folded = op.form.fold(x.detach()), op.form.fold(x.detach(), of)
        elif op.form is None and op.mean is None and x.numel() > 0:
            op.mean = energy(x.detach()) / x.numel()
            op.curved = curvature(use.call, x.detach())
        slot = use.view.slot
        if slot not in self._sizes and slot.root() is slot and x.is_floating_point():
            self._sizes[slot] = energy(x.detach())
            self._errors[slot] = _relative_error(x.detach(), _errors_by(slot, x))
        self._waiting.setdefault(slot, []).append((op, _without_error(x, use.call)))

    def held(self, slot: Slot, whole: Tensor, site: Site, codec: Codec | None) -> None:
        if codec is not None and not codec.lossless:
            self._codes[site.name] = (levels_of(codec, site) - 1) ** -2

    def curved(self, slot: Slot) -> None:
        pass

    def ended(self, call: Call, out: Any) -> None:
        given = list(one_by_one(call_values(call)))
        for arg in given:
            if arg is not out:  # which a module counts in, as batch norm its batches
                self._gradient.reads(arg, call)
        op = _ReachedOp()
        if self._current is not None and self._current[0] is call:
            op, self._current = self._current[1], None
        op.weights = tuple((self._gradient.listen(w), w.dim() < 2) for w in given if is_weight(w))
        if call.name == "batch_norm" and is_weight(scale := call.arg(3, "weight")):
            x = call.arg(0, "input")
            op.scale = self._gradient.listen(scale), x.numel() / max(len(scale), 1)
        for made in one_by_one((out,)):
            if isinstance(made, Tensor) and made.grad_fn is not None:
                self._follow(op, made)
        self._find_sources()

    def _follow(self, op: _ReachedOp, made: Tensor) -> None:
        """Hears of the gradient of what an op has made."""
        node = made.grad_fn
        assert node is not None
        op.nodes |= self._paths.follow(node)
        if op.node >= 0:
            return  # by another result
        op.node = node._sequence_nr()
        self._ops.append(op)
        if op.folded is not None:
            node.register_prehook(_reader(op, made.output_nr))

    def _find_sources(self) -> None:
        """Names the tensors of which it is decided by now what holds them."""
        for slot, ops in list(self._waiting.items()):
            roots = roots_of(slot)
            if any(root.waits for root in roots) or not any(root.sites for root in roots):
                continue
            known = [root for root in roots if root.sites]
            sizes = [self._sizes[root] for root in known if root in self._sizes]
            parts: Sequence[Tensor | float] = [1 / len(known)] * len(known)
            if len(sizes) == len(known):
                parts = parts_of(sizes)
            for op, spared in self._waiting.pop(slot, ops):
                for root, part in zip(known, parts, strict=True):
                    error = _ERROR if op.is_norm else self._errors.get(root, _ERROR)
                    if op.form is not None:  # what it folds is the error itself
                        error = 1.0
                    for site in root.sites:
                        op.sources[site.name, spared] = part * error

    def reached(self) -> tuple[dict[SiteName, float], float]:
        """Returns what codes of two levels would add in this step, and what codes have added.

        That is for each site, and of all, as predicted, over |g|^2. Call this after backward.
        """
        self._find_sources()
        self._paths.end()
        sizes = self._gradient.sizes_now
        total = sum(sizes.values())
        found: dict[SiteName, float] = defaultdict(float)
        if total > 0 and isfinite(total):
            reads = Counter(key for op in self._ops for key, _ in op.weights)
            each = {key: size / max(reads[key], 1) for key, size in sizes.items()}
            of_weights = [self._of_weights(op, each) for op in self._ops]
            gains = self._paths.gains(
                {
                    op.node: (matrices + vectors) / received
                    for op, (matrices, vectors) in zip(self._ops, of_weights, strict=True)
                    if (received := self._paths.received(op.node)) > 0
                }
            )
            for op, (matrices, vectors) in zip(self._ops, of_weights, strict=True):
                for (name, spared), part in op.sources.items():
                    if op.form is not None:  # its bias and what is below have no error
                        reach = _ERROR * matrices if op.closed is None else float(op.closed[1])
                    else:
                        reach = matrices + self._past(op, vectors, spared, gains, sizes)
                    found[name] += float(part) * reach / total
        return dict(found), sum(found[name] * one for name, one in self._codes.items())

    def _past(
        self,
        op: _ReachedOp,
        vectors: float,
        spared: int,
        gains: dict[int, float],
        sizes: dict[Key, float],
    ) -> float:
        """Returns what an error as large as what an op reads adds to vectors and to all below."""
        below = self._paths.sent_on(op.nodes, gains, spared)
        passed_on = _BELOW_NORM if op.is_norm else 1.0 if op.curved is None else float(op.curved)
        received = self._paths.received(op.node)
        if op.scale is not None and received > 0:
            key, each = op.scale
            passed_on = (sizes.get(key, 0.0) / received + 1) / each
        return vectors + passed_on * below

    def _of_weights(self, op: _ReachedOp, sizes: dict[Key, float]) -> tuple[float, float]:
        """Returns what errors as large as what an op reads, or receives, add to its weights.

        That is to matrices, and to vectors. sizes: of gradients, by the ops that read the weight
        """
        if op.closed is not None:
            matrices = float(op.closed[0])
        else:  # as if the gradients of all tokens were orthogonal
            matrices = sum(sizes.get(key, 0.0) for key, is_vector in op.weights if not is_vector)
        each = 1.0 if op.is_norm or op.form is not None or op.mean is None else float(op.mean)
        vectors = sum(is_vector for _, is_vector in op.weights)
        vectors = min(vectors, 1) if op.is_norm else vectors  # the bias's gradient does not read x
        return matrices, vectors * each * self._paths.received(op.node)


def _errors_by(slot: Slot, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns what gives the errors of a code of two levels, by a finer one.

    What is made from other tensors has their errors, which go with how it varies: of maps, around
    the mean of each channel. (A norm's code is off by as much on both sides of its mean, and what a
    ReLU leaves of it has half of that, where a code of its own would be off by a fourth.)
    """
    facts = slot.sites[-1].facts if slot.sites else None

    def tried(part: Tensor) -> Tensor:
        part = part.contiguous()
        code = _TRIED.encode(part, 0) if facts is None else _TRIED.encode(part, 0, facts)
        return code.decode().sub_(part).mul_((_TRIED.levels - 1) * _MARGIN**0.5)

    def inherited(part: Tensor) -> Tensor:
        if part.dim() > 2:
            dims = [dim for dim in range(part.dim()) if dim != 1]
            part = part - part.mean(dims, keepdim=True)
        errors: Tensor = part * _ERROR**0.5
        return errors

    own = x.dtype in _TRIED.dtypes and all(root is slot for root in roots_of(slot))
    return tried if own else inherited


def _relative_error(x: Tensor, errors_of: Callable[[Tensor], Tensor]) -> Tensor | float:
    """Returns the squared error of a code of two levels, relative to x: of a sample."""
    dense = x if x.is_contiguous() or x.dim() < 3 else x.movedim(1, -1)
    if not dense.is_contiguous() or not x.numel():
        return _ERROR
    flat = dense.view(-1)
    if len(flat) > _RUNS * _RUN:
        each = len(flat) // _RUN
        flat = torch.cat([flat[i * each // _RUNS * _RUN :][:_RUN] for i in range(_RUNS)])
    error = energy(errors_of(flat)) / energy(flat)
    return error.nan_to_num(_ERROR).clamp(min=_LEAST_ERROR)


def _without_error(x: Tensor, call: Call) -> int:
    """Returns the node of the operand of a product that x is: its gradient does not read x.

    -1: there is none, or x is both operands.
    """
    own = keys_of(x, call) if call.name in _PRODUCTS else []
    given = arguments(call)[own[0]] if len(own) == 1 and own[0] != RESULT else None
    node = given.grad_fn if isinstance(given, Tensor) else None
    return -1 if node is None else node._sequence_nr()


def _reader(op: _ReachedOp, output: int) -> Callable[[Sequence[Tensor | None]], None]:
    @torch.no_grad()
    def read(grads: Sequence[Tensor | None]) -> None:
        grad, form, folded = grads[output], op.form, op.folded
        if grad is not None and form is not None and folded is not None and is_dense(grad):
            size, error = (form.variance(one, grad) for one in folded)
            op.closed = size, error

    return read


class ReachMeter:
    """The observer of the steps in which the reach of errors is found. step: steps so far."""

    def __init__(self, steps: int) -> None:
        """steps: in which gradients are read."""
        self.step, self.steps = 0, steps
        self._gradient = GradientVariance(entries=_ENTRIES)
        self._reach: Counter[SiteName] = Counter()
        self._added = 0.0
        self._counted = 0  # steps in which there was a gradient
        self._watch: ReachWatch | None = None

    def begin(self) -> ReachWatch | None:
        self.harvest()
        self._watch = ReachWatch(self._gradient) if self.step < self.steps else None
        self.step += 1
        return self._watch

    def harvest(self) -> None:
        """Takes in what the last step has shown. Its backward must be over."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        found, added = watch.reached()
        self._counted += bool(found)
        self._reach.update(found)
        self._added += added
        self._gradient.end_step(last=self.step >= self.steps)

    @property
    def added(self) -> AddedVariance | None:
        """The noise that the watched codes are predicted to have added; None: not known."""
        if not self._counted:
            return None
        share = self._added / self._counted
        return AddedVariance(
            share, share / self._sampling if self._knows_batches else None, self._counted
        )

    @property
    def _knows_batches(self) -> bool:
        """True if it is known how gradients vary from batch to batch."""
        return self._gradient.draws > 0 and not self._gradient.is_one_batch

    @property
    def _sampling(self) -> float:
        """The variance of mini-batches as a share of |g|^2, or 1 where that is not known."""
        if not self._knows_batches:
            return 1.0
        # What codes add is part of the variance over steps. The prediction of it may be too large.
        varies = min(self._gradient.share, 1.0)
        return max(varies - self._added / max(self._counted, 1), varies / 2, _MIN)

    def shares(self, saved_nbytes: int) -> NoiseShares:
        """Returns what codes are predicted to add, as a share of the variance of mini-batches.

        If this is not known, or all batches were the same, |g|^2 takes its place, which is larger.
        Twice what is predicted: `CHOSEN`.

        saved_nbytes: what plain training saves; by it goes what no op was seen to read
        """
        counted, sampling = max(self._counted, 1), self._sampling
        each = CHOSEN / sampling / counted
        sites = tuple(
            SiteShares(name, (2,), (each * reach,)) for name, reach in self._reach.items()
        )
        return NoiseShares(0, sites, PREDICTED / sampling / max(saved_nbytes, 1))

    def error_report(self) -> str:
        return "what codes add is predicted, and not measured"


_Below = list[tuple[int, Tensor]]  # by autograd's number of a node below, the energy that it gets


class Paths:
    """The graph of one step, and the energies of the gradients in its backward.

        gain(node) = variance that reaches the weights / energy of an error in the node's input
                   = own(node) + sum over edges |g_edge|^2 / |g|^2 * gain(node below)

    |g|^2 is the energy of the gradient that the node receives, |g_edge|^2 of what it passes on. So
    an error shrinks and grows as the gradient does, and the errors of two paths add up as energies,
    while gradients may cancel. The weights that a node reads are not edges: the gradients of tokens
    add up in them, and errors without a mean do not. What an op adds there is `own`.

    Nothing is held for it but two numbers a node.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._passed: dict[int, tuple[Tensor, _Below]] = {}  # in the order of backward
        self._energies: dict[int, tuple[float, list[tuple[int, float]]]] = {}

    def follow(self, root: Node) -> frozenset[int]:
        """Follows the nodes that lead to this one and are not followed yet.

        Returns their numbers.
        """
        new, waiting = set(), [root]
        while waiting:
            node = waiting.pop()
            number = node._sequence_nr()
            if hasattr(node, "variable") or number in self._seen:
                continue
            self._seen.add(number)
            new.add(number)
            below = [one for one, _ in node.next_functions]
            leads = [
                None if one is None or hasattr(one, "variable") else one._sequence_nr()
                for one in below
            ]
            node.register_hook(self._reader(number, leads))
            waiting += [one for one in below if one is not None]
        return frozenset(new)

    def _reader(
        self, number: int, leads: Sequence[int | None]
    ) -> Callable[[Sequence[Tensor | None], Sequence[Tensor | None]], None]:
        @torch.no_grad()
        def read(passed: Sequence[Tensor | None], received: Sequence[Tensor | None]) -> None:
            if second_pass.runs:
                return
            gets = [energy(grad) for grad in received if is_dense(grad)]
            if not gets:
                return
            pairs = zip(leads, passed, strict=False)
            below = [(n, energy(grad)) for n, grad in pairs if n is not None and is_dense(grad)]
            self._passed[number] = torch.stack(gets).sum(), below

        return read

    def end(self) -> None:
        """Brings all energies to the CPU. Call this when backward is over."""
        energies = [e for received, below in self._passed.values() for e in (received, *_of(below))]
        values = iter(_numbers(energies))
        self._energies = {
            number: (next(values), [(n, next(values)) for n, _ in below])
            for number, (_, below) in self._passed.items()
        }
        self._passed.clear()

    def received(self, number: int) -> float:
        """Returns the energy of the gradient that a node got; 0 if it got none."""
        return self._energies.get(number, (0.0, []))[0]

    def gains(self, own: Mapping[int, float]) -> dict[int, float]:
        """Returns the gains of all nodes. own: of what the op that ends with a node reads."""
        found: dict[int, float] = {}
        for number in reversed(self._energies):  # those below first
            received, below = self._energies[number]
            sent = sum(each * found.get(n, 0.0) for n, each in below)
            found[number] = own.get(number, 0.0) + (sent / received if received > 0 else 0.0)
        return found

    def sent_on(self, nodes: Collection[int], gains: Mapping[int, float], spared: int) -> float:
        """Returns the variance that an error as large as what these nodes pass on would add.

        spared: a node whose own gradient has no error
        """
        return sum(
            each * gains.get(n, 0.0)
            for number in nodes
            for n, each in self._energies.get(number, (0.0, []))[1]
            if n not in nodes and n != spared
        )


def is_dense(x: Tensor | None) -> TypeGuard[Tensor]:
    """Returns whether this is a tensor with all of its elements."""
    return x is not None and x.layout is torch.strided and x.numel() > 0


def _of(below: _Below) -> list[Tensor]:
    return [each for _, each in below]


def _numbers(scalars: Sequence[Tensor]) -> list[float]:
    if not scalars:
        return []
    found: list[float] = torch.stack([one.double().cpu() for one in scalars]).tolist()
    return found
