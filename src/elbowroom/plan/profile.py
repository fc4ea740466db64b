"""One step as data: what autograd saved, when it was made and asked for, and what else took memory.

A `Profile` is written down by `measure.record` and read by the planner; nothing in it is a tensor
or a module, so it can be kept as JSON, compared, and planned for on another machine. A step is cut
into moments, as in `plan/problem.py`: one begins wherever a storage is saved, asked for or let go
of, and wherever a module begins or ends.
"""

import json
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from elbowroom.codecs import Facts
from elbowroom.errors import DataError
from elbowroom.kernels.windows import Window
from elbowroom.plan.site import Need, Rebuildable, Site

VERSION = 1


@dataclass(frozen=True)
class Save:
    """One op saves a storage.

    left     why it is left alone whatever the policy says, or ""
    modules  the modules whose forward ran, outermost first, by name; without the root
    at       the moment of forward at which it did
    asked    the last moment at which backward asked for it on behalf of this op; -1: never
    """

    site: Site
    left: str
    modules: tuple[str, ...]
    at: int
    asked: int = -1


@dataclass(frozen=True)
class Storage:
    """One saved storage.

    nbytes      in plain autograd
    held        bytes that the profiled step held for it
    kept        whether that was the tensor itself
    born        the moment at which it is saved first
    used        the last moment of forward that reads it
    needs       the moments of backward that ask for it
    freed       the last moment at which something is held for it
    producer_s  seconds of the op that made it
    made_in     the modules that ran then, as in `Save`
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


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    inputs        its tensor arguments, parameters left out: the storage, by index; -1 for one that
                  no op saves
    extra_nbytes  of arguments that no op saves, and that somebody would have to hold
    first, last   the moments of its forward
    why_not       the reason that it cannot be run a second time, or ""
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    extra_nbytes: int
    first: int
    last: int
    seconds: float
    why_not: str = ""


@dataclass(frozen=True)
class Profile:
    """One step.

    level     the most bytes held in each moment, all counted
    floor     bytes held as each moment begins
    starts_s  seconds from the start of the step to each moment
    backward  the first moment of backward
    seconds   of the whole step
    static    bytes held before it
    rates     bytes a second of the machine: "encode dither, 4 levels", "out file", ...
    device    "cpu" or "cuda", and what it is called
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

    @property
    def peak(self) -> int:
        """The highest level, in bytes."""
        return max(self.level, default=self.static)

    def peak_with(self, state_nbytes: int) -> int:
        """The peak, had the states that the optimizer made at the end been there from the start."""
        asked = (need for storage in self.storages for need in storage.needs)
        last = max(asked, default=len(self.level) - 1)
        during = max(self.level[: last + 1], default=self.static) + state_nbytes
        return max(during, *self.level[last + 1 :], 0)

    @property
    def saved_nbytes(self) -> int:
        """What plain autograd saves, in bytes; parameters are not counted."""
        return sum(storage.nbytes for storage in self.storages)

    def save(self, path: str | Path) -> None:
        """Write it as JSON, aside first, so that a crash leaves no half of it."""
        path = Path(path)
        aside = path.with_name(path.name + ".part")
        aside.write_text(json.dumps({"elbowroom_profile": VERSION, **_plain(self)}))
        aside.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Read what `save` wrote. Raises DataError for anything else."""
        try:
            data = json.loads(Path(path).read_text())
            version = data.pop("elbowroom_profile")
            if version != VERSION:
                raise DataError(
                    f"{path} is a profile of version {version}; this elbowroom reads version "
                    f"{VERSION}. Measure it again."
                )
            return _profile(data)
        except (KeyError, TypeError, ValueError, AttributeError, UnicodeDecodeError) as error:
            raise DataError(f"{path} is not a profile written by elbowroom ({error!r})") from error


def is_planned(storage: Storage) -> bool:
    """Whether anything may be done with it."""
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


def _profile(data: dict[str, Any]) -> Profile:
    data["storages"] = tuple(_storage(one) for one in data["storages"])
    data["modules"] = tuple(
        ModuleCall(**{**one, "inputs": tuple(one["inputs"])}) for one in data["modules"]
    )
    for name in ("level", "floor", "starts_s", "device"):
        data[name] = tuple(data[name])
    return Profile(**data)


def _storage(data: dict[str, Any]) -> Storage:
    saves = tuple(
        Save(**{**one, "site": _site(one["site"]), "modules": tuple(one["modules"])})
        for one in data["saves"]
    )
    lists = {name: tuple(data[name]) for name in ("needs", "made_in")}
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
            "facts": Facts(**facts),
        }
    )
