"""Ops that stand in compiled graphs: masks as bits, codes of floats with their seed, and moves.

    draw()                                                   seed   a fresh one each run
    pack_mask(x, order)                                      bits
    unpack_mask(bits, size, order)                           x, bool
    unpack_bytes(bits, size, order)                          x, uint8: what loops on a CPU read fast
    encode(x, order, seed, number, levels, group_size)       codes, ranges, bounds
    decode(codes, ranges, bounds, seed, number, ..., size, order, dtype)   x~
    offload(x, order)                                        x in a file, or in host memory
    fetch(away, size, order, dtype, device)                  x

All are functional, and call the kernels of `kernels/ops.py`. A value is read in the order of its
dimensions in memory (`order`, outermost first), as the plan has it: Inductor chooses the layout of
a convolution's tensors after the plan is made, and may pass any.

The seed is drawn when forward runs, from a counter of this process: PyTorch's generators are not
touched. It is a number in host memory on every device, so that nothing waits for a GPU.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from elbowroom.compiled.away import in_file
from elbowroom.kernels import ops, outputs

_MASK = (1 << 64) - 1
_library: Any = torch.library.Library("elbowroom_graph", "DEF")  # type: ignore[no-untyped-call]
_CODES = "Tensor codes, Tensor ranges, Tensor bounds"
_GRID = "Tensor seed, int number, int levels, int group_size"
_SCHEMAS = {
    "draw": "() -> Tensor",
    "pack_mask": "(Tensor x, int[] order) -> Tensor",
    "unpack_mask": "(Tensor bits, SymInt[] size, int[] order) -> Tensor",
    "unpack_bytes": "(Tensor bits, SymInt[] size, int[] order) -> Tensor",
    "encode": f"(Tensor x, int[] order, {_GRID}) -> (Tensor, Tensor, Tensor)",
    "decode": f"({_CODES}, {_GRID}, SymInt[] size, int[] order, ScalarType dtype) -> Tensor",
    "offload": "(Tensor x, int[] order) -> Tensor",
    "fetch": "(Tensor away, SymInt[] size, int[] order, ScalarType dtype, Device device) -> Tensor",
}


class _Draws:
    """The count of seeds that this process has drawn, and where they start."""

    def __init__(self) -> None:
        self.base, self.count = 0, 0
        self._lock = threading.Lock()

    def restart(self, base: int) -> None:
        """Draw the sequence of another base from its beginning."""
        with self._lock:
            self.base, self.count = base, 0

    def next(self) -> int:
        with self._lock:
            self.count += 1
            return seed_of(seed_of(self.base, rank) if (rank := _rank()) else self.base, self.count)

    @contextmanager
    def started_at(self, base: int) -> Iterator[None]:
        """Draws another base's sequence inside this context, from its beginning."""
        with self._lock:
            before, self.base, self.count = (self.base, self.count), base, 0
        try:
            yield
        finally:
            with self._lock:
                self.base, self.count = before


def seed_of(base: int, number: int) -> int:
    """A seed of 63 bits: a bijective hash of base and number."""
    x = (base + number * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) & (_MASK >> 1)


def _rank() -> int:
    """Returns the rank of this process, by which each process draws noise of its own."""
    distributed = torch.distributed
    return (
        distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    )


draws = _Draws()


def _draw() -> Tensor:
    return torch.tensor(draws.next(), dtype=torch.int64)


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
    strides, step = [0] * len(size), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= size[dim]
    return torch.empty_strided(list(size), strides, dtype=dtype, device=device or x.device)


def _pack_mask(x: Tensor, order: Sequence[int]) -> Tensor:
    return ops.pack_bits(_flat(x, order))


def _unpack_mask(bits: Tensor, size: Sequence[int], order: Sequence[int]) -> Tensor:
    out = _laid_out(bits, size, order, torch.bool)
    ops.unpack_bits(bits, 1.0, _flat(out, order))
    return out


def _unpack_bytes(bits: Tensor, size: Sequence[int], order: Sequence[int]) -> Tensor:
    return _unpack_mask(bits, size, order).view(torch.uint8)


def _encode(
    x: Tensor, order: Sequence[int], seed: Tensor, number: int, levels: int, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    own = seed_of(int(seed), number)
    return ops.dither_quantize(_flat(x, order), own, levels, group_size)


def _decode(
    codes: Tensor,
    ranges: Tensor,
    bounds: Tensor,
    seed: Tensor,
    number: int,
    levels: int,
    group_size: int,
    size: Sequence[int],
    order: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    out = _laid_out(codes, size, order, dtype)
    own = seed_of(int(seed), number)
    ops.dither_dequantize(codes, ranges, bounds, own, levels, group_size, _flat(out, order))
    return out


def _fake_encode(
    x: Tensor, order: Sequence[int], seed: Tensor, number: int, levels: int, group_size: int
) -> Any:
    return outputs.dither(x, levels, group_size)


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


_IMPLEMENTATIONS: dict[str, tuple[Any, Any]] = {
    "draw": (_draw, lambda: torch.empty((), dtype=torch.int64)),
    "pack_mask": (_pack_mask, lambda x, order: outputs.bits(x)),
    "unpack_mask": (
        _unpack_mask,
        lambda bits, size, order: _laid_out(bits, size, order, torch.bool),
    ),
    "unpack_bytes": (
        _unpack_bytes,
        lambda bits, size, order: _laid_out(bits, size, order, torch.uint8),
    ),
    "encode": (_encode, _fake_encode),
    "decode": (
        _decode,
        lambda codes, *rest: _laid_out(codes, rest[-3], rest[-2], rest[-1]),
    ),
    "offload": (_offload, _fake_offload),
    "fetch": (_fetch, _laid_out),
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
PACK_MASK, UNPACK_MASK = _graph.pack_mask.default, _graph.unpack_mask.default
UNPACK_BYTES = _graph.unpack_bytes.default
OFFLOAD, FETCH = _graph.offload.default, _graph.fetch.default
