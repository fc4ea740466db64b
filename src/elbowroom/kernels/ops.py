"""Every operation once: its schema, its fake, and which backend serves it.

    op                                                    out
    pack_bits(x)                                          bits
    unpack_bits(bits, value, out!)
    masked(x, bits, out!)                                 x where the bit is set, else +0
    times_bits(x, bits, value, out!)                      x times value or 0
    sparse_pack(x)                                        bits, kept: what is not zero
    sparse_pack_into(x, kept!, spill!, used!)             bits; kept is what is not zero
    sparse_unpack(bits, kept, spill, out!, exact)
    narrow(x, dtype)                                      x as smaller integers; how many do not fit
    group_quantize(x, seed, levels, group_size)           codes, step, low
    dither_quantize(x, seed, levels, group_size)          codes, ranges, bounds
    nonzero_quantize(x, seed, levels, group_size)         bits, payload (size depends on x), bounds
    division_quantize(x, seed, levels, block, reach, maps)    codes, mean, scale, low
    sided_quantize(x, bits, seed, upper, lower, group_size, fold)
                                                          payload (size depends on bits), bounds
    fp8_quantize(x, group_size, fmt)                      codes, scale
    fdsr_quantize(x, seed, maps, block, levels, kept, dither)     payload, scales, codebook
    comet_quantize(x, grid, seed, rounding, aware, rows, columns, inner)
                                                          bits, headers, sizes, payload (depends)
    affine(x, scale, shift, inner, bits, out!)            x * scale + shift by channel; 0 for bit 0
    optimizer_step(params!, residuals!, grads, states!, rule, weights, kinds, rows, factors, seeds,
                   skip, steps)                           many parameters of one format
    advance(counters!, by)                                what they are then
    beyond(xs, limit)                                     1 if one has NaN or is larger, else 0
    fingerprint(xs, words)                                an int64 of so many words of each tensor
    moments_quantize(m, v, states!, kinds, row, seed)     an optimizer's states, [D, ...] each
    moments_dequantize(states, kinds, row, n)             m, v
    batch_norm_backward(grad, factor, inner, x!)          grad_weight, grad_bias; x is normalized,
    layer_norm_backward(grad, weight, rstd, x!)           and becomes the gradient of the input
    attention_backward(q, k, v, grad, mask, is_causal, factor, of_q!, of_k!, of_v!)
                                                          [batch, heads, tokens, width], any strides
    row_statistics(x, width)                              mean, variance, least, most of each row
    head_spread(x, width, sizes, strides, shares)         how long and wide the rows of heads are
    dropout(x, seed, p, out!)                             x / (1 - p) or 0, by counter

and a `_dequantize` for each `_quantize`, which writes `out`: the caller owns the memory of what is
restored and may reuse it (fresh pages cost more than decoding: docs/log.md). ! marks what an op
writes. Tensors are flat and contiguous; x is float32, bfloat16 or float16. Those in lists may have
any shape, and lie in any order, but without gaps.

`group`, `dither`, `nonzero` and `sided` do an affine in the same pass. With scale, shift [C] and
inner, what they quantize is x * scale + shift, not rounded to x's dtype; what they dequantize is
scaled and shifted before it is rounded, then made 0 where a bit of `mask` [ceil(N / 8)] is unset.
They can do a part, too: `out` begins with tile `first`, and ends with a tile, or with the tensor;
scale, shift and mask are those of all of it.

The seed of a codec's op is a number, or lies in a tensor on the device of x (int64 [1]): then a
CUDA graph that has captured a launch draws other noise each time, if the tensor has changed.

The size of the payload of `nonzero`, `sided` and `comet` depends on values, for which the host
waits on a GPU. Their `_quantize_into` takes its memory instead: `payload`, `spill` for what does
not fit there (reference/spill.py), and `used` [1] int64, which gets the size; a payload made so is
dequantized with its spill.

Each is a `torch.library` op defined by `define` + `impl`, which adds 1.6 us to a call where
`custom_op` adds 8.4 us (EPYC, torch 2.13, n = 11: benchmarks/kernels.py). On a CPU numba serves, on
CUDA Triton; what a backend cannot serve, for a reason that it gives and that is logged once, the
reference serves.
"""

import importlib
import logging
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from elbowroom.kernels import reference
from elbowroom.kernels.paused_clocks import uncounted
from elbowroom.kernels.specs import SPECS

_log = logging.getLogger("elbowroom.kernels")
# Any: neither `Library` nor its methods have types.
_library: Any = torch.library.Library("elbowroom", "DEF")  # type: ignore[no-untyped-call]


@cache
def _backend(name: str) -> ModuleType | None:
    """`elbowroom.kernels.<name>`, or None, logged once, where it cannot be imported."""
    try:
        with uncounted():
            return importlib.import_module(f"elbowroom.kernels.{name}")
    except ImportError as error:
        _log.warning(
            "backend %s is not available (%s); the plain torch reference serves instead",
            name,
            error,
        )
        return None


_watchers = torch._C._len_torch_dispatch_stack


def by_address(x: Tensor) -> ModuleType | None:
    """Returns kernels that take x by its address (`numba/by_address.py`); None: ops must serve it.

    They run on one thread, as its ops would. Nothing is seen of them by dispatch modes, by autograd
    and by torch.compile, so the caller knows that x is a plain tensor; a mode that is open shall
    see ops.
    """
    if x.dtype is not torch.float32 or not x.is_cpu or x.is_neg() or _watchers():
        return None
    kernels = _kernels_by_address()
    return kernels if kernels is not None and kernels.runs_serially(x.numel()) else None


@cache
def _kernels_by_address() -> ModuleType | None:
    return None if _backend("numba") is None else _backend("numba.by_address")


_given_up: set[tuple[str, str]] = set()  # (op, backend) that failed once


@cache
def _implementation(op: str, backend: str) -> Callable[..., Any]:
    found = None if (op, backend) in _given_up else getattr(_backend(backend), op, None)
    return cast(Callable[..., Any], found or getattr(reference, op))


def _serve(op: str, backend: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        try:
            return _implementation(op, backend)(*args)
        except _failures(backend) as error:
            _give_up(op, backend, error)
        return getattr(reference, op)(*args)

    return call


def _serve_seeded(op: str, at: int, backend: str) -> Callable[..., Any]:
    """Serves an op whose seed lies in a tensor; other backends than Triton read it on the host."""

    def by_number(*args: Any) -> Any:
        serve = getattr(reference, op) if backend == "reference" else _serve(op, backend)
        return serve(*args[:at], int(args[at]), *args[at + 1 :])

    def call(*args: Any) -> Any:
        if _implementation(op, backend) is getattr(reference, op):
            return by_number(*args)
        try:
            return _implementation(op, backend)(*args)
        except _failures(backend) as error:
            _give_up(op, backend, error)
        return by_number(*args)

    return call if backend == "triton" else by_number


def _failures(backend: str) -> tuple[type[Exception], ...]:
    """The errors by which a backend says, before a kernel has run, that it cannot serve.

    Never those of wrong arguments: they go to the caller.
    """
    return getattr(_backend(backend), "FAILURES", ())


def _give_up(op: str, backend: str, error: Exception) -> None:
    """Lets the reference serve `op` from now on: to fail again would mean to compile again."""
    if (op, backend) not in _given_up:
        _given_up.add((op, backend))
        _implementation.cache_clear()
        reason = f"{type(error).__name__}: {error}"
        _log.warning(
            "backend %s cannot serve %s (%s); the plain torch reference serves it from now on",
            *(backend, op, reason),
        )


for _op, _spec in SPECS.items():
    _library.define(_op + _spec.schema)
    _library.impl(_op, getattr(reference, _op), "CompositeExplicitAutograd")
    _library.impl(_op, _serve(_op, "numba"), "CPU")
    _library.impl(_op, _serve(_op, "triton"), "CUDA")
    _fake = _spec.outputs or (lambda *_: None)
    torch.library.register_fake(f"elbowroom::{_op}", _fake, lib=_library)
    if " int seed" in _spec.schema:
        _seeded, _at = f"{_op}.seeded", _spec.schema[: _spec.schema.index(" int seed")].count(",")
        _library.define(_seeded + _spec.schema.replace(" int seed", " Tensor seed"))
        _library.impl(_seeded, _serve_seeded(_op, _at, "reference"), "CompositeExplicitAutograd")
        _library.impl(_seeded, _serve_seeded(_op, _at, "numba"), "CPU")
        _library.impl(_seeded, _serve_seeded(_op, _at, "triton"), "CUDA")
        torch.library.register_fake(f"elbowroom::{_seeded}", _fake, lib=_library)

# The overload, not the packet: 2 us less a call. Untyped in torch.
_calls = torch.ops.elbowroom


def _by_seed(op: str) -> Callable[..., Any]:
    """Returns the op for a seed that is a number, or that lies in a tensor (int64 [1])."""
    of_number, of_tensor = getattr(_calls, op).default, getattr(_calls, op).seeded
    at = SPECS[op].schema[: SPECS[op].schema.index(" int seed")].count(",")

    def call(*args: Any) -> Any:
        return (of_tensor if isinstance(args[at], Tensor) else of_number)(*args)

    return call


pack_bits = cast(Callable[..., Tensor], _calls.pack_bits.default)
unpack_bits = cast(Callable[..., None], _calls.unpack_bits.default)
masked = cast(Callable[..., None], _calls.masked.default)
times_bits = cast(Callable[..., None], _calls.times_bits.default)
narrow = cast(Callable[..., tuple[Tensor, Tensor]], _calls.narrow.default)
places_pack = cast(Callable[..., tuple[Tensor, Tensor]], _calls.places_pack.default)
places_unpack = cast(Callable[..., None], _calls.places_unpack.default)
group_quantize = cast(Callable[..., tuple[Tensor, Tensor, Tensor]], _by_seed("group_quantize"))
group_dequantize = cast(Callable[..., None], _calls.group_dequantize.default)
dither_quantize = cast(Callable[..., tuple[Tensor, Tensor, Tensor]], _by_seed("dither_quantize"))
dither_dequantize = cast(Callable[..., None], _by_seed("dither_dequantize"))
batch_norm_backward = cast(Callable[..., tuple[Tensor, Tensor]], _calls.batch_norm_backward.default)
layer_norm_backward = cast(Callable[..., tuple[Tensor, Tensor]], _calls.layer_norm_backward.default)
attention_backward = cast(Callable[..., None], _calls.attention_backward.default)
row_statistics = cast(Callable[..., Tensor], _calls.row_statistics.default)
head_spread = cast(Callable[..., Tensor], _calls.head_spread.default)
nonzero_quantize = cast(Callable[..., tuple[Tensor, Tensor, Tensor]], _by_seed("nonzero_quantize"))
nonzero_quantize_into = cast(
    Callable[..., tuple[Tensor, Tensor]], _by_seed("nonzero_quantize_into")
)
nonzero_dequantize = cast(Callable[..., None], _by_seed("nonzero_dequantize"))
division_quantize = cast(
    Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]], _by_seed("division_quantize")
)
division_dequantize = cast(Callable[..., None], _by_seed("division_dequantize"))
sparse_pack = cast(Callable[..., tuple[Tensor, Tensor]], _calls.sparse_pack.default)
sparse_pack_into = cast(Callable[..., Tensor], _calls.sparse_pack_into.default)
sparse_unpack = cast(Callable[..., None], _calls.sparse_unpack.default)
sided_quantize = cast(Callable[..., tuple[Tensor, Tensor]], _by_seed("sided_quantize"))
sided_quantize_into = cast(Callable[..., Tensor], _by_seed("sided_quantize_into"))
sided_dequantize = cast(Callable[..., None], _by_seed("sided_dequantize"))
fp8_quantize = cast(Callable[..., tuple[Tensor, Tensor]], _calls.fp8_quantize.default)
fp8_dequantize = cast(Callable[..., None], _calls.fp8_dequantize.default)
fdsr_quantize = cast(Callable[..., tuple[Tensor, Tensor, Tensor]], _by_seed("fdsr_quantize"))
fdsr_dequantize = cast(Callable[..., None], _by_seed("fdsr_dequantize"))
comet_quantize = cast(
    Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]], _by_seed("comet_quantize")
)
comet_quantize_into = cast(
    Callable[..., tuple[Tensor, Tensor, Tensor]], _by_seed("comet_quantize_into")
)
comet_dequantize = cast(Callable[..., None], _by_seed("comet_dequantize"))
affine = cast(Callable[..., None], _calls.affine.default)
optimizer_step = cast(Callable[..., None], _calls.optimizer_step.default)
advance = cast(Callable[..., Tensor], _calls.advance.default)
beyond = cast(Callable[..., Tensor], _calls.beyond.default)
fingerprint = cast(Callable[..., Tensor], _calls.fingerprint.default)
moments_quantize = cast(Callable[..., None], _calls.moments_quantize.default)
moments_dequantize = cast(Callable[..., tuple[Tensor, Tensor]], _calls.moments_dequantize.default)
dropout = cast(Callable[..., None], _calls.dropout.default)
NAMES = tuple(SPECS)
