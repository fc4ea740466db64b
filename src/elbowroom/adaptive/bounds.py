"""COMET's controller: error bounds that follow the gradient's momentum (arXiv 2111.09562).

Every `every` steps, for each layer,

    sigma_l = sqrt(added variance of dW_l / entries of W_l)       predicted, closed form
    bound_l <- bound_l * clamp(fraction * rms(m_l) / sigma_l, 1/2, 2)

COMET's own formula for sigma has a constant, 0.32, that could not be reproduced; the closed form
has none (`measure/sensitivity.py`). m_l is the optimizer's momentum: (1 - mu) * buffer for SGD,
sqrt(mean of v) with its bias correction for Adam. A tensor that several layers read gets the
smallest of their bounds; one that only norms or activations read keeps the bound it began with, as
COMET, which codes inputs of convolutions only, has no rule for it.

The prediction (off, 1-D, 2-D) is that which made the smallest code of a sample, tensor by tensor,
where that saves a fiftieth: decoding a predicted map takes longer.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from elbowroom.adaptive.base import Adaptive
from elbowroom.codecs import Codec, Comet
from elbowroom.codecs.comet import PREDICTIONS
from elbowroom.errors import PlanError, UnknownField
from elbowroom.measure.noise import HeldNoise, Trial
from elbowroom.plan import Site, SiteName

_SMALLEST, _LARGEST = 2.0**-20, 0.5  # of a bound relative to a tensor's range
_WORTH = 0.98  # of the bits without prediction


class CometBounds(Adaptive):
    """Noise of each layer's gradient stays `fraction` of its momentum.

    optimizer  whose states hold the momentum: SGD with momentum, Adam, AdamW and their like
    fraction   COMET's 0.01; at 0.05 it saw a loss of accuracy
    codec      what every tensor starts with (default: `Comet()`)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        fraction: float = 0.01,
        codec: Comet | None = None,
        rebuild: bool = True,
        every: int = 50,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise PlanError(
                "CometBounds takes the torch.optim.Optimizer whose momentum it follows; got "
                f"{type(optimizer).__name__}"
            )
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not fraction > 0:
            raise UnknownField(
                f"fraction={fraction!r} is not possible; it is a positive number: noise of a "
                "gradient over its momentum, 0.01 in COMET"
            )
        self.codec = codec or Comet()
        super().__init__(self.codec, rebuild=rebuild, every=every)
        self.fraction, self.bounds = float(fraction), dict[SiteName, float]()
        self.predictions: dict[SiteName, str] = {}
        self._optimizer = optimizer

    def codec_of(self, name: SiteName) -> Comet:
        """Comet with this tensor's bound and prediction."""
        bound = self.bounds.get(name, self.codec.bound)
        prediction = self.predictions.get(name, self.codec.prediction)
        return replace(self.codec, bound=bound, prediction=prediction)

    def _tried(self, site: Site) -> tuple[Codec, ...]:
        """The predictions; what another bound would do it says itself."""
        now = self.codec_of(site.name)
        return tuple(replace(now, prediction=name) for name in PREDICTIONS)

    def _move(self) -> None:
        for name, held in self.table.held.items():
            self.predictions[name] = _smallest(held.trials)
            factor = self._factor(held)
            if factor is not None:
                bound = self.bounds.get(name, self.codec.bound) * min(max(factor, 0.5), 2.0)
                self.bounds[name] = min(max(bound, _SMALLEST), _LARGEST)

    def _factor(self, held: HeldNoise) -> float | None:
        """By how much the bound may grow before some layer has more noise than it should."""
        factors = []
        for op in self.table.ops.values():
            weight = None if op.weight is None else op.weight()
            if held.site.name not in op.sources or weight is None or not op.variance:
                continue
            momentum = self._momentum(weight)
            if momentum:
                factors.append(self.fraction * momentum / (op.variance / weight.numel()) ** 0.5)
        return min(factors) if factors else None

    def _momentum(self, weight: Tensor) -> float | None:
        """Root mean square of the layer's momentum, in units of a gradient; None: there is none."""
        state = self._optimizer.state.get(weight, {})
        group = next(
            (g for g in self._optimizer.param_groups if any(p is weight for p in g["params"])), {}
        )
        if isinstance(state.get("momentum_buffer"), Tensor):
            taken = 1 - float(group.get("dampening", 0.0))  # of a gradient, by the buffer
            share = (1 - float(group.get("momentum", 0.0))) / taken if taken > 0 else 0.0
            return share * _rms(state["momentum_buffer"])
        if isinstance(state.get("exp_avg_sq"), Tensor):
            correction = 1 - float(group["betas"][1]) ** float(state["step"])
            return float((state["exp_avg_sq"].float().mean() / correction).sqrt())
        return None

    def state_dict(self) -> dict[str, Any]:
        """The bounds and predictions, too."""
        state = super().state_dict()  # first: it may choose others
        return state | {
            "bounds": [[*name, bound] for name, bound in self.bounds.items()],
            "predictions": [[*name, prediction] for name, prediction in self.predictions.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        super().load_state_dict(state)
        self.bounds = {SiteName(m, op, nth): bound for m, op, nth, bound in state["bounds"]}
        self.predictions = {SiteName(m, op, nth): name for m, op, nth, name in state["predictions"]}


def _smallest(trials: Sequence[Trial]) -> str:
    """The prediction of the fewest bits, if it is worth its time."""
    bits = {t.codec.prediction: t.bits for t in trials if isinstance(t.codec, Comet)}
    best = min(bits, key=bits.__getitem__)
    return best if bits[best] < _WORTH * bits["none"] else "none"


def _rms(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt())
