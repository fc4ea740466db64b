"""A guard over the training loss: finer codes at once when it gets worse, coarser ones stepwise.

After FDSR's adaptive parameters, re-designed from its abstract (its text is not public):

    alarm   fast average of the loss > (1 + tolerance) x slow average, a loss that is not finite,
            or added variance > `noise` x sampling variance
      ->    the tensors that were made coarser last become finer again, and stay so; if there are
            none, the most sensitive quarter of all tensors becomes one variant finer
    calm    for `patience` steps
      ->    the least sensitive quarter becomes one variant coarser

A tensor's sensitivity is the predicted variance that it adds, for each byte that it takes. All
tensors start at `codec`. The default is in the middle of seven variants of `fdsr`, the three finest
of which are unbiased, so that an alarm can help.
"""

import logging
from collections import deque
from math import isfinite
from typing import Any, SupportsFloat

from torch import Tensor

from elbowroom.adaptive.base import Adaptive
from elbowroom.codecs import Codec, Fdsr
from elbowroom.errors import UnknownField
from elbowroom.kernels.fakes import would_wait
from elbowroom.measure.noise import CodeNoise
from elbowroom.plan import Site, SiteName
from elbowroom.runtime.late import Sent

_FAST, _SLOW = 0.1, 0.01  # weights of a new loss in the two averages
_WARM_UP = 20  # losses before an alarm can be raised
_SILENT = 3  # checks without any loss, until that is said
_log = logging.getLogger("elbowroom")


class Guard(Adaptive):
    """Controller that switches to finer codes as soon as the loss gets worse.

        guard = er.adaptive.Guard()
        with er.saving(guard):
            loss = loss_fn(model(x), y)
        guard.loss(loss)

    codec      the codec that every tensor starts with (default: `Fdsr()`)
    tolerance  how far the fast average of the loss may be above the slow one, as a fraction
    noise      the variance of codes that raises an alarm, relative to that over mini-batches
    patience   the number of steps without an alarm before codes become coarser
    """

    def __init__(
        self,
        codec: Codec | None = None,
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
        super().__init__(codec or Fdsr(), rebuild=rebuild, every=every)
        self.tolerance, self.noise, self.patience = tolerance, noise, patience
        self.alarms = 0
        self._losses, self._calm = 0, 0
        self._sent: deque[Sent | float] = deque()  # losses that were not processed yet
        self._fast = self._slow = 0.0
        self._order: list[SiteName] = []  # of all tensors, the most variance for a byte first
        self._leaner: list[SiteName] = []  # the tensors that were made coarser last
        self._limits: dict[SiteName, int] = {}  # the coarsest variant that a tensor may have
        self._silent = 0  # checks in a row before any loss was reported

    def loss(self, value: float | Tensor) -> None:
        """Reports the loss of this step.

        A loss on a GPU is read when its copy has arrived, a step or two later. Raises UnknownField
        for what is not one number.
        """
        is_one = (
            value.numel() == 1 and not value.is_complex()
            if isinstance(value, Tensor)
            else isinstance(value, SupportsFloat) and not isinstance(value, bool)
        )
        if not is_one:
            got = tuple(value.shape) if isinstance(value, Tensor) else value
            raise UnknownField(
                f"guard.loss takes the loss of a step, a number or a tensor of one; got {got!r}"
            )
        if isinstance(value, Tensor):
            value = value.detach()
        if isinstance(value, Tensor) and would_wait(value):
            self._sent.append(Sent(value.double()))
        elif self._sent:
            self._sent.append(float(value))
        else:
            self._count(float(value))
        self._process(wait=False)

    def _process(self, *, wait: bool) -> None:
        """Processes the losses that have arrived, in their order. wait: all of them."""
        while self._sent:
            first = self._sent[0]
            if isinstance(first, Sent) and not (wait or first.has_arrived):
                return
            self._sent.popleft()
            self._count(first.number(wait=wait) if isinstance(first, Sent) else first)

    def _count(self, loss: float) -> None:
        if not isfinite(loss):  # no average of it would be finite again
            self._alarm()
            self._losses, self._fast, self._slow = 0, 0.0, 0.0
            return
        self._losses += 1
        self._calm += 1
        self._fast += max(1 / self._losses, _FAST) * (loss - self._fast)
        self._slow += max(1 / self._losses, _SLOW) * (loss - self._slow)
        suffers = self._fast > self._slow + self.tolerance * abs(self._slow)
        if self._losses >= _WARM_UP and suffers:
            self._alarm()
            self._fast = self._slow  # one alarm for one rise
        elif self._calm >= self.patience:
            self._calm = 0
            self._leaner = self._order[-self._quarter() :]
            self._shift(self._leaner, 1)

    def _candidates(self, site: Site) -> tuple[Codec, ...]:
        return ()  # it moves by one variant, whatever that does

    def _move(self) -> None:
        tensors = sorted(self.table.held.values(), key=self._price, reverse=True)
        self._order = [held.site.name for held in tensors]
        if (self.table.ratio or 0.0) > self.noise:
            self._alarm()
        self._silent = 0 if self._losses or self.alarms else self._silent + 1
        if self._silent == _SILENT:
            _log.warning(
                "Guard has not been told any loss in %d checks, so only noise can raise an alarm. "
                "Call guard.loss(loss) in each step",
                _SILENT,
            )

    def _alarm(self) -> None:
        self.alarms += 1
        self._calm = 0
        if not self._order:  # nothing was watched yet: all of them
            self.start = max(self.start - 1, 0)
        guilty, self._leaner = self._leaner, []
        self._shift(guilty or self._order[: self._quarter()], -1)
        self._limits |= {name: self.variants[name] for name in guilty}

    def _shift(self, names: list[SiteName], by: int) -> None:
        for name in names:
            variant = self.variants.get(name, self.start) + by
            leanest = self._limits.get(name, len(self.ladder) - 1)
            self.variants[name] = min(max(variant, 0), leanest)

    def _price(self, held: CodeNoise) -> float:
        return (self.table.variance_of(held.site.name) or 0.0) / held.nbytes

    def _quarter(self) -> int:
        return -(-len(self._order) // 4)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, including the averages of the loss.

        It waits for losses whose copies have not arrived yet.
        """
        self._process(wait=True)
        state = super().state_dict()
        mine = {
            "losses": self._losses,
            "calm": self._calm,
            "fast": self._fast,
            "slow": self._slow,
            "alarms": self.alarms,
            "order": [list(name) for name in self._order],
            "leaner": [list(name) for name in self._leaner],
            "limits": [[*name, variant] for name, variant in self._limits.items()],
            "start": self.start,
        }
        return state | {"guard": mine}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the controller from `state_dict()`."""
        super().load_state_dict(state)
        self._sent.clear()
        mine = state["guard"]
        self._losses, self._calm, self.alarms = mine["losses"], mine["calm"], mine["alarms"]
        self._fast, self._slow = mine["fast"], mine["slow"]
        self._order = [SiteName(*name) for name in mine["order"]]
        self._leaner = [SiteName(*name) for name in mine["leaner"]]
        self._limits = {SiteName(m, op, nth): variant for m, op, nth, variant in mine["limits"]}
        self.start = mine["start"]
