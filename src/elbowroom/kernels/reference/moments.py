"""An optimizer's states in 8 or 4 bits: how a group of 128 is stored and loaded.

softsign8, for a first moment m. With w = the stored root of v beside a `log` v, else w = 1:

    r = m / w;   s = max |r| rounded up to bf16
    x = 127 * 3 r / (2 s + |r|),   code = round(x),   m~ = w * 2 s * code / (381 - |code|)

but where x is within 2 of the code before, in a step, code = floor(x) or, stochastically, one more.
To nearest, an m that loses less than half a code in a step would stay, and move its weight for
ever: at momentum 0.99 below a code of 50. What moves by more cannot stay, and nearest halves its
error. Within 2 are one m in ten at beta1 = 0.9, three at 0.99 (docs/log.md, 2026-11-23).

m / sqrt(v) is what moves a weight, and it is bounded: |m| <= 7.3 sqrt(v) at betas 0.9, 0.999 (by
Cauchy and Schwarz). So a group's codes are spent where the update needs them: 1.2 to 10 times less
error of the update than with w = 1, most where v differs within a group (docs/log.md, 2026-11-22).

softsign4, the same with 15 levels, a code in four bits of two's complement:

    x = 21 |r| / (2 s + |r|);   |code| = floor(x) or, stochastically, one more: E[m~] = m
    m~ = w * 2 s * code / (21 - |code|)

To nearest, 0.9 of a level would be that level again (docs/log.md, 2026-11-22).

log8 and log4, for a second moment v, with K = 254 or 14 steps between a group's extremes. The bits
of a positive float32, read as an integer, are its logarithm to base 2 but for at most 0.086:

    L, H = the bits of min sqrt(v) (over v > 0), max sqrt(v), rounded outward to bf16
    st   = ceil((H - L) / K)
    code 0 = 0, code c = the square of the float whose bits are L + (c - 1) st

so levels are evenly spaced within an octave, and no logarithm or power is computed. Stochastic
rounding between the two neighbors lo, hi: up where (v - lo) > u (hi - lo), so E[v~] = v: to
nearest, v would stop to decay at beta2 = 0.999. A v > 0 never gets code 0.

expanded8, for either: E4M3 after the dynamic range expansion of COAT (arXiv 2410.19313):

    L, H as above of |x|;   k = log2(448 / 2^-9) / (H - L)
    y = 448 (|x| / 2^H)^k,   code = sign E4M3(y);   x~ = sign * 2^H (|code| / 448)^(1 / k)

to nearest, but what moves by less than 2 codes in a step as in softsign8: to nearest no v would
decay at beta2 = 0.999, and no m at momentum 0.99. Between neighbors y0 and y0 + d, f of the way,

    p(up) = f - f (1 - f) (1 / k - 1) d / (2 y)

makes E[x~] = x but for terms in (d / y)^3: p = f would make E[y~] = y, of which x is a power.
The powers are taken through log2 and exp2 by polynomials: within 5e-5 octaves of E4M3, whose levels
are 0.09 octaves apart and more. k < 1 where a group is wider than E4M3. COAT stores three float32 a
group; the two bounds give all of them, and an x != 0 never gets code 0. A constant group has
H - L <= 2/256, taken as 9/256. L is at least H - 32 octaves, or an m that fades would take the
codes of all others: what is below is held as 2^L.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from elbowroom.kernels.reference.powers import (
    above_one,
    exp2_from,
    fma,
    log2_above,
    polynomial,
    power_of,
)
from elbowroom.kernels.reference.rounding import bf16_up, square_root
from elbowroom.kernels.states import (
    BEND,
    CEILING,
    FLOOR,
    GROUP,
    HALVES,
    LEAST,
    LEAST_RANGE,
    MOST,
    MOST_RANGE,
    OCTAVES,
    SLOW,
    STEPS,
    rows_of,
)


def grouped(x: Tensor, row: int) -> Tensor:
    """x [N] in rows -> [groups, 128], padded with 0 at the end of each row."""
    D, R, G = rows_of(x.numel(), row)
    return pad(x.view(D, R), (0, G * GROUP - R)).view(D * G, GROUP)


def flat(x: Tensor, row: int, n: int) -> Tensor:
    """The inverse of `grouped`."""
    D, R, G = rows_of(n, row)
    return x.view(D, G * GROUP)[:, :R].reshape(-1)


# --- each kind: load(codes, bounds) -> values, store(values) -> codes, bounds ---


def softsign_load(codes: Tensor, bounds: Tensor, root: Tensor | None) -> Tensor:
    """codes [G, 128] int8, bounds [G, 1] -> [G, 128]."""
    code = codes.float()
    m = bounds.view(torch.bfloat16).float() * ((code + code) / (381 - code.abs()))
    return m if root is None else m * root


def softsign_store(
    m: Tensor, root: Tensor | None, before: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """m [G, 128], its codes before [G, 128] int8, u uniform -> codes, bounds [G, 1] int16."""
    r, s = _relative(m, root)
    s32 = s.float()
    x = torch.where(s32 > 0, (r * 381) / ((s32 + s32) + r.abs()), 0.0)
    slow = (x - before.float()).abs() < SLOW
    return (x + torch.where(slow, u - 0.5, 0.0)).round().to(torch.int8), s.view(torch.int16)


def softsign4_load(codes: Tensor, bounds: Tensor, root: Tensor | None) -> Tensor:
    """codes [G, 128] uint8, below 16, bounds [G, 1] -> [G, 128]."""
    code = ((codes.int() ^ 8) - 8).float()
    m = bounds.view(torch.bfloat16).float() * ((code + code) / (21 - code.abs()))
    return m if root is None else m * root


def softsign4_store(m: Tensor, root: Tensor | None, u: Tensor) -> tuple[Tensor, Tensor]:
    """m [G, 128], u uniform -> codes [G, 128] uint8, below 16, bounds [G, 1] int16."""
    r, s = _relative(m, root)
    s32, size = s.float(), r.abs()
    x = torch.where(s32 > 0, (size * 21) / ((s32 + s32) + size), 0.0)
    below = x.to(torch.int32).clamp(0, 6)
    lower = s32 * ((below + below).float() / (21 - below).float())
    upper = s32 * ((below + below + 2).float() / (20 - below).float())
    code = below + ((size - lower) > u * (upper - lower))
    return (torch.where(r < 0, -code, code) & 15).to(torch.uint8), s.view(torch.int16)


def _relative(m: Tensor, root: Tensor | None) -> tuple[Tensor, Tensor]:
    """m over the stored root of v [G, 128], and its absolute maximum [G, 1] bfloat16."""
    r = m if root is None else torch.where(root > 0, m / root, 0.0)
    s = bf16_up(r.abs().amax(dim=1, keepdim=True))
    return r, torch.where(s < 1e-36, 0, s)


def log_load(codes: Tensor, bounds: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """codes [G, 128], bounds [G, 2] int16 -> v, sqrt(v) [G, 128]."""
    low, step = _grid(bounds, steps)
    root = (low + (codes.int() - 1).clamp(min=0) * step).view(torch.float32)
    root = torch.where(codes == 0, 0.0, root)
    return root * root, root


def log_store(v: Tensor, u: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """v [G, 128] >= 0, u uniform -> codes [G, 128] uint8, bounds [G, 2], the stored root of v."""
    positive = v > 0
    v = v.clamp(LEAST, MOST)
    bits = square_root(v).view(torch.int32)
    bounds = _root_bounds(bits, positive)
    low, step = _grid(bounds, steps)
    per = torch.ones_like(step, dtype=torch.float32) / step.float()
    below = ((bits - low).float() * per).to(torch.int32).clamp(0, steps - 1)
    lower = (low + below * step).view(torch.float32)
    upper = (low + below * step + step).view(torch.float32)
    lo, hi = lower * lower, upper * upper
    up = (v - lo) > u * (hi - lo)
    codes = torch.where(positive, below + up + 1, 0).to(torch.uint8)
    return codes, bounds, torch.where(positive, torch.where(up, upper, lower), 0.0)


def expanded_load(codes: Tensor, bounds: Tensor) -> Tensor:
    """codes [G, 128] uint8, bounds [G, 2] int16 -> [G, 128]."""
    inverse_k = _range(bounds) * (1 / OCTAVES)
    magnitude = codes.int() & 127
    size = exp2_from(octaves(magnitude) * inverse_k, bounds[:, :1].int(), 8)
    size = torch.where(magnitude == 0, 0.0, size)
    return torch.where(codes > 127, -size, size)


def expanded_store(x: Tensor, before: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """x [G, 128], its codes before, u uniform -> codes [G, 128] uint8, bounds [G, 2] int16."""
    size, sign = x.abs(), (x < 0) * 128
    there = size > 0
    size = size.clamp(LEAST, MOST)
    bounds = _bounds(size, there)
    width = _range(bounds)
    k = torch.full_like(width, OCTAVES) / width  # one rounding; OCTAVES / width has two
    z = (log2_above(size, bounds[:, :1].float() * (1 / 256)) * k).clamp(0, OCTAVES)
    place, size = e4m3_place(z)
    slow = (place - (before.int() & 127).float()).abs() < SLOW
    f = place - place.floor()
    bend = ((width * (1 / OCTAVES) - 1) * 0.5).clamp(max=1)  # or p(up) may be below 0
    draw = (u - 0.5) - (f * (1 - f)) * (bend / size)
    code = (place + torch.where(slow, draw, 0.0)).round().to(torch.int32) | sign
    return torch.where(there, code, 0).to(torch.uint8), bounds


def e4m3_place(z: Tensor) -> tuple[Tensor, Tensor]:
    """z in octaves above 2^-9 -> where among the codes y = 2^(z - 9) is, and y / d.

    Codes are spaced evenly up to 2^-6 (z = 3), as subnormals, then within each octave.
    """
    whole = z.to(torch.int32)
    more, power = above_one(z - whole.float()), power_of(whole)
    small, size = more * power + power, more * 8 + 8
    even = whole < 3
    place = torch.where(even, small, more * 8 + (8 * whole - 16).float())
    return place.clamp(max=126), torch.where(even, small, size)


def octaves(magnitude: Tensor) -> Tensor:
    """Returns the octaves of codes [int32] from 1 to 126, above 2^-9.

    From the bits of a float32 of that size: read as an integer they are its logarithm, but for
    log2(1 + f) - f.
    """
    small, large = magnitude.float().view(torch.int32), (magnitude << 20) + (129 << 23)
    bits = torch.where(magnitude < 8, small, large)
    f = (bits & 0x7FFFFF).float() * 2.0**-23
    return fma(polynomial(BEND, f), f, (bits - (127 << 23)).float() * 2.0**-23)


def _bounds(size: Tensor, there: Tensor) -> Tensor:
    """log2 of the least and the largest in units of 1/256, rounded outward [G, 2]; 0, 0 if none."""
    least = torch.where(there, size, MOST).amin(dim=1)
    most = torch.where(there, size, LEAST).amax(dim=1)
    low = (log2_above(least, 0.0) * 256).floor().clamp(FLOOR, CEILING)
    high = (log2_above(most, 0.0) * 256).ceil().clamp(FLOOR, CEILING)
    low, some = torch.maximum(low, high - MOST_RANGE), there.any(dim=1)
    return torch.stack([torch.where(some, low, 0), torch.where(some, high, 0)], 1).to(torch.int16)


def _root_bounds(bits: Tensor, there: Tensor) -> Tensor:
    """The bf16 at or below the least and at or above the largest root [G, 2]; 0, 0 if none."""
    least = torch.where(there, bits, 0x7F000000).amin(dim=1) >> 16
    most = (torch.where(there, bits, 0).amax(dim=1) + 0xFFFF) >> 16
    some = there.any(dim=1)
    return torch.stack([torch.where(some, least, 0), torch.where(some, most, 0)], 1).to(torch.int16)


def _grid(bounds: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The bits of the lowest level and from one to the next [G, 1] int32."""
    low, high = bounds[:, :1].int() << 16, bounds[:, 1:].int() << 16
    return low, (torch.maximum(high - low, torch.full_like(low, steps)) + steps - 1) // steps


def _range(bounds: Tensor) -> Tensor:
    """H - L in octaves [G, 1]."""
    low, high = bounds[:, :1].int(), bounds[:, 1:].int()
    return ((high - low).float() * (1 / 256)).clamp(min=LEAST_RANGE)


# --- a state of a parameter: flat buffers <-> groups ---


def load(
    kind: str, codes: Tensor, bounds: Tensor, row: int, n: int, root: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Values [G, 128], and for a `log` kind their roots."""
    match kind:
        case "fp32":
            return grouped(codes.reshape(-1), row), None
        case "softsign8":
            return softsign_load(grouped(codes.reshape(-1), row), bounds.view(-1, 1), root), None
        case "expanded8":
            return expanded_load(grouped(codes.reshape(-1), row), bounds.view(-1, 2)), None
        case "log8":
            return log_load(grouped(codes.reshape(-1), row), bounds.view(-1, 2), STEPS[kind])
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).view(rows_of(n, row).D, -1)[:, :row]
    fours = grouped(nibbles.reshape(-1), row)
    if kind == "softsign4":
        return softsign4_load(fours, bounds.view(-1, 1), root), None
    return log_load(fours, bounds.view(-1, 2), STEPS[kind])


def store(
    kind: str,
    x: Tensor,
    codes: Tensor,
    bounds: Tensor,
    row: int,
    n: int,
    root: Tensor | None,
    draw: Callable[[], Tensor],
) -> Tensor | None:
    """codes, bounds <- x [G, 128]; returns the stored roots of a `log` kind.

    draw  u [G, 128], only asked for by a kind that rounds stochastically
    """
    made, limits, held = x, None, None
    match kind:
        case "softsign8":
            before = grouped(codes.reshape(-1), row)
            made, limits = softsign_store(x, root, before, draw())
        case "softsign4":
            made, limits = softsign4_store(x, root, draw())
        case "expanded8":
            made, limits = expanded_store(x, grouped(codes.reshape(-1), row), draw())
        case "log8" | "log4":
            made, limits, held = log_store(x, draw(), STEPS[kind])
    values = flat(made, row, n)
    if kind in HALVES:
        even = pad(values.view(-1, row), (0, row % 2))
        values = even[:, ::2] | (even[:, 1::2] << 4)
    codes.copy_(values.reshape(codes.shape))
    if limits is not None:
        bounds.copy_(limits.view(bounds.shape))
    return held
