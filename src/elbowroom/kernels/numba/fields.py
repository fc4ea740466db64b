"""Bit fields of a word moved together and apart: x86's `pext` and `pdep`, or eight steps.

A mask here has the lowest r bits of some of its eight bytes: eight codes of r bits, of which some
count. `extract` puts those side by side from bit 0, `deposit` puts them back.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from elbowroom.kernels.numba.bits import COUNT
from elbowroom.kernels.numba.compiled import inlined, u64


def _has_instructions() -> bool:
    """Returns whether numba compiles for a CPU with fast instructions.

    Those of the first two Zens are slow.
    """
    if config.CPU_NAME or config.CPU_FEATURES:
        return False
    slow = llvm.get_host_cpu_name() in ("znver1", "znver2")
    return bool(llvm.get_host_cpu_features().get("bmi2")) and not slow


def _instruction(name: str) -> Any:
    """An LLVM intrinsic of two 64-bit words."""

    def typed(_typing: Any, word: Any, mask: Any) -> Any:
        def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            of = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * 2)
            return builder.call(get_or_insert_function(builder.module, of, name), args)

        return types.uint64(types.uint64, types.uint64), code

    return intrinsic(typed)


@inlined
def extract_in_steps(word, mask):
    found, at = u64(0), u64(0)
    for i in range(8):
        field = (mask >> u64(8 * i)) & u64(255)
        found |= ((word >> u64(8 * i)) & field) << at
        at += COUNT[field]
    return found


@inlined
def deposit_in_steps(word, mask):
    found, at = u64(0), u64(0)
    for i in range(8):
        field = (mask >> u64(8 * i)) & u64(255)
        found |= ((word >> at) & field) << u64(8 * i)
        at += COUNT[field]
    return found


extract: Any = extract_in_steps
deposit: Any = deposit_in_steps
if _has_instructions():
    extract, deposit = _instruction("llvm.x86.bmi.pext.64"), _instruction("llvm.x86.bmi.pdep.64")
