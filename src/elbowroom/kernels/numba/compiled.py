"""Options by which the loops are compiled, and the types and sizes that all of them share.

Each works on one short slice, in a loop that LLVM can vectorize. Slices, not offsets: numba checks
an index that may be negative, and that check keeps a loop scalar.
"""

import numba
import numpy as np

u8, u16, u32, u64, i32, f32 = np.uint8, np.uint16, np.uint32, np.uint64, np.int32, np.float32

TILE = 2048
CHUNK = 16  # tiles a work item of the parallel loop: scratch is allocated once for all of them
MOST_ITEMS = 64  # work items, where each has sums of its own

# They make no array, and so count no references: counting those of slices took half of an encoding
# on one core, and two threads that count on the same arrays wait for each other. Beside them, what
# gives an array back, or makes one, must count (`counted`); parallel loops alone call that.
_uncounted = {"cache": True, "error_model": "numpy", "nogil": True, "_nrt": False}
jit = numba.njit(**_uncounted)
counted = numba.njit(cache=True, error_model="numpy", nogil=True)
# For functions that are called many times by one loop: LLVM puts them where they are called, since
# an array is seven words of arguments, which is half of the time of a short one.
leaf = numba.njit(forceinline=True, **_uncounted)
# For sums over floats: a vector loop only if their order may change. NaN and Inf mean what they do.
summing = numba.njit(fastmath={"reassoc", "nsz", "contract"}, **_uncounted)
# For a line or two of scalars: numba infers the types of all that it inlines anew, and of what that
# inlines, so functions of functions take it many seconds.
inlined = numba.njit(inline="always", error_model="numpy")
