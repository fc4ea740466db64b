"""Values that bits pick, moved together and apart: AVX-512's `compress` and `expand`.

16 values in one instruction each, where loops take two steps a value. `HAS` says whether numba
compiles for a CPU that has them; elsewhere callers keep to their loops. All three read and write
16 values at a place, whatever the mask: there must be room.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

WIDTH = 16

HAS = not (config.CPU_NAME or config.CPU_FEATURES) and bool(
    llvm.get_host_cpu_features().get("avx512f")
)
_VALUES = ir.VectorType(ir.FloatType(), WIDTH)
_MASK = ir.VectorType(ir.IntType(1), WIDTH)


@intrinsic
def compress(_typing: Any, source: Any, i: Any, mask: Any, kept: Any, j: Any) -> Any:
    """kept[j], kept[j + 1], ... <- those of source[i : i + 16] whose bit is set in mask, uint16."""

    def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        values, (_, _, bits, _, _) = _load(context, builder, source, args[0], args[1]), args
        picked = _call(builder, "compress", values, values, builder.bitcast(bits, _MASK))
        _store(context, builder, picked, kept, args[3], args[4])
        return context.get_dummy_value()

    return types.void(source, types.int64, types.uint16, kept, types.int64), code


@intrinsic
def expand(_typing: Any, up: Any, i: Any, low: Any, j: Any, mask: Any, out: Any, k: Any) -> Any:
    """Inverse of `compress`.

    out[k : k + 16] <- the next of up[i:] where a bit is set, else of low[j:].
    """

    def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[4], _MASK)
        above = _load(context, builder, up, args[0], args[1])
        below = _load(context, builder, low, args[2], args[3])
        below = _call(builder, "expand", below, below, builder.not_(bits))
        both = _call(builder, "expand", above, below, bits)
        _store(context, builder, both, out, args[5], args[6])
        return context.get_dummy_value()

    return types.void(up, types.int64, low, types.int64, types.uint16, out, types.int64), code


@intrinsic
def nonzeros(_typing: Any, source: Any, i: Any) -> Any:
    """A uint16 with a bit for each of source[i : i + 16] that is not 0; NaN is not."""

    def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        values = _load(context, builder, source, *args)
        is_set = builder.fcmp_unordered("!=", values, ir.Constant(_VALUES, None))
        return builder.bitcast(is_set, ir.IntType(WIDTH))

    return types.uint16(source, types.int64), code


def _load(context: Any, builder: Any, kind: Any, values: Any, at: Any) -> Any:
    loaded = builder.load(_place(context, builder, kind, values, at))
    loaded.align = 4
    return loaded


def _store(context: Any, builder: Any, vector: Any, kind: Any, values: Any, at: Any) -> None:
    builder.store(vector, _place(context, builder, kind, values, at)).align = 4


def _place(context: Any, builder: Any, kind: Any, values: Any, at: Any) -> Any:
    data = context.make_array(kind)(context, builder, values).data
    return builder.bitcast(builder.gep(data, [at]), _VALUES.as_pointer())


def _call(builder: Any, name: str, values: Any, otherwise: Any, mask: Any) -> Any:
    of = ir.FunctionType(_VALUES, [_VALUES, _VALUES, _MASK])
    full = f"llvm.x86.avx512.mask.{name}.v{WIDTH}f32"
    return builder.call(get_or_insert_function(builder.module, of, full), [values, otherwise, mask])
