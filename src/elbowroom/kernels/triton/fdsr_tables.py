"""Tables of `Bands` and of the DCT's weights, as functions that compiled code can call.

    b  a `Bands`    p  a position    i_b  a band, 1.. (0 is the mean)    i_r  a run    i_s  a span
    h  a plane of the hash    kept  tiles of a group with a residual

Arguments and results are constants of the compiler.
"""

import triton

from elbowroom.kernels import bands

_COSINES = {B: bands.cosines(B) for B in bands.BLOCKS}
_SIGNS = bands.SIGNS
_PLANES = bands.PLANES


@triton.constexpr_function
def log2(n):
    return n.bit_length() - 1


@triton.constexpr_function
def power_of_two(n):
    """The least that is not below n."""
    return 1 << (n - 1).bit_length()


@triton.constexpr_function
def row_of(B, i):
    """The weights of a folded line of B elements, for its i-th coefficient."""
    return _COSINES[B][i][: B // 2 if i % 2 else B - B // 2]


@triton.constexpr_function
def column_of(B, j, odd):
    """The weights of the odd or of the even coefficients, for the j-th element."""
    return tuple(_COSINES[B][i][j] for i in range(odd, B, 2))


@triton.constexpr_function
def sign(p):
    return _SIGNS[p]


@triton.constexpr_function
def plane(h, p):
    return _PLANES[h][p]


@triton.constexpr_function
def payload_nbytes(b, kept):
    return b.nbytes(kept)


@triton.constexpr_function
def scale_count(b, kept):
    return b.scales(kept)


@triton.constexpr_function
def position_count(b):
    return len(b.order)


@triton.constexpr_function
def place(b, p):
    """Position -> row * B + column."""
    return b.order[p]


@triton.constexpr_function
def position(b, i):
    """Returns the position of row * B + column: the inverse of `place`."""
    return b.order.index(i)


@triton.constexpr_function
def band(b, p):
    return b.band[p]


@triton.constexpr_function
def band_start(b, i_b):
    """The first position of a band."""
    return b.band.index(i_b)


@triton.constexpr_function
def band_stop(b, i_b):
    return b.band.index(i_b) + b.band.count(i_b)


@triton.constexpr_function
def band_count(b):
    """Bands that are coded."""
    return b.bands


@triton.constexpr_function
def coded(b):
    return b.coded


@triton.constexpr_function
def cell(b):
    return b.cell


@triton.constexpr_function
def run_count(b):
    return len(b.runs)


@triton.constexpr_function
def run_start(b, i_r):
    return b.runs[i_r].start


@triton.constexpr_function
def run_size(b, i_r):
    return b.runs[i_r].stop - b.runs[i_r].start


@triton.constexpr_function
def run_levels(b, i_r):
    return b.runs[i_r].levels


@triton.constexpr_function
def run_nbytes(b, i_r):
    return b.run_nbytes(i_r)


@triton.constexpr_function
def span_count(b):
    return len(b.spans)


@triton.constexpr_function
def span_start(b, i_s):
    return b.spans[i_s][0]


@triton.constexpr_function
def span_size(b, i_s):
    return b.spans[i_s][1]
