"""The DCT of a group of tiles (specification: `reference/transform.py`).

A group's elements lie in one of two orders, flat:

    rows      [B, lanes, B]   row, tile, column: a tile's row is side by side, as it is in memory
    raster    [B, B, lanes]   row, column, tile

Down the rows a transform is the same for every tile and column, and runs along all of them; the one
across goes from one order to the other. A whole line of B numbers stays in registers: B and the
number of lanes are constants where `forward` and `backward` are inlined, so their tests of B cost
nothing, and what they load and store lies at known distances, which LLVM needs to vectorize. LLVM
inlines them (`leaf`): the code is as fast as what numba inlines, which takes it six times as long.
"""

from elbowroom.kernels.numba.compiled import jit, leaf, u64


@jit
def coefficients(x, tables, t, y):
    """y, a raster <- the DCT of x, in rows; t is scratch."""
    even, odd = tables.even, tables.odd
    if tables.block == 8:
        forward_both(8, 32, x, even, odd, t, y)
    elif tables.block == 7:
        forward_both(7, 32, x, even, odd, t, y)
    else:
        forward_both(4, 128, x, even, odd, t, y)


@jit
def elements(y, tables, t, x):
    """The inverse of `coefficients`."""
    even_t, odd_t = tables.even_t, tables.odd_t
    if tables.block == 8:
        backward_both(8, 32, y, even_t, odd_t, t, x)
    elif tables.block == 7:
        backward_both(7, 32, y, even_t, odd_t, t, x)
    else:
        backward_both(4, 128, y, even_t, odd_t, t, x)


@leaf
def forward_both(B, L, x, even, odd, t, y):
    forward(B, B * L, even, odd, x, 0, B * L, 1, t, 0, B * L, 1)
    for i in range(B):
        forward(B, L, even, odd, t, i * B * L, 1, B, y, i * B * L, L, 1)


@leaf
def backward_both(B, L, y, even_t, odd_t, t, x):
    backward(B, B * L, even_t, odd_t, y, 0, B * L, 1, t, 0, B * L, 1)
    for i in range(B):
        backward(B, L, even_t, odd_t, t, i * B * L, L, 1, x, i * B * L, 1, B)


@leaf
def forward(B, n, even, odd, x, x_first, x_step, x_next, y, y_first, y_step, y_next):
    """n transforms of B numbers: each `step` apart, the first ones of them `next`."""
    H, E = B // 2, B - B // 2
    for o in range(n):
        a, b, c, d, e, f, g, h = load(B, x, u64(x_first + o * x_next), u64(x_step))
        if B == 8:
            s0, s1, s2, s3 = a + h, b + g, c + f, d + e
            d0, d1, d2, d3 = a - h, b - g, c - f, d - e
        elif B == 7:
            s0, s1, s2, s3 = a + g, b + f, c + e, d
            d0, d1, d2, d3 = a - g, b - f, c - e, d
        else:
            s0, s1, s2, s3 = a + d, b + c, c, d
            d0, d1, d2, d3 = a - d, b - c, c, d
        a, b = weighted(E, even, 0, s0, s1, s2, s3), weighted(H, odd, 0, d0, d1, d2, d3)
        c, d = weighted(E, even, 1, s0, s1, s2, s3), weighted(H, odd, 1, d0, d1, d2, d3)
        if B > 4:
            e, f = weighted(E, even, 2, s0, s1, s2, s3), weighted(H, odd, 2, d0, d1, d2, d3)
            g = weighted(E, even, 3, s0, s1, s2, s3)
        if B > 7:
            h = weighted(H, odd, 3, d0, d1, d2, d3)
        store(B, y, u64(y_first + o * y_next), u64(y_step), a, b, c, d, e, f, g, h)


@leaf
def backward(B, n, even_t, odd_t, y, y_first, y_step, y_next, x, x_first, x_step, x_next):
    """The inverse of `forward`."""
    H, E = B // 2, B - B // 2
    for o in range(n):
        a, b, c, d, e, f, g, h = load(B, y, u64(y_first + o * y_next), u64(y_step))
        s0, d0 = weighted(E, even_t, 0, a, c, e, g), weighted(H, odd_t, 0, b, d, f, h)
        s1, d1 = weighted(E, even_t, 1, a, c, e, g), weighted(H, odd_t, 1, b, d, f, h)
        s2, s3, d2, d3 = s0, s0, d0, d0
        if B > 4:
            s2, d2 = weighted(E, even_t, 2, a, c, e, g), weighted(H, odd_t, 2, b, d, f, h)
            s3 = weighted(E, even_t, 3, a, c, e, g)
        if B > 7:
            d3 = weighted(H, odd_t, 3, b, d, f, h)
        if B == 8:
            a, b, c, d = s0 + d0, s1 + d1, s2 + d2, s3 + d3
            e, f, g, h = s3 - d3, s2 - d2, s1 - d1, s0 - d0
        elif B == 7:
            a, b, c, d = s0 + d0, s1 + d1, s2 + d2, s3
            e, f, g = s2 - d2, s1 - d1, s0 - d0
        else:
            a, b, c, d = s0 + d0, s1 + d1, s1 - d1, s0 - d0
        store(B, x, u64(x_first + o * x_next), u64(x_step), a, b, c, d, e, f, g, h)


@leaf
def weighted(n, w, i, a, b, c, d):
    """The sum of row i of w times the first n of a, b, c, d, added in turn."""
    total = w[i, 0] * a + w[i, 1] * b
    if n > 2:
        total += w[i, 2] * c
    if n > 3:
        total += w[i, 3] * d
    return total


@leaf
def load(B, x, at, step):
    """B numbers of a flat x, and anything where there are fewer than eight."""
    a, b, c, d = x[at], x[at + step], x[at + u64(2) * step], x[at + u64(3) * step]
    e, f, g, h = a, a, a, a
    if B > 4:
        e, f, g = x[at + u64(4) * step], x[at + u64(5) * step], x[at + u64(6) * step]
    if B > 7:
        h = x[at + u64(7) * step]
    return a, b, c, d, e, f, g, h


@leaf
def store(B, x, at, step, a, b, c, d, e, f, g, h):
    """The inverse of `load`."""
    x[at], x[at + step], x[at + u64(2) * step], x[at + u64(3) * step] = a, b, c, d
    if B > 4:
        x[at + u64(4) * step], x[at + u64(5) * step], x[at + u64(6) * step] = e, f, g
    if B > 7:
        x[at + u64(7) * step] = h
