"""Watching one step: what is attached to its forward, and read when its backward is over.

Nothing here keeps a tensor, a parameter, a code or a node of the graph alive: what stays until the
next step are scalars, and for linear ops one number a place. Only a probe keeps the exact tensors
of one op.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from elbowroom.codecs import Codec
from elbowroom.measure.noise import CodeNoise, NoiseTable, OpReading, Trial
from elbowroom.measure.probe import RESULT, Probe, arguments, can_probe, keys_of
from elbowroom.measure.sensitivity import LinearForm, energy, form_of, is_weight
from elbowroom.plan import Site, SiteName
from elbowroom.plan.precision_floor import at_precision_floor
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.observer import Use
from elbowroom.runtime.second_pass import second_pass
from elbowroom.runtime.slot import Geometry, Slot, View
from elbowroom.runtime.storage import version_of

Variants = Callable[[Site], Sequence[Codec]]
_SAMPLE = 32768  # elements on which other codecs are tried
_CHECK_EVERY = 4  # every so many watched steps, closed forms are checked


@dataclass
class _WatchedOp:
    """A call that reads tensors which may carry errors."""

    name: SiteName
    form: LinearForm | None
    weight: "weakref.ref[Tensor] | None" = None
    energies: dict[SiteName, Tensor] = field(default_factory=dict)
    folded: Tensor | None = None
    channels: Tensor | None = None  # of a norm (`channel_errors`)
    strength: Tensor | None = None
    unit: Tensor | None = None
    closed: Tensor | None = None
    measured: Tensor | None = None
    copies: dict[int | str, Tensor] = field(default_factory=dict)
    views: dict[int | str, View] = field(default_factory=dict)

    def take_measured(self, variance: Tensor) -> None:
        self.measured = variance


@dataclass(frozen=True)
class _CodeError:
    site: Site
    codec: Codec
    numel: int
    nbytes: int
    energy: Tensor
    trials: tuple[tuple[Codec, float, Tensor], ...]  # codec, bits, squared error an element


class StepWatch:
    """One watched step.

    table   what is known; hears of the gradients
    probed  how often each op was probed
    probes  ops that may be probed in this step
    variants  codecs to try on a sample of each held tensor
    full    errors are read, not only how gradients vary
    """

    def __init__(
        self,
        table: NoiseTable,
        probed: Counter[SiteName],
        probes: int,
        variants: Variants | None,
        *,
        full: bool,
    ) -> None:
        self._table, self._probed, self._variants, self._full = table, probed, variants, full
        self._probes_left = probes
        self._ops: dict[SiteName, _WatchedOp] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._current: tuple[Call, _WatchedOp] | None = None
        self._pending: weakref.WeakKeyDictionary[Slot, list[tuple[_WatchedOp, Geometry]]] = (
            weakref.WeakKeyDictionary()
        )
        # What ops read that is made from a tensor which waits: it lives until that is encoded.
        self._derived: dict[Slot, list[tuple[_WatchedOp, Slot, Tensor, int]]] = defaultdict(list)
        self._held: dict[SiteName, _CodeError] = {}
        self._weights: dict[int, weakref.ref[Tensor]] = {}

    # forward

    @torch.no_grad()
    def saved(self, use: Use, x: Tensor) -> None:
        """Records that an op saves x, which may carry an error."""
        if not self._full:
            return
        op, slot = self._op(use), use.view.slot
        waits = slot.value is not None and self._waits(op, slot, x)
        if not waits and slot.value is not None and not slot.exact:
            self._measure(op, slot, Geometry.of(x), x)
        elif not waits:
            self._pending.setdefault(slot, []).append((op, use.view.geometry))
        keys = keys_of(x, use.call)
        if not keys or not self._is_turn(op):
            return
        if can_probe(use.call):
            for key in keys:
                exact = x if key == RESULT else arguments(use.call)[key]
                op.copies[key] = exact.detach().clone()
                op.views[key] = use.view
        else:
            self._probed[op.name] += 1  # its turn passes, or no other would ever come

    @torch.no_grad()
    def held(self, slot: Slot, whole: Tensor, site: Site, codec: Codec | None) -> None:
        """Records that the slot has let go of `whole`.

        codec: if it holds a code, and not a recipe.
        """
        if not self._full or slot.exact:
            return
        if codec is not None:
            error = slot.restore_value(private=True).sub_(whole)
            trials = self._trials(whole, site)
            nbytes = 0 if slot.value is None else slot.value.nbytes
            self._held[site.name] = _CodeError(
                site, codec, whole.numel(), nbytes, energy(error), trials
            )
        for op, geometry in self._pending.pop(slot, ()):
            self._measure(op, slot, geometry, geometry.on(whole))
        for op, made, x, version in self._derived.pop(slot, ()):
            if version_of(x) == version and not self._waits(op, made, x):
                self._measure(op, made, Geometry.of(x), x)

    def curved(self, slot: Slot) -> None:
        """Records that a GELU or SiLU reads what is made of this slot.

        Its code must be fine enough for that.
        """
        held = self._held.get(slot.sites[-1].name) if slot.sites else None
        if held is None:
            return
        site = replace(held.site, curved=True)
        if at_precision_floor(held.codec, site) == held.codec:
            self._held[site.name] = replace(held, site=site)

    def ended(self, call: Call, out: Any) -> None:
        """Records that the op has its node in the graph now."""
        for arg in one_by_one(call_values(call)):
            if arg is not out:
                self._table.gradient.reads(arg, call)
            if is_weight(arg) and id(arg) not in self._weights:
                self._weights[id(arg)] = weakref.ref(arg)
                self._table.gradient.listen(arg)
        if self._current is None or self._current[0] is not call:
            return
        op, self._current = self._current[1], None
        out = out[0] if isinstance(out, tuple) else out
        if not isinstance(out, Tensor) or out.grad_fn is None:
            return
        out.grad_fn.register_prehook(self._reader(op, out.output_nr))
        if op.copies:
            self._probed[op.name] += 1
            self._probes_left -= 1
            copies, views, op.copies, op.views = op.copies, op.views, {}, {}
            weights = [weight for ref in self._weights.values() if (weight := ref()) is not None]
            linear = op.form is not None
            Probe(
                *(call, out.grad_fn, out.output_nr, copies, views, weights, op.take_measured),
                only_weights=linear,
            )

    def _op(self, use: Use) -> _WatchedOp:
        call = use.call
        if self._current is None or self._current[0] is not call:
            count = self._calls[use.module, call.name]
            self._calls[use.module, call.name] += 1
            name = SiteName(use.module, call.name, count)
            form = form_of(call)
            linear_in = () if form is None else filter(is_weight, call_values(call))
            weight = next((weakref.ref(arg) for arg in linear_in), None)
            op = self._ops[name] = _WatchedOp(name, form, weight)
            self._current = call, op
        return self._current[1]

    def _waits(self, op: _WatchedOp, slot: Slot, x: Tensor) -> bool:
        """Returns whether x is made from a tensor that waits; its error is measured after that."""
        root = next((root for root in roots_of(slot) if root is not slot and root.waits), None)
        if root is not None:
            self._derived[root].append((op, slot, x, version_of(x)))
        return root is not None

    def _measure(self, op: _WatchedOp, slot: Slot, geometry: Geometry, x: Tensor) -> None:
        """Measures the error of x, which lies in the slot's tensor where `geometry` says.

        What x is made from has a part each (`_parts`).
        """
        roots = [root for root in roots_of(slot) if root.sites]
        if not roots:  # of what is read exactly, nothing is counted
            return
        restored = slot.restore_value(private=True)
        error = geometry.within(slot.base, restored) - x
        op.folded = None if op.form is None else op.form.fold(error)
        total = energy(error)
        coded = [root for root in roots if root.sites[-1].name in self._held] or roots[:1]
        for root, part in zip(coded, self._parts(slot, restored, coded), strict=True):
            source = root.sites[-1].name
            op.energies[source] = op.energies.get(source, 0) + total * part
        if op.name.consumer in CHANNEL_NORMS:
            upper = slot.restore_side()
            upper = None if upper is None else geometry.within(slot.base, upper)
            known = None if slot.statistics is None else slot.statistics.rstd.flatten()
            rstd = known if known is not None and len(known) == x.shape[1] else None
            op.channels = channel_errors(error, x, upper, rstd)

    def _parts(
        self, slot: Slot, restored: Tensor, roots: Sequence[Slot]
    ) -> Sequence[Tensor | float]:
        """Returns which part of the error of `restored` comes from each of the roots.

        Of several, each is made noisier by as much as its code is, and the slot restored again.
        """
        found: list[Tensor] = []
        for root in roots if roots[1:] else ():
            own, before = root.restore_value(private=True), root.whole
            spread = (self._held[root.sites[-1].name].energy / max(own.numel(), 1)).sqrt()
            noise = torch.empty(own.shape, device=own.device)
            noise.normal_(generator=torch.Generator(own.device).manual_seed(len(found)))
            root.whole = own.add_(noise.mul_(spread))
            try:
                found.append(energy(slot.restore_value(private=True).sub_(restored)))
            finally:  # backward must never read the noisy one
                root.whole = before
        return parts_of(found)

    def _is_turn(self, op: _WatchedOp) -> bool:
        """Returns whether this op is to be probed: the least probed one of its kind.

        Ops without a closed form have most turns; the others are only checked now and then.
        """
        if op.copies:
            return True
        if not self._probes_left:
            return False
        probed, known = self._probed, self._table.ops
        linear = {name for name, other in known.items() if other.linear}
        turn = linear if self._table.steps % _CHECK_EVERY == 0 else known.keys() - linear
        kinds = {name.consumer for name, count in probed.items() if count}
        unseen = {name for name in known.keys() - linear if name.consumer not in kinds}
        turn = unseen or turn or set(known)  # of no kind all may be unknown
        return not turn or (op.name in turn and probed[op.name] <= min(probed[n] for n in turn))

    def _trials(self, whole: Tensor, site: Site) -> tuple[tuple[Codec, float, Tensor], ...]:
        if self._variants is None:
            return ()
        each = max(whole.numel() // max(len(whole), 1), 1)
        sample = whole[: -(-_SAMPLE // each)]
        trials = []
        for codec in self._variants(site):
            encoded = codec.encode(sample, 0, site.facts)
            error = energy(encoded.decode().sub_(sample)) / sample.numel()
            trials.append((codec, 8 * encoded.nbytes / sample.numel(), error))
        return tuple(trials)

    # backward

    def _reader(self, op: _WatchedOp, output: int) -> Callable[[Sequence[Tensor | None]], None]:
        @torch.no_grad()
        def read(grads: Sequence[Tensor | None]) -> None:
            grad = grads[output]
            if grad is None or second_pass.runs or not op.energies:
                return
            if op.channels is None:
                fine = torch.stack([*op.energies.values()]).sum()
                op.strength = torch.stack([fine, torch.zeros_like(fine)])
                unit = op.strength * grad.float().square().mean()
            else:
                op.strength = op.channels.mean(1)
                unit = channel_noise(op.channels, grad)
            op.unit = unit + (0 if op.unit is None else op.unit)
            if op.form is not None and op.folded is not None:
                closed = op.form.variance(op.folded, grad)
                op.closed = closed + (0 if op.closed is None else op.closed)

        return read

    # afterwards

    @property
    def lacks_backward(self) -> bool:
        """True if ops read codes, and backward came to none of them."""
        read = [op for op in self._ops.values() if op.energies]
        return bool(read) and all(op.unit is None for op in read)

    def deliver(self) -> tuple[dict[SiteName, CodeNoise], dict[SiteName, OpReading]]:
        """Returns all readings as numbers, in one transfer a device."""
        read = [op for op in self._ops.values() if op.energies and op.unit is not None]
        scalars: list[Tensor] = []
        for h in self._held.values():
            scalars += [h.energy, *(error for *_, error in h.trials)]
        for op in read:
            scalars += op.energies.values()
            scalars += _there(op.unit, op.strength, op.closed, op.measured)
        values = iter(torch.stack([s.double().cpu() for s in scalars]).tolist() if scalars else ())
        held = {}
        for name, h in self._held.items():
            size = next(values)
            trials = tuple(Trial(codec, bits, next(values)) for codec, bits, _ in h.trials)
            held[name] = CodeNoise(h.site, h.codec, h.numel, h.nbytes, size, trials)
        readings = {}
        for op in read:
            energies = {source: next(values) for source in op.energies}
            unit, strength = (next(values), next(values)), (next(values), next(values))
            closed = None if op.closed is None else next(values)
            measured = None if op.measured is None else (next(values), next(values))
            readings[op.name] = OpReading(energies, unit, strength, closed, measured, op.weight)
        return held, readings


def roots_of(slot: Slot) -> list[Slot]:
    """Returns all slots whose bytes a tensor comes from: its own, or those that it is made from."""
    found: dict[Slot, None] = {}
    seen, below = set(), [slot]
    while below:
        one = below.pop()
        if one in seen:
            continue
        seen.add(one)
        ready, source = getattr(one.value, "ready", None), getattr(one.value, "source", None)
        if ready is not None:
            below += reversed(ready.slots)
        elif source is not None:
            below.append(source)
        else:
            found[one] = None
    return list(found)


def parts_of(energies: Sequence[Tensor]) -> Sequence[Tensor | float]:
    """Returns the part that each of several energies has of their sum; equal ones if that is 0."""
    if len(energies) < 2:
        return [1.0]
    device = energies[0].device
    each = torch.stack([energy.to(device) for energy in energies]).double()
    total = each.sum()
    return list(torch.where(total > 0, each / total, 1 / len(each)))


def call_values(call: Call) -> tuple[Any, ...]:
    """Returns all arguments of a call."""
    return (*call.args, *call.kwargs.values())


def one_by_one(values: Iterable[Any]) -> Iterator[Any]:
    """Returns all of them, those in lists, too, as a GRU takes its weights."""
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)


def _there(*values: Tensor | None) -> list[Tensor]:
    return [part for value in values if value is not None for part in value.reshape(-1)]


CHANNEL_NORMS = ("batch_norm", "group_norm")


def channel_errors(error: Tensor, x: Tensor, upper: Tensor | None, rstd: Tensor | None) -> Tensor:
    """Returns v / s [2, C] of an error of x, both [N, C, ...]: of the upper code and of the lower.

    The weight's gradient, sum dY xhat, gets sum_c D_c v_c / s_c of it, where D_c is the sum of
    dY^2 over a channel, s_c the variance of x there, and v_c the mean of e^2. dx gets

        w / sqrt(s) / N (xhat sum dY e / sqrt(s)  +  e sum dY xhat / sqrt(s))

    and goes on to all layers below; its first term is proportional to the sum above. So the ratio
    of what a probe measures to this sum differs by a few times between the norms of a network; with
    |e|^2 |dY|^2 in its place it would differ by thousands.

    For values that a ReLU sets to zero and that have a coarse code (`codecs/sided.py`), e is large
    and dY mostly 0, so that only the second term is left. It is counted as a part of its own, which
    stays when the codes of the other values change. The formulas are those of batch norm; for group
    norm, s is taken over the batch, too.

    upper  1 where that is held, else 0; None: there is one code. `error` is overwritten then
    rstd   1 / sqrt(s) [C], if it is known
    """
    each = x.numel() / x.shape[1]
    both, lower = _squares(error), torch.zeros(x.shape[1], device=x.device)
    upper_mean = both / each
    if upper is not None:
        count = upper.float().sum(_dims_without_channel(x)).clamp(min=1)
        fine = _squares(error.mul_(upper))
        upper_mean, lower = fine / count, (both - fine).clamp(min=0) / each
    if rstd is None:
        spread = x.float().var(_dims_without_channel(x), correction=0)
        rstd = spread.clamp(min=torch.finfo(torch.float32).tiny).rsqrt()
    return torch.stack([upper_mean, lower]) * rstd.float().square()


def channel_noise(errors: Tensor, grad: Tensor) -> Tensor:
    """Returns sum_c D_c v_c / s_c of both parts [2].

    errors: v / s [2, C]; grad: dY [N, C, ...]
    """
    return errors @ _squares(grad)


def _squares(x: Tensor) -> Tensor:
    """The sum of squares of each channel [C], without a copy of x."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=_dims_without_channel(x), dtype=torch.float32)
    return norms.square()


def _dims_without_channel(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]
