"""ActNN's bit allocation as a baseline (arXiv 2104.14129): an average number of bits, well spread.

    minimize sum of variances over tensors     subject to  sum of bits * elements <= bits * all

over codes of 1 to 8 bits in groups of 256, stochastically rounded, by the greedy walk that drops a
bit where that adds least. Two things are not ActNN's: tensors are not split by sample, and the
sensitivities are this library's (closed form and probes) where ActNN has its own approximation.
"""

from elbowroom.adaptive.base import Adaptive, possible
from elbowroom.codecs import Group
from elbowroom.errors import UnknownField
from elbowroom.plan.allocation import CodeChoice, quietest


class ActNN(Adaptive):
    """Controller that keeps to `bits` bits per element on average, without metadata.

    All tensors start at the next whole number of bits.
    """

    def __init__(
        self, *, bits: float = 2.0, group_size: int = 256, rebuild: bool = True, every: int = 50
    ) -> None:
        if isinstance(bits, bool) or not isinstance(bits, int | float) or not 1 <= bits <= 8:
            raise UnknownField(
                f"policy 'actnn': bits={bits!r} is not possible; it is a number from 1 to 8, the "
                "average over all elements"
            )
        super().__init__(
            Group(bits=int(-(-bits // 1)), group_size=group_size), rebuild=rebuild, every=every
        )
        self.bits = float(bits)

    def _move(self) -> None:
        movable = self._movable()
        options = []
        for held in movable:
            bits = [t.codec.bits for t in possible(held) if isinstance(t.codec, Group)]
            made = zip(bits, self._options(held), strict=True)
            options.append([CodeChoice(b * held.numel / 8, option.variance) for b, option in made])
        allowed = self.bits * sum(held.numel for held in movable) / 8
        for held, choice in zip(movable, quietest(options, allowed), strict=True):
            self._take(held, choice)
