"""Checks what a state_dict must be to be loaded; everything is examined before anything changes.

Refused, as StateMismatch: a newer version, other groups, settings that are not possible, what
belongs to another optimizer or to a variant that is not offered, and values that no step has made.
"""

from collections.abc import Callable
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor

from elbowroom.errors import InvalidSetting, StateMismatch
from elbowroom.optim.formats import STATES, Group, names, taken
from elbowroom.optim.layout import StateLayout
from elbowroom.optim.settings import foreign
from elbowroom.optim.sharded import local

VERSION = 2  # of what `state_dict` holds; 1 did not say the order of codes
_EXPONENT = 0x7F80  # of bf16: all ones for NaN and Inf


def check_dict(state_dict: Any) -> None:
    """Raises StateMismatch for what no optimizer has saved."""
    fits = isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys()
    if not fits or not all("params" in group for group in state_dict["param_groups"]):
        found = sorted(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict)
        raise StateMismatch(
            "a state_dict has 'state' and 'param_groups', and those 'params', as "
            f"optimizer.state_dict() returns them; got {found}"
        )


def check_states(groups: list[Group]) -> list[Group]:
    """Returns the group of each parameter in a file. Raises StateMismatch: unknown `state`."""
    for group in groups:
        state = group.get("state", "fp32")
        if state not in STATES:
            raise StateMismatch(
                f"the state_dict has state={state!r}; known are {', '.join(STATES)}"
            )
    return [group for group in groups for _ in group["params"]]


def checked_groups(
    name: str,
    own_groups: list[Group],
    groups: list[Group],
    defaults: Group,
    check_settings: Callable[[Group], None],
) -> list[Group]:
    """The file's groups, for those of the optimizer `name`, without what only `torch.optim` has.

    What others keep there stays: a schedule's `initial_lr`, names that a user gives. `weights` are
    the optimizer's own. So is `state`, unless it is "auto": then the file's is taken, and nothing
    milder from now on.
    """
    if len(groups) != len(own_groups) or any(
        len(theirs["params"]) != len(ours["params"])
        for theirs, ours in zip(groups, own_groups, strict=True)
    ):
        raise StateMismatch(
            f"the state_dict has param groups of {[len(g['params']) for g in groups]} parameters, "
            f"the optimizer of {[len(g['params']) for g in own_groups]}"
        )
    made = []
    for theirs, ours in zip(groups, own_groups, strict=True):
        _check_variant(name, theirs, defaults)
        own = ("state", "weights", "auto", *foreign(theirs | ours, defaults))
        known = {k: theirs.get(k, ours.get(k)) for k in theirs | ours if k not in own}
        known |= {"version": VERSION, "params": theirs["params"]}
        known |= {k: ours[k] for k in own if k in ours}
        try:
            check_settings(known)
        except InvalidSetting as error:
            raise StateMismatch(f"of the state_dict, {error}") from error
        made.append(known | (taken(theirs) if "auto" in ours else {}))
    return made


def _check_variant(name: str, theirs: Group, defaults: Group) -> None:
    """Raises StateMismatch for a group whose rule is not ours."""
    version = theirs.get("version", VERSION)
    if version > VERSION:
        raise StateMismatch(
            f"the state_dict is of version {version}, this elbowroom reads up to {VERSION}; "
            "install a newer elbowroom"
        )
    for key, plain in (("amsgrad", False), ("dampening", 0), ("maximize", False)):
        if key not in defaults and theirs.get(key, plain) != plain:
            raise StateMismatch(
                f"the state_dict has {key}={theirs[key]!r}, which er.optim.{name} does not offer: "
                f"continue with the class of torch.optim, or set it to {plain!r} in param_groups"
            )
    if not theirs.get("decoupled_weight_decay", True) and theirs.get("weight_decay"):
        raise StateMismatch(
            f"the state_dict is of Adam, which adds weight_decay={theirs['weight_decay']!r} to the "
            f"gradient; that of er.optim.{name} is decoupled, as in AdamW. Continue with "
            "torch.optim.Adam, or set weight_decay to 0 in its param_groups"
        )


def check_state(
    layout: StateLayout, p: Tensor, state: dict[str, Any], held_as: str, group: Group
) -> None:
    """Raises StateMismatch for a state of another optimizer, or one that no step leaves behind.

    Of a finite gradient, Inf is left in a v of float32 alone, which may go on as such (`group`).
    """
    held = [name for moment in layout.moments for name in (moment, *names(moment, ""))]
    if other := sorted(state.keys() - {"step", "residual", "order", *held}):
        raise StateMismatch(
            f"the state_dict has {', '.join(map(repr, other))}, so it is not of "
            f"{layout.owner}, which has {', '.join(map(repr, layout.moments))}"
        )
    # Of torch's SGD there is no step; only Adam's correction of bias depends on it.
    step = float(state.get("step", 0 if len(layout.moments) < 2 else -1))
    if not 0 <= step < 2**31:
        raise StateMismatch(
            f"'step' of the state_dict, for a parameter of shape {tuple(p.shape)}, is "
            f"{state.get('step', 'missing')}; expected the number of steps done"
        )
    second = layout.moments[1:]
    plain = layout.format_of(p.shape, group["state"]).second.kind == "fp32"
    for key, found in state.items():
        if isinstance(found, Tensor):
            what = _broken(key, local(found), held_as, squares=key in second, plain=plain)
            if what:
                raise StateMismatch(
                    f"{key!r} of the state_dict, for a parameter of shape {tuple(p.shape)}, holds "
                    f"{what}, which no step leaves behind: load an earlier file, or begin without "
                    "states"
                )


def _broken(key: str, found: Tensor, held_as: str, *, squares: bool, plain: bool) -> str:
    """Says what is wrong with it, or "". Bounds are bits of bf16; in "coat" all are good."""
    if found.is_floating_point() and found.numel():
        least, most = found.min().item(), found.max().item()  # NaN, if there is one
        if isnan(least):
            return "NaN"
        if squares and least < 0:
            return "squares below 0"
        return "Inf" if -least == inf or (most == inf and not (squares and plain)) else ""
    if not key.endswith("_bounds") or held_as == "coat" or found.dtype is not torch.int16:
        return ""
    return "NaN or Inf" if ((found & _EXPONENT) == _EXPONENT).any() else ""
