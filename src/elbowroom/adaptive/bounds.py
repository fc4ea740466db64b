"""COMET's controller: error bounds that follow the gradient's momentum (arXiv 2111.09562).

Every `every` steps, for each op that reads codes,

    V        = variance that its codes add to the gradient         predicted (`measure/noise.py`)
    bound_t <- bound_t * clamp(sqrt(allowed / V), 1/2, 2)          of the tensor t that it reads

    allowed  = entries of W_l * (fraction * m_l)^2                 convolutions, linear layers
               the sum of that over layers / number of other ops   norms, activations, losses

The first line is COMET's rule: the error of a weight's gradient stays at `fraction` of the
momentum. It encodes inputs of convolutions only, and has no rule for other readers, whose error
comes to the gradients of all layers before them. Together they may add as much as all layers.
COMET's own formula for the error has a constant, 0.32, that could not be reproduced; the closed
form of layers has none (`measure/sensitivity.py`), and what other ops add is probed.

m_l is the error of the gradient, drawn anew in each step, that would change the momentum by as much
as it is. An error averages out in it, so this is more than the momentum in units of a gradient:

    rms(buffer) * sqrt(1 - mu^2) / (1 - dampening)   SGD, and Muon, whose dampening is mu
    sqrt(mean of v), with its bias correction        Adam, AdamW and their like, RMSprop, Adafactor
    rms(m) * sqrt((1 + b) / (1 - b)), with its own   what has first moments alone (Lion, Adamax)

Of gradients that are noise alone, all three are their RMS.

States of `er.optim` are decoded for it. With an optimizer that has none of these, bounds stay as
they are, and the log says so. A tensor that several ops read gets the smallest of their bounds.

The prediction (off, 1-D, 2-D) of each tensor is the one with the smallest code of a sample, if it
saves a fiftieth: decoding with a prediction takes longer.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from elbowroom.adaptive.base import Adaptive
from elbowroom.codecs import Codec, Comet
from elbowroom.codecs.comet import PREDICTIONS
from elbowroom.errors import PlanError, UnknownField
from elbowroom.measure.noise import Trial
from elbowroom.optim.base import EncodedOptimizer
from elbowroom.plan import Site, SiteName

_SMALLEST, _LARGEST = 2.0**-20, 0.5  # of a bound relative to a tensor's range
_WORTH = 0.98  # of the bits without prediction
_SECOND = ("exp_avg_sq", "square_avg", "variance", "row_var")  # means of squared gradients
_PATIENCE = 3  # looks without any momentum, until that is said
_log = logging.getLogger("elbowroom")


class CometBounds(Adaptive):
    """Controller that keeps the noise of each layer's gradient at `fraction` of its momentum.

    The noise of norms, activations and losses together is kept at that of all layers.

    optimizer  the optimizer whose states hold the momentum: SGD with momentum, Adam, AdamW or a
               similar one, of torch or of `er.optim`
    fraction   COMET uses 0.01; at 0.05 its authors saw a loss of accuracy
    codec      the codec that every tensor starts with (default: `Comet()`)
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
        self._in_vain = 0  # looks in a row that found no momentum

    def codec_of(self, name: SiteName) -> Comet:
        """Returns Comet with the bound and the prediction of this tensor."""
        bound = self.bounds.get(name, self.codec.bound)
        prediction = self.predictions.get(name, self.codec.prediction)
        return replace(self.codec, bound=bound, prediction=prediction)

    def _candidates(self, site: Site) -> tuple[Codec, ...]:
        """Returns the predictions to try; what another bound would do is computed from them."""
        now = self.codec_of(site.name)
        return tuple(replace(now, prediction=name) for name in PREDICTIONS)

    def _move(self) -> None:
        allowed = self._allowed()
        self._check_learns(bool(allowed))
        for name, held in self.table.held.items():
            self.predictions[name] = _smallest(held.trials)
            factors = [
                (allowed[at] / op.variance) ** 0.5
                for at, op in self.table.ops.items()
                if at in allowed and name in op.sources and op.variance
            ]
            if factors:
                bound = self.bounds.get(name, self.codec.bound)
                bound *= min(max(min(factors), 0.5), 2.0)
                self.bounds[name] = min(max(bound, _SMALLEST), _LARGEST)

    def _allowed(self) -> dict[SiteName, float]:
        """Returns the variance that codes may add through each op; empty without any momentum."""
        layers, others = dict[SiteName, float](), list[SiteName]()
        for name, op in self.table.ops.items():
            weight = None if op.weight is None else op.weight()
            if not op.linear:
                others.append(name)
            elif weight is not None and (momentum := self._momentum(weight)):
                layers[name] = weight.numel() * (self.fraction * momentum) ** 2
        total = sum(layers.values())
        return layers | {name: total / len(others) for name in others if layers}

    def _check_learns(self, learns: bool) -> None:
        """Logs, once, that the optimizer has no momentum."""
        weights = sum(op.linear for op in self.table.ops.values())
        self._in_vain = 0 if learns or not weights else self._in_vain + 1
        if self._in_vain == _PATIENCE:
            _log.warning(
                "CometBounds learns nothing from %s: its states have no momentum for any of the "
                "%d weights that read codes, so all bounds stay at %g. Pass the optimizer that "
                "trains these weights, with momentum, or fix the bound with er.saving('comet', "
                "bound=...)",
                type(self._optimizer).__name__,
                weights,
                self.codec.bound,
            )

    def _momentum(self, weight: Tensor) -> float | None:
        """Returns the error of a gradient that the momentum is as large as; None without one.

        It is the RMS over the entries of an error that is drawn anew in each step.
        """
        state = self._moments(weight)
        group = next(
            (g for g in self._optimizer.param_groups if any(p is weight for p in g["params"])), {}
        )
        betas = group.get("betas", (0.0, 0.0))
        steps = float(self._optimizer.state[weight].get("step", 0)) if state else 0.0
        # First: RMSprop's buffer has the momentum of what was divided by it.
        second = next((state[name] for name in _SECOND if name in state), None)
        if second is not None:
            # Adam corrects a mean that began with 0; RMSprop and Adafactor do not.
            decay = float(betas[1]) if "exp_avg_sq" in state and betas[1] is not None else 0.0
            correction = 1 - decay**steps if decay and steps else 1.0
            return float((second.float().mean() / correction).sqrt())
        if "momentum_buffer" in state:
            kept = float(group.get("momentum", 0.0))
            # What the buffer takes of a gradient. Muon's is a mean.
            taken = 1 - (kept if "ns_steps" in group else float(group.get("dampening", 0.0)))
            share = max(1 - kept**2, 0.0) ** 0.5 / taken if taken > 0 else 0.0
            return share * _rms(state["momentum_buffer"])
        if "exp_avg" in state:
            decay = float(betas["exp_inf" not in state])  # Adamax has the first one's, Lion not
            begun = 1 - decay ** (2 * steps) if steps else 1.0
            return _rms(state["exp_avg"]) * sqrt((1 + decay) / (1 - decay) / begun)
        return None

    def _moments(self, weight: Tensor) -> dict[str, Tensor]:
        """Returns what the optimizer holds for a weight: its tensors by name."""
        if isinstance(self._optimizer, EncodedOptimizer):
            return self._optimizer.decoded_state(weight)
        state = self._optimizer.state.get(weight, {})
        return {name: x for name, x in state.items() if isinstance(x, Tensor) and x.dim()}

    def state_dict(self) -> dict[str, Any]:
        """Returns the controller's state, the bounds and predictions included."""
        state = super().state_dict()  # first: it may choose others
        return state | {
            "bounds": [[*name, bound] for name, bound in self.bounds.items()],
            "predictions": [[*name, prediction] for name, prediction in self.predictions.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the controller from `state_dict()`."""
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
