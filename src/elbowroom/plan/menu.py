"""The menu: what could be done with a profiled storage, and what it would cost.

A `Preset` is one setting of all sites (`plan/presets.py`). What it would hold for one storage
follows from the same questions, in the same order, that the runtime asks: what is held already, and
does it serve the next op?

    keep      the tensor
    exact     bits for masks, small integers for indices, what its op can make again not at all
    a code    the same, and for what tolerates an error a setting of a codec: "dither, 4 levels"
    offload   exact, and what that would keep, from 1 MiB on, in a file or in host memory
    both      a code that is moved there: "dither, 16 levels, to file"
    lean      of a norm's input, the code that serves the norm, its ReLU and the next layer

All registered codecs are weighed by their bytes, their error and their seconds (`registered.py`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from math import inf, prod
from typing import NamedTuple

from elbowroom.codecs import BitMask, Codec, Sided
from elbowroom.codecs.names import setting_name, setting_named
from elbowroom.plan.action import Encode, Keep, Offload, Rebuild
from elbowroom.plan.composed import LEAN_LEVELS, is_composed, is_no_worse, nbytes_with_mask
from elbowroom.plan.policy import Exact, KeepAll, Lean, Lossy, OffloadRest, Tier
from elbowroom.plan.precision_floor import ATTENTION, coded_rows, keeps_rows_apart, suffices
from elbowroom.plan.presets import Preset
from elbowroom.plan.prices import (
    ATTENTION_LOOK,
    RESTORE,
    ROWS,
    error_of,
    levels_of,
    look_s,
    rate_name,
    seconds_of,
    taken_nbytes,
)
from elbowroom.plan.problem import Option
from elbowroom.plan.profile import Profile, Storage
from elbowroom.plan.registered import SLOWER, all_settings, expected_nbytes, quicker, weighed
from elbowroom.plan.restored import MAPS, times_restored, workspace
from elbowroom.plan.site import NORMS, RESULT, Formula, Need, Reads, Rebuildable, Rows, Site

KEEP = Preset("keep", KeepAll(), exact=True)
EXACT_MENU = (Preset("exact", Exact(), exact=True),)
OFFLOAD: dict[Tier, Preset] = {
    "file": Preset("offload to file", OffloadRest("file"), exact=True),
    "host": Preset("offload to host", OffloadRest("host"), exact=True),
}
_TYPICAL_NBYTES = 1 << 20
_AHEAD = 4  # moments: about one tensor is back before it is asked for (runtime/prefetcher.py)
_FIXED = {preset.name: preset for preset in (KEEP, *EXACT_MENU, *OFFLOAD.values())}
_TO: dict[Tier, str] = {"file": ", to file", "host": ", to host"}
_LEAN = re.compile(r"lean, (\d+) levels")


@cache
def preset_named(name: str) -> Preset:
    """The preset of this name, as plans and their files have it. Raises CodecError, ValueError."""
    if name in _FIXED:
        return _FIXED[name]
    for tier, suffix in _TO.items():
        if name.endswith(suffix):
            codec = setting_named(name.removesuffix(suffix))
            return Preset(name, OffloadRest(tier, codec=codec), exact=False)
    lean = _LEAN.fullmatch(name)
    if lean:
        levels = int(lean[1])
        return Preset(name, Lean(upper=levels, plain=levels), exact=False)
    return Preset(name, Lossy(setting_named(name)), exact=False)


def presets_for(codecs: Sequence[Codec], tier: Tier | None = None) -> tuple[Preset, ...]:
    """A preset for each of these settings. tier: where their codes are moved to."""
    suffix = "" if tier is None else _TO[tier]
    return tuple(preset_named(setting_name(codec) + suffix) for codec in codecs)


class Menu:
    """The presets of each storage of a profile.

    codecs  the settings of codes that are allowed; None: all that are registered; (): none
    tier    where tensors and their codes may be moved to; None: nowhere
    whole   tensors may be moved as they are, not only their codes
    """

    def __init__(
        self, profile: Profile, codecs: tuple[Codec, ...] | None, tier: Tier | None, *, whole: bool
    ) -> None:
        self._profile = profile
        self._codecs, self._tier, self._named = codecs, tier, codecs is not None
        self._places = () if tier is None or not whole else (OFFLOAD[tier],)
        self._known: dict[tuple[object, ...], tuple[Preset, ...]] = {}

    def of(self, storage: Storage, *, is_gated: bool = False) -> tuple[Preset, ...]:
        """Returns the presets of a storage, the mildest first; storages of a kind have the same.

        is_gated: it is the input of a norm whose gradient comes through one ReLU
        """
        if self._codecs == ():
            return EXACT_MENU + self._places
        site = storage.saves[0].site
        kind = site.dtype, len(site.shape) >= 4, site.facts.has_zeros, is_gated
        if kind not in self._known:
            settings = all_settings() if self._codecs is None else self._codecs
            taken = weighed(settings, site.dtype, site.facts, maps=kind[1], named=self._named)
            # Of masks and indices no code is made: any setting does the same with them.
            presets = presets_for(taken or settings[:1])
            if not self._named:
                seconds = partial(self._seconds, has_zeros=kind[2])
                quick = quicker(settings, site.dtype, site.facts, maps=kind[1], seconds=seconds)
                presets += presets_for(tuple(codec for codec in quick if codec not in taken))
            presets += self._places
            if self._tier is not None:
                # Their bytes here are nearly none, so a few errors to choose from are enough.
                few = dict.fromkeys(taken[n] for n in (0, len(taken) // 2, -1)) if taken else ()
                presets += presets_for(tuple(few), self._tier)
            if is_gated and any(isinstance(one, Sided) for one in settings):
                presets += tuple(preset_named(f"lean, {n} levels") for n in LEAN_LEVELS)
            self._known[kind] = presets
        return self._known[kind]

    def _seconds(self, codec: Codec, *, has_zeros: bool) -> float:
        """Returns the seconds in which a tensor of typical size is encoded and decoded.

        inf: its speed was not measured, as in a profile from a file
        """
        verbs, profile = ("encode", "decode"), self._profile
        taken_s = (
            seconds_of(profile, verb, codec, _TYPICAL_NBYTES, has_zeros=has_zeros) for verb in verbs
        )
        total_s = sum(taken_s)
        is_known = all(rate_name(verb, codec) in profile.rates for verb in verbs)
        return total_s if is_known else inf


class _StoredForm(NamedTuple):
    """The form in which the runtime would hold one storage, after the sites so far.

    value  "" for nothing, "exact", "lossy"
    codec  of the code that the value comes from, if it does
    zeros  that code has a bitmap of them, which serves as bits
    mapped it is rebuilt from a code that has parts, element by element
    rows   that were normalized before, each by its own mean and std
    normalized  by these, or by the statistics of the norm that it is the input of
    of_xhat by these statistics alone: what that norm's backward reads (`runtime/normal.py`)
    travels bytes of the code that are moved over `link`; None: those of the tensor
    """

    nbytes: int = 0
    bits_nbytes: int = 0
    value: str = ""
    forward_s: float = 0.0
    restore_s: float = 0.0
    error: float = 0.0
    shape: bool = False
    rebuilt: bool = False
    mapped: bool = False
    link: str = ""
    travels: int | None = None
    codec: Codec | None = None
    zeros: bool = False
    rows: Rows | None = None
    normalized: bool = False
    of_xhat: bool = False

    def serves(self, need: Need) -> bool:
        if need is Need.SHAPE:
            return self.shape or bool(self.value) or bool(self.bits_nbytes)
        if need is Need.MASK:
            return bool(self.bits_nbytes) or self.value == "exact"
        return bool(self.value) if need is Need.LOSSY else self.value == "exact"

    def is_fine_for(self, site: Site) -> bool:
        """Returns whether the code, if it is one, has levels enough for this reader, too."""
        if self.value != "lossy" or self.codec is None or site.need is not Need.LOSSY:
            return True
        normalized = self.rows is not None and self.rows == site.rows
        apart = keeps_rows_apart(self.codec, site, normalized=normalized)
        return apart and suffices(self.codec, site)

    def restores(self, reads: Reads, *, exact: bool) -> bool:
        """Returns whether a backward that could read what is held needs the tensor after all.

        exact: no bit of any gradient may change
        """
        match reads:
            case Reads.BITS:
                return not (self.bits_nbytes or self.zeros or isinstance(self.codec, BitMask))
            case Reads.CODE:
                return self.codec is None or not self.of_xhat
            case Reads.GRADIENT:
                return exact or self.codec is None
            case Reads.PLACE:
                return not (self.rebuilt or (self.codec is not None and bool(self.value)))
            case Reads.SAMPLES:
                has_parts = self.codec is not None and self.codec.has_parts
                return exact or not (has_parts or self.mapped)
            case Reads.SIZES:
                return False
        return True


def option(
    profile: Profile, storage: Storage, preset: Preset, *, again: int = 0, is_gated: bool = False
) -> Option:
    """Returns what one preset would hold for one storage, and the time it would take.

    again     how often it is restored for tensors that are rebuilt from it, beside its own needs
    is_gated  as in `Menu.of`

    A tensor that is made again or decoded as a whole waits for a reader in the next moment, which
    takes no memory (`shared.py`).

    A variance of v shares of that of mini-batches makes a step worth 1 / (1 + v) steps (their
    noise adds up), so it is priced at v times the seconds of a step.
    """
    held = _held_by(profile, storage, preset, is_gated=is_gated)
    nbytes = held.nbytes + held.bits_nbytes
    direct = _direct_needs(storage, held, exact=preset.exact)
    is_whole = held.rebuilt or (held.value == "lossy" and held.codec is not None)
    restores = times_restored(storage, exact=preset.exact) if is_whole else len(storage.needs)
    return Option(
        name=preset.name,
        nbytes=min(nbytes, storage.nbytes),
        forward_s=held.forward_s,
        backward_s=held.restore_s * (max(restores, 1) + again),
        variance=held.error,
        exact=not held.error,
        noise_s=held.error * profile.seconds,
        link=held.link,
        ahead=_AHEAD if held.link else 0,
        values=held.value == "exact" and not held.rebuilt,
        direct=(
            *_as_encoded(storage, held),
            *((at, _more_nbytes(profile, storage, at, reads)) for at, reads in direct.items()),
        ),
        levels=levels_of(held.codec, storage.saves[0].site)
        if held.value == "lossy" and held.codec and not held.codec.is_rough_elsewhere
        else 0.0,
        shared=() if preset.exact else _shared(profile, storage),
        restore_s=held.restore_s if is_whole else 0.0,
        beside_nbytes=_sources_nbytes(profile, storage)
        if held.rebuilt
        else _taken(storage, held)[1],
        travels=held.travels,
    )


def _held_by(profile: Profile, storage: Storage, preset: Preset, *, is_gated: bool) -> _StoredForm:
    held = _StoredForm()
    for save in storage.saves:
        if not save.left and not (held.serves(save.site.need) and held.is_fine_for(save.site)):
            held = _served(held, preset, save.site, storage, profile, is_gated=is_gated)
    return held


Chosen = tuple[Storage, Preset, bool]  # with a preset, and whether it is gated as in `Menu.of`


def is_made_of(profile: Profile, one: Chosen, sources: Sequence[Chosen]) -> bool:
    """Returns whether a storage is rebuilt as its preset says, of sources by theirs.

    It is not where one of these has a code that is too coarse for a reader of it, nor, where it is
    exact, where one has a code that is not.
    """
    storage, preset, is_gated = one
    if not _held_by(profile, storage, preset, is_gated=is_gated).rebuilt:
        return True
    codes = [_held_by(profile, source, chosen, is_gated=gated) for source, chosen, gated in sources]
    if preset.exact and any(code.value == "lossy" for code in codes):
        return False
    sites = [save.site for save in storage.saves if not save.site.of_logits]
    return all(code.is_fine_for(site) for code in codes for site in sites)


def _sources_nbytes(profile: Profile, storage: Storage) -> int:
    """Returns the bytes that stand beside a storage while it is rebuilt from others.

    One of these becomes the result if it is as large. What stood there in the profiled step, if
    the storage was rebuilt in it, is part of `base`: all that was not kept then.
    """
    was_made = not storage.kept and storage.held <= storage.nbytes // 8
    sources = [profile.storages[i] for i in storage.made_of]
    restored = [one for one in sources if not one.saves[0].left and (one.kept or not was_made)]
    becomes = any(one.nbytes == storage.nbytes for one in restored)
    return sum(one.nbytes for one in restored) - (storage.nbytes if becomes else 0)


def shared_s(profile: Profile) -> tuple[float, ...]:
    """Returns the seconds that codes of what an attention saves add once: two of each module.

    Its forward runs again as soon as q, k, v or its output is a code, and values are examined, on
    a CPU, as soon as q, k or v is: for how many levels they need.
    """
    looks = profile.device[0] == "cpu"
    return tuple(
        part
        for seconds, nbytes in profile.attentions.values()
        for part in (seconds, look_s(profile, ATTENTION_LOOK, nbytes) if looks else 0.0)
    )


def _shared(profile: Profile, storage: Storage) -> tuple[int, ...]:
    """Returns which of `shared_s` a lossy code of a storage adds."""
    numbers = {module: 2 * n for n, module in enumerate(profile.attentions)}
    found: set[int] = set()
    for save in storage.saves:
        if save.site.consumer == ATTENTION and save.site.module in numbers:
            again = numbers[save.site.module]
            found |= {again} if save.site.reads in RESULT else {again, again + 1}
    return tuple(sorted(found))


def _direct_needs(storage: Storage, held: _StoredForm, *, exact: bool) -> dict[int, list[Reads]]:
    """The moments of backward at which only ops ask for it that read what is held, and how."""
    return {
        need: reads
        for need, reads in storage.readings.items()
        if reads and not any(held.restores(one, exact=exact) for one in reads)
    }


def _more_nbytes(profile: Profile, storage: Storage, moment: int, reads: list[Reads]) -> int:
    """Bytes that an op takes beyond those of `base` where it reads what is held.

    torch's own batch norm makes one tensor beside the gradient, ours on the code does not.
    """
    return -workspace(profile, storage, moment) if reads == [Reads.CODE] else 0


def _as_encoded(storage: Storage, held: _StoredForm) -> Iterator[tuple[int, int]]:
    """The moment at which it gets a code, and the bytes that this takes beside tensor and code.

    A code of logits is one of log-probabilities, which are made for it as a whole.
    """
    nbytes, _ = _taken(storage, held)
    is_code = held.value == "lossy" and held.codec is not None
    if is_code and any(save.site.formula is Formula.LOG_PROBABILITY for save in storage.saves):
        nbytes += storage.nbytes
    if nbytes:
        yield storage.born, nbytes


def _taken(storage: Storage, held: _StoredForm) -> tuple[int, int]:
    """Returns the bytes that encoding and decoding take beside tensor and code."""
    if held.codec is None or held.rebuilt:
        return 0, 0
    return taken_nbytes(held.codec, storage.nbytes, normalized=held.normalized)


def options(
    profile: Profile,
    storage: Storage,
    presets: Sequence[Preset],
    *,
    again: int = 0,
    is_gated: bool = False,
) -> dict[str, Option]:
    """Returns the presets that hold fewer bytes than all milder ones; to keep it comes first.

    Of other codes, those that are faster by a tenth than all that are as small and as fine; of
    composed ones, all that are better in some way than each other preset: in the bytes that are
    held or travel, in time, or in noise.

    again, is_gated: as in `option`.
    """
    found = {KEEP.name: Option(KEEP.name, storage.nbytes)}
    beside = {}
    for preset in presets:
        made = option(profile, storage, preset, again=again, is_gated=is_gated)
        if not is_composed(preset) and made.nbytes < min(one.nbytes for one in found.values()):
            found[preset.name] = made
        elif not preset.exact and made.nbytes < storage.nbytes:
            beside[preset.name] = made, 1 if is_composed(preset) else SLOWER
    for name, (made, slower) in beside.items():
        if not any(is_no_worse(other, made, storage, slower=slower) for other in found.values()):
            worse = [n for n in beside if n in found and is_no_worse(made, found[n], storage)]
            found = {n: other for n, other in found.items() if n not in worse}
            found[name] = made
    return found


def action_name(preset: Preset, storage: Storage) -> str:
    """Returns the runtime's action for a storage: "rebuild", "bitmask", "dither, 4 levels"."""
    names: dict[str, None] = {}
    for save in storage.saves:
        match preset.policy(_as_made(preset, save.site)):
            case Keep():
                names["keep"] = None
            case Rebuild():
                names["rebuild" if save.site.need is not Need.SHAPE else "shape"] = None
            case Offload(tier):
                names[f"offload to {tier}"] = None
            case Encode(gated=Sided()):
                names[preset.name] = None
            case Encode(codec, moved=moved):
                suffix = "" if moved is None else f", to {moved.tier}"
                mask = save.site.need is Need.MASK
                names["bits" if mask else setting_name(codec) + suffix] = None
    return " + ".join(names)


def _served(
    held: _StoredForm,
    preset: Preset,
    site: Site,
    storage: Storage,
    profile: Profile,
    *,
    is_gated: bool,
) -> _StoredForm:
    """Returns the form that serves one more site, by the preset's action for it."""
    site = _as_made(preset, site)
    match preset.policy(site):
        case Offload(tier):
            there = held._replace(value="exact", nbytes=0, error=0.0, link=tier or "", travels=None)
            return _moved(there, storage.nbytes, profile)
        case Rebuild() if site.need is Need.SHAPE:
            return held._replace(shape=True)
        case Rebuild():
            is_exact = site.need is Need.EXACT or preset.exact
            return held._replace(
                value="exact" if is_exact else "lossy",
                nbytes=0,
                restore_s=storage.producer_s + profile.fixed_s.get(RESTORE, 0.0),
                rebuilt=True,
                mapped=not is_exact and site.producer in MAPS and _has_parts(preset, site),
                codec=None,
                link="",
                travels=None,
            )
        case Encode(codec) if site.need is Need.MASK:
            bits = held._replace(bits_nbytes=-(-prod(site.shape) // 8))
            return _coded(bits, codec, site, profile, has_zeros=False)
        case Encode() as action:
            made_nbytes = profile.made_nbytes.get(id(storage), 0)
            return _encoded(held, action, site, profile, made_nbytes, is_gated=is_gated)
    return held._replace(  # it is kept
        value="exact",
        nbytes=storage.nbytes,
        restore_s=0.0,
        error=0.0,
        codec=None,
        link="",
        travels=None,
    )


def _encoded(
    held: _StoredForm,
    action: Encode,
    site: Site,
    profile: Profile,
    made_nbytes: int,
    *,
    is_gated: bool,
) -> _StoredForm:
    """Returns the form in which values have a code. made_nbytes: as in `error_of`."""
    facts, codec = action.facts, action.codec
    if is_gated and isinstance(action.gated, Sided):
        codec = action.gated
    rows = None if site.consumer in NORMS else site.rows
    if rows is not None:
        codec, rows = coded_rows(rows, codec, by_size=site.by_size)
    is_normalized = not codec.lossless and facts.error_bound is None
    nbytes = (
        nbytes_with_mask(codec, prod(site.shape))
        if isinstance(codec, Sided) and is_gated
        else expected_nbytes(codec, site.shape, site.dtype, facts)
    )
    has_bitmap = facts.has_zeros and codec.keeps_zeros  # which serves as bits, too
    is_read = site.reads is not Reads.SIZES  # its values, by a node of ours
    held = held._replace(
        value="exact" if codec.lossless else "lossy",
        nbytes=nbytes if rows is None else nbytes + rows.nbytes,
        bits_nbytes=0 if has_bitmap else held.bits_nbytes,
        forward_s=held.forward_s + (0.0 if rows is None else look_s(profile, ROWS, site.nbytes)),
        error=error_of(codec, site, profile, made_nbytes)
        if is_read and not codec.lossless
        else 0.0,
        codec=codec,
        zeros=held.zeros or has_bitmap,
        rows=rows,
        normalized=is_normalized and (rows is not None or site.consumer in NORMS),
        of_xhat=is_normalized and site.consumer in NORMS and not facts.has_zeros,
        link="",
        travels=None,
    )
    tier = None if action.moved is None else action.moved.tier
    if tier is not None:
        travels = min(held.nbytes, codec.largest_nbytes(site.shape, site.dtype, facts))
        there = held._replace(nbytes=held.nbytes - travels, link=tier, travels=travels)
        held = _moved(there, travels, profile)
    return _coded(held, codec, site, profile, has_zeros=facts.has_zeros)


def _coded(
    held: _StoredForm, codec: Codec, site: Site, profile: Profile, *, has_zeros: bool
) -> _StoredForm:
    """Counts the seconds in which a site's tensor is encoded and decoded."""
    encode_s, decode_s = (
        seconds_of(profile, verb, codec, site.nbytes, has_zeros=has_zeros)
        for verb in ("encode", "decode")
    )
    return held._replace(forward_s=held.forward_s + encode_s, restore_s=held.restore_s + decode_s)


def _as_made(preset: Preset, site: Site) -> Site:
    """Returns the site as it would be met where its sources are held by such a preset, too."""
    is_made = site.rebuildable is not Rebuildable.NO
    if preset.exact:
        return replace(site, rebuildable=Rebuildable.EXACT) if is_made else site
    exactly = site.need is Need.EXACT or site.formula is Formula.RELATIVE
    if is_made and (exactly or site.consumer == ATTENTION):
        return replace(site, rebuildable=Rebuildable.NO)
    return site


def _has_parts(preset: Preset, site: Site) -> bool:
    """Returns whether codes of the preset, such as one that a site is rebuilt from, have parts."""
    action = preset.policy(replace(site, rebuildable=Rebuildable.NO))
    return isinstance(action, Encode) and action.codec.has_parts


def _moved(held: _StoredForm, nbytes: int, profile: Profile) -> _StoredForm:
    """Counts the seconds of a transfer: on a CPU, threads that copy take theirs from the step.

    A profile of an older version has only the rates of the link, by the wall clock.
    """
    if profile.device[0] != "cpu":
        return held
    out_s, in_s = (_copy_s(profile, f"{way} {held.link}", nbytes) for way in ("out", "in"))
    return held._replace(forward_s=held.forward_s + out_s, restore_s=held.restore_s + in_s)


def _copy_s(profile: Profile, way: str, nbytes: int) -> float:
    rate = profile.rates.get(f"copy {way}", profile.rates[way])
    return profile.fixed_s.get(f"copy {way}", 0.0) + nbytes / rate
