"""The page of a profile: its bands come to the level, its peak is the profile's own."""

import gc
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.errors import BudgetTooSmall, DataError
from elbowroom.fitting.model_state import ModelState, storage_nbytes
from elbowroom.measure.resident_bytes import expected_nbytes, knows_states_of
from elbowroom.report import render_profile, step_page
from elbowroom.report.bands import BEFORE, GRADIENTS, REST, STATES, WEIGHTS, by_category, by_module
from elbowroom.report.profile import prospects
from elbowroom.report.step import plain, planned, profiled


def stack():
    torch.manual_seed(0)
    stages = [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(9)
    ]
    model = nn.Sequential(*stages, nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(16, 8, 24, 24)
    model(x)
    return model, x


@pytest.fixture(scope="module")
def profile():
    model, x = stack()
    return er.measure(lambda: model(x).sum().backward())


@pytest.fixture(scope="module")
def known():
    """The profile of a step whose model and optimizer are known."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4096, 512)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return er.measure(step, model=model, optimizer=optimizer)


def shown(html):
    """What the page's script draws."""
    found = re.findall(r'<script type="application/json">(.+?)</script>', html, re.DOTALL)
    return [json.loads(text) for text in found]


def least_plan(profile, **settings):
    try:
        return er.plan(profile, budget=1, **settings)
    except BudgetTooSmall as error:
        return er.plan(profile, budget=error.least_nbytes, **settings)


@pytest.mark.parametrize("cut", [by_category, by_module])
def test_bands_come_to_the_level(profile, known, cut):
    for one in (profile, known):
        for step in (profiled(one), plain(one), planned(one, least_plan(one))):
            found = cut(step)
            assert np.array_equal(sum(band.nbytes for band in found), step.level)
            assert all((band.nbytes >= 0).all() for band in found)


def test_modules_are_few(profile):
    found = by_module(profiled(profile))
    assert (found[0].name, found[-1].name) == (BEFORE, REST)
    assert [band.color for band in found] == [*range(len(found) - 1), 8]
    assert len(found) == 2 + 7  # nine stages: six of them, and the others
    assert found[1].name == "0 (Sequential)"


def test_categories_are_those_of_the_model(known):
    bands = {band.name: band for band in by_category(plain(known))}
    weights = 4 * 2 * (512 * 512 + 512)
    assert (bands[WEIGHTS].nbytes == weights).all()
    assert bands[STATES].max_nbytes == 2 * weights + 4 * 4  # with AdamW's counts
    gradients = bands[GRADIENTS].nbytes
    assert gradients[-1] == weights  # whole when backward has ended
    assert gradients[known.backward] == 0


def test_gradients_that_a_program_keeps_are_there_all_the_while():
    model, x = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()

    found = er.measure(step, model=model, optimizer=optimizer)
    bands = {band.name: band for band in by_category(profiled(found))}
    weights = sum(p.nbytes for p in model.parameters())
    assert ((0.98 * weights < bands[GRADIENTS].nbytes) & (bands[GRADIENTS].nbytes <= weights)).all()


def test_the_peak_of_the_page_is_that_of_the_profile_and_of_the_plan(profile, known):
    for one in (profile, known):
        plan = least_plan(one)
        ours, theirs = shown(render_profile(step_page(one, "Net", plan=plan)))
        assert ours["peak"] == plan.plain_peak
        assert theirs["peak"] == plan.peak
        for chart in (ours, theirs):
            for view in chart["views"]:
                sums = [sum(n) for n in zip(*(b["values"] for b in view["bands"]), strict=True)]
                assert max(sums) == chart["peak"]
                assert len(sums) == len(chart["x"]) <= 801


def test_what_plain_autograd_would_take_is_told_from_a_step_with_exact_actions(profile):
    assert not all(storage.kept for storage in profile.storages)
    assert plain(profile).peak == er.plan(profile, budget="1 GiB").plain_peak > profile.peak


def test_a_plan_that_offloads_is_drawn(profile):
    plan = least_plan(profile, offload="file", exact=True)
    assert plan.peak * 0.5 < planned(profile, plan).peak <= plan.peak


def test_a_plan_of_another_step_is_refused(profile, known):
    with pytest.raises(DataError, match="belongs to another step"):
        step_page(profile, "Net", plan=least_plan(known))


def test_the_line_that_called_the_op_is_known(profile, tmp_path):
    lines = {save.line for storage in profile.storages for save in storage.saves}
    assert all(re.fullmatch(r"test_bands\.py:\d+", line) for line in lines)
    profile.save(tmp_path / "profile.json")
    again = er.Profile.load(tmp_path / "profile.json")
    assert again.storages[0].saves[0].line == profile.storages[0].saves[0].line


def test_names_cannot_end_the_script_that_they_are_in(profile):
    evil = "</script><script>alert(1)</script>"
    storages = tuple(
        replace(one, saves=tuple(replace(save, modules=(evil,), line=evil) for save in one.saves))
        for one in profile.storages
    )
    html = render_profile(step_page(replace(profile, storages=storages), evil))
    assert "<script>alert" not in html
    assert evil in [band["name"] for band in shown(html)[0]["views"][1]["bands"]]


def test_a_page_is_alone(profile):
    html = render_profile(step_page(profile, "<b>Net"))
    assert "&lt;b&gt;Net: where the memory" in html
    assert not re.search(r"<link|<img|src=|href=|@import|url\(", html)
    assert html.count("https://") == 1  # the name of the library's home, in a comment of its own


def test_a_profile_is_told_in_a_line(profile):
    line = str(profile)
    assert line.startswith("profile: peak ")
    assert f"in {len(profile.storages)} tensors" in line
    assert "\n" not in line


def test_each_tensor_has_a_way_or_a_reason(profile):
    found = prospects(profile)
    assert len(found) == len(profile.storages)
    assert [one.storage.nbytes for one in found] == sorted(
        (one.nbytes for one in profile.storages), reverse=True
    )
    assert all(bool(one.ways) != bool(one.why) for one in found)
    assert all(way.held < one.storage.nbytes for one in found for way in one.ways)


def test_states_of_several_optimizers_count_once_a_parameter():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False))
    first = torch.optim.AdamW(model[0].parameters())
    second = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    model_state = ModelState(model, first)
    for optimizer in (first, second, torch.optim.SGD(model[0].parameters(), lr=1)):
        model_state.add(optimizer)
    assert model_state.unallocated_state_nbytes() == 4 * (2 * 16 + 32)
    model(torch.ones(1, 4)).sum().backward()
    first.step()
    assert model_state.unallocated_state_nbytes() == 4 * 32
    second.step()
    assert model_state.unallocated_state_nbytes() == 0
    weights = 4 * (16 + 32)
    assert model_state.nbytes == 2 * weights + 4 * (
        2 * 16 + 32 + 1
    )  # gradients, states, AdamW's count


def test_the_history_of_lbfgs_is_counted_before_and_as_it_grows():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=3)
    model_state, n = ModelState(model, optimizer), sum(p.numel() for p in model.parameters())
    full = 4 * n * (2 * 3 + 2)
    assert model_state.unallocated_state_nbytes() == full

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 64)).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
        states = model_state.nbytes - 8 * n
        assert (
            full - 64 <= states + model_state.unallocated_state_nbytes() <= full + 64
        )  # and a few scalars
    assert model_state.unallocated_state_nbytes() == 0
    assert abs(model_state.resident_bytes().states_nbytes - full) <= 64


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_what_lbfgs_holds_while_forwards_run_in_its_step_is_counted(search):
    """Its states are there between steps; the rest is found among all tensors that are alive."""

    def alive() -> int:
        return storage_nbytes(x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter))

    gc.collect()
    before = alive()
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.1, max_iter=4, history_size=2, line_search_fn=search
    )
    model_state, beside = ModelState(model, optimizer), []
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))

    def closure():
        optimizer.zero_grad()
        if len(beside) >= 8:  # the first step has no states until it ends
            beside.append(alive() - before - x.nbytes - model_state.nbytes)
        else:
            beside.append(0)
        loss = (model(x) - x).square().mean()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    assert 0.6 * model_state.passing_nbytes < max(beside) <= 1.02 * model_state.passing_nbytes


WITH_STATES = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.RMSprop, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.Adafactor, {}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "settings"), WITH_STATES)
def test_states_of_torch_s_optimizers_are_known_before_they_are_made(kind, settings, dtype):
    shapes = (100, 50), (64,), (8, 3, 5, 5)
    parameters = [nn.Parameter(torch.randn(*shape).to(dtype)) for shape in shapes]
    optimizer = kind(parameters, lr=0.1, **settings)
    assert knows_states_of(optimizer)
    expected = sum(expected_nbytes(optimizer, p) for p in parameters)
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    made = [x for state in optimizer.state.values() for x in state.values()]
    assert sum(x.nbytes for x in made if isinstance(x, torch.Tensor) and x.dim()) == expected
