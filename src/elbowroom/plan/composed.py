"""Compositions in the menu: codes that are moved to another tier, and `lean`'s shared code.

    moved   the code's largest buffer lies in a file or in host memory: fewer bytes travel than if
            the tensor did, and none but its ranges stay
    lean    one code of a batch norm's input serves the norm, the ReLU behind it, whose mask is held
            anyway, and what reads the ReLU's result (`codecs/sided.py`)

Neither has a place on the ladder from milder codes to smaller ones, so they are weighed by all that
they take: an option is left out only where another is as good in bytes, traffic, time and noise.
"""

from collections import Counter
from math import ceil

from elbowroom.codecs import Sided
from elbowroom.kernels.layout import TILE, codes_nbytes
from elbowroom.plan.policy import Lean, OffloadRest
from elbowroom.plan.presets import Preset
from elbowroom.plan.problem import Option
from elbowroom.plan.profile import Profile, Storage
from elbowroom.plan.site import Need

LEAN_LEVELS = 16, 8, 4  # of what the ReLU lets pass
RELUS = ("relu", "relu_")  # as producers
_HALF = 1.8  # times the levels, less one: one side of a normal then has the error of the whole
_MORE = 1.25  # of the bytes that are likely, as they depend on the values


def gated(profile: Profile) -> dict[int, int]:
    """Returns the inputs of batch norms whose output only a ReLU reads, whose result is saved.

    Both are indices of storages: input of the norm -> result of the ReLU.

    As far as a profile tells; forward knows whether anything else reads that output
    (`runtime/deferred.py`), and gives the norm's input a larger code if so.
    """
    storages, found, sources = profile.storages, dict[int, int](), Counter[int]()
    for index, storage in enumerate(storages):
        sources.update(storage.made_of)
        sites = [save.site for save in storage.saves]
        if len(storage.made_of) != 1 or not any(site.producer in RELUS for site in sites):
            continue
        (at,) = storage.made_of
        norm = storages[at].saves[0].site
        has_mask = any(site.need is Need.MASK or site.facts.has_zeros for site in sites)
        if has_mask and len(storages[at].saves) == 1 and norm.consumer == "batch_norm":
            found[at] = index
    return {at: made for at, made in found.items() if sources[at] == 1}


def is_lean(preset: Preset) -> bool:
    """Returns whether a preset gives the input of a gated norm a code by the ReLU's mask."""
    return isinstance(preset.policy, Lean)


def is_composed(preset: Preset) -> bool:
    """Returns whether a preset has no place between milder ones and smaller ones."""
    policy = preset.policy
    is_moved = isinstance(policy, OffloadRest) and policy.codec is not None
    return is_moved or is_lean(preset)


def is_no_worse(one: Option, other: Option, storage: Storage, *, slower: float = 1.0) -> bool:
    """Returns whether one option is as good as another in every way.

    slower: times the other's seconds, which count as equal
    """

    def travels(option: Option) -> int:
        whole = storage.nbytes if option.travels is None else option.travels
        return whole if option.link else 0

    return (
        one.nbytes <= other.nbytes
        and one.variance <= other.variance
        and one.cost_s <= other.cost_s * slower
        and travels(one) <= travels(other)
    )


def levels_of_upper(codec: Sided) -> float:
    """Returns the levels of a dither with the error that masked elements have, on normal data."""
    return 1 + (codec.upper - 1) * _HALF


def nbytes_with_mask(codec: Sided, n: int) -> int:
    """Bytes of a code of n elements, half of which its mask sets, and a quarter more."""
    each = 16 / codec.group_size
    upper, lower = (8 * codes_nbytes(one, TILE) / TILE for one in (codec.upper, codec.lower))
    return ceil(_MORE / 8 * n * ((upper + each) / 2 + (lower + each) / 2 / codec.fold + 1 / 32))
