"""Lion (arXiv 2302.06675) over an encoded state."""

from typing import Any

from elbowroom.optim.base import EncodedOptimizer
from elbowroom.optim.device_steps import Step, rate_of
from elbowroom.optim.formats import Group
from elbowroom.optim.settings import check_betas, check_numbers, check_torchs


class Lion(EncodedOptimizer):
    """Lion: updates by the sign of an average of gradients. It has one state.

    The settings are those of `AdamW`.
    """

    rule = "lion"
    moments = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        state: str = "int8",
        weights: str = "residual",
        maximize: bool = False,
        seed: int = 0,
        **torchs: Any,
    ) -> None:
        check_torchs(type(self).__name__, torchs)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, state=state, weights=weights, seed=seed)

    def check_settings(self, group: Group) -> None:
        """Checks the settings of a group. Raises InvalidSetting."""
        check_numbers(group, "lr", "weight_decay")
        check_betas(group["betas"])

    def factors(self, group: Group, step: Step) -> list[Any]:
        """Returns decay, lr, b1, 1 - b1, b2, 1 - b2."""
        lr, (b1, b2) = rate_of(group, step), group["betas"]
        sign = -1 if group["maximize"] else 1
        return [1 - lr * group["weight_decay"], lr, b1, sign * (1 - b1), b2, sign * (1 - b2)]
