"""A ladder of uniform settings, from the mildest to the one that needs the fewest bytes.

    keep -> exact -> dither, 256 levels -> 16 -> 8 -> 4

With what each rung would hold. The first form of a planner: one rung for all sites. A planner that
decides for each site alone replaces `choose`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from elbowroom.codecs import Dither
from elbowroom.plan.action import Encode, Keep
from elbowroom.plan.policy import Exact, KeepAll, Lossy, Policy
from elbowroom.plan.site import Need, Rebuildable, Site


@dataclass(frozen=True)
class Rung:
    """One uniform setting. exact: no bit of any gradient changes."""

    name: str
    policy: Policy
    exact: bool


EXACT_RUNGS = (Rung("keep", KeepAll(), True), Rung("exact", Exact(), True))
LOSSY_RUNGS = tuple(
    Rung(f"dither, {levels} levels", Lossy(Dither(levels=levels)), False)
    for levels in (256, 16, 8, 4)
)


@dataclass(frozen=True)
class SavedStorage:
    """One storage of a step: its bytes in plain autograd, and the sites that its ops made.

    sites        empty: it is left alone whatever the rung
    asked_exact  some op needs its value exactly
    """

    nbytes: int
    sites: tuple[Site, ...]
    asked_exact: bool = False


def held_nbytes(rung: Rung, step: Sequence[SavedStorage]) -> int:
    """Bytes held before backward if this rung had decided.

    An upper bound where a size depends on the data.
    """
    return sum(_held(rung, storage) for storage in step)


def choose(rungs: Sequence[Rung], step: Sequence[SavedStorage], allowed_nbytes: int) -> int | None:
    """The index of the mildest rung that holds at most `allowed_nbytes` before backward.

    None if none does.
    """
    for index, rung in enumerate(rungs):
        if held_nbytes(rung, step) <= allowed_nbytes:
            return index
    return None


def site_nbytes(rung: Rung, site: Site) -> int:
    """Bytes that this rung would hold for one site, or at most."""
    if rung.exact and site.rebuildable is Rebuildable.LOSSY:
        # Its source, encoded when this was noted, would be kept at this rung.
        site = replace(site, rebuildable=Rebuildable.EXACT)
    match rung.policy(site):
        case Keep():
            return site.nbytes
        case Encode(codec, facts):
            if site.need is Need.MASK:
                return -(-prod(site.shape) // 8)
            return min(site.nbytes, codec.encoded_nbytes(site.shape, site.dtype, facts))
    return 0


def _held(rung: Rung, storage: SavedStorage) -> int:
    sites = storage.sites
    if storage.asked_exact and not any(site.need is Need.EXACT for site in sites):
        # What was held for a milder need served the exact one too, and may not at another rung.
        sites = tuple(replace(site, need=Need.EXACT) for site in sites)
    if not sites:
        return storage.nbytes
    return min(storage.nbytes, sum(site_nbytes(rung, site) for site in sites))
