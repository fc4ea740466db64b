"""The ops of `ops.py` written out in aten ops, which Inductor fuses with what is around them.

Inductor cannot fuse across a call of our kernels: it stores their inputs and their results. On a
GPU its own loops are as fast, so `expand` puts these forms into a graph before it is compiled. On a
CPU they cost more than our kernels, and the ops stay.

    bits    byte i  = sum of (x[8 i + k] != 0) * 2^k, k in 0..7
    noise   word(j) = mix(key(tile) + j * 0x9E3779B9),  u from one half of it   (reference/noise.py)
    codes   as in reference/dither.py, with tiles [T, G, S] in place of a flat tensor

The same seed gives the same bits as the reference where each op is rounded by itself, as eager
PyTorch does. A compiler may contract a product and a sum into one rounding (Triton does): a value
that lies within that rounding of the edge between two codes may then take the other one, and
x~ differs by some 1e-7 of the range of its group.

A tensor whose size is not a multiple of a tile, 2048 elements, keeps the op, because its last tile
is packed separately. So do codes of other numbers of levels than 4, 16 and 256.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from elbowroom.compiled import ops
from elbowroom.kernels.layout import TILE
from elbowroom.kernels.reference.rounding import LARGEST, SMALLEST

_WORD = 0xFFFFFFFF
_PER_BYTE = {4: 4, 16: 2, 256: 1}  # levels -> codes in a byte
_LARGEST_HALF = 65504.0


def expand(gm: fx.GraphModule, device: str = "cuda") -> int:
    """Write out all ops of ours whose tensors are on such a device; return how many."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    count = 0
    for node in list(gm.graph.nodes):
        form = _FORMS.get(node.target)
        if form is None or not _is_whole(node) or _device_of(node) != device:
            continue
        given = [a for a in node.args if isinstance(a, fx.Node)]
        call = _with_constants(form, node.args)
        values = [a.meta["val"] for a in given]
        mode = next(v.fake_mode for v in values if isinstance(v, FakeTensor))
        with mode:
            traced = make_fx(call, decomposition_table=select_decomp_table())(*values)
        _inline(gm.graph, node, traced, given)
        count += 1
    if count:
        gm.graph.lint()
        gm.recompile()
    return count


def _with_constants(form: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """The form as a function of the tensors among the arguments."""

    def call(*tensors: Tensor) -> Any:
        left = iter(tensors)
        return form(*(next(left) if isinstance(a, fx.Node) else a for a in args))

    return call


def _inline(graph: fx.Graph, node: fx.Node, traced: fx.GraphModule, given: list[fx.Node]) -> None:
    """Put the nodes of a traced form in the place of a call."""
    known: dict[fx.Node, Any] = dict(
        zip(traced.graph.find_nodes(op="placeholder"), given, strict=True)
    )
    with graph.inserting_before(node):
        for one in traced.graph.nodes:
            if one.op == "call_function":
                known[one] = graph.node_copy(one, known.__getitem__)
    results = traced.graph.output_node().args[0]
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(known[results])
        graph.erase_node(node)
        return
    for part in list(node.users):
        part.replace_all_uses_with(known[results[part.args[1]]])  # type: ignore[index]
        graph.erase_node(part)
    graph.erase_node(node)


def _is_whole(node: fx.Node) -> bool:
    """Returns whether the form can serve: whole tiles, whole bytes of bits, and known sizes."""
    is_made = node.target in (ops.DECODE, ops.UNPACK_MASK)
    numel = (node if is_made else node.all_input_nodes[0]).meta["val"].numel()
    if not isinstance(numel, int):
        return False
    if node.target in (ops.PACK_MASK, ops.UNPACK_MASK):
        return numel % 8 == 0
    levels = node.args[4] if node.target is ops.ENCODE else node.args[5]
    return numel % TILE == 0 and levels in _PER_BYTE


def _device_of(node: fx.Node) -> str:
    given = next(a for a in node.args if isinstance(a, fx.Node))
    return str(given.meta["val"].device.type)


def pack_mask(x: Tensor, order: Sequence[int]) -> Tensor:
    """The form of `ops.PACK_MASK`."""
    flags = (_flat(x, order) != 0).view(-1, 8).to(torch.int32)
    return _joined([flags.select(1, k) for k in range(8)], 1)


def unpack_mask(bits: Tensor, size: Sequence[int], order: Sequence[int]) -> Tensor:
    """The form of `ops.UNPACK_MASK`."""
    place = torch.arange(8, dtype=torch.int32, device=bits.device)
    return _laid_out(((bits.to(torch.int32).unsqueeze(1) >> place) & 1) != 0, size, order)


def encode(
    x: Tensor, order: Sequence[int], seed: Tensor, number: int, levels: int, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The form of `ops.ENCODE`."""
    rows = _flat(x, order).float().view(-1, TILE // group_size, group_size)  # [T, G, S]
    small, large = rows.amin(dim=2), rows.amax(dim=2)  # [T, G]
    smallest, largest = small.amin(dim=1), large.amax(dim=1)  # [T]
    usable = (smallest > -LARGEST) & (largest < LARGEST)
    bounds = torch.stack([_bf16(smallest, up=False), _bf16(largest, up=True)], dim=1)  # [T, 2]
    bounds = torch.where(usable.unsqueeze(1), bounds, float("nan"))
    lo, unit = _unit(bounds)
    scale = _inverse(unit)
    ends = ((small - lo) * scale).floor(), ((large - lo) * scale).ceil()
    ranges = torch.stack(ends, dim=2).nan_to_num(0.0).clamp(0, 255).to(torch.uint8)  # [T, G, 2]
    low, step = _grid(ranges, bounds, levels)
    u = _uniform(seed, number, rows)
    v = (rows - low) * _inverse(step)
    codes = (v + u).nan_to_num(0.0).clamp(0, levels - 1).to(torch.uint8)  # stored as bytes
    per = _PER_BYTE[levels]
    planes = codes.view(-1, per, TILE // per)
    packed = _joined([planes.select(1, k).to(torch.int32) for k in range(per)], 8 // per)
    return packed.view(-1), ranges.view(-1, 2), bounds


def decode(
    codes: Tensor,
    ranges: Tensor,
    bounds: Tensor,
    seed: Tensor,
    number: int,
    levels: int,
    group_size: int,
    size: Sequence[int],
    order: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """The form of `ops.DECODE`."""
    per = _PER_BYTE[levels]
    shift = torch.arange(per, dtype=torch.int32, device=codes.device) * (8 // per)
    planes = codes.view(-1, 1, TILE // per).to(torch.int32) >> shift.unsqueeze(1)
    q = (planes & (2 ** (8 // per) - 1)).view(-1, TILE // group_size, group_size)
    low, step = _grid(ranges.view(-1, TILE // group_size, 2), bounds, levels)
    y = (low + step * 0.5) + step * (q.float() - _uniform(seed, number, q))
    if dtype is torch.float16:
        y = y.clamp(-_LARGEST_HALF, _LARGEST_HALF)
    return _laid_out(y.to(dtype), size, order)


def _flat(x: Tensor, order: Sequence[int]) -> Tensor:
    return x.permute(list(order)).reshape(-1)


def _laid_out(x: Tensor, size: Sequence[int], order: Sequence[int]) -> Tensor:
    """The elements of x, in their order, as a tensor of this size and memory order."""
    back = [list(order).index(d) for d in range(len(order))]
    return x.reshape([size[d] for d in order]).permute(back)


def _joined(planes: Sequence[Tensor], width: int) -> Tensor:
    """One byte of codes that are `width` bits wide, the first in its lowest bits."""
    joined = planes[0]
    for k, plane in enumerate(planes[1:], 1):
        joined = joined | (plane << (k * width))
    return joined.to(torch.uint8)


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


def _uniform(seed: Tensor, number: int, like: Tensor) -> Tensor:
    """Draws u in (0, 1) for tiles [T, G, S], float32: those of `kernels/reference/noise.py`."""
    count, groups, size = like.shape
    own = _seed_of(seed.to(like.device), number)
    tile = torch.arange(count, device=like.device)
    key = _mix(_mix(_mix(tile) ^ (own & _WORD)) ^ ((own >> 32) & _WORD))  # [T]
    place = torch.arange(TILE, dtype=torch.int32, device=like.device)
    key = ((key ^ 2**31) - 2**31).to(torch.int32)
    word = _mix32(key.unsqueeze(1) + place % (TILE // 2) * _signed(0x9E3779B9, 32))  # [T, 2048]
    part = (word >> (place // (TILE // 2) * 16)) & 0xFFFF
    return (part.to(torch.float32) * (1 / 65536) + (0.5 / 65536)).view(count, groups, size)


def _mix(x: Tensor) -> Tensor:
    """`kernels/reference/noise.py`'s mix of 32-bit words, which int64 holds without a sign."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def _mix32(x: Tensor) -> Tensor:
    """Computes `_mix` in int32, which wraps around.

    On a GPU it takes a quarter of the instructions.
    """
    x = x ^ _shifted(x, 16, 32)
    x = x * 0x7FEB352D
    x = x ^ _shifted(x, 15, 32)
    x = x * _signed(0x846CA68B, 32)
    return x ^ _shifted(x, 16, 32)


def _seed_of(seed: Tensor, number: int) -> Tensor:
    """`ops.seed_of` on a tensor; int64 wraps around as 64 bits without a sign do."""
    x = seed + _signed(number * 0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shifted(x, 31)) & (2**63 - 1)


def _shifted(x: Tensor, by: int, bits: int = 64) -> Tensor:
    """A logical shift to the right."""
    mask: int = 2 ** (bits - by) - 1
    return (x >> by) & mask


def _signed(x: int, bits: int = 64) -> int:
    """The number with a sign that has the same bits."""
    x &= 2**bits - 1
    return x - 2**bits if x >= 2 ** (bits - 1) else x


_FORMS: dict[Any, Callable[..., Any]] = {
    ops.PACK_MASK: pack_mask,
    ops.UNPACK_MASK: unpack_mask,
    ops.ENCODE: encode,
    ops.DECODE: decode,
}
