"""The update rules over encoded states: AdamW (arXiv 1711.05101), Lion (arXiv 2302.06675), SGD."""

from math import sqrt
from typing import Any

from torch import Tensor

from elbowroom.optim.base import EncodedOptimizer
from elbowroom.optim.device_steps import Step, rate_of
from elbowroom.optim.formats import Group
from elbowroom.optim.settings import check_betas, check_momentum, check_numbers, check_torchs


class AdamW(EncodedOptimizer):
    """AdamW with states of 8 to 1.05 bytes per parameter, in place of 8.

    state    "fp32", "coat", "int8", "int4", "int4x2" (see `formats.py`), or "auto": `er.fit`
             chooses the format within its budget, and without `er.fit` it is fp32. A parameter
             group may have a format of its own
    weights  for bfloat16 parameters: "residual" (24 bits in all, one more byte each), "sr"
             (stochastic rounding, no more bytes) or "nearest" (updates below half a step are lost)
    seed     the seed of stochastic rounding
    torchs   other settings of torch.optim.AdamW: `foreach` and `fused` have no effect; others, such
             as amsgrad, must be off

    `state_dict()` holds codes, which this class can load. `torch.optim.AdamW` can load
    `portable_state_dict()`. Raises InvalidSetting and UnsupportedParameter.
    """

    rule = "adamw"
    moments = "exp_avg", "exp_avg_sq"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state: str = "int8",
        weights: str = "residual",
        maximize: bool = False,
        seed: int = 0,
        **torchs: Any,
    ) -> None:
        check_torchs(type(self).__name__, torchs)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, state=state, weights=weights, seed=seed)

    def check_settings(self, group: Group) -> None:
        """Checks the settings of a group. Raises InvalidSetting."""
        check_numbers(group, "lr", "eps", "weight_decay")
        check_betas(group["betas"])

    def factors(self, group: Group, step: Step) -> list[Any]:
        """Returns decay, lr, b1, 1 - b1, b2, 1 - b2, root, eps: see `kernels/reference/step.py`."""
        lr, (b1, b2) = rate_of(group, step), group["betas"]
        sign = -1 if group["maximize"] else 1
        rate, left = lr / (1 - b1**step), 1 - b2**step
        root = 1 / (left.sqrt() if isinstance(left, Tensor) else sqrt(left))
        decay = 1 - lr * group["weight_decay"]
        return [decay, rate, b1, sign * (1 - b1), b2, 1 - b2, root, group["eps"]]


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
