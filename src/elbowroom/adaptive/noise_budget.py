"""An error budget: the variance of codes stays below a share of that of mini-batches.

    sum of predicted variances  <=  noise x mini-batch variance of the gradient

with the fewest bytes that allow it (`plan/allocation.py`). DIVISION, ActNN and COMET take bits or
bounds as settings, and the user has to find out their effect; this takes the effect as a setting.
"""

import logging

from elbowroom.adaptive.base import Adaptive
from elbowroom.codecs import Codec
from elbowroom.errors import UnknownField
from elbowroom.plan.allocation import cheapest

_log = logging.getLogger("elbowroom")


class NoiseBudget(Adaptive):
    """Controller that keeps the variance of codes below `noise` times that over mini-batches.

    Tensors keep their first setting until these variances are known, which takes three steps and a
    measurement of each kind of op. If the noise of codes is larger than the gradient can show, all
    tensors get their most precise setting, and a warning says so. Raises UnknownField if `noise` is
    not a positive number.
    """

    def __init__(
        self, codec: Codec, *, noise: float = 0.1, rebuild: bool = True, every: int = 50
    ) -> None:
        if isinstance(noise, bool) or not isinstance(noise, int | float) or not noise > 0:
            raise UnknownField(
                f"noise={noise!r} is not possible; it is a positive number: added variance over "
                "mini-batch variance, 0.1 for a tenth"
            )
        super().__init__(codec, rebuild=rebuild, every=every)
        self.noise = float(noise)
        self._was_drowned = self._has_told = False

    def _tell_unknown(self) -> None:
        """Logs, once, the ops that the budget leaves out: no probe can tell what they add."""
        unknown = [name for name, op in self.table.ops.items() if op.variance is None]
        if self._has_told or not unknown or not self.meter.is_past_first_run:
            return
        self._has_told = True
        first = unknown[0]
        _log.warning(
            "noise=%g: what codes add cannot be probed at '%s' in '%s' (%d in all); it "
            "comes on top of the budget. Ops that change no view in place can be probed; or take "
            "fixed codes that are milder",
            self.noise,
            first.consumer,
            first.module,
            len(unknown),
        )

    def _move(self) -> None:
        self._tell_unknown()
        sampling = self.table.sampling
        movable = self._movable()
        if sampling is None or not movable:
            return
        if not sampling and not self._was_drowned:
            self._was_drowned = True
            _log.warning(
                "noise=%g: codes add more noise than the measurable variance over mini-batches, "
                "so all tensors get the most precise setting until that can be measured; start "
                "with a more precise codec",
                self.noise,
            )
        known = sum(self.table.variance_of(held.site.name) or 0.0 for held in movable)
        fixed = max((self.table.added or known) - known, 0.0)
        options = [self._options(held) for held in movable]
        for held, choice in zip(
            movable, cheapest(options, self.noise * sampling - fixed), strict=True
        ):
            self._take(held, choice)
