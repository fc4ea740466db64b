"""Each op of `ops.py`, declared once: its schema, and the allocation of its outputs.

An op that writes into its arguments returns nothing. If the size of an output depends on values,
the fake of the op has an output of dynamic size (`torch.library`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elbowroom.kernels import outputs


class OpSpec(NamedTuple):
    """schema: as `torch.library` takes it. outputs: allocates the outputs; None: there are none."""

    schema: str
    outputs: Callable[..., Any] | None = None


def _dynamic(x: Tensor) -> Tensor:
    """Allocates bytes whose number depends on values."""
    return outputs.bytes_of(x, torch.library.get_ctx().new_dynamic_size())


def _some(x: Tensor) -> Tensor:
    """Allocates those elements of x that values pick."""
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


def _lost(x: Tensor) -> Tensor:
    """Allocates the count of values that did not fit."""
    return x.new_empty((), dtype=torch.int64)


def _like_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _two_moments(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(n, dtype=torch.float32), x.new_empty(n, dtype=torch.float32)


_CHANNELS = "Tensor? scale=None, Tensor? shift=None, int inner=1"
_RESTORED = f"Tensor(a!) out, {_CHANNELS}, Tensor? mask=None"
_QUANTIZE = (
    f"(Tensor x, int seed, int levels, int group_size, {_CHANNELS}) -> (Tensor, Tensor, Tensor)"
)
_INTO = "Tensor(a!) payload, Tensor(b!) spill, Tensor(c!) used"
_SPILL = "Tensor? spill=None"
_DITHERED = "Tensor codes, Tensor ranges, Tensor bounds, int seed, int levels, int group_size"
_FDSR = "int seed, int[] maps, int block, int[] levels, int kept, bool dither"
_STATES = "Tensor(c!) m_codes, Tensor(d!) m_bounds, Tensor(e!) v_codes, Tensor(f!) v_bounds"
SPECS: dict[str, OpSpec] = {
    "pack_bits": OpSpec("(Tensor x) -> Tensor", outputs.bits),
    "unpack_bits": OpSpec("(Tensor bits, float value, Tensor(a!) out) -> ()"),
    "masked": OpSpec("(Tensor x, Tensor bits, Tensor(a!) out) -> ()"),
    "times_bits": OpSpec("(Tensor x, Tensor bits, float value, Tensor(a!) out) -> ()"),
    "narrow": OpSpec(
        "(Tensor x, ScalarType dtype) -> (Tensor, Tensor)",
        lambda x, dtype: (outputs.narrow(x, dtype), _lost(x)),
    ),
    "places_pack": OpSpec(
        "(Tensor x, int[] window, int[] maps) -> (Tensor, Tensor)",
        lambda x, window, maps: (outputs.places(x, window), _lost(x)),
    ),
    "places_unpack": OpSpec("(Tensor packed, int[] window, int[] maps, Tensor(a!) out) -> ()"),
    "group_quantize": OpSpec(_QUANTIZE, lambda x, seed, *settings: outputs.group(x, *settings[:2])),
    "group_dequantize": OpSpec(
        f"(Tensor codes, Tensor step, Tensor low, int levels, int group_size, {_RESTORED}, "
        "int first=0) -> ()"
    ),
    "dither_quantize": OpSpec(
        _QUANTIZE, lambda x, seed, *settings: outputs.dither(x, *settings[:2])
    ),
    "dither_dequantize": OpSpec(f"({_DITHERED}, {_RESTORED}, int first=0) -> ()"),
    "nonzero_quantize": OpSpec(
        _QUANTIZE, lambda x, *_: (outputs.bits(x), _dynamic(x), outputs.bounds(x))
    ),
    "nonzero_dequantize": OpSpec(
        "(Tensor bits, Tensor payload, Tensor bounds, int seed, int levels, int group_size, "
        f"{_RESTORED}, int first=0, {_SPILL}) -> ()"
    ),
    "nonzero_quantize_into": OpSpec(
        f"(Tensor x, int seed, int levels, int group_size, {_INTO}, {_CHANNELS}) "
        "-> (Tensor, Tensor)",
        lambda x, *_: (outputs.bits(x), outputs.bounds(x)),
    ),
    "division_quantize": OpSpec(
        "(Tensor x, int seed, int levels, int block, int reach, int[] maps) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        lambda x, seed, *settings: outputs.division(x, *settings),
    ),
    "division_dequantize": OpSpec(
        "(Tensor codes, Tensor mean, Tensor scale, Tensor low, int seed, int levels, int block, "
        "int reach, int[] maps, bool dither, Tensor(a!) out) -> ()"
    ),
    "sided_quantize": OpSpec(
        "(Tensor x, Tensor bits, int seed, int upper, int lower, int group_size, int fold, "
        f"{_CHANNELS}) -> (Tensor, Tensor)",
        lambda x, *_: (_dynamic(x), outputs.bounds(x, 2)),
    ),
    "sided_dequantize": OpSpec(
        "(Tensor bits, Tensor payload, Tensor bounds, int seed, int upper, int lower, "
        f"int group_size, int fold, {_RESTORED}, int first=0, {_SPILL}) -> ()"
    ),
    "sided_quantize_into": OpSpec(
        "(Tensor x, Tensor bits, int seed, int upper, int lower, int group_size, int fold, "
        f"{_INTO}, {_CHANNELS}) -> Tensor",
        lambda x, *_: outputs.bounds(x, 2),
    ),
    "sparse_pack": OpSpec("(Tensor x) -> (Tensor, Tensor)", lambda x: (outputs.bits(x), _some(x))),
    "sparse_pack_into": OpSpec(
        "(Tensor x, Tensor(a!) kept, Tensor(b!) spill, Tensor(c!) used) -> Tensor",
        lambda x, *_: outputs.bits(x),
    ),
    "sparse_unpack": OpSpec(
        "(Tensor bits, Tensor kept, Tensor spill, Tensor(a!) out, bool exact=False) -> ()"
    ),
    "batch_norm_backward": OpSpec(
        "(Tensor grad, Tensor factor, int inner, Tensor(a!) x) -> (Tensor, Tensor)",
        lambda grad, by_channel, *_: _like_twice(by_channel),
    ),
    "layer_norm_backward": OpSpec(
        "(Tensor grad, Tensor weight, Tensor rstd, Tensor(a!) x) -> (Tensor, Tensor)",
        lambda grad, by_channel, *_: _like_twice(by_channel),
    ),
    "attention_backward": OpSpec(
        "(Tensor q, Tensor k, Tensor v, Tensor grad, Tensor? mask, bool is_causal, float factor, "
        "Tensor(a!) of_q, Tensor(b!) of_k, Tensor(c!) of_v) -> ()"
    ),
    "row_statistics": OpSpec("(Tensor x, int width) -> Tensor", outputs.row_statistics),
    "head_spread": OpSpec(
        "(Tensor x, int width, int[] sizes, int[] strides, bool shares) -> Tensor",
        lambda x, width, sizes, *_: outputs.head_spread(x, sizes),
    ),
    "fp8_quantize": OpSpec(
        "(Tensor x, int group_size, str fmt) -> (Tensor, Tensor)",
        lambda x, group_size, fmt: outputs.fp8(x, group_size),
    ),
    "fp8_dequantize": OpSpec(
        "(Tensor codes, Tensor scale, int group_size, str fmt, Tensor(a!) out) -> ()"
    ),
    "optimizer_step": OpSpec(
        "(Tensor(a!)[] params, Tensor(b!)[] residuals, Tensor[] grads, Tensor(c!)[] m_codes, "
        "Tensor(d!)[] m_bounds, Tensor(e!)[] v_codes, Tensor(f!)[] v_bounds, str rule, "
        "str weights, str m_kind, str v_kind, int[] rows, Tensor factors, int[] seeds, "
        "Tensor? skip, Tensor? steps=None) -> ()"
    ),
    "advance": OpSpec(
        "(Tensor(a!)[] counters, int by) -> Tensor",
        lambda counters, by: torch.empty(len(counters), dtype=torch.float32),
    ),
    "beyond": OpSpec(
        "(Tensor[] xs, float limit) -> Tensor",
        lambda xs, limit: xs[0].new_empty((), dtype=torch.int32),
    ),
    "fingerprint": OpSpec(
        "(Tensor[] xs, int[] words) -> Tensor",
        lambda xs, words: torch.empty(len(xs), dtype=torch.int64, device="cpu"),
    ),
    "moments_quantize": OpSpec(
        f"(Tensor m, Tensor v, {_STATES}, str m_kind, str v_kind, int row, int seed) -> ()"
    ),
    "moments_dequantize": OpSpec(
        "(Tensor m_codes, Tensor m_bounds, Tensor v_codes, Tensor v_bounds, str m_kind, "
        "str v_kind, int row, int n) -> (Tensor, Tensor)",
        lambda m_codes, *states: _two_moments(m_codes, states[-1]),
    ),
    "affine": OpSpec(
        "(Tensor x, Tensor scale, Tensor shift, int inner, Tensor? bits, Tensor(a!) out) -> ()"
    ),
    "dropout": OpSpec("(Tensor x, int seed, float p, Tensor(a!) out) -> ()"),
    "fdsr_quantize": OpSpec(
        f"(Tensor x, {_FDSR}) -> (Tensor, Tensor, Tensor)",
        lambda x, seed, *settings: outputs.fdsr(x, *settings[:4]),
    ),
    "fdsr_dequantize": OpSpec(
        f"(Tensor payload, Tensor scales, Tensor codebook, {_FDSR}, Tensor(a!) out) -> ()"
    ),
    "comet_quantize": OpSpec(
        "(Tensor x, Tensor grid, int seed, str rounding, bool aware, int rows, int columns, "
        "int inner) -> (Tensor, Tensor, Tensor, Tensor)",
        lambda x, grid, seed, rounding, aware, *_: (*outputs.comet(x, aware=aware), _dynamic(x)),
    ),
    "comet_dequantize": OpSpec(
        "(Tensor bits, Tensor headers, Tensor sizes, Tensor payload, Tensor grid, int seed, "
        f"str rounding, int rows, int columns, int inner, Tensor(a!) out, {_SPILL}) -> ()"
    ),
    "comet_quantize_into": OpSpec(
        "(Tensor x, Tensor grid, int seed, str rounding, bool aware, int rows, int columns, "
        f"int inner, {_INTO}) -> (Tensor, Tensor, Tensor)",
        lambda x, grid, seed, rounding, aware, *_: outputs.comet(x, aware=aware),
    ),
}
