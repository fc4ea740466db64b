"""How the loops are compiled, and the types and sizes that all of them share.

Each works on one short slice, in a loop that LLVM can vectorize. Slices, not offsets: numba checks
an index that may be negative, and that check keeps a loop scalar.
"""

import numba
import numpy as np

u8, u16, u32, u64, i32, f32 = np.uint8, np.uint16, np.uint32, np.uint64, np.int32, np.float32

TILE = 2048
CHUNK = 16  # tiles a work item of the parallel loop: scratch is allocated once for all of them
MOST_ITEMS = 64  # work items, where each has sums of its own

jit = numba.njit(cache=True, error_model="numpy", nogil=True)
# For functions that are called many times by one loop and make no array: they count no references,
# since two threads that count on the same arrays wait for each other (kernels/numba/step.py), and
# LLVM puts them where they are called, since an array is seven words of arguments: half the time.
leaf = numba.njit(cache=True, error_model="numpy", nogil=True, _nrt=False, forceinline=True)
# For sums over floats: a vector loop only if their order may change. NaN and Inf mean what they do.
summing = numba.njit(
    cache=True, error_model="numpy", nogil=True, fastmath={"reassoc", "nsz", "contract"}
)
inlined = numba.njit(inline="always", error_model="numpy")
