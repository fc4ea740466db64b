"""What lossy codes add to the variance of the gradient: predicted for each op, and measured.

    predicted   linear ops: closed form (`sensitivity`), from the code's drawn error and dY
                others: energy of the error x |dY|^2 x gain, the gain as probes found it
    measured    by a probe of the op, whose exact tensors are kept for one step (`probe`)
    sampling    what mini-batches add anyway (`gradient_variance`)

Few steps are watched: the first ones, and then a run of `run` steps in every `every`. In a watched
forward each lossy tensor is decoded once more; in its backward each dY is squared and summed. No
value reaches the CPU before the next step begins. Variances are sums over all entries of all
parameters' gradients.
"""

import weakref
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from torch import Tensor

from elbowroom.codecs import Codec
from elbowroom.measure.gradient_variance import GradientVariance
from elbowroom.plan import Site, SiteName

_SMOOTHING = 0.7  # a gain follows the training within a few probes


@dataclass(frozen=True)
class Trial:
    """A codec tried on a sample of a tensor: bits an element, squared error an element."""

    codec: Codec
    bits: float
    error: float


@dataclass(frozen=True)
class HeldNoise:
    """One tensor that is held by a lossy code.

    energy  sum of squared errors of all its elements
    trials  what the meter's `rungs` would do to it
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
    gain      variance for a unit of energy and of |dY|^2, as probes found it; 0 without probes
    variance  predicted at the last watched step; None: it cannot be yet
    checked   (predicted, measured) variance of the step that was probed last
    weight    see `OpReading`
    linear    whether there is one, which a checkpoint can tell
    """

    sources: dict[SiteName, float] = field(default_factory=dict)
    gain: float = 0.0
    probes: int = 0
    variance: float | None = None
    checked: tuple[float | None, float] | None = None
    weight: "weakref.ref[Tensor] | None" = None
    linear: bool = False

    def learn_gain(self, gain: float) -> None:
        self.probes += 1
        self.gain += _share(self.probes) * (gain - self.gain)


def _share(nth: int) -> float:
    """The weight of the nth value in an average that weighs all alike at first, then forgets."""
    return max(1 / nth, 1 - _SMOOTHING)


@dataclass(frozen=True)
class OpReading:
    """What one watched step tells of one op.

    energies  of the error, by the tensor it comes from
    grad      |dY|^2
    closed    variance by the closed form, where there is one
    measured  variance by a probe, if there was one
    weight    beside which the op is linear in what it reads, if it is
    """

    energies: dict[SiteName, float]
    grad: float
    closed: float | None
    measured: float | None
    weight: "weakref.ref[Tensor] | None" = None

    @property
    def finite(self) -> bool:
        """Whether no number overflowed."""
        numbers = [*self.energies.values(), self.grad, self.closed or 0.0, self.measured or 0.0]
        return all(map(isfinite, numbers))


class NoiseTable:
    """What is known of all sites and ops of one training."""

    def __init__(self) -> None:
        self.held: dict[SiteName, HeldNoise] = {}
        self.ops: dict[SiteName, OpNoise] = {}
        self.gradient = GradientVariance()
        self.steps = 0  # watched in full

    def take(self, held: dict[SiteName, HeldNoise], readings: dict[SiteName, OpReading]) -> None:
        """A step that was watched in full is over.

        A forward without a backward tells nothing, nor does one that overflowed (GradScaler skips
        such steps, too).
        """
        if not readings or not all(reading.finite for reading in readings.values()):
            return
        self.steps += 1
        self.held = held
        before, self.ops = self.ops, {}
        for name in readings:
            self.ops[name] = before.get(name, OpNoise())
        for name, reading in readings.items():
            self._update(name, self.ops[name], reading)

    def _update(self, name: SiteName, op: OpNoise, reading: OpReading) -> None:
        op.sources, op.weight = reading.energies, reading.weight
        op.linear = reading.weight is not None
        unit = sum(reading.energies.values()) * reading.grad
        predicted = reading.closed
        if predicted is None:
            gain = self._gain(name, op)
            predicted = None if gain is None else gain * unit
        if reading.measured is not None:
            op.checked = predicted, reading.measured
            if reading.closed is None and unit > 0:
                op.learn_gain(reading.measured / unit)
                predicted = op.gain * unit
        op.variance = predicted

    def _gain(self, name: SiteName, op: OpNoise) -> float | None:
        """What probes found for this op; before its first one, the mean of its kind."""
        if op.probes:
            return op.gain
        alike = [
            other.gain
            for other_name, other in self.ops.items()
            if other.probes and other_name.consumer == name.consumer
        ]
        return sum(alike) / len(alike) if alike else None

    def variance_of(self, site: SiteName) -> float | None:
        """What one held tensor adds through all ops that read it; None: not all can be told."""
        total = 0.0
        for op in self.ops.values():
            energy = sum(op.sources.values())
            if site in op.sources and energy > 0:
                if op.variance is None:
                    return None
                total += op.variance * op.sources[site] / energy
        return total

    @property
    def added(self) -> float | None:
        """What all codes add, predicted; None: not known yet."""
        if not self.steps or any(op.variance is None for op in self.ops.values()):
            return None
        return sum(op.variance or 0.0 for op in self.ops.values())

    @property
    def sampling(self) -> float | None:
        """The variance that mini-batches have anyway; None: not known yet."""
        if not self.gradient.draws:
            return None
        return max(self.gradient.value - (self.added or 0.0), 0.0)

    @property
    def ratio(self) -> float | None:
        """Added over sampling: what `noise` bounds. None: not known yet."""
        added, sampling = self.added, self.sampling
        return None if added is None or not sampling else added / sampling

    def state_dict(self) -> dict[str, Any]:
        """What was learned over many steps, and whose turn to be probed comes next.

        What the last step showed is seen again soon.
        """
        ops = [[*name, op.gain, op.probes, op.linear] for name, op in self.ops.items()]
        return {"steps": self.steps, "ops": ops, "gradient": self.gradient.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self.steps, self.held = state["steps"], {}
        self.ops = {
            SiteName(module, op, nth): OpNoise(gain=gain, probes=probes, linear=linear)
            for module, op, nth, gain, probes, linear in state["ops"]
        }
        self.gradient.load_state_dict(state["gradient"])
