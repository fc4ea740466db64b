"""How far gradients g~ are from the true g, over seeds of the noise.

gErr2     mean |g~ - g|^2 / |g|^2
sampling  (gErr2 - |mean(g~ - g)|^2 / |g|^2) / (n - 1): what n seeds alone leave of the mean
bias^2    |mean(g~ - g)|^2 / |g|^2 - sampling: around 0, of either sign, where g~ is unbiased
"""

from math import sqrt

import torch
from torch import Tensor

Grads = list[Tensor]


class GradientError:
    """g~ against g over noise seeds, summed up as it comes. norm2: |g|^2."""

    def __init__(self, g: Grads) -> None:
        self._g = g
        self.norm2 = _norm2(g)
        self._sum = [torch.zeros_like(part) for part in g]
        self.errors2: list[float] = []
        self.bit_equal = True

    def add(self, grads: Grads) -> None:
        differences = [new - true for new, true in zip(grads, self._g, strict=True)]
        self.bit_equal &= all(
            torch.equal(new, true) for new, true in zip(grads, self._g, strict=True)
        )
        self.errors2.append(_norm2(differences) / self.norm2)
        torch._foreach_add_(self._sum, differences)

    @property
    def gerr2(self) -> float:
        return sum(self.errors2) / len(self.errors2)

    @property
    def gerr2_sd(self) -> float:
        """Standard deviation from seed to seed."""
        n = len(self.errors2)
        return sqrt(sum((e - self.gerr2) ** 2 for e in self.errors2) / (n - 1)) if n > 1 else 0.0

    @property
    def sampling2(self) -> float:
        """What |mean error|^2 is expected to be from n seeds alone: variance / n."""
        n = len(self.errors2)
        return (self.gerr2 - self._mean2) / (n - 1) if n > 1 else self.gerr2

    @property
    def bias2(self) -> float:
        return self._mean2 - self.sampling2

    @property
    def _mean2(self) -> float:
        return _norm2(self._sum) / len(self.errors2) ** 2 / self.norm2


def _norm2(parts: Grads) -> float:
    return sum(float(part.double().square().sum()) for part in parts)
