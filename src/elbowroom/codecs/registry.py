"""Finds a codec by its id.

Codecs of other packages come through the entry-point group `elbowroom.codecs`.
"""

import re
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from inspect import signature
from typing import Any

from elbowroom.codecs.base import Codec
from elbowroom.errors import CodecError, UnknownCodec, UnknownField

POLICIES = ("exact", "keep", "lean", "coat", "actnn", "offload")  # er.saving takes them, too
_NAME = re.compile(r"[\w.-]+")  # plans write its fields behind it: "group, bits=4"
_registered: dict[str, type[Codec]] = {}


def register(cls: type[Codec]) -> type[Codec]:
    """Class decorator that registers a codec under its id.

    Raises CodecError if another codec or a policy has this id, or if it is not one word.
    """
    if not (
        isinstance(cls, type)
        and issubclass(cls, Codec)
        and isinstance(getattr(cls, "id", None), str)
    ):
        raise CodecError(
            f"cannot register {cls!r}: a codec is a subclass of elbowroom.codecs.Codec with an id"
        )
    if not _NAME.fullmatch(cls.id) or cls.id in POLICIES:
        what = "is the name of a policy" if cls.id in POLICIES else "is not one word"
        raise CodecError(
            f"codec id {cls.id!r} of {cls.__qualname__} {what}; an id has letters, digits, '_', "
            f"'-' and '.', and is none of {', '.join(POLICIES)}"
        )
    known = _registered.setdefault(cls.id, cls)
    if known is not cls:
        raise CodecError(
            f"codec id '{cls.id}' belongs to {known.__qualname__}; "
            f"give {cls.__qualname__} another id"
        )
    return cls


@cache
def _load_plugins() -> None:
    for point in entry_points(group="elbowroom.codecs"):
        try:
            register(point.load())
        except Exception as error:
            raise CodecError(
                f"cannot load codec '{point.name}' from {point.value}: {error}. "
                "Repair or uninstall its package."
            ) from error


def codecs() -> list[str]:
    """Returns the ids of all registered codecs, sorted."""
    _load_plugins()
    return sorted(_registered)


def codec_class(id: str) -> type[Codec]:
    """Returns the class of an id. Raises UnknownCodec, which lists all ids and the nearest one."""
    if not isinstance(id, str):
        raise UnknownCodec(
            f"the id of a codec is a string; got {id!r}. There are {', '.join(codecs())}."
        )
    if id not in codecs():
        raise UnknownCodec(
            f"no codec {id!r}; there are {', '.join(codecs())}.{nearest(id, codecs())}"
        )
    return _registered[id]


def codec(id: str, **settings: Any) -> Codec:
    """Returns a codec by its id, with its fields as keywords: codec("dither", bits=2).

    Raises UnknownCodec, or UnknownField if the codec does not have a field, or if the field does
    not accept a value.
    """
    cls = codec_class(id)
    known = _fields_of(cls)
    for name in settings:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise UnknownField(f"codec '{id}' has no field {name!r}; {has}.{nearest(name, known)}")
    return cls(**settings)


@cache  # to look at a signature takes as long as ten calls of a replayed step
def _fields_of(cls: type[Codec]) -> list[str]:
    return list(signature(cls).parameters)


def nearest(name: str, known: list[str]) -> str:
    """Returns an addition to an error: the known name that was perhaps meant."""
    near = get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
