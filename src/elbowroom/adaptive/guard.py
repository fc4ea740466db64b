"""A guard over the training loss: codes get milder at once when it suffers, leaner step by step.

After FDSR's adaptive parameters, re-designed from its abstract (its text is not public):

    alarm   fast average of the loss > (1 + tolerance) x slow average,
            or added variance > `noise` x sampling variance
      ->    the most sensitive quarter of all tensors goes one rung up
    calm    for `patience` steps
      ->    the least sensitive quarter goes one rung down

A tensor's sensitivity is the variance that it adds, predicted, for each byte that it takes.
"""

from collections import deque
from typing import Any

from torch import Tensor

from elbowroom.adaptive.base import Adaptive
from elbowroom.codecs import Codec
from elbowroom.errors import UnknownField
from elbowroom.kernels.fakes import would_wait
from elbowroom.measure.noise import HeldNoise
from elbowroom.plan import Site, SiteName
from elbowroom.runtime.late import Sent

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
        self._sent: deque[Sent | float] = deque()  # losses of which nobody has heard yet
        self._fast = self._slow = 0.0
        self._order: list[SiteName] = []  # of all tensors, the most variance for a byte first

    def loss(self, value: float | Tensor) -> None:
        """The loss of this step. One on a GPU is read when it has arrived, a step or two later."""
        if isinstance(value, Tensor):
            value = value.detach()
        if isinstance(value, Tensor) and would_wait(value):
            self._sent.append(Sent(value.double()))
        elif self._sent:
            self._sent.append(float(value))
        else:
            self._count(float(value))
        self._hear(wait=False)

    def _hear(self, *, wait: bool) -> None:
        """Take the losses that have arrived, in their order. wait: take all of them."""
        while self._sent:
            first = self._sent[0]
            if isinstance(first, Sent) and not (wait or first.has_arrived):
                return
            self._sent.popleft()
            self._count(first.number(wait=wait) if isinstance(first, Sent) else first)

    def _count(self, loss: float) -> None:
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
        """The averages of the loss, too. Losses that are still on their way are waited for."""
        self._hear(wait=True)
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
        self._sent.clear()
        mine = state["guard"]
        self._losses, self._calm, self.alarms = mine["losses"], mine["calm"], mine["alarms"]
        self._fast, self._slow = mine["fast"], mine["slow"]
        self._order = [SiteName(*name) for name in mine["order"]]
