"""Policies that change their settings during training, by the noise that they measure.

Each lossy tensor has a variant of its own among those of one codec (`adaptive/base.py`). The policy
is its own observer: a meter watches a few steps, and after each of them `_move` may choose other
variants. The choice depends only on measurements and seeds, so a run can be repeated, and
`state_dict` goes into a checkpoint.

    with er.saving(control) as saved:
        loss = loss_fn(model(x), y)
    loss.backward()
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from elbowroom.codecs import Codec, codec_class, codecs
from elbowroom.codecs.quality import MAPS
from elbowroom.errors import PlanError, UnknownField
from elbowroom.measure.error_report import ErrorReport
from elbowroom.measure.meter import NoiseMeter
from elbowroom.measure.noise import CodeNoise, NoiseTable, Trial
from elbowroom.plan import Action, Lossy, Site, SiteName
from elbowroom.plan.allocation import CodeChoice
from elbowroom.plan.precision_floor import at_precision_floor
from elbowroom.runtime.observer import Watch


class Adaptive(ABC):
    """Base class of all controllers.

    codec    the codec whose settings are used. Every tensor starts at this codec
    rebuild  see `er.saving`
    every    the number of steps between two measurements

    Raises UnknownField if `every` is not a positive int.
    """

    exact: ClassVar[bool] = False

    def __init__(self, codec: Codec, *, rebuild: bool = True, every: int = 50) -> None:
        if type(every) is not int or every < 1:
            raise UnknownField(f"every={every!r} is not possible; it is an int of 1 or more: steps")
        self.ladder = ladder_of(codec)
        self.start = self.ladder.index(codec)
        self.rebuild = rebuild
        self.variants: dict[SiteName, int] = {}
        self.meter = NoiseMeter(every, variants=self._candidates)
        self._seen = 0

    @property
    def table(self) -> NoiseTable:
        """Table of the noise that has been measured so far."""
        return self.meter.table

    def __call__(self, site: Site) -> Action:
        """Returns, as a policy, the action for a site: `Lossy` with this tensor's own codec."""
        return Lossy(self.codec_of(site.name), self.rebuild)(site)

    def codec_of(self, name: SiteName) -> Codec:
        """Returns the current codec of a tensor."""
        return self.ladder[self.variants.get(name, self.start)]

    def begin(self) -> Watch | None:
        """Begins a forward, as the observer of a context."""
        self._adapt()
        return self.meter.begin()

    def error_report(self) -> ErrorReport:
        """Returns the noise of codes, predicted and measured, as far as it is known."""
        self._adapt()
        return self.meter.error_report()

    def _adapt(self) -> None:
        self.meter.harvest()
        if self.table.steps > self._seen:
            self._seen = self.table.steps
            self._move()

    @abstractmethod
    def _move(self) -> None:
        """Chooses variants after a step that was watched."""

    def _candidates(self, site: Site) -> tuple[Codec, ...]:
        return tuple(codec for codec in self.ladder if site.dtype in codec.dtypes)

    def _movable(self) -> list[CodeNoise]:
        """Returns the tensors whose noise is known, and on which all variants were tried."""
        held = self.table.held.values()
        return [h for h in held if possible(h) and self.table.variance_of(h.site.name) is not None]

    def _options(self, held: CodeNoise) -> list[CodeChoice]:
        """Returns, for each variant, the bytes and the variance that it would add.

        The measured variance is scaled by the ratio of the errors of the trials.
        """
        variance = self.table.variance_of(held.site.name) or 0.0
        each = held.energy / held.numel
        now = next((t.error for t in held.trials if t.codec == held.codec), each)
        unit = variance / now if now > 0 else 0.0
        return [CodeChoice(t.bits * held.numel / 8, unit * t.error) for t in possible(held)]

    def _take(self, held: CodeNoise, option: int) -> None:
        self.variants[held.site.name] = self.ladder.index(possible(held)[option].codec)

    def state_dict(self) -> dict[str, Any]:
        """Returns all that is needed to resume with the same choices."""
        self._adapt()
        variants = [[*name, variant] for name, variant in self.variants.items()]
        return {
            "ladder": [str(codec.config()) for codec in self.ladder],
            "rungs": variants,
            "seen": self._seen,
            "meter": self.meter.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the controller from `state_dict()`.

        Raises PlanError if the state belongs to another controller, or to other settings.
        """
        if not isinstance(state, dict) or not self.state_dict().keys() <= state.keys():
            raise PlanError(
                f"this is no state of a {type(self).__name__}: load what state_dict() of one gave"
            )
        if state["ladder"] != [str(codec.config()) for codec in self.ladder]:
            raise PlanError(
                f"this state is of another ladder than that of {self.ladder[self.start]}; load it "
                "into a controller of the same codec"
            )
        variants = {
            SiteName(module, op, nth): variant for module, op, nth, variant in state["rungs"]
        }
        self.variants, self._seen = variants, state["seen"]
        self.meter.load_state_dict(state["meter"])


def possible(held: CodeNoise) -> list[Trial]:
    """Returns the trials of what this tensor may be held with (`plan/precision_floor.py`)."""
    return [
        trial for trial in held.trials if at_precision_floor(trial.codec, held.site) == trial.codec
    ]


def ladder_of(codec: Codec) -> tuple[Codec, ...]:
    """Returns the ladder of a codec, with the codec itself among its settings, by its size.

    Raises PlanError for a codec that has only one setting.
    """
    variants = codec.ladder()
    if not variants:
        known = ", ".join(id for id in codecs() if codec_class(id).ladder is not Codec.ladder)
        raise PlanError(
            f"codec '{codec.id}' has no ladder of settings to move along; these have: {known}"
        )
    if codec in variants:
        return variants
    own = _nbytes(codec)
    milder = sum(_nbytes(variant) >= own for variant in variants)
    return (*variants[:milder], codec, *variants[milder:])


def _nbytes(codec: Codec) -> int:
    return codec.encoded_nbytes(MAPS, codec.dtypes[0])
