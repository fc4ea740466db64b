"""The prices of an option: seconds and memory of encoding and decoding, and the gradient variance.

Seconds and variance come from a profile. Rates of a codec that the profile lacks are measured when
they are asked for, if they can be; noise that was not measured is estimated by the size of tensors.
"""

from collections.abc import Sequence
from functools import lru_cache

from elbowroom.codecs import Codec, Dither, Sided
from elbowroom.codecs.dropped import drop
from elbowroom.codecs.names import setting_name
from elbowroom.codecs.quality import is_own, quality_of
from elbowroom.codecs.workspace import normalizes_a_copy, workspace_of
from elbowroom.plan.composed import levels_of_upper
from elbowroom.plan.profile import Profile, Storage
from elbowroom.plan.site import Need, Site

ROWS = "rows"  # the rate at which the means and sizes of rows are found
ATTENTION_LOOK = "attention levels"  # the rate at which it is found how fine its codes must be
RESTORE = "decode bitmask"  # the fixed seconds of what does nearly nothing else
_TYPICAL = 32  # levels of a code that a module runs again from
_UNMEASURED = 4e9  # bytes a second: about what a code takes on one core


def seconds_of(
    profile: Profile, verb: str, codec: Codec, nbytes: int, *, has_zeros: bool = False
) -> float:
    """Returns the seconds in which so many bytes of a tensor are encoded or decoded.

    has_zeros: the code has a bitmap of the tensor's zeros, which takes a pass of its own
    """
    fixed = fixed_name(verb, codec)
    if has_zeros and codec.keeps_zeros and of_zeros(fixed) in profile.rates:
        fixed = of_zeros(fixed)
        return profile.fixed_s.get(fixed, 0.0) + nbytes / profile.rates[fixed]
    try:
        rate = profile.rates[rate_name(verb, codec)]  # what was not asked for is measured now
    except KeyError:
        rate = _UNMEASURED
    except Exception as error:
        if is_own(type(codec)):
            raise
        rate = _UNMEASURED
        drop(type(codec), f"it fails: {type(error).__name__}: {error}")
    return profile.fixed_s.get(fixed, 0.0) + nbytes / rate


def taken_nbytes(codec: Codec, nbytes: int, *, normalized: bool) -> tuple[int, int]:
    """Returns the bytes that encoding and decoding such a tensor take beside it and its code.

    normalized: it is encoded in normalized form
    """
    try:
        encode, decode = workspace_of(codec)
    except Exception as error:
        if is_own(type(codec)):
            raise
        drop(type(codec), f"it fails: {type(error).__name__}: {error}")
        return 0, 0
    copied = normalized and normalizes_a_copy(codec)
    return int((encode + copied) * nbytes), int(decode * nbytes)


def look_s(profile: Profile, name: str, nbytes: int) -> float:
    """Returns the seconds of one look at the values of so many bytes."""
    return profile.fixed_s.get(name, 0.0) + nbytes / profile.rates.get(name, _UNMEASURED)


@lru_cache(1024)
def rate_name(verb: str, codec: Codec) -> str:
    """Returns the name of a rate in a profile: "encode dither, 4 levels".

    The size of groups makes no difference to a dither.
    """
    named = Dither(levels=codec.levels) if isinstance(codec, Dither) else codec
    return f"{verb} {setting_name(named)}"


def fixed_name(verb: str, codec: Codec) -> str:
    """Returns the name of seconds in a profile that each tensor takes: "encode dither"."""
    return f"{verb} {codec.id}"


def of_zeros(fixed: str) -> str:
    """Returns the name of the rate and seconds of codes with a bitmap: "encode dither of zeros".

    All settings of a class have about the same.
    """
    return f"{fixed} of zeros"


def error_of(codec: Codec, site: Site, profile: Profile, made_nbytes: int = 0) -> float:
    """Returns the gradient variance that the code adds, as a share of that of mini-batches.

    made_nbytes: of what is made of the tensor, and has the error of its code, too; where shares of
    sites are known, it is in them

    Where that was not measured, all tensors matter as their size: the share of all saved bytes that
    this is, times the variance of a code of a normal. What is no dither counts as one that makes as
    large an error of a normal.
    """
    return _noise(profile, site, levels_of(codec, site), made_nbytes)


def levels_of(codec: Codec, site: Site) -> float:
    """Returns the levels of the dither that makes an error as large as this code."""
    if isinstance(codec, Dither):
        return codec.levels
    if isinstance(codec, Sided) and codec.is_rough_elsewhere:
        return levels_of_upper(codec)  # the rough values have no gradient of their own
    maps = len(site.shape) >= 4
    quality = quality_of(codec, maps=maps)
    # A dither is better than usual where a ReLU leaves zeros, and of maps, whose values lie apart
    # from zero or in a narrow range: a code whose error goes with each value gains nothing by that.
    is_less = codec.is_relative and (site.facts.has_zeros or maps)
    return quality.levels_of_zeros if is_less else quality.levels


def _noise(profile: Profile, site: Site, levels: float, made_nbytes: int = 0) -> float:
    if profile.noise is not None:
        more = 0 if profile.noise.sites else made_nbytes
        return profile.noise.of(site.name, site.nbytes + more, levels)
    return site.nbytes / max(profile.saved_nbytes, 1) / (levels - 1) ** 2


def noise_again(profile: Profile, storages: Sequence[Storage]) -> float:
    """Returns the variance that recomputing a module from a code of two levels adds.

    storages  that its forward saves: all of them are then off by what the code of its input is
              off by, as a share of their size. From n levels it is that over (n - 1)^2.
    """
    total = 0.0
    for storage in storages:
        sites = [save.site for save in storage.saves]
        site = next((site for site in sites if site.need is Need.LOSSY), sites[0])
        if site.dtype.is_floating_point:
            total += _noise(profile, site, _TYPICAL) * (_TYPICAL - 1) ** 2
    return total
