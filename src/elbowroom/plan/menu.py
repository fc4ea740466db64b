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

All registered codecs are weighed (`registered.py`).
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import prod

from elbowroom.codecs import BitMask, Codec, Dither, Sided
from elbowroom.codecs.dropped import drop, is_own
from elbowroom.codecs.names import setting_name, setting_named
from elbowroom.codecs.quality import quality_of
from elbowroom.plan.action import Encode, Keep, Offload, Rebuild
from elbowroom.plan.composed import (
    LEAN_LEVELS,
    RELUS,
    beside_mask,
    is_composed,
    is_no_worse,
    levels_of_upper,
)
from elbowroom.plan.offload_rest import OffloadRest, Tier
from elbowroom.plan.policy import Exact, KeepAll, Lean, Lossy
from elbowroom.plan.precision_floor import ATTENTION, coded_rows, keeps_rows_apart, suffices
from elbowroom.plan.presets import Preset
from elbowroom.plan.problem import Option
from elbowroom.plan.profile import Profile, Storage
from elbowroom.plan.registered import all_settings, expected_nbytes, weighed
from elbowroom.plan.samples import samples_at_once
from elbowroom.plan.site import NORMS, Formula, Need, Reads, Rebuildable, Rows, Site

KEEP = Preset("keep", KeepAll(), exact=True)
EXACT_MENU = (Preset("exact", Exact(), exact=True),)
OFFLOAD: dict[Tier, Preset] = {
    "file": Preset("offload to file", OffloadRest("file"), exact=True),
    "host": Preset("offload to host", OffloadRest("host"), exact=True),
}
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
        self, codecs: tuple[Codec, ...] | None, tier: Tier | None = None, *, whole: bool = True
    ) -> None:
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
            presets = presets_for(taken or settings[:1]) + self._places
            if self._tier is not None:
                # Their bytes here are nearly none, so a few errors to choose from are enough.
                few = dict.fromkeys(taken[n] for n in (0, len(taken) // 2, -1)) if taken else ()
                presets += presets_for(tuple(few), self._tier)
            if is_gated and any(isinstance(one, Sided) for one in settings):
                presets += tuple(preset_named(f"lean, {n} levels") for n in LEAN_LEVELS)
            self._known[kind] = presets
        return self._known[kind]


@dataclass
class _Held:
    """The form in which the runtime would hold one storage so far.

    value  "" for nothing, "exact", "lossy"
    codec  of the code that the value comes from, if it does
    zeros  that code has a bitmap of them, which serves as bits
    mapped it is rebuilt from a code, element by element
    rows   that were normalized before, each by its own mean and std
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
                return not isinstance(self.codec, Dither)
            case Reads.GRADIENT:
                return exact or self.codec is None
            case Reads.PLACE:
                return not (self.rebuilt or (self.codec is not None and bool(self.value)))
            case Reads.SAMPLES:
                return exact or not (isinstance(self.codec, Dither) or self.mapped)
            case Reads.SIZES:
                return False
        return True


def option(
    profile: Profile,
    storage: Storage,
    preset: Preset,
    *,
    again: int = 0,
    is_gated: bool = False,
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
        beside=_beside(profile, storage) if held.rebuilt else 0,
        travels=held.travels,
    )


def _held_by(profile: Profile, storage: Storage, preset: Preset, *, is_gated: bool) -> _Held:
    held = _Held()
    for save in storage.saves:
        if not save.left and not (held.serves(save.site.need) and held.is_fine_for(save.site)):
            _set_held(held, preset, save.site, storage, profile, is_gated=is_gated)
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
    return all(code.is_fine_for(save.site) for code in codes for save in storage.saves)


def _beside(profile: Profile, storage: Storage) -> int:
    """Returns the bytes that stand beside a storage while it is rebuilt from others.

    One of these becomes the result if it is as large. What stood there in the profiled step, if
    the storage was rebuilt in it, is part of `base`: all that was not kept then.
    """
    was_made = not storage.kept and storage.held <= storage.nbytes // 8
    sources = [profile.storages[i] for i in storage.made_of]
    restored = [one for one in sources if not one.saves[0].left and (one.kept or not was_made)]
    becomes = any(one.nbytes == storage.nbytes for one in restored)
    return sum(one.nbytes for one in restored) - (storage.nbytes if becomes else 0)


def times_restored(storage: Storage, made: Collection[int] = (), *, exact: bool) -> int:
    """Returns how often a storage is rebuilt or decoded for its readers.

    Consecutive readers that take it whole share one restored tensor; each other reader has its own.

    made   moments at which something is made of it
    exact  in a plan that changes no bit, in which all readers take it whole
    """
    whole = set(storage.needs) if exact else whole_needs(storage)
    apart = set(storage.needs) - whole - set(made)
    return runs_of(sorted(whole.union(made))) + len(apart)


def whole_needs(storage: Storage) -> set[int]:
    """Returns the moments at which its readers take the whole tensor, where it is a code."""
    parts = {save.asked for save in storage.saves if save.site.reads not in _WHOLE}
    return set(storage.needs) - parts


def is_mapped(storage: Storage) -> bool:
    """Returns whether it is made of a code in the pass that decodes that."""
    return storage.saves[0].site.producer in _MAPS


def runs_of(moments: Sequence[int]) -> int:
    """Returns the number of runs of consecutive moments, among ascending ones."""
    return sum(before + 1 != moment for before, moment in pairwise((-2, *moments)))


def shared_s(profile: Profile) -> tuple[float, ...]:
    """Returns the seconds that codes of what an attention saves add once: two of each module.

    Its forward runs again as soon as q, k, v or its output is a code, and values are examined, on
    a CPU, as soon as q, k or v is: for how many levels they need.
    """
    looks = profile.device[0] == "cpu"
    return tuple(
        part
        for seconds, nbytes in profile.attentions.values()
        for part in (seconds, _look_s(profile, ATTENTION_LOOK, nbytes) if looks else 0.0)
    )


def _shared(profile: Profile, storage: Storage) -> tuple[int, ...]:
    """Returns which of `shared_s` a lossy code of a storage adds."""
    numbers = {module: 2 * n for n, module in enumerate(profile.attentions)}
    found: set[int] = set()
    for save in storage.saves:
        if save.site.consumer == ATTENTION and save.site.module in numbers:
            again = numbers[save.site.module]
            found |= {again} if save.site.reads is Reads.GRADIENT else {again, again + 1}
    return tuple(sorted(found))


def _direct_needs(storage: Storage, held: _Held, *, exact: bool) -> dict[int, list[Reads]]:
    """The moments of backward at which only ops ask for it that read what is held, and how."""
    asked = {
        need: [save.site.reads for save in storage.saves if save.asked == need]
        for need in storage.needs
    }
    return {
        need: reads
        for need, reads in asked.items()
        if reads and not any(held.restores(one, exact=exact) for one in reads)
    }


def _more_nbytes(profile: Profile, storage: Storage, moment: int, reads: list[Reads]) -> int:
    """Bytes that an op takes beyond those of `base` where it reads what is held.

    torch's own batch norm makes one tensor beside the gradient, ours on the code does not.
    """
    return -workspace(profile, storage, moment) if reads == [Reads.CODE] else 0


def _as_encoded(storage: Storage, held: _Held) -> Iterator[tuple[int, int]]:
    """The moment at which it gets a code, and the bytes that this takes beside tensor and code.

    A code of logits is one of log-probabilities, which are made for it as a whole.
    """
    is_code = held.value == "lossy" and held.codec is not None
    if is_code and any(save.site.formula is Formula.LOG_PROBABILITY for save in storage.saves):
        yield storage.born, storage.nbytes


def spared(profile: Profile, storage: Storage) -> dict[int, int]:
    """Returns, by moment, the bytes that convolutions spare by working on a few samples at a time.

    Their workspace is that of these samples alone (`Direct.exact`), and of the gradient only their
    part waits to be copied. Decoded samples are freed before that, and take no more.
    """
    found = {}
    for need in storage.needs:
        if [save.site.reads for save in storage.saves if save.asked == need] == [Reads.SAMPLES]:
            share = _share(storage, need)
            part = share * storage.nbytes
            found[need] = round((1 - share) * workspace(profile, storage, need) - part)
    return found


def workspace(profile: Profile, storage: Storage, moment: int) -> int:
    """Returns the bytes that backward took at this moment beside the tensor and the gradient."""
    restored = 0 if storage.kept else storage.nbytes
    taken = profile.level[moment] - profile.floor[moment] - restored - storage.nbytes
    return max(taken, 0)


def _share(storage: Storage, moment: int) -> float:
    """The part of its samples that a convolution takes at once, which asks for it then."""
    site = next(save.site for save in storage.saves if save.asked == moment)
    at_once = site.samples or samples_at_once(site.shape, site.dtype.itemsize)  # of an old profile
    return at_once / site.shape[0]


def options(
    profile: Profile,
    storage: Storage,
    presets: Sequence[Preset],
    *,
    again: int = 0,
    is_gated: bool = False,
) -> dict[str, Option]:
    """Returns the presets that hold fewer bytes than all milder ones; to keep it comes first.

    Of composed ones, all that are better in some way than each other preset: in the bytes that are
    held or travel, in time, or in noise.

    again, is_gated: as in `option`.
    """
    found = {KEEP.name: Option(KEEP.name, storage.nbytes)}
    composed = {}
    for preset in presets:
        made = option(profile, storage, preset, again=again, is_gated=is_gated)
        if is_composed(preset):
            composed[preset.name] = made
        elif made.nbytes < min(known.nbytes for known in found.values()):
            found[preset.name] = made
    for name, made in composed.items():
        if not any(is_no_worse(other, made, storage) for other in found.values()):
            worse = [n for n in composed if n in found and is_no_worse(made, found[n], storage)]
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


def _set_held(
    held: _Held,
    preset: Preset,
    site: Site,
    storage: Storage,
    profile: Profile,
    *,
    is_gated: bool = False,
) -> None:
    site = _as_made(preset, site)
    match preset.policy(site):
        case Keep():
            held.value, held.nbytes, held.restore_s, held.error = "exact", storage.nbytes, 0.0, 0.0
            held.codec, held.link, held.travels = None, "", None
        case Offload(tier):
            held.value, held.nbytes, held.error, held.link = "exact", 0, 0.0, tier or ""
            held.travels = None
            _add_travel(held, storage.nbytes, profile)
        case Rebuild() if site.need is Need.SHAPE:
            held.shape = True
        case Rebuild():
            held.value = "exact" if site.need is Need.EXACT or preset.exact else "lossy"
            again_s = storage.producer_s + profile.fixed_s.get(RESTORE, 0.0)
            held.nbytes, held.restore_s, held.rebuilt = 0, again_s, True
            held.codec, held.mapped = None, held.value == "lossy" and site.producer in _MAPS
            held.link, held.travels = "", None
        case Encode(codec) if site.need is Need.MASK:
            held.bits_nbytes = -(-prod(site.shape) // 8)
            held.forward_s += _seconds(profile, "encode", codec, site.nbytes)
            held.restore_s += _seconds(profile, "decode", codec, site.nbytes)
        case Encode(codec, facts, moved=moved) as action:
            if is_gated and isinstance(action.gated, Sided):
                codec = action.gated
            rows = None if site.consumer in NORMS else site.rows
            if rows is not None:
                codec, rows = coded_rows(rows, codec, by_size=site.by_size)
            held.nbytes = (
                beside_mask(codec, prod(site.shape))
                if isinstance(codec, Sided) and is_gated
                else expected_nbytes(codec, site.shape, site.dtype, facts)
            )
            held.value, held.codec = "exact" if codec.lossless else "lossy", codec
            held.rows, held.link, held.travels = rows, "", None
            if rows is not None:
                held.nbytes += rows.nbytes
                held.forward_s += _look_s(profile, ROWS, site.nbytes)
            if moved is not None and moved.tier is not None:
                largest = codec.largest_nbytes(site.shape, site.dtype, facts)
                held.link, held.travels = moved.tier, min(held.nbytes, largest)
                held.nbytes -= held.travels
                _add_travel(held, held.travels, profile)
            if facts.has_zeros and codec.keeps_zeros:
                held.bits_nbytes, held.zeros = 0, True
            held.forward_s += _seconds(profile, "encode", codec, site.nbytes)
            held.restore_s += _seconds(profile, "decode", codec, site.nbytes)
            held.error = 0.0 if codec.lossless else _error(codec, site, profile)


def _as_made(preset: Preset, site: Site) -> Site:
    """Returns the site as it would be met where its sources are held by such a preset, too."""
    is_made = site.rebuildable is not Rebuildable.NO
    if preset.exact:
        return replace(site, rebuildable=Rebuildable.EXACT) if is_made else site
    if is_made and (site.need is Need.EXACT or site.consumer == ATTENTION):
        return replace(site, rebuildable=Rebuildable.NO)
    return site


def _add_travel(held: _Held, nbytes: int, profile: Profile) -> None:
    """Counts the time of a transfer: on a CPU, threads that copy take theirs from the step.

    A profile of an older version has only the rates of the link, by the wall clock.
    """
    if profile.device[0] == "cpu":
        out, back = f"out {held.link}", f"in {held.link}"
        held.forward_s += nbytes / profile.rates.get(f"copy {out}", profile.rates[out])
        held.restore_s += nbytes / profile.rates.get(f"copy {back}", profile.rates[back])


def _seconds(profile: Profile, verb: str, codec: Codec, nbytes: int) -> float:
    """Returns the seconds in which so many bytes of a tensor are encoded or decoded."""
    try:
        rate = profile.rates[rate_name(verb, codec)]  # what was not asked for is measured now
    except KeyError:
        rate = _UNMEASURED
    except Exception as error:
        if is_own(type(codec)):
            raise
        rate = _UNMEASURED
        drop(type(codec), f"it fails: {type(error).__name__}: {error}")
    return profile.fixed_s.get(fixed_name(verb, codec), 0.0) + nbytes / rate


def _look_s(profile: Profile, name: str, nbytes: int) -> float:
    """Returns the seconds of one look at the values of so many bytes."""
    return profile.fixed_s.get(name, 0.0) + nbytes / profile.rates.get(name, _UNMEASURED)


ROWS = "rows"  # the rate at which the means and sizes of rows are found
ATTENTION_LOOK = "attention levels"  # the rate at which it is found how fine its codes must be
RESTORE = "decode bitmask"  # the fixed seconds of what does nearly nothing else
_MAPS = (*RELUS, "batch_norm")  # what they make of a code has parts
# Of what waits for its next reader.
_WHOLE = (Reads.RESTORED, Reads.PLACE, Reads.GRADIENT, Reads.ROWS)
_AHEAD = 4  # moments: about one tensor is back before it is asked for (runtime/prefetcher.py)
_TYPICAL = 32  # levels of a code that a module runs again from
_UNMEASURED = 4e9  # bytes a second: about what a code takes on one core


def rate_name(verb: str, codec: Codec) -> str:
    """Returns the name of a rate in a profile: "encode dither, 4 levels".

    The size of groups makes no difference to a dither.
    """
    named = Dither(levels=codec.levels) if isinstance(codec, Dither) else codec
    return f"{verb} {setting_name(named)}"


def fixed_name(verb: str, codec: Codec) -> str:
    """Returns the name of seconds in a profile that each tensor takes: "encode dither"."""
    return f"{verb} {codec.id}"


def _error(codec: Codec, site: Site, profile: Profile) -> float:
    """Returns the gradient variance that the code adds, as a share of that of mini-batches.

    Where that was not measured, all tensors matter as their size: the share of all saved bytes that
    this is, times the variance of a code of a normal. What is no dither counts as one that makes as
    large an error of a normal.
    """
    return _noise(profile, site, levels_of(codec, site))


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


def _noise(profile: Profile, site: Site, levels: float) -> float:
    if profile.noise is not None:
        return profile.noise.of(site.name, site.nbytes, levels)
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
