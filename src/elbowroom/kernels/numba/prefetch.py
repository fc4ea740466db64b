"""Asking for memory before it is needed.

A loop that reads a page of one array, then a page of another, is too short on each for the
processor to guess what comes next. Nothing is checked: a place beyond an array does no harm.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from elbowroom.kernels.numba.compiled import leaf, u64

LINE = 64  # bytes


@intrinsic
def prefetch(_typing: Any, array: Any, place: Any) -> Any:
    """Ask for the line that holds array[place]."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, args[0]).data
        at = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [at.type, number, number, number])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [at.type], kind)
        builder.call(ask, [at, number(0), number(3), number(1)])  # to read; keep near; data
        return context.get_dummy_value()

    return types.void(array, types.uint64), code


@leaf
def prefetch_run(array, at, n):
    """Ask for array[at .. at + n]."""
    step = u64(LINE // array.itemsize)
    for o in range((n + step - u64(1)) // step):
        prefetch(array, at + o * step)
