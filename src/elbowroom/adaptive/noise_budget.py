"""An error budget: the variance of codes stays below a share of that of mini-batches.

    sum of predicted variances  <=  noise x mini-batch variance of the gradient

with the fewest bytes that allow it (`plan/allocation.py`). DIVISION, ActNN and COMET take bits or
bounds as settings, and the user has to find out their effect; this takes the effect as a setting.
"""

import logging
from dataclasses import replace

from elbowroom.adaptive.base import Adaptive
from elbowroom.codecs import Codec, Dither, Sided
from elbowroom.errors import UnknownField
from elbowroom.kernels.layout import TILE, codes_nbytes
from elbowroom.measure.noise import CodeNoise
from elbowroom.plan import Action, Lean, Site
from elbowroom.plan.allocation import CodeChoice, cheapest
from elbowroom.plan.precision_floor import at_precision_floor

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


_CODED = 0.5  # of a tensor that ReLU splits: what it lets pass


class LeanBudget(NoiseBudget):
    """A `NoiseBudget` for the levels of the policy `Lean`. All tensors start at `upper` levels.

        er.saving("lean", noise=0.1)

    Each tensor has levels of its own, as `upper` or `plain` of `Lean`. Other levels need no trial:
    the error of a dithered code is proportional to 1 / (levels - 1)^2, and its bytes to their bits.
    The coarse code of values that the ReLU sets to zero (`fold`) stays as it is, and so does its
    variance.
    """

    def __init__(self, lean: Lean, *, noise: float = 0.1, every: int = 50) -> None:
        start = Dither(levels=lean.upper, group_size=lean.group_size)
        super().__init__(start, noise=noise, rebuild=lean.rebuild, every=every)
        self.lean = lean

    def __call__(self, site: Site) -> Action:
        """Returns, as a policy, the action for a site: `Lean` with this tensor's own levels."""
        levels = _levels(self.codec_of(site.name))
        return replace(self.lean, upper=levels, plain=levels)(site)

    def _candidates(self, site: Site) -> tuple[Codec, ...]:
        return ()

    def _movable(self) -> list[CodeNoise]:
        known = (h for h in self.table.held.values() if isinstance(h.codec, Dither | Sided))
        return [h for h in known if self.table.variance_of(h.site.name) is not None]

    def _options(self, held: CodeNoise) -> list[CodeChoice]:
        rough, now = self.table.rough_of(held.site.name), _levels(held.codec)
        fine = (self.table.variance_of(held.site.name) or 0.0) - rough
        is_split = isinstance(held.codec, Sided) or held.site.facts.has_zeros
        coded = held.numel * (_CODED if is_split else 1.0)
        found = []
        for codec in self.ladder:
            levels = _levels(at_precision_floor(codec, held.site))
            more = coded * (codes_nbytes(levels, TILE) - codes_nbytes(now, TILE)) / TILE
            variance = rough + fine * ((now - 1) / (levels - 1)) ** 2
            found.append(CodeChoice(held.nbytes + more, variance))
        return found

    def _take(self, held: CodeNoise, option: int) -> None:
        self.variants[held.site.name] = option


def _levels(codec: Codec) -> int:
    assert isinstance(codec, Dither | Sided)
    return codec.upper if isinstance(codec, Sided) else codec.levels
