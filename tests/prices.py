"""Prices that are drawn, in place of seconds that are measured: plans that no load can change."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

from elbowroom.codecs.names import setting_named
from elbowroom.errors import CodecError
from elbowroom.plan.profile import Profile

_MOMENT_S = 1e-4
_RATE = 2e9  # bytes a second
_FIXED_S = 2e-5
_SPREAD = 1.0  # of the logarithms


class DrawnRates(dict[str, float]):
    """Bytes a second by name, each drawn when it is first asked for. fixed_s: for each tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = np.random.default_rng(seed)
        self["out file"], self["in file"] = self._drawn(_RATE), self._drawn(_RATE)
        codecs = ("dither", "bitmask", "narrow")
        names = (f"{verb} {codec}" for codec in codecs for verb in ("encode", "decode"))
        self.fixed_s = {name: self._drawn(_FIXED_S) for name in names}

    def _drawn(self, around: float) -> float:
        return around * float(self._random.lognormal(0, _SPREAD))

    def __missing__(self, name: str) -> float:
        verb, _, setting = name.partition(" ")
        if verb in ("encode", "decode"):
            try:
                setting_named(setting)
            except (CodecError, ValueError) as error:
                raise KeyError(name) from error
        self[name] = self._drawn(_RATE)
        return self[name]


def priced(profile: Profile, seed: int) -> Profile:
    """The same step, whose seconds and rates are drawn by a seed: other plans are best then."""

    def drawn() -> Iterator[float]:
        random = np.random.default_rng(seed)
        while True:
            yield _MOMENT_S * float(random.lognormal(0, _SPREAD))

    times, rates = drawn(), DrawnRates(seed)
    moments = len(profile.level)
    return replace(
        profile,
        starts_s=tuple(_MOMENT_S * i for i in range(moments)),
        seconds=_MOMENT_S * moments,
        storages=tuple(replace(s, producer_s=next(times)) for s in profile.storages),
        modules=tuple(replace(m, seconds=next(times)) for m in profile.modules),
        rates=rates,
        fixed_s=rates.fixed_s,
    )


class Ticking:
    """A clock that goes on by one tick whenever the user looks at it."""

    def __init__(self) -> None:
        self._ticks = 0

    def now_s(self) -> float:
        self._ticks += 1
        return _MOMENT_S * self._ticks


def draw_prices(monkeypatch: pytest.MonkeyPatch, seed: int) -> DrawnRates:
    """Lets `er.fit` plan by prices that are drawn, which it returns, and by a clock that ticks."""
    rates = DrawnRates(seed)
    monkeypatch.setattr(import_module("elbowroom.measure.clocks"), "Undisturbed", Ticking)
    for name in ("elbowroom.fitting.session", "elbowroom.measure.recording"):
        monkeypatch.setattr(import_module(name), "rates", lambda *_, **__: rates)
    return rates
