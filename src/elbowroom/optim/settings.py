"""Which settings are possible: asked of the constructor, of each param group, and of a file."""

from math import isfinite
from typing import Any

from elbowroom.errors import InvalidSetting
from elbowroom.optim.formats import Group


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


def _between(value: Any, least: float, below: float) -> bool:
    try:
        number = float(value)  # a learning rate may be a tensor
    except (TypeError, ValueError):
        return False
    return isfinite(number) and least <= number < below
