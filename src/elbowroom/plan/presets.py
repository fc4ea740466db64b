"""A ladder of uniform settings, from the mildest to the one that needs the fewest bytes.

    keep -> exact -> dither, 256 levels -> 16 -> 8 -> 4

`held_nbytes` says what each would hold. `choose` is the simplest planner: one preset for all sites.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from elbowroom.codecs import Dither
from elbowroom.plan.action import Encode, Keep
from elbowroom.plan.policy import Exact, KeepAll, Lossy, Policy
from elbowroom.plan.site import Need, Rebuildable, Site


@dataclass(frozen=True)
class Preset:
    """One uniform setting. exact: no bit of any gradient changes."""

    name: str
    policy: Policy
    exact: bool


EXACT_PRESETS = (Preset("keep", KeepAll(), True), Preset("exact", Exact(), True))
LOSSY_PRESETS = tuple(
    Preset(f"dither, {levels} levels", Lossy(Dither(levels=levels)), False)
    for levels in (256, 16, 8, 4)
)


@dataclass(frozen=True)
class SavedStorage:
    """One storage of a step: its bytes in plain autograd, and the sites that its ops made.

    sites        empty: it is left alone whatever the preset
    asked_exact  some op needs its value exactly
    """

    nbytes: int
    sites: tuple[Site, ...]
    asked_exact: bool = False


def held_nbytes(preset: Preset, step: Sequence[SavedStorage]) -> int:
    """Bytes held before backward if this preset had decided.

    An upper bound where a size depends on the data.
    """
    return sum(_held(preset, storage) for storage in step)


def choose(
    presets: Sequence[Preset], step: Sequence[SavedStorage], allowed_nbytes: int
) -> int | None:
    """The index of the mildest preset that holds at most `allowed_nbytes` before backward.

    None if none does.
    """
    for index, preset in enumerate(presets):
        if held_nbytes(preset, step) <= allowed_nbytes:
            return index
    return None


def site_nbytes(preset: Preset, site: Site) -> int:
    """Bytes that this preset would hold for one site, or at most."""
    if preset.exact and site.rebuildable is Rebuildable.LOSSY:
        # Its source, encoded when this was noted, would be kept at this preset.
        site = replace(site, rebuildable=Rebuildable.EXACT)
    match preset.policy(site):
        case Keep():
            return site.nbytes
        case Encode(codec, facts):
            if site.need is Need.MASK:
                return -(-prod(site.shape) // 8)
            return min(site.nbytes, codec.encoded_nbytes(site.shape, site.dtype, facts))
    return 0


def _held(preset: Preset, storage: SavedStorage) -> int:
    sites = storage.sites
    if storage.asked_exact and not any(site.need is Need.EXACT for site in sites):
        # What was held for a milder need served the exact one too, and may not at another preset.
        sites = tuple(replace(site, need=Need.EXACT) for site in sites)
    if not sites:
        return storage.nbytes
    return min(storage.nbytes, sum(site_nbytes(preset, site) for site in sites))
