"""Eight bytes of a uint8 array at any place, as one little-endian word.

numpy has no view that starts between two elements. Nothing is checked: the caller leaves room for
eight bytes behind the place.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

_WORD = ir.IntType(64)


@intrinsic
def load8(_typing: Any, array: Any, place: Any) -> Any:
    """array [n] uint8, place -> uint64."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _pointer(context, builder, signature.args[0], *args[:2])
        return builder.load(at, align=1)

    return types.uint64(array, types.intp), code


@intrinsic
def store8(_typing: Any, array: Any, place: Any, word: Any) -> Any:
    """array [place .. place + 8) <- the uint64 word."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(context, builder, signature.args[0], *args[:2]), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint64), code


def _pointer(context: Any, builder: Any, kind: Any, array: Any, place: Any) -> Any:
    data = make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [place]), _WORD.as_pointer())
