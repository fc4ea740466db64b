"""`er.log_to`: a dict always, and every logger through its public interface."""

import logging

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.errors import PlanError


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    er.fit(net, budget="1 GiB", exact=True)
    x = torch.randn(512, 256)
    for _ in range(3):
        net(x).square().mean().backward()
    yield net
    er.release(net)


class Writer:
    """As TensorBoard's."""

    def __init__(self):
        self.scalars, self.texts = [], []

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def add_text(self, name, text, step):
        self.texts.append((name, text, step))


class Run:
    """As those of wandb and trackio."""

    def __init__(self):
        self.logged = []

    def log(self, figures, step=None):
        self.logged.append((figures, step))


def test_a_dict_comes_always(model):
    figures = er.log_to()(model, 0)
    assert figures["memory/budget_mib"] == 1024
    assert figures["memory/peak_mib"] > 1
    assert figures["memory/exact"] == 1
    assert isinstance(figures["memory/setting"], str)
    assert all(name.startswith("memory/") for name in figures)


def test_each_kind_of_logger_gets_the_figures(model):
    writer, run, last, entries, calls = Writer(), Run(), {}, [], []
    log = er.log_to(writer, run, last, entries, lambda *told: calls.append(told))
    figures = log(model, 7)
    log(model, 8)
    assert ("memory/peak_mib", figures["memory/peak_mib"], 7) in writer.scalars
    assert not any(name == "memory/setting" for name, *_ in writer.scalars)
    assert writer.texts == [("memory/setting", figures["memory/setting"], 7)]  # once, not a step
    assert run.logged == [(figures, 7), (figures, 8)]
    assert last == figures
    assert entries == [{"step": 7, **figures}, {"step": 8, **figures}]
    assert calls == [(figures, 7), (figures, 8)]


def test_the_model_may_have_been_wrapped(model):
    assert er.log_to()(nn.Sequential(model), 0) == er.log_to()(model, 0)


def test_a_model_that_is_not_fitted_has_no_figures():
    run = Run()
    assert er.log_to(run)(nn.Linear(2, 2), 0) == {}
    assert run.logged == []


def test_a_logger_that_fails_is_named_once_and_ends_no_training(model, caplog):
    def broken(figures, step):
        raise OSError("disk is full")

    entries = []
    log = er.log_to(broken, entries)
    with caplog.at_level(logging.WARNING, "elbowroom"):
        log(model, 0)
        log(model, 1)
    assert len(entries) == 2
    assert len(caplog.records) == 1
    assert "broken raised OSError: disk is full" in caplog.text


@pytest.mark.parametrize("target", ["wandb", 3])
def test_what_cannot_log_is_refused(target):
    with pytest.raises(PlanError, match="log_to takes a SummaryWriter"):
        er.log_to(target)
