"""A guard over the training loss: codes get milder at once when it suffers, leaner step by step.

After FDSR's adaptive parameters, re-designed from its abstract (its text is not public):

    alarm   fast average of the loss > (1 + tolerance) x slow average,
            or added variance > `noise` x sampling variance
      ->    the most sensitive quarter of all tensors goes one rung up
    calm    for `patience` steps
      ->    the least sensitive quarter goes one rung down

A tensor's sensitivity is the variance that it adds, predicted, for each byte that it takes.
"""

from typing import Any

from torch import Tensor

from elbowroom.adaptive.base import Adaptive
from elbowroom.codecs import Codec
from elbowroom.errors import UnknownField
from elbowroom.measure.noise import HeldNoise
from elbowroom.plan import Site, SiteName

_FAST, _SLOW = 0.1, 0.01  # weights of a new loss in the two averages
_WARM_UP = 20  # losses before an alarm can be raised


class Guard(Adaptive):
    """Tell it each loss: `guard.loss(loss)`.

    tolerance  how far the fast average of the loss may lie above the slow one, as a share
    noise      how much added variance is an alarm, as a share of mini-batch variance
    patience   steps of calm before codes become leaner
    """

    def __init__(
        self,
        codec: Codec,
        *,
        tolerance: float = 0.01,
        noise: float = 0.1,
        patience: int = 500,
        rebuild: bool = True,
        every: int = 50,
    ) -> None:
        for name, value in (("tolerance", tolerance), ("noise", noise), ("patience", patience)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise UnknownField(f"{name}={value!r} is not possible; it is a positive number")
        super().__init__(codec, rebuild=rebuild, every=every)
        self.tolerance, self.noise, self.patience = tolerance, noise, patience
        self.alarms = 0
        self._losses, self._calm = 0, 0
        self._fast = self._slow = 0.0
        self._order: list[SiteName] = []  # of all tensors, the most variance for a byte first

    def loss(self, value: float | Tensor) -> None:
        """The loss of this step. A tensor is read: on a GPU that waits for it."""
        loss = float(value.detach() if isinstance(value, Tensor) else value)
        self._losses += 1
        self._calm += 1
        self._fast += max(1 / self._losses, _FAST) * (loss - self._fast)
        self._slow += max(1 / self._losses, _SLOW) * (loss - self._slow)
        suffers = self._fast > self._slow + self.tolerance * abs(self._slow)
        if self._losses >= _WARM_UP and (suffers or loss != loss):
            self._alarm()
            self._fast = self._slow  # one alarm for one rise
            if loss != loss:
                self._losses, self._fast, self._slow = 0, 0.0, 0.0
        elif self._calm >= self.patience:
            self._calm = 0
            self._shift(self._order[-self._quarter() :], 1)

    def _tried(self, site: Site) -> tuple[Codec, ...]:
        return ()  # it moves by one rung, whatever that does

    def _move(self) -> None:
        tensors = sorted(self.table.held.values(), key=self._price, reverse=True)
        self._order = [held.site.name for held in tensors]
        if (self.table.ratio or 0.0) > self.noise:
            self._alarm()

    def _alarm(self) -> None:
        self.alarms += 1
        self._calm = 0
        self._shift(self._order[: self._quarter()], -1)

    def _shift(self, names: list[SiteName], by: int) -> None:
        for name in names:
            rung = self.rungs.get(name, self.start) + by
            self.rungs[name] = min(max(rung, 0), len(self.ladder) - 1)

    def _price(self, held: HeldNoise) -> float:
        return (self.table.variance_of(held.site.name) or 0.0) / held.nbytes

    def _quarter(self) -> int:
        return -(-len(self._order) // 4)

    def state_dict(self) -> dict[str, Any]:
        """The averages of the loss, too."""
        state = super().state_dict()
        mine = {
            "losses": self._losses,
            "calm": self._calm,
            "fast": self._fast,
            "slow": self._slow,
            "alarms": self.alarms,
            "order": [list(name) for name in self._order],
        }
        return state | {"guard": mine}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        super().load_state_dict(state)
        mine = state["guard"]
        self._losses, self._calm, self.alarms = mine["losses"], mine["calm"], mine["alarms"]
        self._fast, self._slow = mine["fast"], mine["slow"]
        self._order = [SiteName(*name) for name in mine["order"]]
