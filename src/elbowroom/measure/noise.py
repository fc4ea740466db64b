"""The gradient variance that lossy codes add: predicted for each op, and measured.

    predicted   linear ops: closed form (`sensitivity`), from the code's drawn error and dY
                others: energy of the error x |dY|^2 x gain, the gain as probes found it
    measured    by a probe of the op, whose exact tensors are kept for one step (`probe`)
    sampling    what mini-batches add anyway (`gradient_variance`)

The variance that a unit of error adds differs tenfold from batch to batch, as |g|^2 does. So its
share of |g|^2 is averaged over the watched steps, and so is the share of the variance over
mini-batches. Codes are chosen by both.

Few steps are watched: the first ones, and then a run of `run` steps in every `every`. In a watched
forward each lossy tensor is decoded once more; in its backward each dY is squared and summed. No
value reaches the CPU before the next step begins. Variances are sums over all entries of all
parameters' gradients.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from torch import Tensor

from elbowroom.codecs import Codec
from elbowroom.measure.gradient_variance import GradientVariance
from elbowroom.plan import Site, SiteName

_SMOOTHING = 0.7  # averages follow the training within a few probes and looks
Pair = tuple[float, float]  # of the upper code, or all, and of the lower


@dataclass(frozen=True)
class Trial:
    """A codec tried on a sample of a tensor: bits an element, squared error an element."""

    codec: Codec
    bits: float
    error: float


@dataclass(frozen=True)
class CodeNoise:
    """One tensor that is held by a lossy code.

    energy  sum of squared errors of all its elements
    trials  what the meter's `variants` would do to it
    """

    site: Site
    codec: Codec
    numel: int
    nbytes: int
    energy: float
    trials: tuple[Trial, ...] = ()


@dataclass
class OpNoise:
    """One op that reads lossy tensors.

    sources   which of its error's energy comes from which held tensor
    gains     variance over `OpReading.unit`, by parts, as probes found it
    shares    of |g|^2 that `OpReading.strength` 1 has of unit or closed form, by parts, over steps
    variance  predicted from that, at the |g|^2 and with the errors of the last watched step; None:
              it cannot be yet
    rough     what lower codes have of it (`Sided`), which stay when the others change
    alone     predicted from the last watched step alone
    checked   (predicted, measured) variance of the step that was probed last
    weight    see `OpReading`
    linear    whether there is one, which a checkpoint can tell
    """

    sources: dict[SiteName, float] = field(default_factory=dict)
    gains: tuple["Average", "Average"] = field(default_factory=lambda: (Average(), Average()))
    shares: tuple["Average", "Average"] = field(default_factory=lambda: (Average(), Average()))
    variance: float | None = None
    rough: float = 0.0
    alone: float | None = None
    checked: tuple[float | None, float] | None = None
    weight: "weakref.ref[Tensor] | None" = None
    linear: bool = False

    @property
    def probes(self) -> int:
        return max(gain.count for gain in self.gains)


@dataclass
class Average:
    """Running average that weighs all values alike at first, then forgets."""

    value: float = 0.0
    count: int = 0

    def learn(self, value: float) -> None:
        self.count += 1
        self.value += max(1 / self.count, 1 - _SMOOTHING) * (value - self.value)


@dataclass(frozen=True)
class OpReading:
    """The result of one watched step for one op.

    energies  squared error, by the tensor it comes from
    unit      what the variance is proportional to: the sum of energies times the mean of dY^2, or
              for norms what `channel_errors` says; two numbers: of the upper code, or all, and of
              the lower code
    strength  of the error alone, without dY: `unit` and `closed` are proportional to it, by parts
    closed    variance by the closed form, if there is one
    measured  variance by a probe, if there was one, of both codes
    weight    the parameter beside which the op is linear in the tensor, if it is
    """

    energies: dict[SiteName, float]
    unit: Pair
    strength: Pair
    closed: float | None
    measured: tuple[float, float] | None
    weight: "weakref.ref[Tensor] | None" = None

    @property
    def finite(self) -> bool:
        """True if no number overflowed."""
        measured = self.measured or (0.0, 0.0)
        numbers = [*self.energies.values(), *self.unit, *self.strength, self.closed or 0.0]
        numbers += measured
        return all(map(isfinite, numbers))


def _typical(op: OpNoise, units: Pair, strengths: Pair, size: float) -> Pair:
    """Returns the units of a step of |g|^2 = size, were dY over |g| as it is on average."""
    found = []
    for share, unit, strength in zip(op.shares, units, strengths, strict=True):
        if size > 0 and strength > 0:
            share.learn(unit / strength / size)
            unit = share.value * strength * size
        found.append(unit)
    return found[0], found[1]


class NoiseTable:
    """The noise that is known of all sites and ops of one training."""

    def __init__(self) -> None:
        self.held: dict[SiteName, CodeNoise] = {}
        self.ops: dict[SiteName, OpNoise] = {}
        self.gradient = GradientVariance()
        self.steps = 0  # watched in full

    def take(self, held: dict[SiteName, CodeNoise], readings: dict[SiteName, OpReading]) -> bool:
        """Adds a step that was watched in full; returns whether it can be learned from.

        Nothing is learned from a forward without a backward, or from a step that overflowed
        (GradScaler skips such steps, too).
        """
        size = self.gradient.size_now  # once: it reads all parameters
        finite = isfinite(size) and all(reading.finite for reading in readings.values())
        if not readings or not finite:
            return False
        self.steps += 1
        self.held = held
        before, self.ops = self.ops, {}
        for name in readings:
            self.ops[name] = before.get(name, OpNoise())
        for name, reading in readings.items():
            self._update(name, self.ops[name], reading, size)
        return True

    def _update(self, name: SiteName, op: OpNoise, reading: OpReading, size: float) -> None:
        op.sources, op.weight = reading.energies, reading.weight
        op.linear = reading.weight is not None
        closed, measured = reading.closed is not None, reading.measured
        units = reading.unit if reading.closed is None else (reading.closed, 0.0)
        op.alone, _ = self._predict(name, op, units, closed)
        if measured is not None:
            op.checked = op.alone, sum(measured)
            for gain, unit, found in zip(op.gains, units, measured, strict=True):
                if unit > 0 and not closed:
                    gain.learn(found / unit)
            op.alone, _ = self._predict(name, op, units, closed)
        typical = _typical(op, units, reading.strength, size)
        op.variance, op.rough = self._predict(name, op, typical, closed)

    def _predict(
        self, name: SiteName, op: OpNoise, units: Pair, closed: bool
    ) -> tuple[float | None, float]:
        """Returns the variance by all that is held, and by the lower codes of it."""
        gains = [1.0 if closed else self._gain(name, op, part) for part in range(2)]
        fine, rough = (
            0.0 if unit <= 0 else None if gain is None else gain * unit
            for gain, unit in zip(gains, units, strict=True)
        )
        return None if fine is None or rough is None else fine + rough, rough or 0.0

    def _gain(self, name: SiteName, op: OpNoise, part: int) -> float | None:
        """Returns the op's gain by probes; before its first one, a bound for most of its kind.

        A planner chooses the coarsest codes where the prediction is lowest, so with a mean the
        added variance would be larger than predicted.
        """
        if op.gains[part].count:
            return op.gains[part].value
        alike = [
            other.gains[part].value
            for other_name, other in self.ops.items()
            if other.gains[part].count and other_name.consumer == name.consumer
        ]
        from statistics import mean, pstdev  # it imports decimals and fractions

        return mean(alike) + pstdev(alike) if alike else None

    @property
    def unprobed(self) -> int:
        """The number of ops without a closed form that no probe has seen."""
        return sum(not op.probes and not op.linear for op in self.ops.values())

    def variance_of(self, site: SiteName) -> float | None:
        """Returns what a held tensor adds through all ops that read it; None: unknown."""
        return self._through(site, lambda op: op.variance)

    def rough_of(self, site: SiteName) -> float:
        """Returns the part of it that the lower code has, if there are two."""
        return self._through(site, lambda op: op.rough) or 0.0

    def _through(self, site: SiteName, of: Callable[[OpNoise], float | None]) -> float | None:
        total = 0.0
        for op in self.ops.values():
            energy = sum(op.sources.values())
            if site in op.sources and energy > 0:
                variance = of(op)
                if variance is None:
                    return None
                total += variance * op.sources[site] / energy
        return total

    @property
    def added(self) -> float | None:
        """Returns what all codes add, predicted; None: not known yet."""
        if not self.steps or any(op.variance is None for op in self.ops.values()):
            return None
        return self.known_added

    @property
    def known_added(self) -> float:
        """Returns the same, of the ops of which it is known."""
        return sum(op.variance or 0.0 for op in self.ops.values())

    @property
    def added_last(self) -> float:
        """Returns the same, in the last watched step alone."""
        return sum(op.alone or 0.0 for op in self.ops.values())

    @property
    def sampling(self) -> float | None:
        """Variance that mini-batches have anyway, at the last step that was watched in full.

        None: not known yet.
        """
        gradient = self.gradient
        return min(max(gradient.share, 0.0), 1.0) * gradient.size if gradient.draws else None

    @property
    def ratio(self) -> float | None:
        """Ratio of added to sampling variance, which `noise` bounds. None: not known yet."""
        added, sampling = self.added, self.sampling
        return None if added is None or not sampling else added / sampling

    def state_dict(self) -> dict[str, Any]:
        """Returns what was learned over many steps, and whose turn to be probed comes next.

        What the last step showed is seen again soon.
        """
        ops = [
            [*name, op.linear, *((mean.value, mean.count) for mean in (*op.gains, *op.shares))]
            for name, op in self.ops.items()
        ]
        return {"steps": self.steps, "ops": ops, "gradient": self.gradient.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state from `state_dict()`."""
        self.steps, self.held = state["steps"], {}
        self.ops = {}
        for module, consumer, nth, linear, *means in state["ops"]:
            fine, rough, *shares = (Average(*mean) for mean in means)
            op = OpNoise(gains=(fine, rough), shares=(shares[0], shares[1]), linear=linear)
            self.ops[SiteName(module, consumer, nth)] = op
        self.gradient.load_state_dict(state["gradient"])
