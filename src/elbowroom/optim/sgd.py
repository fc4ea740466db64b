"""SGD with momentum over an encoded state."""

from typing import Any

from elbowroom.optim.base import EncodedOptimizer
from elbowroom.optim.device_steps import Step, rate_of
from elbowroom.optim.formats import Group
from elbowroom.optim.settings import check_momentum, check_numbers, check_torchs


class SGD(EncodedOptimizer):
    """`torch.optim.SGD` with momentum. The settings are those of `AdamW`.

    `dampening`, which torch has between momentum and weight_decay, is always 0. Therefore momentum
    and weight_decay are keyword arguments.
    """

    rule = "sgd"
    moments = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.9,
        *,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        state: str = "int8",
        weights: str = "residual",
        seed: int = 0,
        **torchs: Any,
    ) -> None:
        check_torchs(type(self).__name__, torchs)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, state=state, weights=weights, seed=seed)

    def check_settings(self, group: Group) -> None:
        """Checks the settings of a group. Raises InvalidSetting."""
        check_numbers(group, "lr", "weight_decay")
        check_momentum(group["momentum"])

    def factors(self, group: Group, step: Step) -> list[Any]:
        """Returns decay, lr, momentum, look, keep."""
        momentum = group["momentum"]
        ahead = (momentum, 1.0) if group["nesterov"] else (1.0, 0.0)
        return [group["weight_decay"], rate_of(group, step), momentum, *ahead]
