"""From an id to a codec: what exists is found, what does not is answered with the nearest name."""

import importlib
import inspect
import pkgutil
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import elbowroom as er
from elbowroom.codecs import Codec, Dither, Facts, codec, codec_class, codecs, register, registry
from elbowroom.codecs.base import Buffers, Encoded, Expected, Layout
from elbowroom.errors import CodecError, UnknownCodec, UnknownField

PACKAGE = importlib.import_module("elbowroom.codecs")  # the name `elbowroom.codecs` is a function
SAVING = inspect.signature(er.saving).parameters  # in one name space with the fields of a codec


FLOATING = ("cast", "comet", "dither", "division", "fdsr", "group", "sided")
KNOWN = sorted((*FLOATING, "bitmask", "narrow", "sparse_lossless"))


@dataclass(frozen=True)
class Plain(Codec):
    """Exact, and of no use: what another package may register."""

    id: ClassVar[str] = "plain"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)

    def _layout(self, n: int, dtype: torch.dtype, facts: Facts) -> Layout:
        return (Expected(dtype, (n,)),)

    def _encode(self, flat: Tensor, seed: int, facts: Facts) -> Buffers:
        return (flat.clone(),)

    def _decode_into(self, encoded: Encoded, out: Tensor) -> None:
        out.copy_(encoded.buffers[0])


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Each test registers into a copy, and plugins are looked for anew."""
    codecs()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    yield
    registry._load_plugins.cache_clear()


@pytest.fixture
def install(monkeypatch):
    """Pretend that packages with these entry points (name, load) are installed."""

    def pretend(**points):
        def entry_points(*, group):
            assert group == "elbowroom.codecs"
            return [SimpleNamespace(name=n, value=f"{n}_pkg:C", load=f) for n, f in points.items()]

        monkeypatch.setattr(registry, "entry_points", entry_points)
        registry._load_plugins.cache_clear()

    return pretend


def test_the_codecs_that_exist():
    assert codecs() == KNOWN


def test_every_codec_of_the_package_is_registered():
    for module in pkgutil.iter_modules(PACKAGE.__path__):
        importlib.import_module(f"elbowroom.codecs.{module.name}")
    ours, found = [Codec], set()
    while ours:
        cls = ours.pop()
        ours += cls.__subclasses__()
        if cls.__module__.startswith("elbowroom.") and not inspect.isabstract(cls):
            found.add(cls)
    assert found == {codec_class(id) for id in codecs()}


@pytest.mark.parametrize("id", codecs())
def test_a_class_describes_itself(id):
    cls = codec_class(id)
    assert cls.id == id
    assert isinstance(cls.lossless, bool)
    assert cls.dtypes
    assert (cls.__doc__ or "").startswith("Lossless" if cls.lossless else "Lossy")
    assert codec(id).config() == {"id": id} | {f.name: f.default for f in fields(cls)}
    assert getattr(PACKAGE, cls.__name__) is cls


@pytest.mark.parametrize("id", codecs())
def test_no_field_shadows_a_keyword_of_saving(id):
    assert "min_nbytes" in SAVING
    assert not set(SAVING) & set(inspect.signature(codec_class(id)).parameters)
    assert id not in ("exact", "keep"), "a policy of saving has this name"


def test_an_unknown_codec_is_answered_with_what_exists():
    with pytest.raises(UnknownCodec) as unknown:
        codec("dithr", bits=2)
    assert str(unknown.value) == (
        f"no codec 'dithr'; there are {', '.join(KNOWN)}. Did you mean 'dither'?"
    )
    assert isinstance(unknown.value, KeyError)


def test_nothing_near_suggests_nothing():
    with pytest.raises(UnknownCodec, match=r"sparse_lossless\.$"):
        codec("zstd")


def test_an_unknown_field_is_answered_with_the_fields():
    with pytest.raises(UnknownField) as unknown:
        codec("dither", bit=2)
    assert str(unknown.value) == (
        "codec 'dither' has no field 'bit'; it has levels, group_size, bits. Did you mean 'bits'?"
    )
    with pytest.raises(UnknownField, match=r"codec 'bitmask' has no field 'bits'; it has none\.$"):
        codec("bitmask", bits=1)


@pytest.mark.parametrize(
    ("id", "settings", "message"),
    [
        ("dither", {"levels": 1}, "levels=1 is not possible; levels is an int from 2 to 256"),
        ("dither", {"levels": 257}, "levels=257 is not possible"),
        ("dither", {"levels": 4.0}, "levels=4.0 is not possible"),
        ("dither", {"bits": 9}, "bits=9 is not possible; bits is an int from 1 to 8"),
        ("dither", {"bits": True}, "bits=True is not possible"),
        ("dither", {"bits": 3, "levels": 7}, "bits=3 means levels=8; got levels=7 too"),
        ("dither", {"bits": 3, "levels": 4}, "bits=3 means levels=8; got levels=4 too"),
        ("dither", {"group_size": 48}, "group_size=48 is not possible; .* one of 32, 64, 128, 256"),
        ("dither", {"group_size": 64.0}, "group_size=64.0 is not possible"),
        ("group", {"bits": 0}, "bits=0 is not possible"),
        ("group", {"group_size": None}, "group_size=None is not possible"),
        (
            "cast",
            {"to": "int8"},
            "to='int8' is not possible; to is one of 'bf16', 'fp16', 'fp8_e4m3'",
        ),
        ("cast", {"to": 1}, "to=1 is not possible"),
        ("cast", {"to": "fp8_e4m3", "group_size": 1}, "group_size=1 is not possible"),
        ("cast", {"sparse": True}, "sparse=True is not possible with to='bf16'"),
        ("cast", {"to": "fp8_e5m2", "sparse": 1}, "sparse=1 is not possible"),
    ],
)
def test_an_impossible_value_names_the_possible_ones(id, settings, message):
    with pytest.raises(UnknownField, match=f"codec '{id}': {message}"):
        codec(id, **settings)


def test_bits_are_sugar_for_levels():
    assert codec("dither", bits=3) == Dither(levels=8)
    assert codec("dither", bits=3).config() == {"id": "dither", "levels": 8, "group_size": 64}
    assert codec("dither", bits=2, levels=4) == codec("dither") == Dither()
    assert type(codec("dither").levels) is int
    with pytest.raises(UnknownField, match="Give one of the two"):
        er.saving("dither", bits=3, levels=4)


def test_a_codec_cannot_be_changed():
    with pytest.raises(AttributeError):
        codec("dither").levels = 8


def test_one_line_registers_a_codec():
    assert register(Plain) is Plain
    assert register(Plain) is Plain  # the same class again is no conflict
    assert "plain" in codecs()
    x = torch.randn(3, 2)
    assert torch.equal(codec("plain").encode(x).decode(), x)
    assert codec("plain").encoded_nbytes((3, 2), torch.float32) == 24


def test_an_id_has_one_owner():
    @dataclass(frozen=True)
    class Mine(Plain):
        id: ClassVar[str] = "dither"

    with pytest.raises(
        CodecError, match=r"codec id 'dither' belongs to Dither; give .*Mine another id"
    ):
        register(Mine)
    assert codec_class("dither") is Dither


@pytest.mark.parametrize("id", ["keep", "exact", "lean", "coat", "offload", "actnn"])
def test_an_id_is_no_name_of_a_policy(id):
    named = dataclass(frozen=True)(type("Named", (Plain,), {"id": id}))
    with pytest.raises(CodecError, match=f"codec id '{id}' of Named is the name of a policy"):
        register(named)
    assert id not in codecs()


@pytest.mark.parametrize("id", ["odd, to file", "lean, 8 levels", "two words", "", "a {"])
def test_an_id_is_one_word(id):
    """Plans write settings behind it, and where the code is moved to."""
    named = dataclass(frozen=True)(type("Named", (Plain,), {"id": id}))
    with pytest.raises(CodecError, match="is not one word; an id has letters"):
        register(named)
    assert id not in codecs()


@pytest.mark.parametrize("thing", [int, "dither", Plain(), Codec])
def test_what_is_no_codec_class_cannot_be_registered(thing):
    with pytest.raises(
        CodecError, match=r"cannot register .*: a codec is a subclass of .*Codec with an id"
    ):
        register(thing)


def test_another_package_brings_a_codec(install):
    install(plain=lambda: Plain)
    assert "plain" in codecs()
    assert codec("plain") == Plain()


def test_another_package_cannot_take_an_id(install):
    @dataclass(frozen=True)
    class Mine(Plain):
        id: ClassVar[str] = "group"

    install(group=lambda: Mine)
    with pytest.raises(
        CodecError, match=r"cannot load codec 'group' from group_pkg:C: codec id 'group' belongs"
    ):
        codecs()


def test_a_broken_package_is_named(install):
    def broken():
        raise ImportError("no module named 'cupy'")

    install(fast=broken)
    with pytest.raises(
        CodecError, match=r"'fast' from fast_pkg:C: no module named 'cupy'. Repair or uninstall"
    ):
        codec("dither")
