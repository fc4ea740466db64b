"""How much a gradient varies from mini-batch to mini-batch: the noise that training has anyway.

    V = sum over all entries of Var(g)  ~  mean over three steps in a row of |g - 2 g' + g''|^2 / 6

on a fixed random sample of entries of each parameter, scaled up. The second difference takes off
what moves steadily with the weights; what else moves makes V too large: 0.97 to 1.21 times that
at frozen weights on small networks early in training, up to 2.3 times where steps are large for
their noise (benchmarks/noise.py; first differences are worse). What lossy codes add is in it, and
whoever knows that takes it off. A gradient is read as backward delivers it, before it is
accumulated or clipped.

Not done: the difference of the gradients of two halves of one batch, which no weight's move
disturbs. BatchNorm ties the halves to each other, and it came out 2 to 7 times too large.
"""

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from elbowroom.measure.probe import second_pass

_ENTRIES = 512  # of each parameter, or all that it has
_Key = tuple[int, int]  # which parameter of the step, and its size


class GradientVariance:
    """Fed by hooks on parameters, in runs of consecutive steps.

    value   V
    draws   how many triples of steps it is the average of
    """

    def __init__(self, smoothing: float = 0.95) -> None:
        self._smoothing = smoothing
        self._before: list[dict[_Key, Tensor]] = []  # the last two steps of this run
        self._now: dict[_Key, Tensor] = {}
        self._places: dict[_Key, Tensor] = {}
        self._hooks: dict[int, Any] = {}  # by id
        self.value = 0.0
        self.draws = 0

    def listen(self, weight: Tensor) -> None:
        """Read the gradient of this parameter in the backward to come."""
        if id(weight) not in self._hooks:
            key = len(self._hooks), weight.numel()
            hook = weight.register_hook(self._reader(key))  # type: ignore[no-untyped-call]
            self._hooks[id(weight)] = hook

    def _reader(self, key: _Key) -> Callable[[Tensor], None]:
        def read(grad: Tensor) -> None:
            if grad.layout is not torch.strided or second_pass.runs:
                return
            flat = (torch.view_as_real(grad) if grad.is_complex() else grad).detach().reshape(-1)
            if key not in self._places:
                self._places[key] = _sample(flat.numel()).to(grad.device)
            places = self._places[key]
            part = flat[places].float() * (flat.numel() / len(places)) ** 0.5
            self._now[key] = part if key not in self._now else self._now[key] + part

        return read

    def end_step(self, *, last: bool) -> None:
        """The backward of a step is over. last: of this run of steps."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        if len(self._before) == 2:
            first, second = self._before
            parts = [
                (g - 2 * second[key] + first[key]).square().sum().cpu() / 6
                for key, g in self._now.items()
                if key in first and key in second
            ]
            self._take(float(torch.stack(parts).sum()) if parts else float("nan"))
        self._before = [] if last else [*self._before[-1:], self._now]
        self._now = {}

    def _take(self, variance: float) -> None:
        """An average that weighs all values alike at first, and forgets slowly later."""
        if not isfinite(variance):
            return  # a step that overflowed, which GradScaler skips too; or none had a gradient
        self.draws += 1
        self.value += max(1 / self.draws, 1 - self._smoothing) * (variance - self.value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "draws": self.draws, "before": list(self._before)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.draws = state["value"], state["draws"]
        self._before = list(state["before"])


def _sample(numel: int) -> Tensor:
    if numel <= _ENTRIES:
        return torch.arange(numel)
    own = torch.Generator().manual_seed(numel)  # the user's random numbers are untouched
    return torch.randint(numel, (_ENTRIES,), generator=own)
