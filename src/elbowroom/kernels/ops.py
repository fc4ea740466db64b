"""Every operation once: its schema, its fake, and which backend serves it.

    op                                                    out
    pack_bits(x)                                          bits
    unpack_bits(bits, value, out!)
    masked(x, bits, out!)                                 x where the bit is set, else +0
    times_bits(x, bits, value, out!)                      x times value or 0
    narrow(x, dtype)                                      x as smaller integers; how many do not fit
    group_quantize(x, seed, levels, group_size)           codes, step, low
    dither_quantize(x, seed, levels, group_size)          codes, ranges, bounds
    nonzero_quantize(x, seed, levels, group_size)         bits, payload (size depends on x), bounds
    division_quantize(x, seed, levels, block, reach, maps)    codes, mean, scale, low
    sided_quantize(x, bits, seed, upper, lower, group_size)
                                                          payload (size depends on bits), bounds
    fp8_quantize(x, group_size, fmt)                      codes, scale
    fdsr_quantize(x, seed, maps, block, levels, kept, dither)     payload, scales, codebook
    comet_quantize(x, grid, seed, rounding, aware, rows, columns, inner)
                                                          bits, headers, sizes, payload (depends)
    affine(x, scale, shift, inner, bits, out!)            x * scale + shift by channel; 0 for bit 0
    optimizer_step(param!, residual!, grad, states!, rule, weights, kinds, row, factors, seed)
    moments_quantize(m, v, states!, kinds, row, seed)     an optimizer's states, [D, ...] each
    moments_dequantize(states, kinds, row, n)             m, v
    dither_batch_norm_backward(grad, ..., factor, inner, out!)    grad_weight, grad_bias; out is
    dither_layer_norm_backward(grad, ..., weight, rstd, out!)     the gradient of what was encoded
    dropout(x, seed, p, out!)                             x / (1 - p) or 0, by counter

and a `_dequantize` for each `_quantize`, which writes `out`: the caller owns the memory of what is
restored and may reuse it (fresh pages cost more than decoding: docs/log.md). ! marks what an op
writes. Tensors are flat and contiguous; x is float32, bfloat16 or float16.

`group`, `dither`, `nonzero` and `sided` do an affine in the same pass. With scale, shift [C] and
inner, what they quantize is x * scale + shift, not rounded to x's dtype; what they dequantize is
scaled and shifted before it is rounded, then made 0 where a bit of `mask` [ceil(N / 8)] is unset.

Each is a `torch.library` op defined by `define` + `impl`, which adds 1.6 us to a call where
`custom_op` adds 8.4 us (EPYC, torch 2.13, n = 11: benchmarks/kernels.py). On a CPU numba serves, on
CUDA Triton; what a backend cannot serve, for a reason that it gives and that is logged once, the
reference serves.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from elbowroom.kernels import reference
from elbowroom.kernels.bands import WORDS, bands_of, tiles_of
from elbowroom.kernels.layout import blocks as runs
from elbowroom.kernels.layout import groups, packed_nbytes, tiles
from elbowroom.kernels.maps import blocks, ranges
from elbowroom.kernels.windows import window_of

_log = logging.getLogger("elbowroom.kernels")
# Any: neither `Library` nor its methods have types.
_library: Any = torch.library.Library("elbowroom", "DEF")  # type: ignore[no-untyped-call]

_CHANNELS = "Tensor? scale=None, Tensor? shift=None, int inner=1"
_RESTORED = f"Tensor(a!) out, {_CHANNELS}, Tensor? mask=None"
_QUANTIZE = (
    f"(Tensor x, int seed, int levels, int group_size, {_CHANNELS}) -> (Tensor, Tensor, Tensor)"
)
_DITHERED = "Tensor codes, Tensor ranges, Tensor bounds, int seed, int levels, int group_size"
_FDSR = "int seed, int[] maps, int block, int[] levels, int kept, bool dither"
_STATES = "Tensor(c!) m_codes, Tensor(d!) m_bounds, Tensor(e!) v_codes, Tensor(f!) v_bounds"
_SCHEMAS = {
    "pack_bits": "(Tensor x) -> Tensor",
    "unpack_bits": "(Tensor bits, float value, Tensor(a!) out) -> ()",
    "masked": "(Tensor x, Tensor bits, Tensor(a!) out) -> ()",
    "times_bits": "(Tensor x, Tensor bits, float value, Tensor(a!) out) -> ()",
    "narrow": "(Tensor x, ScalarType dtype) -> (Tensor, Tensor)",
    "places_pack": "(Tensor x, int[] window, int[] maps) -> (Tensor, Tensor)",
    "places_unpack": "(Tensor packed, int[] window, int[] maps, Tensor(a!) out) -> ()",
    "group_quantize": _QUANTIZE,
    "group_dequantize": (
        f"(Tensor codes, Tensor step, Tensor low, int levels, int group_size, {_RESTORED}) -> ()"
    ),
    "dither_quantize": _QUANTIZE,
    "dither_dequantize": f"({_DITHERED}, {_RESTORED}) -> ()",
    "dither_batch_norm_backward": (
        f"(Tensor grad, {_DITHERED}, Tensor factor, int inner, Tensor(a!) out) -> (Tensor, Tensor)"
    ),
    "dither_layer_norm_backward": (
        f"(Tensor grad, {_DITHERED}, Tensor weight, Tensor rstd, Tensor(a!) out) -> "
        "(Tensor, Tensor)"
    ),
    "nonzero_quantize": _QUANTIZE,
    "nonzero_dequantize": (
        "(Tensor bits, Tensor payload, Tensor bounds, int seed, int levels, int group_size, "
        f"{_RESTORED}) -> ()"
    ),
    "division_quantize": (
        "(Tensor x, int seed, int levels, int block, int reach, int[] maps) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "division_dequantize": (
        "(Tensor codes, Tensor mean, Tensor scale, Tensor low, int seed, int levels, int block, "
        "int reach, int[] maps, bool dither, Tensor(a!) out) -> ()"
    ),
    "sided_quantize": (
        f"(Tensor x, Tensor bits, int seed, int upper, int lower, int group_size, {_CHANNELS}) -> "
        "(Tensor, Tensor)"
    ),
    "sided_dequantize": (
        "(Tensor bits, Tensor payload, Tensor bounds, int seed, int upper, int lower, "
        f"int group_size, {_RESTORED}) -> ()"
    ),
    "fp8_quantize": "(Tensor x, int group_size, str fmt) -> (Tensor, Tensor)",
    "fp8_dequantize": "(Tensor codes, Tensor scale, int group_size, str fmt, Tensor(a!) out) -> ()",
    "optimizer_step": (
        f"(Tensor(a!) param, Tensor(b!)? residual, Tensor grad, {_STATES}, str rule, str weights, "
        "str m_kind, str v_kind, int row, float[] factors, int seed) -> ()"
    ),
    "moments_quantize": (
        f"(Tensor m, Tensor v, {_STATES}, str m_kind, str v_kind, int row, int seed) -> ()"
    ),
    "moments_dequantize": (
        "(Tensor m_codes, Tensor m_bounds, Tensor v_codes, Tensor v_bounds, str m_kind, "
        "str v_kind, int row, int n) -> (Tensor, Tensor)"
    ),
    "affine": (
        "(Tensor x, Tensor scale, Tensor shift, int inner, Tensor? bits, Tensor(a!) out) -> ()"
    ),
    "dropout": "(Tensor x, int seed, float p, Tensor(a!) out) -> ()",
    "fdsr_quantize": f"(Tensor x, {_FDSR}) -> (Tensor, Tensor, Tensor)",
    "fdsr_dequantize": (
        f"(Tensor payload, Tensor scales, Tensor codebook, {_FDSR}, Tensor(a!) out) -> ()"
    ),
    "comet_quantize": (
        "(Tensor x, Tensor grid, int seed, str rounding, bool aware, int rows, int columns, "
        "int inner) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "comet_dequantize": (
        "(Tensor bits, Tensor headers, Tensor sizes, Tensor payload, Tensor grid, int seed, "
        "str rounding, int rows, int columns, int inner, Tensor(a!) out) -> ()"
    ),
}


@cache
def _backend(name: str) -> ModuleType | None:
    """`elbowroom.kernels.<name>`, or None, logged once, where it cannot be imported."""
    try:
        return importlib.import_module(f"elbowroom.kernels.{name}")
    except ImportError as error:
        _log.warning(
            "backend %s is not available (%s); the plain torch reference serves instead",
            name,
            error,
        )
        return None


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


def _failures(backend: str) -> tuple[type[Exception], ...]:
    """The errors by which a backend says, before a kernel has run, that it cannot serve.

    Never those of wrong arguments: they go to the caller.
    """
    return getattr(_backend(backend), "FAILURES", ())


def _give_up(op: str, backend: str, error: Exception) -> None:
    """From now on the reference serves `op`: to fail again would mean to compile again."""
    if (op, backend) not in _given_up:
        _given_up.add((op, backend))
        _implementation.cache_clear()
        reason = f"{type(error).__name__}: {error}"
        _log.warning(
            "backend %s cannot serve %s (%s); the plain torch reference serves it from now on",
            *(backend, op, reason),
        )


def _fake_codes(x: Tensor, levels: int) -> Tensor:
    return x.new_empty(packed_nbytes(levels, x.numel()), dtype=torch.uint8)


def _fake_group(
    x: Tensor, seed: int, levels: int, group_size: int, *channels: Any
) -> tuple[Tensor, Tensor, Tensor]:
    step = x.new_empty(groups(x.numel(), group_size), dtype=torch.bfloat16)
    return _fake_codes(x, levels), step, torch.empty_like(step)


def _fake_dither(
    x: Tensor, seed: int, levels: int, group_size: int, *channels: Any
) -> tuple[Tensor, Tensor, Tensor]:
    ranges = x.new_empty(groups(x.numel(), group_size), 2, dtype=torch.uint8)
    return _fake_codes(x, levels), ranges, x.new_empty(tiles(x.numel()), 2, dtype=torch.bfloat16)


def _fake_nonzero(
    x: Tensor, seed: int, levels: int, group_size: int, *channels: Any
) -> tuple[Tensor, Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    bits = x.new_empty(-(-x.numel() // 8), dtype=torch.uint8)
    return (
        bits,
        x.new_empty(size, dtype=torch.uint8),
        x.new_empty(tiles(x.numel()), 2, dtype=torch.bfloat16),
    )


def _fake_division(
    x: Tensor, seed: int, levels: int, block: int, reach: int, maps: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean = x.new_empty(blocks(maps, block).entries, dtype=torch.bfloat16)
    scale = x.new_empty(ranges(maps, block, reach).entries, dtype=torch.bfloat16)
    return _fake_codes(x, levels), mean, scale, torch.empty_like(scale)


def _fake_sided(
    x: Tensor, bits: Tensor, seed: int, upper: int, lower: int, group_size: int, *channels: Any
) -> tuple[Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    bounds = x.new_empty(2 * tiles(x.numel()), 2, dtype=torch.bfloat16)
    return x.new_empty(size, dtype=torch.uint8), bounds


def _fake_fp8(x: Tensor, group_size: int, fmt: str) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(groups(x.numel(), group_size), dtype=torch.bfloat16)
    return torch.empty_like(x, dtype=torch.uint8), scale


def _fake_fdsr(
    x: Tensor,
    seed: int,
    maps: Sequence[int],
    block: int,
    levels: Sequence[int],
    kept: int,
    dither: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    b = bands_of(block, tuple(levels))
    groups = -(-tiles_of(maps, block) // b.lanes)
    return (
        x.new_empty(groups, b.nbytes(kept), dtype=torch.uint8),
        x.new_empty(groups, b.scales(kept), dtype=torch.bfloat16),
        x.new_empty(WORDS if kept else 0, b.rest, dtype=torch.int8),
    )


def _fake_comet(
    x: Tensor, grid: Tensor, seed: int, rounding: str, aware: bool, *maps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return (
        x.new_empty(-(-x.numel() // 8) if aware else 0, dtype=torch.uint8),
        x.new_empty(runs(x.numel()), dtype=torch.uint8),
        x.new_empty(tiles(x.numel()), dtype=torch.int16),
        x.new_empty(size, dtype=torch.uint8),
    )


def _fake_moments(m_codes: Tensor, *states: Any) -> tuple[Tensor, Tensor]:
    n = states[-1]
    return m_codes.new_empty(n, dtype=torch.float32), m_codes.new_empty(n, dtype=torch.float32)


def _fake_norm_backward(grad: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    by_channel = settings[-3]  # the factor, or the weight
    return torch.empty_like(by_channel), torch.empty_like(by_channel)


# An op that writes `out` returns nothing, and its fake does nothing.
_FAKES: dict[str, Callable[..., Any]] = {
    "pack_bits": lambda x: x.new_empty(-(-x.numel() // 8), dtype=torch.uint8),
    "narrow": lambda x, dtype: (
        torch.empty_like(x, dtype=dtype),
        x.new_empty((), dtype=torch.int64),
    ),
    "places_pack": lambda x, window, maps: (
        x.new_empty(window_of(window).nbytes(x.numel()), dtype=torch.uint8),
        x.new_empty((), dtype=torch.int64),
    ),
    "group_quantize": _fake_group,
    "dither_quantize": _fake_dither,
    "dither_batch_norm_backward": _fake_norm_backward,
    "dither_layer_norm_backward": _fake_norm_backward,
    "nonzero_quantize": _fake_nonzero,
    "division_quantize": _fake_division,
    "sided_quantize": _fake_sided,
    "fp8_quantize": _fake_fp8,
    "fdsr_quantize": _fake_fdsr,
    "comet_quantize": _fake_comet,
    "moments_dequantize": _fake_moments,
}

for _op, _schema in _SCHEMAS.items():
    _library.define(_op + _schema)
    _library.impl(_op, getattr(reference, _op), "CompositeExplicitAutograd")
    _library.impl(_op, _serve(_op, "numba"), "CPU")
    _library.impl(_op, _serve(_op, "triton"), "CUDA")
    torch.library.register_fake(f"elbowroom::{_op}", _FAKES.get(_op, lambda *_: None), lib=_library)

# The overload, not the packet: 2 us less a call. Untyped in torch.
_calls = torch.ops.elbowroom
pack_bits = cast(Callable[..., Tensor], _calls.pack_bits.default)
unpack_bits = cast(Callable[..., None], _calls.unpack_bits.default)
masked = cast(Callable[..., None], _calls.masked.default)
times_bits = cast(Callable[..., None], _calls.times_bits.default)
narrow = cast(Callable[..., tuple[Tensor, Tensor]], _calls.narrow.default)
places_pack = cast(Callable[..., tuple[Tensor, Tensor]], _calls.places_pack.default)
places_unpack = cast(Callable[..., None], _calls.places_unpack.default)
group_quantize = cast(Callable[..., tuple[Tensor, Tensor, Tensor]], _calls.group_quantize.default)
group_dequantize = cast(Callable[..., None], _calls.group_dequantize.default)
dither_quantize = cast(Callable[..., tuple[Tensor, Tensor, Tensor]], _calls.dither_quantize.default)
dither_dequantize = cast(Callable[..., None], _calls.dither_dequantize.default)
dither_batch_norm_backward = cast(
    Callable[..., tuple[Tensor, Tensor]], _calls.dither_batch_norm_backward.default
)
dither_layer_norm_backward = cast(
    Callable[..., tuple[Tensor, Tensor]], _calls.dither_layer_norm_backward.default
)
nonzero_quantize = cast(
    Callable[..., tuple[Tensor, Tensor, Tensor]], _calls.nonzero_quantize.default
)
nonzero_dequantize = cast(Callable[..., None], _calls.nonzero_dequantize.default)
division_quantize = cast(
    Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]], _calls.division_quantize.default
)
division_dequantize = cast(Callable[..., None], _calls.division_dequantize.default)
sided_quantize = cast(Callable[..., tuple[Tensor, Tensor]], _calls.sided_quantize.default)
sided_dequantize = cast(Callable[..., None], _calls.sided_dequantize.default)
fp8_quantize = cast(Callable[..., tuple[Tensor, Tensor]], _calls.fp8_quantize.default)
fp8_dequantize = cast(Callable[..., None], _calls.fp8_dequantize.default)
fdsr_quantize = cast(Callable[..., tuple[Tensor, Tensor, Tensor]], _calls.fdsr_quantize.default)
fdsr_dequantize = cast(Callable[..., None], _calls.fdsr_dequantize.default)
comet_quantize = cast(
    Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]], _calls.comet_quantize.default
)
comet_dequantize = cast(Callable[..., None], _calls.comet_dequantize.default)
affine = cast(Callable[..., None], _calls.affine.default)
optimizer_step = cast(Callable[..., None], _calls.optimizer_step.default)
moments_quantize = cast(Callable[..., None], _calls.moments_quantize.default)
moments_dequantize = cast(Callable[..., tuple[Tensor, Tensor]], _calls.moments_dequantize.default)
dropout = cast(Callable[..., None], _calls.dropout.default)
NAMES = tuple(_SCHEMAS)
