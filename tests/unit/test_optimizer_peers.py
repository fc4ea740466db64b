"""The optimizer benchmark's rows of others: bytes counted, and one that cannot run says why."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elbowroom.measure import Paired

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("_optimizer_peers")


@pytest.fixture
def script(peers):
    return importlib.import_module("optimizer_states")


def coder(peer):
    return lambda m, v: (m, v)


def test_what_is_not_installed_has_a_row_that_says_how_to_get_it(script, peers):
    absent = peers.Peer("nosuchpeer", "nosuchpeer.optim", "AdamW8bit", 8, coder)
    row = script.peer_row(absent, script.Clock(2**12, 1))
    assert row.problem == f"not installed: {peers.INSTALL}"
    assert script.cells(row, ["net"]) == ["nosuchpeer AdamW8bit", "-", "-", row.problem, "-"]
    ours = script.Row("int8", time=Paired((1.0,), (2.0,)))
    line = script.faster(ours, row)
    assert not line["met"]
    assert "not installed" in line["measured"]


def test_what_fails_is_quoted(script, peers):
    rejected = peers.Peer("torch", "torch.optim", "SparseAdam", 8, coder)  # takes sparse ones only
    row = script.peer_row(rejected, script.Clock(2**12, 1))
    assert row.problem.startswith("RuntimeError: SparseAdam does not support dense gradients")


def test_a_row_that_runs_is_compared_by_its_ratio_to_fused_adamw(script, peers):
    plain = peers.Peer("torch", "torch.optim", "AdamW", 8, coder)
    row = script.peer_row(plain, script.Clock(2**12, 2))
    assert (row.problem, row.nbytes) == ("", 8.0)
    assert row.time.n == 2
    ours = script.Row("int8", time=Paired((1.0,), (2.0,)))
    for peer_s, met in ((3.0, True), (1.5, False)):
        assert script.faster(ours, replace(row, time=Paired((1.0,), (peer_s,))))["met"] is met


def test_bytes_of_a_state_are_those_of_its_parts_without_the_step(peers):
    state = {"step": torch.zeros(()), "codes": torch.zeros(8, dtype=torch.uint8), "count": 3}
    assert peers.nbytes(state | {"scale": torch.zeros(2)}) == 16
