"""Checks which settings are possible: of the constructor, of each param group, and of a file."""

from math import isfinite
from typing import Any

from elbowroom.errors import InvalidSetting
from elbowroom.optim.formats import Group

_SPEED = "foreach", "fused"  # how torch computes its own step
_ONLY = {
    "amsgrad": False,
    "capturable": False,
    "dampening": 0,
    "decoupled_weight_decay": True,
    "differentiable": False,
    "maximize": False,
}


def foreign(group: Group, defaults: Group) -> Group:
    """Settings in a group that only `torch.optim` has.

    Of them an optimizer of ours may offer `maximize`; `defaults`, where torch itself puts
    `differentiable` when it unpickles, say so.
    """
    ours = {"maximize"} & defaults.keys()
    return {k: group[k] for k in (*_SPEED, *_ONLY) if k in group and k not in ours}


def check_numbers(group: Group, *names: str) -> None:
    """Raises InvalidSetting for what is not a finite number, at least 0."""
    for name in names:
        if not _between(group[name], 0, float("inf")):
            raise InvalidSetting(f"{name} is a finite number, at least 0; got {group[name]!r}")


def check_betas(betas: Any) -> None:
    """Raises InvalidSetting for what is not two numbers, at least 0 and below 1."""
    two = isinstance(betas, tuple | list) and len(betas) == 2
    if not two or not all(_between(beta, 0, 1) for beta in betas):
        raise InvalidSetting(f"betas are two numbers, at least 0 and below 1; got {betas!r}")


def check_momentum(momentum: Any) -> None:
    """Raises InvalidSetting for what is not above 0 and below 1."""
    if not _between(momentum, 0, 1) or float(momentum) == 0:
        raise InvalidSetting(
            f"momentum is above 0 and below 1; got {momentum!r}. Without momentum there is no "
            "state to encode: use torch.optim.SGD"
        )


def check_torchs(optimizer: str, given: dict[str, Any]) -> None:
    """Checks settings that only `torch.optim` has: they are taken where they change nothing.

    Raises InvalidSetting for the others, and for what nobody knows.
    """
    for name, value in given.items():
        if name not in (*_SPEED, *_ONLY):
            raise InvalidSetting(
                f"er.optim.{optimizer} has no setting {name!r}; help(er.optim.{optimizer}) "
                "shows those that there are"
            )
        if name in _ONLY and value != _ONLY[name]:
            raise InvalidSetting(
                f"er.optim.{optimizer} does not offer {name}={value!r}, only {_ONLY[name]!r}: "
                "leave it out, or use the class of torch.optim"
            )


def _between(value: Any, least: float, below: float) -> bool:
    try:
        number = float(value)  # a learning rate may be a tensor
    except (TypeError, ValueError):
        return False
    return isfinite(number) and least <= number < below
