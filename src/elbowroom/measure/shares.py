"""Measures, in a few watched steps, the gradient variance that each code of the menu would add.

The steps run with codes of 16 levels wherever an error is tolerated, and the meter measures the
variance that the code of each tensor adds to the gradient. The other codes of the menu are tried on
a sample of the tensor. Their variance is scaled by the ratio of their squared errors.
"""

from collections.abc import Callable, Sequence

from elbowroom.codecs import Codec, Dither
from elbowroom.codecs.dither import LEVELS
from elbowroom.measure.meter import NoiseMeter
from elbowroom.measure.noise import CodeNoise, NoiseTable
from elbowroom.plan import Lossy, Site
from elbowroom.plan.precision_floor import at_precision_floor
from elbowroom.plan.shares import NoiseShares, SiteShares
from elbowroom.runtime.context import Context
from elbowroom.runtime.saving import Saving

STEPS = (
    8  # in full, at the start of a meter: enough for three draws of mini-batch variance, and two
)
_WATCHED = Lossy(Dither(levels=16))


def menu_meter(probes: int = 2) -> NoiseMeter:
    """A meter that tries the codes of the menu. probes: as in `NoiseMeter`; each takes memory."""
    return NoiseMeter(run=STEPS // 2, probes=probes, variants=_codes)


def watch_noise(step: Callable[[], object], *, min_nbytes: int) -> NoiseShares | None:
    """Runs `step` STEPS times with lossy codes. None: nothing was lossy, or had a gradient."""
    meter = menu_meter()
    for _ in range(STEPS):
        context = Context(learns=False)
        with Saving(_WATCHED, min_nbytes=min_nbytes, context=context, observer=meter):
            step()
    meter.harvest()
    return shares_of(meter.table)


def shares_of(table: NoiseTable) -> NoiseShares | None:
    """Returns what a meter has found. None: not enough yet.

    Where all batches were the same, shares are those of |g|^2.
    """
    gradient = table.gradient
    sampling = gradient.size if gradient.is_one_batch else table.sampling
    if not sampling:
        return None
    known = [
        (held, shares)
        for held in table.held.values()
        if (shares := _shares(table, held, sampling)) is not None
    ]
    if not known:
        return None
    per_byte = sum(_unit(shares) for _, shares in known) / sum(h.site.nbytes for h, _ in known)
    return NoiseShares(table.steps, tuple(shares for _, shares in known), per_byte)


def _unit(shares: SiteShares) -> float:
    """The share times (levels - 1) ** 2, about the same for all levels: their mean."""
    pairs = zip(shares.levels, shares.shares, strict=True)
    return sum(share * (levels - 1) ** 2 for levels, share in pairs) / len(shares.levels)


def _shares(table: NoiseTable, held: CodeNoise, sampling: float) -> SiteShares | None:
    variance = table.variance_of(held.site.name)
    each = held.energy / max(held.numel, 1)  # of a code that is none of those which are tried
    now = next((trial.error for trial in held.trials if trial.codec == held.codec), each)
    if variance is None or now <= 0:
        return None
    rated = {
        trial.codec.levels: variance * trial.error / now / sampling
        for trial in held.trials
        if isinstance(trial.codec, Dither)
    }
    return SiteShares(held.site.name, tuple(rated), tuple(rated.values())) if rated else None


def _codes(site: Site) -> Sequence[Codec]:
    codes = (at_precision_floor(Dither(levels=levels), site) for levels in LEVELS)
    return tuple(dict.fromkeys(code for code in codes if site.dtype in code.dtypes))
