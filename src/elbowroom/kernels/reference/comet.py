"""Error-bounded codes: integers on a grid, each block of 32 as narrow as its largest one.

    q    = floor(x / step + u)        u, from `noise.py`: see ROUNDINGS; only where x is not 0
    x~   = step * (q + 1/2 - u')      never 0: what comes out nearer to 0 than `least` becomes it
    grid = bound, step, 1 / step      float32 [3]; step is 2 bound less what the arithmetic may add

Every x~, rounded to the dtype of x, is held against x: if |x~ - x| > bound anywhere in a block, or
anything is not finite, the block is *raw*, the elements themselves (-0.0 as 0.0). The element that
failed has q = 0, and so has a zero: q depends on one element alone, which `predict.py` builds on.

    bits      [ceil(N / 8)] what is not 0, as in `bits.py`; or [0]: each block holds its own
    headers   [ceil(N / 32)] a byte a block: width w of its codes in bits 0..4, and
                  0x00  all zeros                      0x20  zigzag: some q is negative
                  0x20  w = 0: no zeros, all q = 0     0x40  there are zeros: only the others coded
                  0x80  raw                            0x80  and w > 0: a zero is code 0, q is q + 1
    sizes     [tiles] int16, the bytes of a tile's payload
    payload   a tile after the other: the bitmaps (4 bytes) of its blocks with 0x40, unless `bits`
              has them, then the codes of each block, or 32 elements

k codes of w bits are w // 8 times k bytes, low bits first, then the w % 8 bits left over, value
after value: ceil(k w / 8) bytes. Of all forms a block takes the smallest.
"""

import torch
from torch import Tensor

from elbowroom.kernels.layout import BLOCK, TILE, blocks, check_payload, tiles, width_nbytes
from elbowroom.kernels.reference.bits import flags, pack_bits
from elbowroom.kernels.reference.noise import uniform
from elbowroom.kernels.reference.predict import residuals, restored
from elbowroom.kernels.reference.rounding import store
from elbowroom.kernels.reference.spill import divide, unite

# rounding -> whether u is noise in the encoder, and in the decoder; else it is 1/2
ROUNDINGS = {"dither": (True, True), "stochastic": (True, False), "nearest": (False, False)}
LARGEST = 2.0**26  # of q: a residual of four and its zigzag fit 30 bits
ZIGZAG, MASKED, RAW = 0x20, 0x40, 0x80


def comet_quantize(
    x: Tensor,
    grid: Tensor,
    seed: int,
    rounding: str,
    aware: bool,
    rows: int,
    columns: int,
    inner: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [N] -> bits (empty unless aware), headers, sizes, payload.

    rows, columns, inner: the maps that q is predicted in; rows = 0: no prediction.
    """
    n = x.numel()
    q, held = integers(x, grid, seed, rounding)
    codes = residuals(q, rows, columns, inner) if rows else q
    headers = torch.empty(blocks(n), dtype=torch.uint8, device=x.device)
    sizes = torch.empty(tiles(n), dtype=torch.int16, device=x.device)
    payload = [torch.empty(0, dtype=torch.uint8, device=x.device)]
    for i_t in range(tiles(n)):
        bitmaps, bodies = [], []
        for i_b in range(i_t * TILE // BLOCK, min((i_t + 1) * TILE // BLOCK, blocks(n))):
            at = slice(i_b * BLOCK, min((i_b + 1) * BLOCK, n))
            headers[i_b], bitmap, body = _block(x[at], codes[at], bool(held[at].all()), aware)
            bitmaps.append(bitmap)
            bodies.append(body)
        payload += bitmaps + bodies
        sizes[i_t] = sum(len(part) for part in bitmaps + bodies)
    bits = pack_bits(x) if aware else payload[0].clone()
    return bits, headers, sizes, torch.cat(payload)


def comet_quantize_into(
    x: Tensor,
    grid: Tensor,
    seed: int,
    rounding: str,
    aware: bool,
    rows: int,
    columns: int,
    inner: int,
    payload: Tensor,
    spill: Tensor,
    used: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes as `comet_quantize` does, but payload and spill are given.

    used [1] int64 gets the payload's size.
    """
    given = grid, seed, rounding, aware, rows, columns, inner
    bits, headers, sizes, whole = comet_quantize(x, *given)
    divide(whole, sizes.tolist(), payload, spill, TILE * x.element_size())
    used.fill_(len(whole))
    return bits, headers, sizes


def comet_dequantize(
    bits: Tensor,
    headers: Tensor,
    sizes: Tensor,
    payload: Tensor,
    grid: Tensor,
    seed: int,
    rounding: str,
    rows: int,
    columns: int,
    inner: int,
    out: Tensor,
    spill: Tensor | None = None,
) -> None:
    """Inverse of `comet_quantize`: out [N] is written.

    Raises ValueError if headers, sizes and payload disagree.
    """
    n = out.numel()
    codes = torch.zeros(n, dtype=torch.int64, device=out.device)
    coded = torch.zeros(n, dtype=torch.bool, device=out.device)
    raw = torch.zeros_like(coded)
    present = flags(bits, n) if len(bits) else None
    sizes = sizes.clamp(min=0)  # damaged ones may be anything
    if spill is not None:
        payload = unite(payload, spill, sizes.tolist(), TILE * out.element_size())
    check_payload(payload, int(sizes.sum()))
    for i_t, part in enumerate(torch.split(payload, sizes.tolist())):
        first = i_t * TILE // BLOCK
        each = headers[first : first + TILE // BLOCK].tolist()
        at = 0 if len(bits) else 4 * sum(_masked(header) for header in each)
        bitmaps = _body(part, 0, at).view(-1, 4)
        for i_b, header in enumerate(each, first):
            run = slice(i_b * BLOCK, min((i_b + 1) * BLOCK, n))
            mask = torch.full_like(raw[run], header != 0)
            if present is not None and header < RAW:
                mask = present[run]
            elif _masked(header):
                if not len(bitmaps):  # a raw block, or one beside a mask, has none
                    raise ValueError(f"expected headers that ask for no bitmap; got {header:#x}")
                mask, bitmaps = flags(bitmaps[0], BLOCK)[: len(mask)], bitmaps[1:]
            if header == RAW:
                size = len(mask) * out.element_size()
                out[run] = _body(part, at, size).clone().view(out.dtype)
                raw[run] = True
            else:
                width, k = header & 31, int(mask.sum())
                size = width_nbytes(k, width)
                found = unpack_width(_body(part, at, size), k, width)
                if _filled(header):
                    mask = found > 0
                    found = found[mask] - 1
                codes[run][mask] = (found >> 1) ^ -(found & 1) if header & ZIGZAG else found
                coded[run] = mask
            at += size
        check_payload(part, at)
    q = codes
    if rows:
        known = integers(out, grid, seed, rounding)[0]
        q = restored(codes, coded, torch.where(raw, known, 0), rows, columns, inner)
    values = torch.empty_like(out)
    store(_values(q, grid, seed, rounding, out.dtype), values)
    out.copy_(torch.where(coded, values, torch.where(raw, out, 0)))


def integers(x: Tensor, grid: Tensor, seed: int, rounding: str) -> tuple[Tensor, Tensor]:
    """q [N] int64, and whether the bound holds [N]. Where it does not, and where x is 0, q is 0."""
    bound, _, inverse = grid
    values = x.float()
    v = values * inverse + _noise(x, seed, ROUNDINGS[rounding][0])
    q = v.nan_to_num(0.0).clamp(-LARGEST, LARGEST).floor()
    back = torch.empty_like(x)
    store(_values(q, grid, seed, rounding, x.dtype), back)
    held = (x == 0) | ((back.float() - values).abs() <= bound)
    return torch.where(held & (x != 0), q, 0.0).long(), held


def _values(q: Tensor, grid: Tensor, seed: int, rounding: str, dtype: torch.dtype) -> Tensor:
    """x~ [N] float32, before it is rounded to the dtype."""
    values = (q.float() + (0.5 - _noise(q, seed, ROUNDINGS[rounding][1]))) * grid[1]
    least = 2.0**-24 if dtype is torch.float16 else 2.0**-126
    return torch.where(values.abs() < least, least, values)


def _noise(like: Tensor, seed: int, random: bool) -> Tensor:
    """u [N]: noise, or 1/2."""
    n = like.numel()
    if not random:
        return torch.full((n,), 0.5, device=like.device)
    return uniform(seed, 0, tiles(n), like.device).view(-1)[:n]


def _block(x: Tensor, codes: Tensor, held: bool, aware: bool) -> tuple[int, Tensor, Tensor]:
    """Header, bitmap and body of one block."""
    none, n = torch.empty(0, dtype=torch.uint8, device=x.device), len(x)
    mask = x != 0
    kept = codes[mask]
    k = len(kept)
    if k == 0:
        return 0, none, none
    sign = ZIGZAG if bool((kept < 0).any()) else 0
    kept = (kept << 1) ^ (kept >> 63) if sign else kept
    width = int(kept.max()).bit_length()
    header, bitmap, body = sign | width, none, pack_width(kept, width)
    if k < n:
        header |= MASKED
        bitmap = none if aware else pack_bits(torch.nn.functional.pad(mask, (0, BLOCK - n)))
        filled = int(kept.max() + 1).bit_length()
        if not aware and width_nbytes(n, filled) <= 4 + len(body):
            every = torch.zeros_like(codes)
            every[mask] = kept + 1
            header, bitmap, body = RAW | sign | filled, none, pack_width(every, filled)
    elif width == 0:
        header = ZIGZAG
    if not held or len(bitmap) + len(body) >= n * x.element_size():
        return RAW, none, torch.where(mask, x, 0.0).view(torch.uint8)
    return header, bitmap, body


def _masked(header: int) -> bool:
    return bool(header & MASKED)


def _filled(header: int) -> bool:
    return header > RAW and not _masked(header)


def _body(part: Tensor, at: int, size: int) -> Tensor:
    if at + size > len(part):
        raise ValueError(f"expected {at + size} bytes or more in a tile; got {len(part)}")
    return part[at : at + size]


def pack_width(codes: Tensor, width: int) -> Tensor:
    """codes [k] -> [ceil(k * width / 8)] uint8."""
    whole = [((codes >> shift) & 255).to(torch.uint8) for shift in range(0, width - 7, 8)]
    rest = torch.arange(width & ~7, width, device=codes.device)
    return torch.cat([*whole, pack_bits(((codes[:, None] >> rest) & 1).view(-1))])


def unpack_width(packed: Tensor, k: int, width: int) -> Tensor:
    """[ceil(k * width / 8)] uint8 -> codes [k] int64."""
    whole = packed[: width // 8 * k].view(width // 8, k).long()
    left = width % 8
    rest = flags(packed[width // 8 * k :], k * left).view(k, left).long()
    shifts = torch.arange(32, device=packed.device)
    codes = (whole << (8 * shifts[: width // 8, None])).sum(dim=0)
    return codes + (rest << (shifts[:left] + (width & ~7))).sum(dim=1)
