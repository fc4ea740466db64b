"""Ops that stand in compiled graphs: codes of saved values with their seed, moves, and attention.

    draw(device)                                             seed   a fresh one each run
    encode(x, order, coding, seed, number)                   buffers
    decode(buffers, coding, seed, number, size, order, dtype)       x~
    offload(x, order)                                        x in a file, or in host memory
    fetch(away, size, order, dtype, device)                  x
    attention_backward(grad, q, k, v, mask, is_causal, scale)   gradients of q, k and v

All are functional. A coding names a codec and what is known of the values (`coding_name`); the ops
run the form that it declares (`Codec.graph_form`). A value is read in the order of its dimensions
in memory (`order`, outermost first), as the plan has it: Inductor chooses the layout of a
convolution's tensors after the plan is made, and may pass any.

The seed is drawn when forward runs, from a counter: PyTorch's generators are not touched. On a CPU
the process counts. On a GPU the device does, so that a CUDA graph, which runs no Python, draws
another seed at each launch; the n-th seed of a device is the n-th of a CPU.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from elbowroom.codecs import Codec, Facts
from elbowroom.codecs.base import Layout
from elbowroom.codecs.facts import NOTHING
from elbowroom.codecs.graph_form import GraphForm, Seed
from elbowroom.codecs.names import setting_name, setting_named
from elbowroom.compiled.away import in_file
from elbowroom.kernels import aten, attention

_MASK = (1 << 64) - 1
_library: Any = torch.library.Library("elbowroom_graph", "DEF")  # type: ignore[no-untyped-call]
_CODING = "str coding, Tensor? seed, int number"
_SCHEMAS = {
    "draw": "(Device device) -> Tensor",
    "encode": f"(Tensor x, int[] order, {_CODING}) -> Tensor[]",
    "decode": f"(Tensor[] buffers, {_CODING}, SymInt[] size, int[] order, ScalarType dtype)"
    " -> Tensor",
    "offload": "(Tensor x, int[] order) -> Tensor",
    "fetch": "(Tensor away, SymInt[] size, int[] order, ScalarType dtype, Device device) -> Tensor",
    "attention_backward": "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal"
    ", float? scale) -> (Tensor, Tensor, Tensor)",
}


def coding_name(codec: Codec, facts: Facts = NOTHING) -> str:
    """Names a codec's setting, and what is known of the values that it encodes."""
    known = {k: v for k, v in asdict(facts).items() if v is not None and v is not False}
    return setting_name(codec) + (f" | {json.dumps(known)}" if known else "")


@cache
def coding_named(coding: str) -> tuple[Codec, Facts]:
    """The inverse of `coding_name`."""
    setting, _, known = coding.partition(" | ")
    return setting_named(setting), Facts(**json.loads(known)) if known else NOTHING


def form_of(coding: str, size: Sequence[int], order: Sequence[int]) -> GraphForm:
    """Returns the form of a coding for a value of this size."""
    return _known_form(coding, tuple(size), tuple(order))


@lru_cache(maxsize=4096)
def _known_form(coding: str, size: tuple[int, ...], order: tuple[int, ...]) -> GraphForm:
    form = coding_named(coding)[0].graph_form(_facts_of(coding, size, order))
    assert form is not None, f"{coding} has no form for graphs"
    return form


def layout_of(x: Tensor, order: Sequence[int], coding: str) -> Layout:
    """Returns what the buffers of a value are."""
    facts = _facts_of(coding, x.shape, order)
    return coding_named(coding)[0]._layout(x.numel(), x.dtype, facts)


def _facts_of(coding: str, size: Sequence[int], order: Sequence[int]) -> Facts:
    codec, facts = coding_named(coding)
    return codec._seen(tuple(size), tuple(_strides(size, order)), facts)


class _Draws:
    """The seeds that this process has drawn: how many, and where they start.

    Each GPU has a count of its own, in its memory: base and count, int64 [2].
    """

    def __init__(self) -> None:
        self.base, self.count = 0, 0
        self._devices: dict[torch.device, Tensor] = {}
        self._lock = threading.Lock()

    def restart(self, base: int) -> None:
        """Draw the sequence of another base from its beginning."""
        with self._lock:
            self._restart(base)

    def next(self) -> int:
        with self._lock:
            self.count += 1
            return seed_of(_of_this_rank(self.base), self.count)

    def next_on(self, device: torch.device) -> Tensor:
        """Draws on a device, which counts for itself: int64 [1], and no number of the host's."""
        counter = self._devices.get(device)
        if counter is None:
            counter = self.prepare(device)
        counter[1].add_(1)
        return aten.seed_of(counter[:1], counter[1:])

    def prepare(self, device: torch.device) -> Tensor:
        """Makes the counter of a device, which must be older than any CUDA graph that draws."""
        with self._lock, torch.inference_mode(False), torch.no_grad(), unset_fake_temporarily():
            if device not in self._devices:
                counter = torch.zeros(2, dtype=torch.int64, device=device)
                self._devices[device] = counter
                _set(counter, self.base)
            return self._devices[device]

    @contextmanager
    def started_at(self, base: int) -> Iterator[None]:
        """Draws another base's sequence inside this context, from its beginning."""
        with self._lock:
            before = self.base, self.count
            counters = {device: counter.clone() for device, counter in self._devices.items()}
            self._restart(base)
        try:
            yield
        finally:
            with self._lock:
                self.base, self.count = before
                for device, counter in self._devices.items():
                    if device in counters:
                        counter.copy_(counters[device])
                    else:  # it began to draw in here
                        _set(counter, self.base)

    def _restart(self, base: int) -> None:
        self.base, self.count = base, 0
        for counter in self._devices.values():
            _set(counter, base)


def _set(counter: Tensor, base: int) -> None:
    """Starts a device's count, without waiting for the device."""
    counter[0].fill_((_of_this_rank(base) + 2**63) % 2**64 - 2**63)
    counter[1].zero_()


def seed_of(base: int, number: int) -> int:
    """A seed of 63 bits: a bijective hash of base and number."""
    x = (base + number * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) & (_MASK >> 1)


def _of_this_rank(base: int) -> int:
    """Returns a base of this process's own, so that no two processes draw the same noise."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return base
    rank = distributed.get_rank()
    return seed_of(base, rank) if rank else base


draws = _Draws()


def _draw(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.tensor([draws.next()], dtype=torch.int64)
    return draws.next_on(device)


def _own(seed: Tensor | None, number: int) -> Seed:
    """The seed of one code."""
    if seed is None:
        return 0
    if seed.device.type == "cpu":
        return seed_of(int(seed), number)
    return aten.seed_of(seed, number)


def _flat(x: Tensor, order: Sequence[int]) -> Tensor:
    """The elements of x [...] with its dimensions in this order, [N]; no copy if they lie so."""
    return x.permute(list(order)).reshape(-1)


def _laid_out(
    x: Tensor,
    size: Sequence[int],
    order: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Tensor:
    """Fresh memory for this size whose dimensions lie in this order; device None: that of x."""
    strides = _strides(size, order)
    return torch.empty_strided(list(size), strides, dtype=dtype, device=device or x.device)


def _strides(size: Sequence[int], order: Sequence[int]) -> list[int]:
    strides, step = [0] * len(size), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= size[dim]
    return strides


def _encode(
    x: Tensor, order: Sequence[int], coding: str, seed: Tensor | None, number: int
) -> list[Tensor]:
    if not x.numel():
        return _fake_encode(x, order, coding, seed, number)
    form = form_of(coding, x.shape, order)
    return list(form.quantize(_flat(x, order), _own(seed, number)))


def _decode(
    buffers: Sequence[Tensor],
    coding: str,
    seed: Tensor | None,
    number: int,
    size: Sequence[int],
    order: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    out = _laid_out(buffers[0], size, order, dtype)
    if out.numel():
        form = form_of(coding, size, order)
        form.dequantize(tuple(buffers), _own(seed, number), _flat(out, order))
    return out


def _fake_encode(
    x: Tensor, order: Sequence[int], coding: str, seed: Tensor | None, number: int
) -> list[Tensor]:
    return [x.new_empty(one.shape, dtype=one.dtype) for one in layout_of(x, order, coding)]


def _offload(x: Tensor, order: Sequence[int]) -> Tensor:
    flat = _flat(x, order).view(torch.uint8)
    if x.device.type == "cpu":
        return in_file(flat)
    # On this stream: what fetches it comes later on the same one.
    out = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
    return out.copy_(flat, non_blocking=True)


def _fetch(
    away: Tensor,
    size: Sequence[int],
    order: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    out = _laid_out(away, size, order, dtype, device)
    _flat(out, order).view(torch.uint8).copy_(away, non_blocking=True)
    return out


def _fake_offload(x: Tensor, order: Sequence[int]) -> Tensor:
    return torch.empty((x.numel() * x.dtype.itemsize,), dtype=torch.uint8, device="cpu")


def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> attention.Three:
    into = _fake_attention_backward(grad, q, k, v)
    with torch.no_grad():
        return attention.gradients(
            attention.AttentionArguments(q, k, v, mask, is_causal, scale), grad, into
        )


def _fake_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *settings: Any
) -> attention.Three:
    """The memory of the results, which lie as those of PyTorch's own op do."""
    of_q, of_k, of_v = (
        x.new_empty([x.shape[i] for i in (0, 2, 1, 3)]).transpose(1, 2) for x in (q, k, v)
    )
    return of_q, of_k, of_v


_IMPLEMENTATIONS: dict[str, tuple[Any, Any]] = {
    "draw": (_draw, lambda device: torch.empty((1,), dtype=torch.int64, device=device)),
    "encode": (_encode, _fake_encode),
    "decode": (_decode, lambda buffers, *rest: _laid_out(buffers[0], rest[-3], rest[-2], rest[-1])),
    "offload": (_offload, _fake_offload),
    "fetch": (_fetch, _laid_out),
    "attention_backward": (_attention_backward, _fake_attention_backward),
}
for _name, _schema in _SCHEMAS.items():
    _implementation, _fake = _IMPLEMENTATIONS[_name]
    # Inductor may pass tensors in any layout: each op states how it reads them. A seed must never
    # be shared by two calls, nor made when the graph is compiled.
    _tags = (torch.Tag.flexible_layout,)
    if _name == "draw":
        _tags = (torch.Tag.nondeterministic_seeded,)
    _library.define(_name + _schema, tags=_tags)
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"elbowroom_graph::{_name}", _fake, lib=_library)

_graph = cast(Any, torch.ops.elbowroom_graph)
DRAW, ENCODE, DECODE = _graph.draw.default, _graph.encode.default, _graph.decode.default
OFFLOAD, FETCH = _graph.offload.default, _graph.fetch.default
ATTENTION_BACKWARD = _graph.attention_backward.default
