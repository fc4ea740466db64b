"""One step as data: what autograd saved, when it was made and asked for, and what else took memory.

A `Profile` is written down by `measure.record` and read by the planner; nothing in it is a tensor
or a module, so it can be kept as JSON (docs/formats/profile.md), compared, and planned for on
another machine. A step is cut into moments, as in `plan/problem.py`: one begins wherever a storage
is saved, asked for or let go of, and wherever a module begins or ends.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from elbowroom.codecs import Facts
from elbowroom.kernels.windows import Window
from elbowroom.plan import files
from elbowroom.plan.precision_floor import ATTENTION
from elbowroom.plan.resident_bytes import ResidentBytes, resident_bytes_from
from elbowroom.plan.shares import PREDICTED, NoiseShares, SiteShares
from elbowroom.plan.site import (
    RECURRENT,
    RESULT,
    SMALL,
    Formula,
    Need,
    Reads,
    Rebuildable,
    Rows,
    Site,
    SiteKey,
    SiteName,
    key_of,
    limited,
)
from elbowroom.units import show_nbytes, show_seconds

VERSION = 1


@dataclass(frozen=True)
class Save:
    """One op that saves a storage.

    left     why every plan must keep the storage as it is, or ""
    modules  the modules that were running, outermost first, by name, without the root
    at       the moment of forward
    asked    the last moment at which backward requested the storage for this op; -1: never
    line     the file and line of Python that called the op, outside of torch; "": not known
    """

    site: Site
    left: str
    modules: tuple[str, ...]
    at: int
    asked: int = -1
    line: str = field(default="", compare=False)

    def asked_at(self, moment: int) -> "Save":
        """Returns the same save, for which backward requests the storage last at this moment."""
        return Save(self.site, self.left, self.modules, self.at, moment, self.line)


def limited_saves(saves: Sequence[Save], reasons: Sequence[str]) -> list[Save]:
    """Returns the saves of one storage, as they are once codes of few levels were found wrong.

    What one op needs exactly, all of them read.

    reasons: for each save, "": none was
    """
    found = [
        replace(one, site=limited(one.site, why)) if why else one
        for one, why in zip(saves, reasons, strict=True)
    ]
    limits = [one.site for one, why in zip(found, reasons, strict=True) if why]
    exact = next((str(site.why) for site in limits if site.need is Need.EXACT), "")
    return [replace(one, site=limited(one.site, exact)) for one in found] if exact else found


@dataclass(frozen=True)
class Storage:
    """One saved storage.

    nbytes      bytes in plain autograd
    held        bytes that the profiled step kept for it
    kept        whether the profiled step kept the storage itself
    born        the moment of the first save
    used        the last moment of forward that reads it
    needs       the moments of backward that request it
    freed       the last moment at which any memory is kept for it
    producer_s  seconds of the op that computed it, and of the ops between it and what is saved
    made_in     the modules that were running then, as in `Save`, and the modules of all ops between
                the storage and the storages from which it could be rebuilt
    made_of     the storages from which it could be rebuilt, by index
    """

    nbytes: int
    held: int
    kept: bool
    born: int
    used: int
    needs: tuple[int, ...]
    freed: int
    producer_s: float
    made_in: tuple[str, ...]
    saves: tuple[Save, ...]
    made_of: tuple[int, ...] = ()

    @cached_property
    def readings(self) -> dict[int, list[Reads]]:
        """How the ops read it that ask for it last at a moment, by each of its needs."""
        found: dict[int, list[Reads]] = {need: [] for need in self.needs}
        for save in self.saves:
            if save.asked in found:
                found[save.asked].append(save.site.reads)
        return found

    @property
    def restored(self) -> tuple[int, ...]:
        """The needs at which the restored storage takes memory of its own, if it is not kept.

        Where a product's result takes the place of a restored factor, the factor takes none, nor
        does a tensor of which only the sizes are read.
        """
        none = (Reads.PLACE, Reads.SIZES)
        others = {save.asked for save in self.saves if save.site.reads not in none}
        places = {save.asked for save in self.saves} - others
        return tuple(need for need in self.needs if need not in places)


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    inputs        the storages of its tensor arguments without parameters, by index; -1: no op saves
                  it
    extra_nbytes  bytes of the arguments that no op saves, and that must be kept to run it again
    sources       storages from which the arguments that no op saves can be rebuilt, bit for bit
    made_nbytes   bytes of these arguments
    rough         a function that it calls and that may not tolerate an error in its input, or ""
    first, last   the first and the last moment of its forward
    why_not       the reason that it cannot run a second time, or ""
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    extra_nbytes: int
    first: int
    last: int
    seconds: float
    why_not: str = ""
    sources: tuple[int, ...] = ()
    made_nbytes: int = 0
    rough: str = ""


_CONTAINERS = {"Sequential", "ModuleList", "ModuleDict"}


@dataclass(frozen=True)
class Profile:
    """The profile of one training step.

    level     the highest memory use in each moment, in bytes, with everything counted
    floor     bytes in use at the start of each moment
    starts_s  seconds from the start of the step to each moment
    backward  the first moment of backward
    seconds   seconds of the whole step
    static    bytes in use before the step
    rates     bytes per second on this machine: "encode dither, 4 levels", "out file", ...
    fixed_s   fixed seconds per tensor, independent of its size: "encode dither", ...
    noise     the noise that codes would add to the gradient; None: not measured
    standing  bytes of the model and its optimizers between steps; None: not known
    device    "cpu" or "cuda", and the name of the GPU
    unlisted_nbytes  bytes that are kept for backward and belong to no storage above: of subclasses,
                     sparse tensors and lazy conjugates
    """

    level: tuple[int, ...]
    floor: tuple[int, ...]
    starts_s: tuple[float, ...]
    backward: int
    seconds: float
    static: int
    storages: tuple[Storage, ...]
    modules: tuple[ModuleCall, ...]
    rates: dict[str, float] = field(default_factory=dict)
    device: tuple[str, str] = ("cpu", "")
    measured: bool = True
    noise: NoiseShares | None = None
    standing: ResidentBytes | None = None
    fixed_s: dict[str, float] = field(default_factory=dict)
    unlisted_nbytes: int = 0

    def __str__(self) -> str:
        kind = "measured" if self.measured else "estimated"
        return (
            f"profile: peak {show_nbytes(self.peak)}, of which {show_nbytes(self.static)} stood "
            f"before; {show_nbytes(self.saved_nbytes)} saved for backward in {len(self.storages)} "
            f"tensors; {show_seconds(self.seconds)} ({kind})"
        )

    @cached_property
    def problems(self) -> dict[object, Any]:
        """Problems built from this profile, by their settings (`build_problem.py`)."""
        return {}

    @cached_property
    def by_size(self) -> "Profile":
        """This profile with noise that is predicted from the sizes of tensors alone."""
        return replace(self, noise=NoiseShares.by_size(self.saved_nbytes))

    @cached_property
    def made_nbytes(self) -> dict[int, int]:
        """Bytes of the tensors that are made of a storage, by its `id`: they have its error, too.

        Tensors that are made of these in turn are left out: of a sum of many, the error of one is a
        small part.
        """
        found: Counter[int] = Counter()
        for one in self.storages:
            if any(save.site.need in (Need.EXACT, Need.LOSSY) for save in one.saves):
                for source in set(one.made_of):
                    found[id(self.storages[source])] += one.nbytes
        return dict(found)

    @cached_property
    def unmeasured(self) -> "Profile":
        """This profile for questions about bytes alone: a rate that is not known stays unknown.

        `rates` may measure what is missing, and then compiles a kernel on a GPU, a second each.
        """
        return replace(self, rates=dict(self.rates))

    @cached_property
    def attentions(self) -> dict[str, tuple[float, int]]:
        """Seconds that attentions of each module take again, and the bytes of their q, k and v."""
        found: dict[str, tuple[float, int]] = {}
        for storage in self.storages:
            for save in storage.saves:
                if save.site.consumer == ATTENTION and save.asked >= 0 and not save.left:
                    seconds, nbytes = found.get(save.site.module, (0.0, 0))
                    if save.site.reads in RESULT:
                        # On a CPU, gradients without forward take 0.7 to 1.3 times torch's own
                        # backward, up to a thousand keys (`kernels/attention.py`).
                        is_free = self.device[0] == "cpu" and save.site.dtype is torch.float32
                        seconds += 0.0 if is_free else storage.producer_s
                    else:
                        nbytes += save.site.nbytes
                    found[save.site.module] = seconds, nbytes
        return found

    @cached_property
    def composes_attention(self) -> bool:
        """True if an attention ran without a kernel of torch's, each of which saves its result.

        So torch composes it of smaller ops, which save matrices of all pairs, and elbowroom does
        not. This step does not tell how many bytes these are.
        """
        reads = Counter(
            save.site.reads
            for storage in self.storages
            for save in storage.saves
            if save.site.consumer == ATTENTION and save.site.need is Need.LOSSY
        )
        results = sum(reads[one] for one in RESULT)
        return reads[Reads.RESTORED] > 3 * results  # q, k and v

    @cached_property
    def spared(self) -> dict[int, int]:
        """Bytes by moment that torch's op takes there, beyond those of the op that elbowroom runs.

        For a factor that is expanded to the size of a map, torch allocates the whole product. For
        cross entropy, it makes a gradient of the log-probabilities and one of the logits, where
        elbowroom's takes the place of the logits.
        """
        asked = [
            (save.asked, storage, save.site)
            for storage in self.storages
            for save in storage.saves
            if save.asked >= 0
        ]
        places = [(at, one.nbytes) for at, one, site in asked if site.reads is Reads.PLACE]
        factors = Counter(moment for moment, _ in places)
        found = {moment: nbytes for moment, nbytes in places if factors[moment] == 1}
        for at, storage, site in asked:
            if site.reads is Reads.ROWS and site.formula is Formula.LOG_PROBABILITY:
                restored = 0 if storage.kept else storage.nbytes
                taken = max(self.level[at] - self.floor[at] - restored, 0)
                if taken >= storage.nbytes:  # a gradient beside logits that somebody still holds
                    taken -= storage.nbytes  # torch's stands there, too
                found[at] = max(2 * storage.nbytes - taken, 0)
        return found

    @property
    def peak(self) -> int:
        """The highest memory use, in bytes."""
        return max(self.level, default=self.static)

    @property
    def followed_peak(self) -> int:
        """The peak, in bytes, without tensors that a step restores for bits while it is profiled.

        A step that is not profiled reads the bits.
        """
        level = list(self.level)
        for storage in self.storages:
            for need in storage.restored if storage.held and not storage.kept else ():
                are_bits = all(one is Reads.BITS for one in storage.readings[need])
                level[need] -= storage.nbytes * are_bits
        return max(level, default=self.static)

    def peak_with(self, state_nbytes: int) -> int:
        """Returns the peak as if the optimizer states created at its end had existed before."""
        after = self.level[self._backward_end :]
        return max(self.backward_peak + state_nbytes, *after, 0)

    @property
    def forward_peak(self) -> int:
        """The highest memory use before backward begins."""
        return max(self.level[: self.backward], default=self.static)

    @property
    def backward_peak(self) -> int:
        """The highest memory use until backward has requested the last tensor."""
        return max(self.level[: self._backward_end], default=self.static)

    @property
    def _backward_end(self) -> int:
        asked = (need for storage in self.storages for need in storage.needs)
        return max(asked, default=len(self.level) - 1) + 1

    def shifted(self, nbytes: int) -> "Profile":
        """Returns the same step with this number of bytes more in use, before it and throughout."""
        return replace(
            self,
            static=self.static + nbytes,
            level=tuple(level + nbytes for level in self.level),
            floor=tuple(level + nbytes for level in self.floor),
        )

    def with_outputs(self, nbytes: int) -> "Profile":
        """Returns the same step with this number of bytes more in use until backward begins."""
        levels, floors = self.level, self.floor
        return replace(
            self,
            level=tuple(one + nbytes * (at < self.backward) for at, one in enumerate(levels)),
            floor=tuple(one + nbytes * (at < self.backward) for at, one in enumerate(floors)),
        )

    def never_again(
        self,
        names: Collection[str],
        *,
        alike: bool = False,
        why: str = "it, or one of its class, gives another result when it runs again",
    ) -> "Profile":
        """Returns the same step, with these modules excluded from recomputation.

        alike: also excludes other modules of their class, which run the same code. Otherwise each
        would cost a step to find out. Containers run the code of others, and are not excluded.
        """
        if not names:
            return self
        kinds = {one.kind for one in self.modules if alike and one.name in names} - _CONTAINERS
        kept = (
            replace(one, why_not=why) if one.name in names or one.kind in kinds else one
            for one in self.modules
        )
        return replace(self, modules=tuple(kept))

    def never_again_around(self, inner: Collection[str], why: str) -> "Profile":
        """Returns the same step, with modules that are or contain one of these excluded."""
        around = {
            one.name
            for one in self.modules
            if any(name == one.name or name.startswith(f"{one.name}.") for name in inner)
        }
        return self.never_again(around, why=why)

    def exact_at(self, known: Mapping[SiteKey, str]) -> "Profile":
        """Returns the same step, with what these sites save kept as it is, or in 16 bits.

        known: reasons, by module, op, shape and dtype
        """
        if not known:
            return self
        storages = []
        for storage in self.storages:
            reasons = [known.get(key_of(one.site), "") for one in storage.saves]
            if any(reasons):
                storage = replace(storage, saves=tuple(limited_saves(storage.saves, reasons)))
            storages.append(storage)
        return replace(self, storages=tuple(storages))

    @property
    def is_recurrent(self) -> bool:
        """True if an LSTM, GRU or RNN has saved anything."""
        saves = (save for storage in self.storages for save in storage.saves)
        return any(save.site.consumer in RECURRENT for save in saves)

    @property
    def small_nbytes(self) -> int:
        """Bytes in storages that are kept because each of them is small."""
        return sum(one.nbytes for one in self.storages if one.saves[0].left == SMALL)

    @cached_property
    def saved_nbytes(self) -> int:
        """Bytes that plain autograd saves, without parameters."""
        return sum(storage.nbytes for storage in self.storages)

    @cached_property
    def most_noise(self) -> float:
        """How many times the noise of a plan by sizes alone (`Plan.noise`) codes may add.

        By sizes, each byte matters as any other, and a code of two levels adds what is there. But
        the gradients of weights are made of some of the bytes: in a net of many functions of single
        elements of a quarter. And two levels add up to `PREDICTED` times that.
        """
        of_weights = (
            one.nbytes
            for one in self.storages
            if any(save.site.formula is Formula.SUMMED for save in one.saves)
        )
        return PREDICTED * self.saved_nbytes / (sum(of_weights) or max(self.saved_nbytes, 1))

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON."""
        files.write(path, {"elbowroom_profile": VERSION, **_plain(self)})

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Reads a profile that `save` wrote. Raises DataError for any other file."""
        return files.read(path, "profile", VERSION, _profile)


def is_planned(storage: Storage) -> bool:
    """Returns whether anything may be done with it."""
    return not storage.saves[0].left


def _plain(value: Any) -> Any:
    """Nested dataclasses as what JSON knows."""
    if isinstance(value, Facts):
        kept = {f.name: getattr(value, f.name) for f in fields(value) if f.name != "mask"}
        return {k: _plain(v) for k, v in kept.items() if v not in (None, False)}
    if isinstance(value, Window):
        return list(value)
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _module(data: dict[str, Any]) -> ModuleCall:
    inputs, sources = tuple(data["inputs"]), tuple(data.get("sources", ()))
    return ModuleCall(**{**data, "inputs": inputs, "sources": sources})


def _profile(data: dict[str, Any]) -> Profile:
    data["storages"] = tuple(_storage(one) for one in data["storages"])
    data["modules"] = tuple(_module(one) for one in data["modules"])
    for name in ("level", "floor", "starts_s", "device"):
        data[name] = tuple(data[name])
    if data.get("noise") is not None:
        data["noise"] = _noise(data["noise"])
    data["standing"] = resident_bytes_from(data.get("standing"))
    profile = Profile(**data)
    _check(profile)
    return profile


def _check(profile: Profile) -> None:
    """Raises ValueError where moments, or what refers to them, do not agree."""
    files.check_types(profile)
    moments = len(profile.level)
    if not moments == len(profile.floor) == len(profile.starts_s):
        raise ValueError("each moment has a level, a floor and a time")
    if not all(rate > 0 for rate in profile.rates.values()):
        raise ValueError("a rate is of more than 0 bytes a second")
    for one in () if profile.noise is None else profile.noise.sites:
        if len(one.levels) != len(one.shares) or not all(levels > 1 for levels in one.levels):
            raise ValueError("a share is that of a code of 2 levels or more")
    seen = [profile.backward]
    for storage in profile.storages:
        seen += [storage.born, storage.used, storage.freed, *storage.needs]
        if not all(0 <= index < len(profile.storages) for index in storage.made_of):
            raise ValueError("a storage is made from a storage")
        if not storage.saves:
            raise ValueError("a storage is saved by some op")
    for call in profile.modules:
        seen += [call.first, call.last]
        if not all(-1 <= index < len(profile.storages) for index in call.inputs):
            raise ValueError("an input is a storage")
        if not all(0 <= index < len(profile.storages) for index in call.sources):
            raise ValueError("an input is made from a storage")
    if not all(isinstance(moment, int) and 0 <= moment < moments for moment in seen):
        raise ValueError("something happens at no moment")


def _noise(data: dict[str, Any]) -> NoiseShares:
    sites = (
        SiteShares(SiteName(*one["site"]), tuple(one["levels"]), tuple(one["shares"]))
        for one in data["sites"]
    )
    return NoiseShares(data["steps"], tuple(sites), data["per_byte"])


def _storage(data: dict[str, Any]) -> Storage:
    saves = tuple(
        Save(**{**one, "site": _site(one["site"]), "modules": tuple(one["modules"])})
        for one in data["saves"]
    )
    lists = {name: tuple(data.get(name, ())) for name in ("needs", "made_in", "made_of")}
    return Storage(**{**data, **lists, "saves": saves})


def _site(data: dict[str, Any]) -> Site:
    facts = dict(data["facts"])
    if "window" in facts:
        facts["window"] = Window(*facts["window"])
    dtype = getattr(torch, data["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {data['dtype']!r}")
    return Site(
        **{
            **data,
            "shape": tuple(data["shape"]),
            "dtype": dtype,
            "need": Need(data["need"]),
            "rebuildable": Rebuildable(data["rebuildable"]),
            "reads": Reads(data.get("reads", Reads.RESTORED)),
            "formula": Formula(data.get("formula", Formula.UNKNOWN)),
            "facts": Facts(**facts),
            "rows": Rows(*map(tuple, data["rows"])) if data.get("rows") else None,
        }
    )
