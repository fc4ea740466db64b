"""The menu is the registry: whatever is registered, honest and good for something is weighed."""

import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.codecs import (
    Cast,
    Codec,
    Dither,
    Facts,
    Group,
    codecs,
    register,
    registry,
    workspace,
)
from elbowroom.codecs.base import FLOATS, Buffers, Encoded, Expected, Layout
from elbowroom.codecs.names import setting_name, setting_named
from elbowroom.codecs.quality import _RECORDED, broken_promise, measured, quality_of
from elbowroom.errors import BudgetTooSmall, DataError, PlanError, UnknownCodec
from elbowroom.kernels.layout import GROUP_SIZES
from elbowroom.measure import memory_curve
from elbowroom.measure.rates import Rates, rates
from elbowroom.plan import registered
from elbowroom.plan.build_problem import build_problem
from elbowroom.plan.make import make_plan
from elbowroom.plan.menu import preset_named
from elbowroom.plan.plan import ExplainedLine
from elbowroom.plan.precision_floor import LEVELS, _with_levels, at_least, at_precision_floor
from elbowroom.plan.prices import levels_of
from elbowroom.plan.profile import Profile
from elbowroom.plan.registered import all_settings, quicker, settings_of, weighed
from elbowroom.plan.site import Formula, Need, Site
from elbowroom.units import show_nbytes

VERBS = ("encode", "decode")
solve_module, auto_module, rates_module = map(
    importlib.import_module,
    ("elbowroom.plan.solve", "elbowroom.plan.solve.auto", "elbowroom.measure.rates"),
)


@dataclass(frozen=True)
class Signs(Codec):
    """Four bits an element at the error of about 100 levels: better than anything, by cheating.

    It keeps the tensor itself aside and holds a stand-in of half a byte an element.
    """

    id: ClassVar[str] = "signs"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATS
    aside: ClassVar[dict[int, Tensor]] = {}

    off: float = 0.01

    def _layout(self, n: int, dtype: torch.dtype, facts: Facts) -> Layout:
        return (Expected(torch.uint8, (-(-n // 2),)),)

    def _encode(self, flat: Tensor, seed: int, facts: Facts) -> Buffers:
        held = torch.zeros(-(-len(flat) // 2), dtype=torch.uint8)
        noise = torch.randn(len(flat), generator=torch.Generator().manual_seed(seed))
        self.aside[held.data_ptr()] = flat + self.off * noise
        return (held,)

    def _decode_into(self, encoded: Encoded, out: Tensor) -> None:
        out.copy_(self.aside[encoded.buffers[0].data_ptr()])


@dataclass(frozen=True)
class Small(Signs):
    """Says that it is half as large as it is."""

    id: ClassVar[str] = "small"

    def encoded_nbytes(self, *args: Any) -> int:
        return super().encoded_nbytes(*args) // 2


@dataclass(frozen=True)
class Sure(Signs):
    """Promises a smaller error than it has."""

    id: ClassVar[str] = "sure"

    @property
    def stated_error(self) -> float:
        return 1e-6


@dataclass(frozen=True)
class Same(Signs):
    """Says that it loses nothing."""

    id: ClassVar[str] = "same"
    lossless: ClassVar[bool] = True


@dataclass(frozen=True)
class Broken(Signs):
    """Fails."""

    id: ClassVar[str] = "broken"

    def _decode_into(self, encoded: Encoded, out: Tensor) -> None:
        raise RuntimeError("no")


@dataclass(frozen=True)
class Changing(Signs):
    """Changes the tensor that it encodes, which forward goes on with."""

    id: ClassVar[str] = "changing"

    def _encode(self, flat: Tensor, seed: int, facts: Facts) -> Buffers:
        held = super()._encode(flat, seed, facts)
        flat.mul_(0.5)
        return held


@dataclass(frozen=True)
class Aliasing(Signs):
    """Holds the tensor itself."""

    id: ClassVar[str] = "aliasing"

    def _layout(self, n: int, dtype: torch.dtype, facts: Facts) -> Layout:
        return (Expected(torch.uint8, (n,)),)

    def _encode(self, flat: Tensor, seed: int, facts: Facts) -> Buffers:
        held = flat.view(torch.uint8)[: len(flat)]
        self.aside[held.data_ptr()] = flat.clone()
        return (held,)


@dataclass(frozen=True)
class Window(Signs):
    """Holds views of memory that is larger."""

    id: ClassVar[str] = "window"

    def _encode(self, flat: Tensor, seed: int, facts: Facts) -> Buffers:
        return tuple(torch.cat([x, x])[: len(x)] for x in super()._encode(flat, seed, facts))


@dataclass(frozen=True)
class Halves(Signs):
    """Takes no float32."""

    id: ClassVar[str] = "halves"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Integers(Signs):
    """Takes no floats."""

    id: ClassVar[str] = "integers"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.int64,)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test registers into a copy, and rates anew."""
    codecs()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    # What `Signs` keeps aside would be all the memory that it saves, and more.
    monkeypatch.setattr(workspace, "_measured", lambda codec: workspace.Workspace(0.0, 0.0))
    caches = registered._honest, broken_promise, measured, preset_named
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()
    Signs.aside.clear()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128)) for _ in range(4)]
    return nn.Sequential(*layers)


def profile_of(model: nn.Module) -> Profile:
    x = torch.randn(512, 128)
    return er.measure(lambda: model(x).square().mean().backward(), min_nbytes=4096)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of(net())


def least(profile: Profile, **settings: Any) -> er.Plan:
    """The plan of the smallest peak."""
    with pytest.raises(er.errors.BudgetTooSmall) as refused:
        er.plan(profile, budget=profile.static + 1, recompute=False, **settings)
    return er.plan(profile, budget=refused.value.least_nbytes, recompute=False, **settings)


def codes_of(plan: er.Plan) -> set[str]:
    return {known.preset for known in plan.sites.values()} - {"keep", "exact"}


def site(formula: Formula = Formula.SUMMED, shape: tuple[int, ...] = (512, 128)) -> Site:
    return Site("m", "linear", "", shape, torch.float32, 4 * 512 * 128, Need.LOSSY, formula=formula)


# --- names


@pytest.mark.parametrize("codec", all_settings(), ids=setting_name)
def test_a_setting_is_found_by_its_name(codec: Codec) -> None:
    assert setting_named(setting_name(codec)) == codec
    assert preset_named(setting_name(codec)).name == setting_name(codec)


@pytest.mark.parametrize(
    ("codec", "name"),
    [
        (Dither(levels=16), "dither, 16 levels"),  # as in plan files since the first
        (Dither(levels=16, group_size=32), "dither, levels=16, group_size=32"),
        (Group(bits=4), "group, bits=4"),
    ],
)
def test_names(codec: Codec, name: str) -> None:
    assert setting_name(codec) == name
    assert setting_named(name) == codec


@dataclass(frozen=True)
class Worded(Signs):
    id: ClassVar[str] = "worded"
    word: str = ""


@pytest.mark.parametrize("word", ["a, b", "1", "true", "x=y", '{"a": 1}', " {", "", "plain"])
def test_any_field_is_read_back(word: str) -> None:
    register(Worded)
    assert setting_named(setting_name(Worded(word=word))) == Worded(word=word)


def test_a_plan_file_with_an_unknown_setting(profile: Profile, tmp_path: Path) -> None:
    plan = least(profile)
    strange = {name: replace(known, preset="nobody, bits=2") for name, known in plan.sites.items()}
    replace(plan, sites=strange).save(tmp_path / "plan.json")
    with pytest.raises(DataError, match="no setting"):
        er.Plan.load(tmp_path / "plan.json")


# --- what is written down is what is measured


@pytest.mark.sampled  # each compiles kernels of its own
@pytest.mark.parametrize("name", _RECORDED)
def test_the_recorded_quality(name: str) -> None:
    bits, maps, rows, unbiased = _RECORDED[name]
    codec = setting_named(name)
    assert measured(codec, maps=True).bits == pytest.approx(bits, abs=0.01)
    assert measured(codec, maps=True).error == pytest.approx(maps, rel=0.03)
    assert measured(codec, maps=False).error == pytest.approx(rows, rel=0.03)
    assert measured(codec, maps=True).unbiased == unbiased


def test_a_judged_setting_leaves_no_tensor_behind() -> None:
    """It may be judged inside of a step, whose peak counts."""
    measured.cache_clear()
    curve = memory_curve(lambda: measured(Group(bits=7), maps=True))
    assert curve.peak_nbytes >= 1 << 20
    assert curve.nbytes[-1] == 0


def test_a_setting_is_judged_in_little_memory() -> None:
    """A plan asks in the middle of a step: a first step took 3.45 of a budget of 3.4 MiB so."""
    measured.cache_clear()
    measured(Group(bits=7), maps=True)  # compiles
    measured.cache_clear()
    curve = memory_curve(lambda: measured(Group(bits=7), maps=True))
    assert curve.peak_nbytes < 5 * 2**20  # the tensor, two codes and what they are decoded to


def test_settings_of_the_ladder_are_recorded() -> None:
    of_presets = {Group(bits=4, group_size=32), Group(bits=5)}  # of products, and of maps
    assert {setting_name(codec) for codec in of_presets} <= set(_RECORDED)


def test_every_setting_of_ours_is_recorded() -> None:
    """Floors and rows make others of them. Each that is not recorded is judged inside of a step."""
    ours = all_settings()
    floors = (at_least(codec, levels) for codec in ours for levels in (*LEVELS, 2 * LEVELS[-1]))
    milder = {*ours, *floors, *(_with_levels(codec, 16, apart=True) for codec in ours)}
    of_rows = {
        replace(codec, group_size=size)
        for codec in milder
        if isinstance(codec, Group) or (isinstance(codec, Cast) and codec.to.startswith("fp8"))
        for size in GROUP_SIZES
        if size <= codec.group_size
    }
    asked = {setting_name(codec) for codec in milder | of_rows if not isinstance(codec, Dither)}
    assert asked <= set(_RECORDED)


# --- what is weighed


def test_few_settings_are_left_of_many() -> None:
    left = weighed(all_settings(), torch.float32, Facts(), maps=False, named=False)
    names = [setting_name(codec) for codec in left]
    assert [name for name in names if name.startswith("dither")] == [
        f"dither, {n} levels" for n in (256, 64, 16, 8, 6, 4, 3, 2)
    ]
    assert len(names) <= 10
    errors = [quality_of(codec, maps=False).error for codec in left]
    assert errors == sorted(errors)


def test_the_same_settings_are_weighed_once() -> None:
    """Each plan asks for them again, for each kind of tensors."""
    kind = {"maps": False, "named": False}
    taken = weighed(all_settings(), torch.float32, Facts(), **kind)
    assert weighed(all_settings(), torch.float32, Facts(), **kind) is taken
    with_zeros = weighed(all_settings(), torch.float32, Facts(has_zeros=True), **kind)
    assert with_zeros != taken


def test_what_is_biased_is_weighed_where_it_is_named() -> None:
    fdsr = settings_of("fdsr")
    assert not any(
        codec.rounding == "nearest"
        for codec in weighed(fdsr, torch.float32, Facts(), maps=True, named=False)
    )
    named = weighed(fdsr, torch.float32, Facts(), maps=True, named=True)
    assert sum(codec.rounding == "nearest" for codec in named) >= 4


def test_a_rate_is_measured_when_it_is_asked_for() -> None:
    found = rates("cpu")
    found.pop("encode group, bits=5", None)
    found.pop("decode group, bits=5", None)
    assert found["decode group, bits=5"] > 0
    assert "encode group, bits=5" in found
    with pytest.raises(KeyError):
        found["encode nobody"]
    with pytest.raises(KeyError):
        found["out nowhere"]


def test_a_file_is_measured_only_where_tensors_may_be_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Rates(torch.device("cpu"))
    monkeypatch.setattr(rates_module, "_begun", lambda device_type: found)
    before = set(threading.enumerate())
    er.fit(nn.Linear(2, 2), budget="1 GiB", exact=True)
    assert "out file" not in found
    assert set(threading.enumerate()) == before
    er.fit(nn.Linear(2, 2), budget="1 GiB", exact=True, offload="file")
    assert found["out file"] > 0


def test_the_least_budget_is_searched_for_only_where_it_is_named(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none where a bound says that nothing fits."""
    asked: list[object] = []
    for name in ("relaxed", "least_peak"):
        before = getattr(solve_module if name == "least_peak" else auto_module, name)

        def spied(*args: Any, name: str = name, before: Any = before, **kwargs: Any) -> Any:
            asked.append(name)
            return before(*args, **kwargs)

        monkeypatch.setattr(solve_module if name == "least_peak" else auto_module, name, spied)

    def refused(finest: float) -> BudgetTooSmall:
        asked.clear()
        with pytest.raises(BudgetTooSmall) as caught:
            make_plan(profile, 1, finest=finest)
        return caught.value

    refused(inf)
    assert not asked
    coarse = refused(1 << 20)
    assert asked.count("least_peak") >= 1
    fine = refused(1)
    assert fine.least_nbytes <= coarse.least_nbytes
    assert make_plan(profile, fine.least_nbytes).peak <= fine.least_nbytes
    asked.clear()
    make_plan(profile, fine.least_nbytes)
    assert "relaxed" not in asked


@pytest.mark.parametrize("exact", [True, None])
def test_who_takes_the_least_gets_the_plan_of_the_budget_that_a_refusal_names(
    profile: Profile, exact: bool | None
) -> None:
    with pytest.raises(BudgetTooSmall) as refused:
        make_plan(profile, 1, exact=exact)
    least = make_plan(profile, 1, exact=exact, takes_least=True)
    assert least.peak == least.budget == refused.value.least_nbytes
    assert least.exact is bool(exact)


def test_who_asks_for_a_plan_only_is_not_told_what_would_help(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To tell it, the menu of codes would be weighed in vain."""
    asked: list[object] = []
    make_module = importlib.import_module("elbowroom.plan.make")
    monkeypatch.setattr(make_module, "codes_help", lambda *given, **named: asked.append(given))
    for finest in (1, inf):
        with pytest.raises(BudgetTooSmall):
            make_plan(profile, 1, exact=True, finest=finest)
        assert len(asked) == 1


def test_problems_with_and_without_modules_that_run_again_share_their_options(
    profile: Profile,
) -> None:
    for exact in (True, False):
        alone, both = (
            build_problem(profile, exact=exact, recompute=again) for again in (False, True)
        )
        assert both.problem.items is alone.problem.items
        assert both.problem.base == alone.problem.base
        assert not alone.problem.regions


def test_a_registered_codec_is_chosen(profile: Profile) -> None:
    """Without another line: and it is followed, and its plan saved."""
    assert not codes_of(least(profile)) & {"signs"}
    register(Signs)
    plan = least(profile)
    assert "signs" in codes_of(plan)
    model, x = net(), torch.randn(512, 128)
    with er.following(plan, min_nbytes=4096) as followed:
        loss = model(x).square().mean()
    loss.backward()
    assert "signs" in str(followed.ledger)
    assert not plan.unknown_sites


@pytest.mark.parametrize("other", [Halves, Integers])
def test_a_codec_of_other_dtypes_is_no_hindrance(other: type[Codec], profile: Profile) -> None:
    register(other)
    assert other.id not in codes_of(least(profile))


def test_a_codec_of_halves_is_chosen_for_them() -> None:
    register(Halves)
    model, x = net().bfloat16(), torch.randn(512, 128, dtype=torch.bfloat16)
    profile = er.measure(lambda: model(x).square().mean().backward(), min_nbytes=4096)
    assert "halves" in codes_of(least(profile, codecs=["halves"]))
    assert rates("cpu")["decode halves"] > 0


def test_a_registered_codec_keeps_to_the_floors() -> None:
    coarse = Signs(off=0.5)
    assert at_precision_floor(coarse, site()) == coarse
    assert at_precision_floor(coarse, site(Formula.CURVED)) == Dither(levels=16)
    assert at_precision_floor(Signs(), site(Formula.CURVED)) == Signs()
    assert at_precision_floor(Signs(), site(Formula.LOG_PROBABILITY)) == Dither(levels=256)


# --- who lies


@pytest.mark.parametrize(
    ("liar", "what"),
    [
        (Small, "it says 65536 bytes of float32 of shape (4, 16, 64, 64), and holds 131072"),
        (Sure, "it promises a squared error of 1e-06"),
        (Same, "it promises a squared error of 0"),
        (Broken, "it fails: RuntimeError: no"),
        (Changing, "it changes the tensor that it encodes"),
        (Aliasing, "its code lies in the memory of the tensor"),
        (Window, "it says 131072 bytes of float32 of shape (4, 16, 64, 64), and its code keeps"),
    ],
)
def test_a_liar_is_named_once_and_takes_no_part(
    liar: type[Codec], what: str, profile: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    register(liar)
    with caplog.at_level(logging.WARNING, "elbowroom"):
        plans = [least(profile), least(profile)]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert f"'{liar.id}'" in said[0]
    assert what in said[0]
    assert all(liar.id not in codes_of(plan) for plan in plans)
    with pytest.raises(PlanError, match=liar.id):
        er.plan(profile, budget="1 GiB", codecs=[liar()])


NORMAL = torch.randn(512, 128, generator=torch.Generator().manual_seed(1))
FLOATED = {
    "rows of a normal": (NORMAL, Facts()),
    "what a ReLU leaves": (NORMAL.view(4, 16, 32, 32).relu(), Facts(has_zeros=True)),
    "maps that lie apart from zero": (1 + 0.62 * NORMAL.view(4, 16, 32, 32), Facts()),
}


@pytest.mark.parametrize("kind", FLOATED)
@pytest.mark.parametrize("to", ["fp8_e4m3", "fp8_e5m2"])
def test_a_float_counts_as_the_dither_of_the_same_error(to: str, kind: str) -> None:
    """Of zeros and a range half as wide a dither is better than of a normal; a float is not."""
    x, facts = FLOATED[kind]
    float8 = er.codec("cast", to=to)
    here = replace(site(shape=tuple(x.shape)), facts=facts)
    alike = Dither(levels=round(levels_of(float8, here)))
    errors = [float(F.mse_loss(one.encode(x, 1, facts).decode(), x)) for one in (float8, alike)]
    assert errors[0] == pytest.approx(errors[1], rel=0.2)


# --- codecs=


@pytest.mark.parametrize("name", ["division", "group", "comet"])
def test_a_menu_of_one_codec(name: str, profile: Profile) -> None:
    plan = least(profile, codecs=[name])
    assert {preset.partition(",")[0] for preset in codes_of(plan)} == {name}
    assert any(f"{name}" in line.action for line in plan.lines)


def test_a_menu_of_one_setting(profile: Profile) -> None:
    plan = least(profile, codecs=[er.codec("division", bits=4, block=4)])
    assert codes_of(plan) == {"division, bits=4, block=4"}


def test_why_it_won(profile: Profile) -> None:
    plan = least(profile)
    coded = [line for line in plan.lines if line.action.startswith(("dither", "group"))]
    assert coded
    assert all("keep: " in line.why or "next: " in line.why for line in coded)
    assert any("above the budget" in line.why for line in coded)


def test_what_is_kept_though_it_could_be_smaller_has_room() -> None:
    """A dropout's mask can have no code, but bits, of which an exact plan has made use."""
    x = torch.randn(64, 512)
    first, last = nn.Linear(512, 512), nn.Linear(512, 512)
    profile = er.measure(lambda: last(F.dropout(first(x), 0.5)).square().mean().backward())

    def of_dropout(budget: int) -> ExplainedLine:
        lines = er.plan(profile, budget=budget, exact=True).lines
        return next(line for line in lines if line.op == "dropout")

    with pytest.raises(BudgetTooSmall) as caught:
        er.plan(profile, budget=1, exact=True)
    assert of_dropout(1 << 30).why == "there is room"
    assert of_dropout(caught.value.least_nbytes).action == "bitmask"


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([], PlanError, "leaves no code"),
        (["dihter"], UnknownCodec, "Did you mean 'dither'"),
        (["leam"], UnknownCodec, "there are lean, coat, .* Did you mean 'lean'"),
        (["sparse_lossless"], PlanError, "has no lossy code: exact actions and lossless codes"),
        ("division", PlanError, "it is a list"),
        (["bitmask"], PlanError, "plans choose among cast, comet, dither"),
        ([3], UnknownCodec, "a string"),
        ([["division"]], UnknownCodec, "a string"),
    ],
)
def test_menus_that_are_refused(given: Any, error: type, words: str, profile: Profile) -> None:
    with pytest.raises(error, match=words):
        er.plan(profile, budget="1 GiB", codecs=given)
    with pytest.raises(error, match=words):
        er.fit(net(), budget="1 GiB", codecs=given)


def test_a_menu_for_an_exact_plan_is_refused(profile: Profile) -> None:
    with pytest.raises(PlanError, match="exact=True allows no lossy code"):
        er.plan(profile, budget="1 GiB", exact=True, codecs=["division"])


def test_arguments_that_contradict_a_noise_of_zero_are_refused(profile: Profile) -> None:
    contradictions: tuple[tuple[dict[str, Any], str], ...] = (
        ({"codecs": ["division"]}, "noise=0 allows no lossy code"),
        ({"exact": False}, "noise=0 allows no codes, and exact=False"),
    )
    for asked, words in contradictions:
        with pytest.raises(PlanError, match=words):
            er.plan(profile, budget="1 GiB", noise=0, **asked)
        with pytest.raises(PlanError, match=words):
            er.fit(net(), budget="1 GiB", noise=0, **asked)


def test_an_unknown_solver_is_refused_by_fit() -> None:
    with pytest.raises(PlanError, match=r"no solver 'dleta'.*'delta'"):
        er.fit(net(), budget="1 GiB", solver="dleta")


def test_a_plan_with_other_codes_is_refused_by_fit(profile: Profile) -> None:
    plan = least(profile)
    with pytest.raises(PlanError, match="codecs="):
        er.fit(net(), budget="1 GiB", plan=plan, codecs=["division"])


def test_fit_keeps_to_the_menu(caplog: pytest.LogCaptureFixture) -> None:
    """A paper's system as the paper has it: from the first preset on, no other code is seen."""
    model = net()
    plain = er.peak(lambda: model(torch.randn(512, 128)).square().mean().backward())
    x = torch.randn(512, 128)
    standing = sum(2 * p.nbytes for p in model.parameters())
    er.fit(
        model,
        budget=standing + int(0.8 * plain),
        exact=False,
        codecs=["division"],
        min_nbytes=4096,
    )
    for _ in range(8):
        model(x).square().mean().backward()
        for p in model.parameters():
            p.grad = None
    assert "dither" not in caplog.text
    er.release(model)


def test_codes_in_the_place_of_those_that_are_named_are_said(profile: Profile) -> None:
    plan = least(profile, codecs=["fdsr"])
    keep = replace(plan.lines[0], action="keep")
    fdsr, finer = replace(keep, action="fdsr"), replace(keep, action="bits + dither, 32 levels")
    assert replace(plan, lines=(keep, fdsr)).substitution == ""
    told = replace(plan, lines=(keep, fdsr, finer))
    assert f"'dither' in 1 tensors ({show_nbytes(keep.nbytes)}) in the place of 'fdsr'" in (
        told.substitution
    )
    assert told.substitution in told.explain()
    assert replace(least(profile), lines=(keep,)).substitution == ""


# --- by seconds


def fast(codec: Codec) -> float:
    """Seconds of a group code: a half of any other's."""
    return 1.0 if isinstance(codec, Group) else 2.0


def quick(seconds: Callable[[Codec], float], **facts: bool) -> set[str]:
    found = quicker(all_settings(), torch.float32, Facts(**facts), maps=True, seconds=seconds)
    return {setting_name(codec) for codec in found}


def test_what_is_faster_is_weighed_beside_what_is_smaller() -> None:
    groups = {"group, bits=6", "group, bits=3", "group"}
    assert groups <= quick(fast)
    assert groups <= quick(fast, has_zeros=True)
    # As fast as a dither that is as small and as fine, or unknown: it would win nowhere.
    assert not groups & quick(lambda codec: 1.0)
    assert not groups & quick(lambda codec: inf)


def test_no_speed_is_asked_for_that_no_plan_needs() -> None:
    asked = set()

    def seconds(codec: Codec) -> float:
        asked.add(codec.id)
        return fast(codec)

    quick(seconds)
    assert asked == {"dither", "group"}


def test_a_plan_takes_a_larger_code_that_is_faster(profile: Profile) -> None:
    rates = {name: rate for name, rate in profile.rates.items() if "group" not in name}
    names = [f"{verb} {setting_name(codec)}" for codec in settings_of("group") for verb in VERBS]
    fixed = {f"{verb} group": 0.0 for verb in VERBS}
    for rate, is_taken in ((1e12, True), (1e8, False)):
        known = {**rates, **dict.fromkeys(names, rate)}
        one = replace(profile, rates=known, fixed_s={**profile.fixed_s, **fixed})
        items = build_problem(one, exact=False).problem.items
        options = [option for item in items for option in item.options]
        larger = [one for one in options if one.name in ("group, bits=6", "group, bits=3")]
        assert bool(larger) is is_taken


def test_noise_by_sizes_counts_what_gradients_of_weights_are_made_of():
    """A plan said 0.9 % of a net of many functions of single elements: it was 27 %."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(128, 128), nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            for _ in range(4):
                x = x * x.sigmoid()
            return self.down(x)

    plain = profile_of(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)))
    # The inputs of both layers, and with them that of the loss; or nine more.
    assert plain.most_noise == pytest.approx(3 * 3 / 2)
    assert profile_of(Gated()).most_noise == pytest.approx(3 * 11 / 2)
