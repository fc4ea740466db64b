"""Converts the states of one parameter to another format, or to another order in memory.

    codes, bounds -> float32 m, v -> codes, bounds          some rows at a time

No group crosses a row, so rows are converted by themselves: what the kernels take on the way is
less than the parameter's states in float32 (the plain torch reference: 26 float32 for each element
of those rows). Into another order the whole parameter is converted at once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from elbowroom.kernels import ops
from elbowroom.optim.formats import Group, names, row_of, seed_of
from elbowroom.optim.layout import StateLayout, has_residual
from elbowroom.optim.order import Order, order_of, reordered
from elbowroom.optim.sharded import local, shard_of, spread

_ELEMENTS, _SHARE = 1 << 16, 16  # at a time: so many, or so much of a large parameter, or one row


def transcode(
    layout: StateLayout,
    p: Tensor,
    saved: dict[str, Tensor],
    held_as: str,
    fresh: dict[str, Tensor],
    group: Group,
) -> None:
    """Fill `fresh`, states of p held as `group` says, with what `saved` holds as `held_as`."""
    encoded = names(layout.moments[0], "").codes in saved
    theirs = layout.format_of(p.shape, held_as if encoded else "fp32")
    ours = layout.format_of(p.shape, group["state"])
    *before, m_before, v_before = layout.arguments(p, saved, theirs)
    *after, m_after, v_after = layout.arguments(p, fresh, ours)
    row, step = row_of(p.shape), int(fresh["step"].item())
    orders = held_order(layout, saved), held_order(layout, fresh)
    shape, same = local(p).shape, orders[0] == orders[1]
    rows = shape.numel() // row
    for nth, (first, last) in enumerate(_some(rows, row) if same else [(0, rows)]):
        old, new = ([_part(x, first, last, row) for x in side] for side in (before, after))
        values = ops.moments_dequantize(*old, m_before, v_before, row, (last - first) * row)
        if not same:
            m, v = values
            values = reordered(m, shape, *orders), reordered(v, shape, *orders) if len(v) else v
        seed = seed_of(group["seed"], step, nth, shard_of(p))
        ops.moments_quantize(*values, *new, m_after, v_after, row, seed)
    torch.autograd.graph.increment_version([x for x in fresh.values() if x is not fresh["step"]])


def held_order(layout: StateLayout, state: dict[str, Tensor]) -> Order:
    """The order of what `state` holds: codes say it beside them, float32 by its strides."""
    plain = names(layout.moments[0], "fp32").codes
    if plain in state:
        return order_of(local(state[plain]))
    return tuple(state["order"].tolist()) if "order" in state else ()


def follow(layout: StateLayout, p: Tensor, state: dict[str, Tensor], group: Group) -> None:
    """Bring states to where p is now: its dtype and memory format may change between steps.

    A bfloat16 parameter gets a residual of 0, as at its birth; one of another dtype has none.
    """
    order, residual = order_of(local(p)), state.get("residual")
    if not has_residual(p, group):
        state.pop("residual", None)
    elif residual is None or order_of(local(residual)) != order:
        moved = torch.zeros_like(local(p), dtype=torch.int8)
        state["residual"] = spread(moved if residual is None else moved.copy_(local(residual)), p)
    if held_order(layout, state) != order:
        fresh = layout.fresh(p, group | {"weights": "nearest"})  # without a residual
        fresh["step"] = state["step"]
        transcode(layout, p, state, group["state"], fresh, group)
        state.pop("order", None)
        state.update(fresh)


def _some(rows: int, row: int) -> Iterator[tuple[int, int]]:
    """Yields pairs (from, to) of rows that are converted together."""
    together = max(1, _ELEMENTS // row, rows // _SHARE)
    for first in range(0, rows, together):
        yield first, min(first + together, rows)


def _part(x: Tensor, first: int, last: int, row: int) -> Tensor:
    """Returns some rows of a state: [D, ...], or flat where it is fp32."""
    if x.numel() == 0:
        return x
    return x[first * row : last * row] if x.dim() == 1 else x[first:last]
