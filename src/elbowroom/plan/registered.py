"""The lossy part of the menu: every registered codec, at the settings that it names.

A planner considers the settings that take fewer bytes than every milder one, that is, every one
with a smaller error on normal data (`codecs/quality.py`). Sizes are those for tensors of one kind:
maps or rows, of this dtype, with zeros or not. A setting of another codec than `dither` must take
3 % less, and no smaller setting may have nearly its error, because settings that are nearly the
same make problems larger and no plan better. Of the codecs that take part so, settings that are
faster by a tenth than all that are as small and as fine take part, too (`quicker`). Biased settings
are left out, because an error that does not average out cannot be counted as noise.

If the user names codecs, all of their settings that take fewer bytes than every milder one are
considered, also biased ones. A codec whose declared size or error is wrong is named in one warning,
and left out.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from math import ceil, prod

import torch

from elbowroom.codecs import Cast, Codec, Dither, Facts, Sided, codec_class, codecs
from elbowroom.codecs.dropped import drop, why_dropped
from elbowroom.codecs.quality import broken_promise, dtypes_of, is_own, quality_of
from elbowroom.codecs.registry import nearest
from elbowroom.errors import PlanError, UnknownCodec

_SHAPES = {True: (8, 32, 32, 32), False: (256, 1024)}  # of maps, of rows
_LESS = 0.97  # of the bytes of the milder settings
_NEAR = 1.25  # times the error: counts as equally fine
SLOWER = 1.1  # times the seconds: what is as small and as fine is no reason to leave one out
_MORE = 1.25  # of the bytes for normal data: allowance if a size depends on the values

# What two policies of `er.saving` fix is chosen here for each tensor: of `lean` the levels of a
# norm's input, and of others; of `coat` the number of elements that share a scale.
_SYSTEMS: dict[str, tuple[Codec, ...]] = {
    "lean": (*Sided.settings(), *(Dither(levels=levels) for levels in (16, 8, 6, 4, 3))),
    "coat": tuple(Cast("fp8_e4m3", group_size) for group_size in (32, 128, 256)),
}

Codecs = Sequence[str | Codec]


def all_settings() -> tuple[Codec, ...]:
    """Every useful setting of every registered codec that is lossy, or of another package."""
    return tuple(setting for id in codecs() for setting in settings_of(id))


def settings_of(id: str) -> tuple[Codec, ...]:
    """The settings that one registered codec names, if it is honest; else it is warned of, once."""
    cls = codec_class(id)
    settings = _honest(cls)
    return () if why_dropped(cls) else settings


def still_used(settings: tuple[Codec, ...] | None) -> tuple[Codec, ...] | None:
    """Returns those of these settings whose codecs have not been dropped since they were given."""
    if settings is None:
        return None
    return tuple(codec for codec in settings if not why_dropped(type(codec)))


@cache
def _honest(cls: type[Codec]) -> tuple[Codec, ...]:
    if cls.lossless and is_own(cls):
        return ()  # `Exact` takes it by itself, where it applies
    if not dtypes_of(cls):
        return ()
    try:
        settings = tuple(cls.settings())
        lie = next(filter(None, map(broken_promise, settings)), "")
    except Exception as error:
        settings, lie = (), f"it fails: {type(error).__name__}: {error}"
    if lie:
        drop(cls, lie)
        return ()
    return settings


def chosen_settings(
    given: Codecs | None, *, exact: bool | None = None, noise: float | None = None
) -> tuple[Codec, ...] | None:
    """The settings of these codecs, by name or themselves; None: no restriction.

    Raises PlanError where nothing is left, and UnknownCodec, each with what is possible.
    """
    if given is None:
        return None
    possible = f"without codecs=, plans choose among {', '.join(_useful())}"
    if isinstance(given, str | Codec) or not isinstance(given, Sequence):
        raise PlanError(f"codecs={given!r} is not possible; it is a list, as [{'division'!r}]")
    if not given:
        raise PlanError(
            f"codecs=[] leaves no code to plan with; {possible}; to use no codes, give exact=True"
        )
    found: dict[Codec, None] = {}
    for one in given:
        if isinstance(one, Codec):
            _check_registered(type(one))
            lie = why_dropped(type(one)) or broken_promise(one)
            if lie:
                raise PlanError(
                    f"codec '{one.id}' cannot be planned with, because it does not do what it "
                    f"declares: {lie}; {possible}"
                )
            found |= dict.fromkeys((one,) if dtypes_of(one) else ())
        else:
            system = _SYSTEMS.get(one) if isinstance(one, str) else None
            if isinstance(one, str) and system is None and one not in codecs():
                known = [*_SYSTEMS, *codecs()]
                raise UnknownCodec(
                    f"no code {one!r}; there are {', '.join(known)}.{nearest(one, known)}"
                )
            found |= dict.fromkeys(system or settings_of(one))
    shown = [one if isinstance(one, str) else one.id for one in given]
    if exact or noise == 0:
        asked = "exact=True" if exact else "noise=0"
        raise PlanError(
            f"{asked} allows no lossy code, so codecs={shown} has no effect; leave one of the "
            "two out. exact=None takes codes where exact actions do not suffice"
        )
    lies = {cls.id: lie for cls in map(_class_of, given) if (lie := why_dropped(cls))}
    if not found and lies:
        why = "; ".join(f"'{id}': {lie}" for id, lie in lies.items())
        raise PlanError(
            f"codecs={shown} has no code to plan with, because of what these say is not so: {why}; "
            f"{possible}"
        )
    if not found:
        raise PlanError(
            f"codecs={shown} has no lossy code: exact actions and lossless codes need not be "
            f"named, and take part anyway; {possible}"
        )
    return tuple(found)


def _check_registered(cls: type[Codec]) -> None:
    """Raises PlanError unless a codec is the one of its id: plans know settings by their names."""
    if cls.id not in codecs():
        raise PlanError(
            f"codec '{cls.id}' is not registered, and plans have codecs by their names; call "
            f"register({cls.__name__}) first, with 'from elbowroom.codecs import register'"
        )
    known = codec_class(cls.id)
    if known is not cls:
        raise PlanError(
            f"codec '{cls.id}' of class {cls.__name__} is not the one of that id, which is "
            f"{known.__name__} of {known.__module__}: a plan would use the latter. Give the class "
            "an id of its own, and register it"
        )


def _class_of(one: str | Codec) -> type[Codec]:
    if isinstance(one, Codec):
        return type(one)
    return type(_SYSTEMS[one][0]) if one in _SYSTEMS else codec_class(one)


def _useful() -> list[str]:
    return [id for id in codecs() if settings_of(id)]


def weighed(
    settings: Sequence[Codec], dtype: torch.dtype, facts: Facts, *, maps: bool, named: bool
) -> tuple[Codec, ...]:
    """Returns the codecs that a planner takes for tensors of one kind, the mildest first.

    named: the user has asked for these
    """
    return _weighed(tuple(settings), dtype, has_zeros=facts.has_zeros, maps=maps, named=named)


@lru_cache(maxsize=64)  # for all plans of a process: of each kind they weigh the same settings
def _weighed(
    settings: tuple[Codec, ...], dtype: torch.dtype, *, has_zeros: bool, maps: bool, named: bool
) -> tuple[Codec, ...]:
    shape, facts = _SHAPES[maps], Facts(has_zeros=has_zeros)
    sizes: dict[Codec, int] = {}
    for codec in by_error(settings, maps=maps):
        quality = quality_of(codec, maps=maps)
        if (named or quality.unbiased) and dtype in codec.dtypes:
            sizes[codec] = _nbytes(codec, shape, dtype, facts)
    least, found = prod(shape) * dtype.itemsize, []
    for codec, size in sizes.items():
        if size < least * (1 if named or isinstance(codec, Dither) else _LESS):
            found.append(codec)
            least = size
    if named:
        return tuple(found)
    return tuple(codec for codec in found if not _is_needless(codec, sizes, maps=maps))


def quicker(
    settings: Sequence[Codec],
    dtype: torch.dtype,
    facts: Facts,
    *,
    maps: bool,
    seconds: Callable[[Codec], float],
) -> tuple[Codec, ...]:
    """Returns the settings that are faster by a tenth than all that are about as small and as fine.

    They are those of other packages, and of codecs of which a setting takes part by its size in
    tensors without zeros: no kernel is compiled, and no speed measured, that no plan needs anyway.
    """
    shape = _SHAPES[maps]
    by_size = weighed(settings, dtype, Facts(), maps=maps, named=False)
    classes = {*map(type, by_size), *(cls for cls in map(type, settings) if not is_own(cls))}
    known = {
        codec: (_nbytes(codec, shape, dtype, facts), quality_of(codec, maps=maps).error)
        for codec in by_error([one for one in settings if type(one) in classes], maps=maps)
        if dtype in codec.dtypes and quality_of(codec, maps=maps).unbiased
    }
    found = []
    for codec, (nbytes, error) in known.items():
        as_good = [
            other
            for other, (its_nbytes, its_error) in known.items()
            if other != codec and _LESS * its_nbytes <= nbytes and its_error <= _NEAR * error
        ]
        is_faster = all(SLOWER * seconds(codec) < seconds(other) for other in as_good)
        if is_faster and nbytes < prod(shape) * dtype.itemsize:
            found.append(codec)
    return tuple(found)


def _nbytes(codec: Codec, shape: tuple[int, ...], dtype: torch.dtype, facts: Facts) -> int:
    """Returns the bytes of a code, and of the bitmap of zeros that has to stand beside it."""
    size = expected_nbytes(codec, shape, dtype, facts)
    return size + (prod(shape) // 8 if facts.has_zeros and not codec.keeps_zeros else 0)


def _is_needless(codec: Codec, sizes: dict[Codec, int], *, maps: bool) -> bool:
    """Returns whether a smaller code is nearly as fine."""
    coarsest = _NEAR * quality_of(codec, maps=maps).error
    return not isinstance(codec, Dither) and any(
        size < sizes[codec] and quality_of(other, maps=maps).error <= coarsest
        for other, size in sizes.items()
    )


def by_error(settings: Sequence[Codec], *, maps: bool = True) -> list[Codec]:
    """Sorts settings by their error, the mildest first."""
    return sorted(settings, key=lambda codec: quality_of(codec, maps=maps).error)


@lru_cache(4096)  # layers of a kind, and each estimate of a step, ask for the same
def expected_nbytes(codec: Codec, shape: tuple[int, ...], dtype: torch.dtype, facts: Facts) -> int:
    """Returns the bytes of a code, or an upper bound that nearly always holds.

    If a size depends on the values, it is the size for normal data and a quarter more, and at most
    the bound that the codec states.
    """
    said = codec.encoded_nbytes(shape, dtype, facts)
    if isinstance(codec, Dither) or codec.fixed_size(facts):
        return said
    bits = quality_of(codec, maps=len(shape) >= 4).bits + (1 if facts.has_zeros else 0)
    return min(said, ceil(_MORE * bits / 8 * prod(shape)))
