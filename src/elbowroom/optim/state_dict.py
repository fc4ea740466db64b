"""Makes what an optimizer saves, and reads what it can load.

A state_dict holds codes as they are, so a resumed run continues with the same bits. It loads
    its own format            bit for bit
    another `state=`          decoded to float32, encoded anew
    another memory format     the same
    torch.optim's             encoded
and refuses what is another optimizer's, or does not fit (`checked.py`). `portable_state_dict` has
float32 states under torch.optim's names, and nothing that torch.optim does not know.

torch's own `load_state_dict` is not used: it casts each state to its parameter's dtype, and codes
are no such numbers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from elbowroom.errors import StateMismatch
from elbowroom.kernels import ops
from elbowroom.optim.checked import VERSION, check_state
from elbowroom.optim.formats import Group, names, row_of
from elbowroom.optim.layout import StateLayout
from elbowroom.optim.order import check_order, in_order, noted, order_of
from elbowroom.optim.sharded import is_sharded, local
from elbowroom.optim.transcode import held_order, transcode

_OURS = ("state", "weights", "seed", "version", "auto")


def portable(
    layout: StateLayout, groups: list[Group], held: Mapping[Tensor, dict[str, Any]], more: Group
) -> dict[str, Any]:
    """Returns what `torch.optim` loads of groups and the states `held`; each group gets `more`."""
    states: dict[int, dict[str, Tensor]] = {}
    made, index = [], 0
    for group in groups:
        for p in group["params"]:
            if state := held.get(p):
                values = decoded(layout, p, state, group["state"])
                states[index] = {"step": state["step"].clone(), **values}
            index += 1
        count = len(group["params"])
        plain = {k: v for k, v in group.items() if k not in _OURS and k != "params"}
        made.append({**plain, **more, "params": list(range(index - count, index))})
    return {"state": states, "param_groups": made}


def decoded(
    layout: StateLayout, p: Tensor, state: dict[str, Any], held_as: str
) -> dict[str, Tensor]:
    """The moments as float32, like p."""
    first = layout.moments[0]
    encoded = names(first, "").codes in state
    found = layout.format_of(p.shape, held_as if encoded else "fp32")
    *tensors, m_kind, v_kind = layout.arguments(p, state, found)
    row, n = row_of(p.shape), local(p).numel()
    values = ops.moments_dequantize(*tensors, m_kind, v_kind, row, n)
    made, order = {}, held_order(layout, state)
    for name, value in zip(layout.moments, values, strict=False):
        made[name] = torch.empty_like(p, dtype=torch.float32)
        local(made[name]).copy_(in_order(value, local(p).shape, order))
    return made


def loaded(
    layout: StateLayout, p: Tensor, state: dict[str, Any], group: Group, origin: Group
) -> dict[str, Tensor]:
    """The state of p as an optimizer holds it, from one of a group `origin` of a file.

    That may be held in another format, and in another order in memory.
    """
    held_as = origin.get("state", "fp32")
    check_state(layout, p, state, held_as, group)
    fresh = layout.fresh(p, group)
    if origin.get("version", VERSION) < 2:
        state = state | noted(order_of(local(p)))  # all that could be loaded then
    fresh["step"].fill_(float(state.get("step", 0)))
    if "residual" in fresh and "residual" in state:
        _fill(fresh["residual"], state["residual"], "residual")
    wanted = [key for key in fresh if key not in ("step", "residual", "order")]
    encoded = any(key.endswith("_codes") for key in wanted)
    as_it_is = not encoded or (
        held_as == group["state"] and held_order(layout, state) == held_order(layout, fresh)
    )
    if as_it_is and all(key in state for key in wanted):
        for key in wanted:
            _fill(fresh[key], state[key], key)
        return fresh
    transcode(layout, p, _like_saved(layout, p, state, held_as), held_as, fresh, group)
    return fresh


def _like_saved(
    layout: StateLayout, p: Tensor, state: dict[str, Any], held_as: str
) -> dict[str, Tensor]:
    """The saved tensors, held against the shapes of the format that they are said to be in."""
    encoded = names(layout.moments[0], "").codes in state
    expected = layout.fresh(p, {"state": held_as if encoded else "fp32", "weights": "nearest"})
    expected.pop("order", None)
    if encoded:
        order = held_order(layout, state)
        check_order(order, p)
        expected |= noted(order)
    for key in expected:
        if key not in ("step", "order"):
            if state.get(key) is None:
                raise StateMismatch(
                    f"the state_dict has no {key!r} for a parameter of shape {tuple(p.shape)}, "
                    f"only {sorted(state)}"
                )
            _fill(expected[key], state[key], key)
    return expected


def _fill(target: Tensor, source: Tensor, key: str) -> None:
    """Copies a loaded state; a float32 state may come in another float dtype, codes may not."""
    same = source.dtype == target.dtype or (
        source.dtype.is_floating_point and target.dtype is torch.float32
    )
    if source.shape != target.shape or not same:
        raise StateMismatch(
            f"{key!r} of the state_dict is {source.dtype} of shape {tuple(source.shape)}; "
            f"expected {target.dtype} of shape {tuple(target.shape)}"
        )
    if is_sharded(source) != is_sharded(target):
        raise StateMismatch(
            f"{key!r} of the state_dict is {'a part' if is_sharded(source) else 'the whole'} of a "
            "parameter, and the optimizer's is not. Load it by torch.distributed.checkpoint and "
            "its set_optimizer_state_dict, which divide it anew"
        )
    target.copy_(source)
