"""Arithmetic that stays in bytes: numba's own goes on in 64 bits, with an eighth of the lanes."""

from typing import Any

from numba import types
from numba.extending import intrinsic


def _in_bytes(name: str) -> Any:
    """The LLVM instruction `name` on two uint8; what does not fit in one is lost."""

    def operation(context: Any, x: Any, y: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, name)(*args)

        return types.uint8(types.uint8, types.uint8), generate

    return intrinsic(operation)


left, right, times = _in_bytes("shl"), _in_bytes("lshr"), _in_bytes("mul")
