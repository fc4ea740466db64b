"""Loggers of others, as their own quick starts use them: nothing is sent anywhere."""

import json

import pytest
import torch
from torch import nn

import elbowroom as er


@pytest.fixture
def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    er.fit(net, budget="1 GiB", exact=True)
    yield net
    er.release(net)


def train(model, log):
    for step in range(3):
        model(torch.randn(512, 256)).square().mean().backward()
        figures = log(model, step)
    return figures


def test_tensorboard(model, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        figures = train(model, er.log_to(writer))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = events.Scalars("memory/peak_mib")
    assert found[-1].step == 2
    assert found[-1].value == pytest.approx(figures["memory/peak_mib"])


def test_wandb(model, tmp_path):
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=str(tmp_path), project="test") as run:
        figures = train(model, er.log_to(run))
        run.log({"done": 1}, step=3)  # the step before is kept when another begins
        assert run.summary["memory/peak_mib"] == figures["memory/peak_mib"]
        assert run.summary["memory/setting"] == figures["memory/setting"]


def test_trackio(model, tmp_path, monkeypatch):
    trackio = pytest.importorskip("trackio")
    entries = []
    monkeypatch.setattr(trackio, "log", lambda figures, step=None: entries.append((figures, step)))
    figures = train(model, er.log_to(trackio))
    assert entries[-1] == (figures, 2)
    json.dumps(entries)
