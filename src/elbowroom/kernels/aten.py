"""Kernels written out in aten ops, which Inductor fuses with what is around them.

Each function stands for the one of its name in `reference/`, with two differences: a seed is a
tensor (int64 [1]) on the device of x, and what is dequantized is returned. Where each op is rounded
by itself, as eager PyTorch does, the bits are those of the reference, for any number of elements. A
compiler may contract a product and a sum into one rounding (Triton does): a value that lies within
that rounding of the edge between two codes may then take the other one, and x~ differs by some 1e-7
of the range of its group.

Nothing is examined: what has a NaN, an Inf, or a value beyond 2^125 decodes to NaN with its group
(`group`, `fp8`), tile (`dither`) or range (`division`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from elbowroom.kernels.layout import RADIX, TILE, codes_nbytes, groups, segments, tiles
from elbowroom.kernels.maps import blocks, ranges
from elbowroom.kernels.reference.division import cut, means, spread
from elbowroom.kernels.reference.fp8 import FORMATS
from elbowroom.kernels.reference.noise import mix
from elbowroom.kernels.reference.rounding import LARGEST, SMALLEST

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15
_LARGEST_HALF = 65504.0
_INF = float("inf")


def pack_bits(x: Tensor) -> Tensor:
    """x [N] -> bits [ceil(N / 8)] uint8."""
    return _joined(_padded(x != 0, 8, 0).view(-1, 8, 1), 2).view(-1)


def unpack_bits(bits: Tensor, value: float, n: int, dtype: torch.dtype) -> Tensor:
    """Inverse of `pack_bits`: [n], `value` where the bit is set."""
    place = torch.arange(8, dtype=torch.int32, device=bits.device)
    flags = _first((bits.to(torch.int32).unsqueeze(1) >> place) & 1, n) != 0
    return flags if dtype is torch.bool else torch.where(flags, value, 0.0).to(dtype)


def group_quantize(x: Tensor, seed: Tensor, levels: int, group_size: int) -> tuple[Tensor, ...]:
    """x [N] -> codes [packed] uint8, step [G] bf16, low [G] bf16."""
    n, x = x.numel(), x.float()
    smallest, largest = _ends(x, group_size)  # [G]
    usable = (smallest > -LARGEST) & (largest < LARGEST)
    low = _bf16(torch.where(usable, smallest, 0.0), up=False)
    step = (torch.where(usable, largest, 0.0) - low.float()) * (1 / (levels - 1))
    step = torch.where(usable, _bf16(step, up=True), float("nan"))
    rows = _padded(x, group_size, 0).view(-1, group_size)
    v = (rows - low.float().unsqueeze(1)) * _inverse(step.float()).unsqueeze(1)
    return _coded(_first(v, n) + _uniform(seed, n, x.device), levels), step, low


def group_dequantize(
    buffers: tuple[Tensor, ...], levels: int, group_size: int, n: int, dtype: torch.dtype
) -> Tensor:
    """Inverse of `group_quantize`: [n]."""
    codes, step, low = buffers
    q = _padded(_unpacked(codes, n, levels), group_size, 0).view(-1, group_size)
    y = low.float().unsqueeze(1) + step.float().unsqueeze(1) * q.float()
    return _stored(_first(y, n), dtype)


def has_fp8() -> bool:
    """Returns whether the GPU of this process, if there is one, converts to 8-bit floats."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


def fp8_quantize(x: Tensor, group_size: int, fmt: str) -> tuple[Tensor, ...]:
    """x [N] -> codes [N] uint8 (the bits of the float8), scale [G] bf16."""
    rows = _padded(x.float(), group_size, 0).view(-1, group_size)  # [G, S]
    largest = torch.finfo(FORMATS[fmt]).max
    absmax = rows.abs().amax(dim=1)
    usable = absmax < LARGEST
    scale = _bf16(torch.where(usable, absmax, 0.0) * (1 / largest), up=True)
    scale = torch.where(usable, scale, float("nan"))
    scaled = (rows * _inverse(scale.float()).unsqueeze(1)).nan_to_num(0.0)
    codes = scaled.clamp(-largest, largest).to(FORMATS[fmt]).view(torch.uint8)
    return _first(codes, x.numel()), scale


def fp8_dequantize(
    buffers: tuple[Tensor, ...], group_size: int, fmt: str, n: int, dtype: torch.dtype
) -> Tensor:
    """Inverse of `fp8_quantize`: [n]."""
    codes, scale = buffers
    rows = _padded(codes, group_size, 0).view(-1, group_size).view(FORMATS[fmt])
    return _stored(_first(rows.float() * scale.float().unsqueeze(1), n), dtype)


def division_quantize(
    x: Tensor, seed: Tensor, levels: int, block: int, reach: int, maps: Sequence[int]
) -> tuple[Tensor, ...]:
    """x [N] -> codes [packed] uint8, mean [blocks] bf16, scale, low [ranges] bf16."""
    n, x = x.numel(), x.float()
    over_blocks, over_ranges = blocks(maps, block), ranges(maps, block, reach)
    mean = means(x, over_blocks)
    h = x - spread(mean, over_blocks)  # [N]
    least = cut(h, over_ranges, _INF).amin(dim=(2, 4)).view(-1)  # [ranges]
    most = cut(h, over_ranges, -_INF).amax(dim=(2, 4)).view(-1)
    small = (x.abs() < LARGEST).float()  # 0 for NaN, too
    usable = cut(small, over_ranges, 1.0).amin(dim=(2, 4)).view(-1) != 0
    low = _bf16(torch.where(usable, least, 0.0), up=False)
    scale = (torch.where(usable, most, 0.0) - low.float()) * (1 / (levels - 1))
    scale = torch.where(usable, _bf16(scale, up=True), float("nan"))
    v = (h - spread(low, over_ranges)) * _inverse(spread(scale, over_ranges))
    return _coded(v + _uniform(seed, n, x.device), levels), mean, scale, low


def division_dequantize(
    buffers: tuple[Tensor, ...],
    seed: Tensor,
    levels: int,
    block: int,
    reach: int,
    maps: Sequence[int],
    dither: bool,
    n: int,
    dtype: torch.dtype,
) -> Tensor:
    """Inverse of `division_quantize`: [n]. The seed is read with dither only."""
    codes, mean, scale, low = buffers
    over_ranges = ranges(maps, block, reach)
    q = _unpacked(codes, n, levels).float()
    base, step = spread(low, over_ranges), spread(scale, over_ranges)
    if dither:
        q = q - _uniform(seed, n, codes.device)
        base = base + step * 0.5
    return _stored(spread(mean, blocks(maps, block)) + (base + step * q), dtype)


def dither_quantize(x: Tensor, seed: Tensor, levels: int, group_size: int) -> tuple[Tensor, ...]:
    """x [N] -> codes [packed] uint8, ranges [G, 2] uint8, bounds [tiles, 2] bf16."""
    n, x, each = x.numel(), x.float(), TILE // group_size
    small, large = (
        _padded(end, each, fill).view(-1, each)
        for end, fill in zip(_ends(x, group_size), (_INF, -_INF), strict=True)
    )  # [T, G]
    smallest, largest = small.amin(dim=1), large.amax(dim=1)  # [T]
    usable = (smallest > -LARGEST) & (largest < LARGEST)
    bounds = torch.stack([_bf16(smallest, up=False), _bf16(largest, up=True)], dim=1)  # [T, 2]
    bounds = torch.where(usable.unsqueeze(1), bounds, float("nan"))
    lo, unit = _unit(bounds)
    scale = _inverse(unit)
    ends = ((small - lo) * scale).floor(), ((large - lo) * scale).ceil()
    found = torch.stack(ends, dim=2).nan_to_num(0.0).clamp(0, 255).to(torch.uint8)  # [T, G, 2]
    low, step = _grid(found, bounds, levels)
    rows = _padded(x, TILE, 0).view(-1, each, group_size)  # [T, G, S]
    v = _first((rows - low) * _inverse(step), n)
    codes = _coded(v + _uniform(seed, n, x.device), levels)
    return codes, found.view(-1, 2).narrow(0, 0, groups(n, group_size)), bounds


def dither_dequantize(
    buffers: tuple[Tensor, ...],
    seed: Tensor,
    levels: int,
    group_size: int,
    n: int,
    dtype: torch.dtype,
) -> Tensor:
    """Inverse of `dither_quantize`: [n]."""
    (codes, found, bounds), each = buffers, TILE // group_size
    found = _padded(found.view(-1), 2 * each, 0).view(-1, each, 2)
    low, step = _grid(found, bounds, levels)  # [T, G, 1]
    less = _unpacked(codes, n, levels).float() - _uniform(seed, n, codes.device)
    rows = _padded(less, TILE, 0).view(-1, each, group_size)
    return _stored(_first((low + step * 0.5) + step * rows, n), dtype)


def seed_of(seed: Tensor, number: int | Tensor) -> Tensor:
    """A seed of 63 bits: a bijective hash of seed and number, in int64, which wraps around."""
    return mixed(seed + (offset_of(number) if isinstance(number, int) else number * _STRIDE))


def offset_of(number: int) -> int:
    """Returns the number that `seed_of` adds to a seed before it mixes the sum."""
    return _signed(number * _GOLDEN)


def mixed(x: Tensor) -> Tensor:
    """Computes the hash of `seed_of`, in int64."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shifted(x, 31)) & (2**63 - 1)


def _padded(x: Tensor, multiple: int, fill: float) -> Tensor:
    """x [N] with `fill` behind it up to a multiple."""
    missing = -x.numel() % multiple
    return pad(x, (0, missing), value=fill) if missing else x


def _first(x: Tensor, n: int) -> Tensor:
    """The first n elements of x, flat: `x[:n]` asks for a device where x is fake."""
    return x.reshape(-1) if x.numel() == n else x.reshape(-1).narrow(0, 0, n)


def _ends(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """The least and the largest of each group of x [N]: [G] each."""
    least, largest = (_padded(x, group_size, fill).view(-1, group_size) for fill in (_INF, -_INF))
    return least.amin(dim=1), largest.amax(dim=1)


def _coded(v: Tensor, levels: int) -> Tensor:
    """Codes of v [N], packed."""
    codes = v.nan_to_num(0.0).clamp(0, levels - 1).to(torch.uint8)  # stored as bytes
    rest = codes.numel() % TILE
    whole = codes.numel() - rest
    parts = [codes.narrow(0, 0, whole).view(-1, TILE)] if whole else []
    parts += [codes.narrow(0, whole, rest).view(1, rest)] if rest else []
    packed = [_packed(rows, levels) for rows in parts]
    return packed[0] if len(packed) == 1 else torch.cat(packed)


def _packed(rows: Tensor, levels: int) -> Tensor:
    """Codes of tiles [T, n] -> [T * bytes of n codes]."""
    found = []
    for per, base, shift in _runs(levels):
        run = rows if levels in RADIX else (rows >> shift) & (base - 1)
        missing = -rows.shape[1] % per
        run = pad(run, (0, missing)) if missing else run
        found.append(_joined(run.view(len(rows), per, -1), base))
    return (found[0] if len(found) == 1 else torch.cat(found, dim=1)).view(-1)


def _joined(planes: Tensor, base: int) -> Tensor:
    """[T, per, n] codes below `base` -> [T, n] bytes, the first of `per` in the lowest place."""
    joined = planes.select(1, 0).to(torch.int32)
    for k in range(1, planes.shape[1]):
        joined = joined + planes.select(1, k).to(torch.int32) * base**k
    return joined.to(torch.uint8)


def _unpacked(codes: Tensor, n: int, levels: int) -> Tensor:
    """Inverse of `_coded`: [n] int32."""
    rest = n % TILE
    whole = n - rest
    tail = codes_nbytes(levels, rest)
    last = codes.numel() - tail
    parts = []
    if whole:
        parts.append(_unpacked_tiles(codes.narrow(0, 0, last), whole // TILE, TILE, levels))
    if rest:
        parts.append(_unpacked_tiles(codes.narrow(0, last, tail), 1, rest, levels))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _unpacked_tiles(codes: Tensor, count: int, n: int, levels: int) -> Tensor:
    """[count * bytes of n codes] -> [count * n]."""
    rows, start, found = codes.view(count, -1).to(torch.int32), 0, None
    for per, base, shift in _runs(levels):
        nbytes = -(-n // per)
        stored = rows.narrow(1, start, nbytes).unsqueeze(1)  # [T, 1, bytes]
        start += nbytes
        place = torch.arange(per, dtype=torch.int32, device=codes.device).unsqueeze(1)
        if base & (base - 1):
            planes = torch.stack([stored.squeeze(1) // base**k % base for k in range(per)], dim=1)
        else:
            planes = (stored >> place * (base.bit_length() - 1)) & (base - 1)
        part = planes.reshape(count, -1).narrow(1, 0, n) << shift
        found = part if found is None else found | part
    assert found is not None
    return found.reshape(-1)


def _runs(levels: int) -> list[tuple[int, int, int]]:
    """Returns, for each run of a tile's bytes: codes in a byte, their base, their shift."""
    if levels in RADIX:
        return [(RADIX[levels], levels, 0)]
    return [(s.per, 1 << s.width, s.shift) for s in segments(levels)]


def _bf16(x: Tensor, *, up: bool) -> Tensor:
    """The bf16 next to x that is not below it (up), or not above it."""
    nearest = x.to(torch.bfloat16)
    pattern = nearest.view(torch.int16)
    away = (nearest > 0) if up else (nearest < 0)
    moved = torch.where(away, pattern + 1, pattern - 1)
    moved = torch.where(nearest == 0, 1 if up else -32767, moved).view(torch.bfloat16)
    beyond = nearest.float() < x if up else nearest.float() > x
    return torch.where(beyond, moved, nearest)


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x < SMALLEST, 0.0, 1 / x)


def _unit(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """The lower end of each tile, and a 255th of its range: [T, 1] each."""
    lo, hi = bounds.float().unbind(dim=1)
    return lo.unsqueeze(1), (hi * (1 / 255) - lo * (1 / 255)).unsqueeze(1)


def _grid(ranges: Tensor, bounds: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The lower end and the step of each group, [T, G, 1] each; ranges [T, G, 2]."""
    lo, unit = _unit(bounds)
    a, b = ranges.float().unbind(dim=2)
    low, step = lo + a * unit, (b - a) * unit * (1 / (levels - 1))
    return low.unsqueeze(2), step.unsqueeze(2)


def _stored(y: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference/rounding.py`'s store."""
    return (y.clamp(-_LARGEST_HALF, _LARGEST_HALF) if dtype is torch.float16 else y).to(dtype)


def _uniform(seed: Tensor, n: int, device: torch.device) -> Tensor:
    """Draws u [n] in (0, 1), float32: those of `reference/noise.py`."""
    tile = torch.arange(tiles(n), device=device)
    key = mix(mix(mix(tile) ^ (seed & _WORD)) ^ ((seed >> 32) & _WORD))  # [T]
    place = torch.arange(TILE, dtype=torch.int32, device=device)
    key = ((key ^ 2**31) - 2**31).to(torch.int32)
    word = _mix32(key.unsqueeze(1) + place % (TILE // 2) * _signed(0x9E3779B9, 32))  # [T, 2048]
    part = (word >> (place // (TILE // 2) * 16)) & 0xFFFF
    return _first(part.to(torch.float32) * (1 / 65536) + (0.5 / 65536), n)


def _mix32(x: Tensor) -> Tensor:
    """Computes `mix` in int32, which wraps around.

    On a GPU it takes a quarter of the instructions.
    """
    x = x ^ _shifted(x, 16, 32)
    x = x * 0x7FEB352D
    x = x ^ _shifted(x, 15, 32)
    x = x * _signed(0x846CA68B, 32)
    return x ^ _shifted(x, 16, 32)


def _shifted(x: Tensor, by: int, bits: int = 64) -> Tensor:
    """A logical shift to the right."""
    mask: int = 2 ** (bits - by) - 1
    return (x >> by) & mask


def _signed(x: int, bits: int = 64) -> int:
    """The number with a sign that has the same bits."""
    x &= 2**bits - 1
    return x - 2**bits if x >= 2 ** (bits - 1) else x


_STRIDE = _signed(_GOLDEN)
