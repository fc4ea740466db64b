"""What each op of `ops.py` takes and returns, in `torch.library`'s words."""

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
SCHEMAS = {
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
    "dither_dequantize": f"({_DITHERED}, {_RESTORED}, int first=0) -> ()",
    "nonzero_quantize": _QUANTIZE,
    "nonzero_dequantize": (
        "(Tensor bits, Tensor payload, Tensor bounds, int seed, int levels, int group_size, "
        f"{_RESTORED}, int first=0, {_SPILL}) -> ()"
    ),
    "nonzero_quantize_into": (
        f"(Tensor x, int seed, int levels, int group_size, {_INTO}, {_CHANNELS}) "
        "-> (Tensor, Tensor)"
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
        "(Tensor x, Tensor bits, int seed, int upper, int lower, int group_size, int fold, "
        f"{_CHANNELS}) -> (Tensor, Tensor)"
    ),
    "sided_dequantize": (
        "(Tensor bits, Tensor payload, Tensor bounds, int seed, int upper, int lower, "
        f"int group_size, int fold, {_RESTORED}, int first=0, {_SPILL}) -> ()"
    ),
    "sided_quantize_into": (
        "(Tensor x, Tensor bits, int seed, int upper, int lower, int group_size, int fold, "
        f"{_INTO}, {_CHANNELS}) -> Tensor"
    ),
    "sparse_pack_into": (
        "(Tensor x, Tensor(a!) kept, Tensor(b!) spill, Tensor(c!) used) -> Tensor"
    ),
    "sparse_unpack": "(Tensor bits, Tensor kept, Tensor spill, Tensor(a!) out) -> ()",
    "batch_norm_backward": (
        "(Tensor grad, Tensor factor, int inner, Tensor(a!) x) -> (Tensor, Tensor)"
    ),
    "layer_norm_backward": (
        "(Tensor grad, Tensor weight, Tensor rstd, Tensor(a!) x) -> (Tensor, Tensor)"
    ),
    "fp8_quantize": "(Tensor x, int group_size, str fmt) -> (Tensor, Tensor)",
    "fp8_dequantize": "(Tensor codes, Tensor scale, int group_size, str fmt, Tensor(a!) out) -> ()",
    "optimizer_step": (
        "(Tensor(a!)[] params, Tensor(b!)[] residuals, Tensor[] grads, Tensor(c!)[] m_codes, "
        "Tensor(d!)[] m_bounds, Tensor(e!)[] v_codes, Tensor(f!)[] v_bounds, str rule, "
        "str weights, str m_kind, str v_kind, int[] rows, Tensor factors, int[] seeds, "
        "Tensor? skip) -> ()"
    ),
    "advance": "(Tensor(a!)[] counters, int by) -> Tensor",
    "beyond": "(Tensor[] xs, float limit) -> Tensor",
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
        f"str rounding, int rows, int columns, int inner, Tensor(a!) out, {_SPILL}) -> ()"
    ),
    "comet_quantize_into": (
        "(Tensor x, Tensor grid, int seed, str rounding, bool aware, int rows, int columns, "
        f"int inner, {_INTO}) -> (Tensor, Tensor, Tensor)"
    ),
}
