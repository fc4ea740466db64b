"""Arithmetic that stays as wide as its operands, and so keeps all lanes of a vector.

numba's own goes on in 64 bits: an eighth of the lanes for bytes, half of them for 32 bits where
LLVM cannot take it back (in a sum over a loop, and where a value is read twice, as in a hash).
"""

from typing import Any

from numba import types
from numba.extending import intrinsic


def _two(kind: Any, build: Any) -> Any:
    """A function of two values of type `kind`; what does not fit in one is lost."""

    def operation(context: Any, x: Any, y: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return build(builder, *args)

        return kind(kind, kind), generate

    return intrinsic(operation)


def _instruction(kind: Any, name: str) -> Any:
    return _two(kind, lambda builder, x, y: getattr(builder, name)(x, y))


def _chosen(kind: Any, order: str) -> Any:
    return _two(kind, lambda builder, x, y: builder.select(builder.icmp_signed(order, x, y), x, y))


# uint8
left, right, times = (_instruction(types.uint8, name) for name in ("shl", "lshr", "mul"))
# uint32
xor32, right32, times32, plus32 = (
    _instruction(types.uint32, name) for name in ("xor", "lshr", "mul", "add")
)
# int32
least, most = _chosen(types.int32, "<"), _chosen(types.int32, ">")
left32 = _instruction(types.int32, "shl")
