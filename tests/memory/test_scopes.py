"""Peaks are measured without touching the scopes, profilers and terminal of the program."""

import os
import subprocess
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from elbowroom.measure import mark, memory_curve
from elbowroom.measure.background import Background
from elbowroom.measure.interval import Interval

CPU = torch.device("cpu")

NET = """
import contextlib, hashlib, os, sys, torch
import torch.distributed as dist
import elbowroom as er
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU()) for _ in range(6)
        )
        self.unused, self.head = nn.Linear(128, 128), nn.Linear(128, 8)
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
def hash_of(net):
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    return weights.hexdigest()
def main():
    for budget in sys.argv[1:]:
        torch.manual_seed(0)
        net = Net()
        train(net, budget)
        print(hash_of(net))
"""

DISTRIBUTED = (
    NET
    + """
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def train(net, budget):
    if budget != "plain":
        er.fit(net, budget=budget, exact=True)
    wrapped = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    for step in range(8):
        for half in range(2):
            with wrapped.no_sync() if half == 0 else contextlib.nullcontext():
                wrapped(torch.randn(512, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
main()
dist.destroy_process_group()
"""
)

CLOSURE = (
    NET
    + """
def train(net, budget):
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    if budget != "plain":
        er.fit(net, budget=budget, optimizer=optimizer, exact=True)
    def closure():
        optimizer.zero_grad()
        with torch.autograd.profiler.record_function("theirs"):
            loss = net(torch.randn(512, 128)).square().mean()
        loss.backward()
        return loss
    for step in range(8):
        optimizer.step(closure)
main()
"""
)


def trained(script: str, *budgets: str) -> list[str]:
    """The weights that a process of its own prints; it must end well and say nothing else."""
    found = subprocess.run(
        [sys.executable, "-c", script, *budgets], capture_output=True, text=True, timeout=200
    )
    assert found.returncode == 0, found.stderr
    lines = [line for line in found.stderr.splitlines() if not line.startswith("budget ")]
    assert not lines
    return found.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("script", [DISTRIBUTED, CLOSURE], ids=["distributed", "closure"])
def test_a_model_may_be_called_inside_somebody_elses_scope(script: str) -> None:
    plain, *fitted = trained(script, "plain", "5MiB", "9MiB")
    assert len(plain) == 64
    assert fitted == [plain, plain]


def test_no_scope_of_the_program_is_touched() -> None:
    """An open scope that began before, inside or across measurements has no callback of ours."""
    with record_function("theirs"):
        first = Interval.start(0, CPU)
        assert first is not None
        inner = record_function("also theirs")
        inner.__enter__()
        kept = torch.zeros(1000, dtype=torch.uint8)
        assert first.stop() == 1000
        second = Interval.start(0, CPU)
        assert second is not None
        inner.__exit__(None, None, None)
        del kept
        assert second.stop() == 0


def test_a_profiler_that_the_program_starts_sees_all_and_ends_ours() -> None:
    ours = Interval.start(0, CPU)
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        torch.ones(1000).square()
        assert Interval.start(0, CPU) is None
    assert Background.running is None
    assert ours is not None
    assert ours.stop() is None
    assert "aten::square" in {event.name for event in theirs.events() or ()}
    again = Interval.start(0, CPU)
    assert again is not None
    assert again.close()


def test_a_profiler_that_waits_for_its_turn_is_left_alone() -> None:
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule) as theirs:
        assert Interval.start(0, CPU) is None
        theirs.step()
        torch.ones(1000).square()
    assert "aten::square" in {event.name for event in theirs.events() or ()}


def test_marks_are_told_from_the_allocations_of_the_program() -> None:
    def step() -> None:
        for _ in range(3):
            torch.empty(4097, dtype=torch.uint8)
            mark("one")
            torch.empty(1025)

    curve = memory_curve(step)
    assert [name for name, _ in curve.marks] == ["one"] * 3
    assert curve.peak_nbytes == 4100
    assert curve.end_nbytes == 0
    assert len(curve.nbytes) == 12


QUIET = """
import sys
import torch
from torch import nn
import elbowroom as er
assert not {"scipy", "rich", "numba", "triton", "statistics"} & set(sys.modules), "a slow import"
before = [torch.ones(1000) for _ in range(3)]
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
er.fit(model, budget="9MiB", exact=True, optimizer=optimizer)
for _ in range(6):
    model(torch.randn(512, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before.clear()
er.peak(lambda: torch.zeros(1000))
"""


def test_measuring_says_nothing() -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KINETO", "TORCH_CPP"))}
    found = subprocess.run(
        [sys.executable, "-c", QUIET], capture_output=True, text=True, timeout=200, env=clean
    )
    assert found.returncode == 0, found.stderr
    assert (found.stdout, found.stderr) == ("", "")
