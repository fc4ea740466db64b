"""An error budget: what codes add stays below a share of what mini-batches vary by anyway.

    sum of predicted variances  <=  noise x mini-batch variance of the gradient

with the fewest bytes that allow it (`plan/allocation.py`). DIVISION, ActNN and COMET ask for bits
or bounds, and leave it to the user to find out what those do; this asks for the effect.
"""

from elbowroom.codecs import Codec
from elbowroom.control.adaptive import Adaptive
from elbowroom.errors import UnknownField
from elbowroom.plan.allocation import cheapest


class NoiseBudget(Adaptive):
    """Rungs such that added variance is at most `noise` times the sampling variance.

    As long as that is not known, which takes three steps and a probe of every kind of op, tensors
    stay where they start. Raises UnknownField for a share that is not a positive number.
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

    def _move(self) -> None:
        sampling = self.table.sampling
        movable = self._movable()
        if not sampling or not movable:
            return
        known = sum(self.table.variance_of(held.site.name) or 0.0 for held in movable)
        fixed = max((self.table.added or known) - known, 0.0)
        options = [self._options(held) for held in movable]
        for held, choice in zip(
            movable, cheapest(options, self.noise * sampling - fixed), strict=True
        ):
            self._take(held, choice)
