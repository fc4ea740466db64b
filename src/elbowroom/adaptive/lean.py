"""Lean codes with levels that follow the training: the smallest within a share of the noise.

    er.saving("lean", noise=0.1)

Each tensor has levels of its own, as `upper` or `plain` of `Lean`. Other levels need no trial: the
error of a dithered code is proportional to 1 / (levels - 1)^2, and its bytes to their bits. The
coarse code of values that the ReLU sets to zero (`fold`) stays as it is, and so does its variance.
"""

from dataclasses import replace

from elbowroom.adaptive.noise_budget import NoiseBudget
from elbowroom.codecs import Codec, Dither, Sided
from elbowroom.kernels.layout import TILE, codes_nbytes
from elbowroom.measure.noise import HeldNoise
from elbowroom.plan import Action, Lean, Site
from elbowroom.plan.allocation import CodeChoice
from elbowroom.plan.precision_floor import at_precision_floor

_CODED = 0.5  # of a tensor that ReLU splits: what it lets pass


class LeanBudget(NoiseBudget):
    """A `NoiseBudget` for the levels of the policy `Lean`. All tensors start at `upper` levels."""

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

    def _movable(self) -> list[HeldNoise]:
        known = (h for h in self.table.held.values() if isinstance(h.codec, Dither | Sided))
        return [h for h in known if self.table.variance_of(h.site.name) is not None]

    def _options(self, held: HeldNoise) -> list[CodeChoice]:
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

    def _take(self, held: HeldNoise, option: int) -> None:
        self.variants[held.site.name] = option


def _levels(codec: Codec) -> int:
    assert isinstance(codec, Dither | Sided)
    return codec.upper if isinstance(codec, Sided) else codec.levels
