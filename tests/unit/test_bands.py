"""The page of a profile: its bands come to the level, its chart is XML, every tensor has a line."""

from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.fitting.model_state import ModelState
from elbowroom.plan.savings_report import prospects
from elbowroom.report import render_profile, step_page
from elbowroom.report.bands import BEFORE, REST, bands
from elbowroom.report.stack import stack


@pytest.fixture(scope="module")
def profile():
    torch.manual_seed(0)
    stages = [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(9)
    ]
    model = nn.Sequential(*stages, nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(16, 8, 24, 24)
    model(x)
    return er.measure(lambda: model(x).sum().backward())


def test_bands_come_to_the_level_and_are_few(profile):
    found = bands(profile)
    assert (found[0].name, found[-1].name) == (BEFORE, REST)
    assert np.array_equal(sum(band.nbytes for band in found), np.array(profile.level))
    assert all((band.nbytes >= 0).all() for band in found)
    assert [band.colour for band in found] == [*range(len(found) - 1), 8]
    assert len(found) == 2 + 7  # nine stages: six of them, and the others


def test_the_chart_is_xml_and_says_the_peak(profile):
    svg = ElementTree.fromstring(stack(profile, bands(profile)))
    text = " ".join("".join(e.itertext()) for e in svg.iter("text"))
    assert "peak " in text
    assert "backward begins" in text
    assert len([e for e in svg.iter("path") if "band" in e.get("class", "")]) == 9


def test_the_page_escapes_what_it_is_told(profile):
    assert "&lt;b&gt;Net: where the memory" in render_profile(step_page(profile, "<b>Net"), profile)


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
    owned = ModelState(model, first)
    for optimizer in (first, second, torch.optim.SGD(model[0].parameters(), lr=1)):
        owned.add(optimizer)
    assert owned.unborn_state_nbytes() == 4 * (2 * 16 + 32)
    model(torch.ones(1, 4)).sum().backward()
    first.step()
    assert owned.unborn_state_nbytes() == 4 * 32
    second.step()
    assert owned.unborn_state_nbytes() == 0
    weights = 4 * (16 + 32)
    assert owned.nbytes == 2 * weights + 4 * (2 * 16 + 32 + 1)  # gradients, states, AdamW's count


def test_the_history_of_lbfgs_is_counted_before_and_as_it_grows():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=3)
    owned, n = ModelState(model, optimizer), sum(p.numel() for p in model.parameters())
    full = 4 * n * (2 * 3 + 2)
    assert owned.unborn_state_nbytes() == full

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 64)).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
        states = owned.nbytes - 8 * n
        assert full - 64 <= states + owned.unborn_state_nbytes() <= full + 64  # and a few scalars
    assert owned.unborn_state_nbytes() == 0
    assert abs(owned.standing().states_nbytes - full) <= 64
