"""Names of codec settings, as plans, tables and files write them.

    dither, 16 levels                 a dither with groups of 64
    group, bits=4                     a codec's id, and the fields that differ from their defaults
    fdsr, bands=6/4, rounding=dither
    own {"word": "a, b"}              JSON, if the short form could not be read back

`setting_named` reads them.
"""

import json
import re
from dataclasses import fields
from functools import lru_cache
from typing import Any

from elbowroom.codecs.base import Codec
from elbowroom.codecs.dither import Dither
from elbowroom.codecs.registry import codec as codec_of

_DITHER = re.compile(r"dither, (\d+) levels")


def setting_name(codec: Codec) -> str:
    """The name of a setting, from which `setting_named` makes an equal codec."""
    try:
        return _known_name(codec)
    except TypeError:  # a codec of another package may have no hash
        return _name(codec)


@lru_cache(maxsize=1024)  # a plan asks for the name of each setting for each tensor
def _known_name(codec: Codec) -> str:
    return _name(codec)


def _name(codec: Codec) -> str:
    if isinstance(codec, Dither) and codec == Dither(levels=codec.levels):
        return f"dither, {codec.levels} levels"
    config = codec.config()
    defaults = {field.name: field.default for field in fields(codec)}
    given = {k: v for k, v in config.items() if k != "id" and v != defaults.get(k)}
    short = ", ".join((codec.id, *(f"{k}={_written(v)}" for k, v in given.items())))
    return short if _read(short) == (codec.id, given) else f"{codec.id} {json.dumps(given)}"


def setting_named(name: str) -> Codec:
    """Returns the codec of this name. Raises CodecError, or ValueError for invalid JSON."""
    dither = _DITHER.fullmatch(name)
    if dither:
        return Dither(levels=int(dither[1]))
    id, config = _read(name)
    return codec_of(id, **config)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _read(name: str) -> tuple[str, dict[str, Any]]:
    id, brace, rest = name.partition(" {")
    if brace and "," not in id:
        return id, json.loads("{" + rest)
    id, *pairs = name.split(", ")
    return id, {k: _value(v) for k, _, v in (pair.partition("=") for pair in pairs)}


def _value(written: str) -> Any:
    try:
        return json.loads(written)
    except ValueError:
        return written
