"""A product of small matrices whose result stays in registers: four rows of sixteen columns.

    for each k:  c[r, :16] += a[r, k] * b[k, :16]        r = 0 .. 3

LLVM cannot vectorize such a loop by itself, since it does not know that a, b and c lie apart, and
so loads and stores c at each step. Written out as vector instructions, it reaches 105 to 120 GFLOP
a second on one core (AVX-512, products of 48 x 128 x 16 to 48 x 64 x 128), where batched products
of torch's reach 90, and loops over rows 30 to 60. What the machine lacks of a vector's width, LLVM
makes of several.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from elbowroom.kernels.numba.compiled import jit

ROWS, COLUMNS = 4, 16
_FLOAT, _INT = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, COLUMNS)
_FLAGS = "contract", "nsz"  # one rounding of a product and its sum, where the machine has that
_FIRST = ir.Constant(ir.VectorType(ir.IntType(32), COLUMNS), [0] * COLUMNS)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = 4
    return loaded


def _splat(builder: Any, value: Any) -> Any:
    """A vector of one value."""
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    only = builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(only, nothing, _FIRST)


@intrinsic
def multiply_tile(
    _: Any, c: Any, c_row: Any, a: Any, a_row: Any, a_k: Any, b: Any, b_k: Any, K: Any, add: Any
) -> Any:  # fmt: skip
    """Writes a [4, K] times b [K, 16] to c [4, 16], all float32; with `add`, adds it there.

    c, a, b: addresses. c_row, a_row, a_k, b_k: elements from one row, or k, to the next. K > 0.
    """

    def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        c, c_row, a, a_row, a_k, b, b_k, K, add = args
        width = ir.Constant(_INT, 4)
        c_row, a_row, a_k, b_k = (builder.mul(one, width) for one in (c_row, a_row, a_k, b_k))
        of_c, of_a = [c], [a]
        for _ in range(1, ROWS):
            of_c.append(builder.add(of_c[-1], c_row))
            of_a.append(builder.add(of_a[-1], a_row))
        names = "tile_before", "tile_begin", "tile_step", "tile_end"
        before, begin, step, end = (builder.append_basic_block(name) for name in names)
        entry = builder.block
        builder.cbranch(builder.icmp_signed("!=", add, ir.Constant(_INT, 0)), before, begin)

        builder.position_at_end(before)
        held = [_load(builder, one, _VECTOR) for one in of_c]
        builder.branch(begin)

        builder.position_at_end(begin)
        sums = []
        for one in held:
            total = builder.phi(_VECTOR)
            total.add_incoming(ir.Constant(_VECTOR, [0.0] * COLUMNS), entry)
            total.add_incoming(one, before)
            sums.append(total)
        builder.branch(step)

        builder.position_at_end(step)
        begins = [ir.Constant(_INT, 0), b, ir.Constant(_INT, 0), *sums]
        found = [builder.phi(one.type) for one in begins]
        k, at_b, at_a, *totals = found
        row = _load(builder, at_b, _VECTOR)
        made = []
        for one, total in zip(of_a, totals, strict=True):
            factor = _splat(builder, _load(builder, builder.add(one, at_a), _FLOAT))
            product = builder.fmul(factor, row, flags=_FLAGS)
            made.append(builder.fadd(total, product, flags=_FLAGS))
        after = builder.add(k, ir.Constant(_INT, 1))
        ends = [after, builder.add(at_b, b_k), builder.add(at_a, a_k), *made]
        for one, first, last in zip(found, begins, ends, strict=True):
            one.add_incoming(first, begin)
            one.add_incoming(last, step)
        builder.cbranch(builder.icmp_signed("<", after, K), step, end)

        builder.position_at_end(end)
        for address, total in zip(of_c, made, strict=True):
            store = builder.store(total, builder.inttoptr(address, _VECTOR.as_pointer()))
            store.align = 4
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 9), code


@jit
def whole_columns(n):
    """Return the least multiple of a tile's columns that is not below n."""
    return (n + COLUMNS - 1) // COLUMNS * COLUMNS


@jit
def whole_rows(n):
    """Return the least multiple of a tile's rows that is not below n."""
    return (n + ROWS - 1) // ROWS * ROWS


@jit
def multiply(c, c_row, a, a_row, a_k, b, b_column, b_k, M, N, K, add):
    """The same for c [M, N] in whole tiles; columns of b begin `b_column` elements apart by 16."""
    for j in range(0, N, COLUMNS):
        for i in range(0, M, ROWS):
            of_c, of_a = c + 4 * (i * c_row + j), a + 4 * i * a_row
            multiply_tile(of_c, c_row, of_a, a_row, a_k, b + 4 * (j // 16) * b_column, b_k, K, add)
