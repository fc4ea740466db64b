"""Compositions in the menu: each is taken where it is best, and its gradient is right."""

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.codecs import Cast, Dither, Facts, Group, Sided
from elbowroom.codecs.quality import quality_of
from elbowroom.errors import BudgetTooSmall, PlanError
from elbowroom.plan import places
from elbowroom.plan.build_problem import build_problem
from elbowroom.plan.composed import gated, nbytes_with_mask
from elbowroom.plan.make import make_plan, plain_peak
from elbowroom.plan.menu import preset_named
from elbowroom.plan.places import with_codes
from elbowroom.plan.plan import check_plan
from elbowroom.plan.problem import Choice, Item, Link, Option, Problem, cost, levels, stalls
from elbowroom.plan.profile import Profile
from elbowroom.plan.registered import chosen_settings, weighed
from elbowroom.plan.solve import solve
from elbowroom.runtime.tiers.choose import file_tier

MB = 1 << 20
CODES: dict[str, dict[str, Any]] = {
    "dither": {"codec": "dither, 16 levels"},
    "group": {"codec": Group(bits=4)},
    "cast": {"codec": "cast, to=fp8_e4m3"},
}


@pytest.fixture(autouse=True)
def seeded(one_thread: None) -> None:
    torch.manual_seed(0)


def linears(width: int = 64, depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(depth))
    )


class Norms(nn.Module):
    """Convolution, batch norm and ReLU, three times."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3 if i == 0 else width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            )
            for i in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean((2, 3))


def gradients(model: nn.Module, x: Tensor, context: Any) -> list[Tensor]:
    model.zero_grad()
    with context:
        loss = model(x).square().mean()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


DRAWS = 24


def noise_of(plan: er.Plan, model: nn.Module, x: Tensor) -> tuple[float, float, set[str]]:
    """Returns the sum of gErr2 over draws, gErr2 of the mean gradient, and all actions."""
    plain = gradients(model, x, er.saving("keep"))
    total, alone = [torch.zeros_like(one) for one in plain], 0.0
    size = sum(float(one.square().sum()) for one in plain)
    for seed in range(1, DRAWS + 1):
        context = er.following(plan, seed=seed)
        ours = gradients(model, x, context)
        alone += sum(float((a - b).square().sum()) for a, b in zip(ours, plain, strict=True)) / size
        for one, given in zip(total, ours, strict=True):
            one += given / DRAWS
    off = sum(float((a - b).square().sum()) for a, b in zip(total, plain, strict=True)) / size
    return alone, off, set(context.ledger.totals("action"))


# --- a code that is moved, by hand


@pytest.mark.parametrize("name", CODES)
def test_a_moved_code_gives_the_bits_of_one_that_stays(name: str, tmp_path: Path) -> None:
    """In the first step, in those that follow a script, and where the seed is another."""
    model, x = linears(), torch.randn(256, 64)
    codec = CODES[name]["codec"]
    stays = preset_named(codec).policy if isinstance(codec, str) else codec
    for seed in (1, 2, 3, 4):
        plain = gradients(model, x, er.saving(stays, seed=seed, min_nbytes=0))
        moved = er.saving(
            "offload",
            from_nbytes=0,
            seed=seed,
            min_nbytes=0,
            directory=str(tmp_path),
            **CODES[name],
        )
        assert alike(gradients(model, x, moved), plain)
        assert name in moved.ledger.totals("action")


def test_a_moved_code_of_a_relu_keeps_its_zeros_here(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    x = torch.randn(256, 64)
    plain = gradients(model, x, er.saving("dither", levels=16, seed=1, min_nbytes=0))
    ours = er.saving(
        "offload", codec="dither, 16 levels", from_nbytes=0, seed=1, min_nbytes=0,
        directory=str(tmp_path),
    )  # fmt: skip
    assert alike(gradients(model, x, ours), plain)


def test_a_moved_code_holds_only_its_ranges(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), torch.randn(1024, 256)
    x.requires_grad_()
    ours = er.saving("offload", codec=Dither(levels=16), seed=1, directory=str(tmp_path))
    with ours:
        loss = model(x * 1.0).sum()
    tier = file_tier(str(tmp_path))
    tier.flush()
    codec, shape = Dither(levels=16), (1024, 256)
    whole = codec.encoded_nbytes(shape, torch.float32)
    largest = codec.largest_nbytes(shape, torch.float32)
    assert largest == 1024 * 256 // 2
    assert ours.ledger.held_nbytes == 2 * (whole - largest)
    assert ours.ledger.held_away_nbytes == 2 * largest
    loss.backward()
    assert ours.ledger.held_nbytes == ours.ledger.held_away_nbytes == 0


def test_a_bitmap_of_zeros_is_not_what_moves() -> None:
    facts = Facts(has_zeros=True)
    few = Dither(levels=2)
    assert few.largest_nbytes((1024,), torch.float32, facts) > 128
    assert few.largest_nbytes((0,), torch.float32) == 0


def test_a_lossless_code_is_moved_exactly(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(2))
    x = torch.randn(32, 3, 32, 32)
    plain = gradients(model, x, er.saving("keep"))
    ours = er.saving("offload", from_nbytes=0, min_nbytes=0, directory=str(tmp_path))
    assert alike(gradients(model, x, ours), plain)
    assert "narrow" in ours.ledger.totals("action")


def test_backward_twice_reads_it_twice(tmp_path: Path) -> None:
    model, x = linears(), torch.randn(256, 64)
    with er.saving("offload", codec=Dither(levels=16), from_nbytes=0, directory=str(tmp_path)):
        loss = model(x).square().mean()
    file_tier(str(tmp_path)).flush()
    given = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in "12"]
    assert alike(*map(list, given))


def test_a_tensor_that_has_no_code_is_moved_as_it_is(tmp_path: Path) -> None:
    model, x = linears(depth=2), torch.randn(256, 64)
    x[3, 5] = float("inf")
    plain = gradients(model, x, er.saving("dither", levels=16, seed=1, min_nbytes=0))
    ours = er.saving(
        "offload", codec=Dither(levels=16), from_nbytes=0, seed=1, min_nbytes=0,
        directory=str(tmp_path),
    )  # fmt: skip
    given = gradients(model, x, ours)
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(plain, given, strict=True)
    )


@pytest.mark.parametrize("codec", ["nobody", 4, Dither])
def test_a_codec_that_is_none(codec: Any) -> None:
    with pytest.raises(er.errors.ElbowroomError, match="codec"):
        er.saving("offload", codec=codec)


# --- a code that is moved, in the memory model


STEP = Problem(
    base=(0,) * 8,
    starts_s=tuple(map(float, range(8))),
    backward=3,
    seconds=8.0,
    items=(),
    links={"host": Link(10.0, 5.0, room=60)},
)
ITEM = Item(
    100,
    0,
    1,
    ((5, 5), (7, 7)),
    7,
    (
        Option("keep", 100),
        Option("away", 0, link="host", ahead=1),
        Option("code", 30, exact=False, variance=0.1, levels=16),
        Option("code, away", 5, exact=False, variance=0.1, link="host", travels=25, ahead=1),
    ),
)


def test_a_moved_code_is_back_before_its_need_and_decoded_at_it() -> None:
    problem = replace(STEP, items=(ITEM,))
    assert levels(problem, Choice((3,))).tolist() == [105, 105, 5, 5, 30, 130, 30, 130]


def test_fewer_bytes_are_sooner_there_and_take_less_room() -> None:
    problem = replace(STEP, items=(ITEM,))
    assert stalls(problem, Choice((1,)), "host") == (8.0, 18.0)
    assert stalls(problem, Choice((3,)), "host") == (0.5, 3.0)


@pytest.mark.parametrize("solver", ["auto", "milp", "rounding", "greedy"])
@pytest.mark.parametrize("room", [60, None])
def test_it_is_taken_where_the_link_is_slow_or_small(solver: str, room: int | None) -> None:
    links = {"host": Link(10.0, 5.0, room)}
    problem = replace(STEP, base=(0, 0, 110, 110, 0, 0, 0, 0), items=(ITEM,), links=links)
    found = solve(problem, 131, solver=solver)
    assert found.feasible
    assert found.choice.options == (3,)
    assert solve(problem, 131, exact=True, solver=solver).feasible == (room is None)


# --- ... in plans


@pytest.fixture(scope="module")
def profile() -> Profile:
    model = linears(256, 6)

    def step() -> None:
        model.zero_grad()
        model(torch.randn(1024, 256)).square().mean().backward()

    found = er.measure(step, noise=True)
    by_bytes = {name: one for name, one in found.fixed_s.items() if not name.startswith("copy")}
    return replace(found, fixed_s=by_bytes)


FILE = "out file", "in file", "copy out file", "copy in file"  # rates


def least(profile: Profile, **settings: Any) -> er.Plan:
    with pytest.raises(BudgetTooSmall) as refused:
        make_plan(profile, 1, recompute=False, **settings)
    return make_plan(profile, refused.value.least_nbytes, recompute=False, **settings)


def test_codes_that_move_need_less_than_codes_or_moves_alone(profile: Profile) -> None:
    """Where links are so slow that what moves must be small, and codes alone are too large."""
    rates = {**profile.rates, **dict.fromkeys(FILE, 2e8)}
    slow = replace(profile, rates=rates)
    both = least(slow, exact=False, offload="file", noise=0.1)
    stays = least(slow, exact=False, noise=0.1)
    assert both.peak < stays.peak
    moved = {name for name in {one.preset for one in both.sites.values()} if "to file" in name}
    assert moved & {f"dither, {n} levels, to file" for n in (256, 64, 16, 8, 6, 4, 3, 2)}
    assert both.tier == "file"
    assert any(" travel in place of 1.00 MiB" in line.why for line in both.lines)
    raw = least(slow, exact=True, offload="file")
    assert (both.peak, both.seconds) < (raw.peak, raw.seconds)


def test_a_plan_with_moved_codes_is_followed(profile: Profile) -> None:
    rates = {**profile.rates, **dict.fromkeys(FILE, 2e8)}
    plan = least(replace(profile, rates=rates), exact=False, offload="file", noise=0.1)
    model, x = linears(256, 6), torch.randn(1024, 256)
    alone, off, totals = noise_of(plan, model, x)
    assert off < 3 * alone / DRAWS**2
    assert "dither" in totals
    assert not plan.unknown_sites


def test_a_plan_that_moves_codes_is_read_back_and_refused_without_a_tier(
    profile: Profile, tmp_path: Path
) -> None:
    rates = {**profile.rates, **dict.fromkeys(FILE, 2e8)}
    plan = least(replace(profile, rates=rates), exact=False, offload="file", noise=0.1)
    plan.save(tmp_path / "plan.json")
    again = er.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert {type(codec) for codec in again.codecs} >= {Dither}
    model = linears(256, 6)
    with pytest.raises(PlanError, match="moves tensors to the file"):
        er.fit(model, budget="1 GiB", plan=again)


def test_a_move_takes_the_seconds_of_the_processor_that_copies(profile: Profile) -> None:
    """A disk that is waited for holds up the link, and takes nothing from what is computed."""
    rates = {**profile.rates, **dict.fromkeys(FILE[:2], 1e6), **dict.fromkeys(FILE[2:], 4e9)}
    problem = build_problem(replace(profile, rates=rates), exact=True, offload="file").problem
    moved = [(i, one) for i in problem.items for one in i.options if one.link]
    assert moved
    assert problem.links["file"].out_rate == 1e6
    for item, one in moved:
        assert one.forward_s == pytest.approx(item.nbytes / 4e9)
    older = replace(profile, rates={**rates, **dict.fromkeys(FILE[:2], 1e9)})
    for name in FILE[2:]:
        del older.rates[name]
    problem = build_problem(older, exact=True, offload="file").problem
    moved = [(i, one) for i in problem.items for one in i.options if one.link]
    assert all(one.forward_s == pytest.approx(i.nbytes / 1e9) for i, one in moved)


def test_each_move_takes_a_fixed_time_besides(profile: Profile) -> None:
    """Forty small codes that moved were predicted for free, and took a fourth of a step."""
    rates = {**profile.rates, **dict.fromkeys(FILE, 1e9)}
    fixed_s = {**profile.fixed_s, "copy out file": 0.25, "copy in file": 0.5}
    dear = replace(profile, rates=rates, fixed_s=fixed_s)
    problem = build_problem(dear, exact=True, offload="file").problem
    moved = [(i, one) for i in problem.items for one in i.options if one.link]
    assert moved
    for item, one in moved:
        assert one.forward_s == pytest.approx(0.25 + item.nbytes / 1e9)
        back_s = 0.5 + item.nbytes / 1e9
        assert one.backward_s == pytest.approx(back_s * round(one.backward_s / back_s))
        assert one.backward_s >= 0.5
    items = build_problem(dear, exact=False, offload="file").problem.items
    moved = [(i, one) for i in items for one in i.options if one.link and one.travels]
    assert all(one.forward_s > 0.25 and one.backward_s > 0.5 for _, one in moved)


def test_dear_codes_are_no_options(profile: Profile) -> None:
    """A code that takes longer than the move of the whole tensor, and adds noise, is left out."""
    items = build_problem(profile, exact=False, offload="file").problem.items
    assert any("to file" in one.name and one.travels for item in items for one in item.options)
    free = {**profile.rates, **dict.fromkeys(FILE, 1e15)}
    items = build_problem(replace(profile, rates=free), exact=False, offload="file").problem.items
    for item in items:
        moved = [one for one in item.options if one.travels is not None]
        raw = next((one for one in item.options if one.link and one.travels is None), None)
        assert raw is None or all(one.travels < item.nbytes for one in moved)


# --- tensors and codes move, codes alone, or nothing


def each_place(profile: Profile, budget: int, least: bool | None) -> list[tuple[Any, Any, int]]:
    """All three problems, solved, with the bytes that are on their way."""
    found = []
    for tier, whole in (("file", True), ("file", False), (None, False)):
        problem = build_problem(profile, exact=False, offload=tier, whole=whole).problem
        moved = [i.travels(o) for i in problem.items for o in i.options if o.link]
        travels = MB if whole else max(moved, default=0)
        found.append((problem, solve(problem, budget - travels, least=least), travels))
    return found


def in_places(profile: Profile, budget: int, least: bool | None = None) -> tuple[Any, Any, int]:
    settings: dict[str, Any] = {"recompute": True, "codecs": None, "variance": inf}
    return with_codes(profile, budget, MB, offload="file", solver="auto", least=least, **settings)


@pytest.mark.parametrize("room", [7, 5, 3, 2])
def test_no_other_place_would_have_been_much_cheaper(profile: Profile, room: int) -> None:
    budget = profile.static + room * MB
    built, found, _ = in_places(profile, budget)
    all_three = each_place(profile, budget, None)
    feasible = [cost(problem, one.choice) for problem, one, _ in all_three if one.feasible]
    assert found.feasible == bool(feasible)
    if feasible:
        most = 1.01 * min(feasible) + 0.005 * profile.seconds
        assert cost(built.problem, found.choice) <= most


def test_the_least_of_all_places_is_named(profile: Profile) -> None:
    _, found, travels = in_places(profile, 1, True)
    assert not found.feasible
    others = [one.peak + travel for _, one, travel in each_place(profile, 1, True)]
    assert found.peak + travels == min(others)


def test_where_nothing_could_be_gained_one_place_is_searched(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def counted(problem: Problem, budget: int, **settings: Any) -> Any:
        asked.append(budget)
        return solve(problem, budget, **settings)

    monkeypatch.setattr(places, "solve", counted)
    in_places(profile, plain_peak(profile) + 2 * MB)
    assert len(asked) == 1
    in_places(profile, 1)
    assert len(asked) == 4


# --- lean


@pytest.fixture(scope="module")
def norms() -> Profile:
    torch.manual_seed(0)
    model = Norms()

    def step() -> None:
        model.zero_grad()
        model(torch.randn(32, 3, 32, 32)).square().mean().backward()

    return er.measure(step, noise=True)


def test_norms_behind_which_one_relu_stands_are_found(norms: Profile) -> None:
    found = gated(norms)
    assert {norms.storages[i].saves[0].site.consumer for i in found} == {"batch_norm"}
    assert len(found) >= 2


def test_the_bytes_of_lean_are_at_most_what_is_counted() -> None:
    codec, x = Sided(4, 4, fold=8), torch.randn(32, 16, 32, 32)
    mask = er.codec("bitmask").encode((x > 0).float(), 0, Facts(value=1.0)).buffers[0]
    held = codec.encode(x, 1, Facts(mask=mask)).nbytes
    assert 0.7 * nbytes_with_mask(codec, x.numel()) < held <= nbytes_with_mask(codec, x.numel())


def test_lean_is_taken_where_codes_must_be_small(norms: Profile) -> None:
    plan = least(norms, exact=False, noise=0.1)
    presets = {one.preset for one in plan.sites.values()}
    assert any(name.startswith("lean") for name in presets), presets
    assert "lean, " in plan.explain()


def test_lean_plans_are_followed_and_unbiased(norms: Profile) -> None:
    plan = least(norms, exact=False)
    lean = {
        name: replace(known, preset="lean, 4 levels")
        for name, known in plan.sites.items()
        if name.consumer == "batch_norm"
    }
    plan = replace(plan, sites={**plan.sites, **lean})
    torch.manual_seed(0)
    model, x = Norms(), torch.randn(32, 3, 32, 32)
    alone, off, totals = noise_of(plan, model, x)
    assert "sided" in totals
    assert off < 3 * alone / DRAWS**2


# --- systems by name


def test_lean_and_coat_are_chosen_by_name(norms: Profile, profile: Profile) -> None:
    lean = least(norms, exact=False, codecs=chosen_settings(["lean"]))
    names = {one.preset for one in lean.sites.values()} - {"keep", "exact"}
    assert any(name.startswith("lean") for name in names)
    assert {name.split(",")[0] for name in names} <= {"lean", "sided", "dither"}
    assert any(isinstance(codec, Sided) for codec in lean.codecs)
    check_plan(lean, lean.peak, exact=False, codecs=chosen_settings(["lean"]))
    with pytest.raises(PlanError, match="codecs= leaves out"):
        check_plan(lean, lean.peak, exact=False, codecs=chosen_settings(["dither"]))
    coat = least(profile, exact=False, codecs=chosen_settings(["coat"]))
    assert {type(codec) for codec in coat.codecs} == {Cast}


def test_the_finer_granularity_is_taken_where_noise_must_be_small() -> None:
    """And the wider one where bytes must be: they are options of each tensor."""
    settings = chosen_settings(["coat"])
    assert settings is not None
    taken = weighed(settings, torch.float32, Facts(), maps=False, named=True)
    errors = [quality_of(codec, maps=False).error for codec in taken]
    nbytes = [codec.encoded_nbytes((256, 1024), torch.float32) for codec in taken]
    assert errors == sorted(errors)
    assert nbytes == sorted(nbytes, reverse=True)
