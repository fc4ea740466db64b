"""The codec settings that `rate_distortion.py` compares: a family is one line of its plot.

    ours      what this library offers and recommends
    baseline  what others have published, in our kernels
    peer      programs of others (benchmarks/_peers.py)

A codec that is not registered has no rows; a note says so. Nothing but dither and comet is also run
with rebuild=True: then a code serves the norm, the mask and what comes after it, which is no
property of the code.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from _peers import MISSING, PEERS, Peer, Prequant, Sz3, Zfp
from _ways import Way, typed

import elbowroom as er
from elbowroom.codecs import Codec, codec, codec_class, codecs
from elbowroom.plan import Lean

BOUNDS = (1e-1, 3e-2, 1e-2)  # of the value range
LEVELS = (2, 3, 4, 8, 16, 32, 64, 128, 256)  # of dither: as far as the errors of fp8 and zfp go


@dataclass(frozen=True)
class Setting:
    """One row: a codec, how it is used, and the family that it belongs to.

    lean  the policy that is used instead; `codec` is then the one for what ReLU lets pass
    """

    family: str
    kind: str
    codec: Codec
    rebuild: bool = False
    lean: Lean | None = None

    @property
    def way(self) -> Way:
        """As a way to run forward."""
        return Way(
            self.name,
            lambda seed: er.saving(self.lean or self.codec, seed=seed, rebuild=self.rebuild),
            exact=False,
            ours=self.kind == "ours",
        )

    @property
    def name(self) -> str:
        """As one would type it: the codec and its fields that are not the default, or lead."""
        if self.lean is not None:
            given = replace(self.lean, rebuild=True)
            changed = [
                f"{field.name}={getattr(given, field.name)}"
                for field in fields(given)
                if field.name in ("upper", "plain") or getattr(given, field.name) != field.default
            ]
            return _call("er.saving", '"lean"', *changed)
        given = "" if self.rebuild else "rebuild=False"
        if isinstance(self.codec, Peer):
            return _call(type(self.codec).__name__, _shown(self.codec))
        return _call("er.saving", f'"{self.codec.id}"', _shown(self.codec), given)


def _call(name: str, *given: str) -> str:
    return f"{name}({', '.join(part for part in given if part)})"


def _shown(shown: Codec) -> str:
    """The first field and those that differ from their default."""
    settings = [(field.name, field.default) for field in fields(shown)]
    values = [(name, getattr(shown, name), default) for name, default in settings]
    return ", ".join(
        f"{name}={typed(value)}"
        for i, (name, value, default) in enumerate(values)
        if i == 0 or value != default
    )


def settings(*, ends_only: bool = False) -> tuple[list[Setting], list[str]]:
    """All settings whose codec is there, and a line on each that is not.

    ends_only: the first and the last of each family.
    """
    found, notes = [*_always()], [*MISSING]
    for id, rows in (("division", _division), ("fdsr", _fdsr), ("comet", _comet)):
        if id in codecs():
            found += rows()
        else:
            notes.append(f"codec '{id}' is not registered, so it has no row")
    found += _peers()
    return [one for one in found if not ends_only or one in _ends(found, one.family)], notes


def _ends(found: list[Setting], family: str) -> tuple[Setting, Setting]:
    members = [one for one in found if one.family == family]
    return members[0], members[-1]


def _of(family: str, kind: str, id: str, rebuild: bool = False, **given: Any) -> Setting:
    return Setting(family, kind, codec(id, **given), rebuild)


def _always() -> Iterator[Setting]:
    for bits in (2, 3, 4):
        yield _of("group", "baseline", "group", bits=bits)
    for to in ("fp8_e4m3", "fp8_e5m2"):
        yield _of("fp8", "baseline", "cast", to=to)
    for rebuild in (False, True):
        for levels in LEVELS:
            family = "dither, rebuild" if rebuild else "dither"
            yield _of(family, "ours", "dither", rebuild, levels=levels)
    for upper, lower, plain in ((2, 2, 2), (3, 2, 3), (4, 2, 4), (6, 2, 4), (8, 2, 6), (16, 6, 12)):
        lean = Lean(upper, lower, plain)
        yield Setting("lean", "ours", codec("dither", levels=upper), rebuild=True, lean=lean)


def _division() -> Iterator[Setting]:
    for bits in (1, 2, 4):
        yield _of("division", "baseline", "division", bits=bits)
    for bits in (1, 2, 4):
        yield _of("division, dither", "ours", "division", bits=bits, rounding="dither")


def _fdsr() -> Iterator[Setting]:
    """Its own list of settings, which is sorted by rate, or else its default."""
    variants = getattr(sys.modules[codec_class("fdsr").__module__], "VARIANTS", (codec("fdsr"),))
    for variant in variants:
        yield Setting(f"fdsr, {getattr(variant, 'rounding', 'default')}", "ours", variant)


def _comet() -> Iterator[Setting]:
    for bound in BOUNDS:
        yield _of("comet, nearest", "baseline", "comet", bound=bound, rounding="nearest")
    for bound in BOUNDS:
        yield _of("comet, dither", "ours", "comet", bound=bound, rounding="dither")
    for bound in BOUNDS:
        yield _of("comet, dither, rebuild", "ours", "comet", True, bound=bound, rounding="dither")


def _peers() -> Iterator[Setting]:
    for bound in BOUNDS:
        for family, peer in (
            ("SZ3, no prediction", Sz3(bound, "NOPRED")),
            ("SZ3, interpolation", Sz3(bound, "INTERP_LORENZO")),
            ("zfp", Zfp(bound)),
            ("prequantized, ZSTD", Prequant(bound, "zstd")),
            ("prequantized, LZ4", Prequant(bound, "lz4")),
        ):
            if type(peer) in PEERS:
                yield Setting(family, "peer", peer)
