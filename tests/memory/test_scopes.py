"""Peaks are measured without touching the scopes, profilers and terminal of the program."""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import elbowroom as er
from elbowroom.measure import allocations, mark, memory_curve, peak, rates
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


def in_backward(act: Callable[[], object]) -> None:
    """Calls this while the engine runs."""
    x = torch.ones(10, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: void(act()))
    y.sum().backward()


def void(_: object) -> None:
    """Takes a result away."""


def test_a_measurement_that_is_closed_in_a_backward_ends_after_it() -> None:
    """The engine would put its profiler back: nothing could be measured any more in the process."""
    one = Interval.start(0, CPU)
    assert one is not None
    in_backward(one.close)
    assert one.is_abandoned
    assert Background.running is one
    assert peak(lambda: torch.zeros(1000, dtype=torch.uint8)) == 1000
    assert Background.running is None
    assert not allocations.is_busy()


def test_what_nobody_ends_ends_with_the_next_garbage() -> None:
    before = list(gc.callbacks)
    one = Interval.start(0, CPU)
    assert one is not None
    in_backward(one.close)
    in_backward(gc.collect)
    assert Background.running is one
    gc.collect()
    assert Background.running is None
    assert not allocations.is_busy()
    assert gc.callbacks == before


def test_one_that_another_thread_closes_makes_room_for_the_next() -> None:
    one = Interval.start(0, CPU)
    assert one is not None
    thread = threading.Thread(target=one.close)
    thread.start()
    thread.join()
    two = Interval.start(0, CPU)
    assert two is not None
    assert two.stop() == 0
    gc.collect()


def test_a_fitted_model_that_dies_in_a_backward_leaves_others_to_be_measured() -> None:
    held = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))]
    er.fit(held[0], budget="1 GiB")
    held[0](torch.ones(2, 8)).sum().backward()
    assert Background.running is not None

    def dies() -> None:
        held.clear()
        gc.collect()

    in_backward(dies)
    again = Interval.start(0, CPU)
    assert again is not None
    assert again.close()
    assert not allocations.is_busy()


def test_within_a_backward_none_begins() -> None:
    """Its profiler would be gone with the backward."""
    found: list[object] = []
    in_backward(lambda: found.append(Interval.start(0, CPU)))
    assert found == [None]
    with pytest.raises(RuntimeError, match="inside a backward"):
        in_backward(lambda: peak(lambda: None))
    with pytest.raises(RuntimeError, match="inside a backward"):
        in_backward(allocations.Allocations)
    assert not allocations.is_busy()


def test_a_code_that_is_timed_in_a_training_takes_little_memory() -> None:
    """It counts in the first step: 33 MiB of other work, where the budget was 11."""
    found = rates.Rates(CPU)
    assert peak(lambda: found["encode group"]) < 6 << 20
    assert found.fixed_s["encode group"] > 0


FORKS = """
import atexit, ctypes, os, sys, torch
import elbowroom as er
from torch import nn
net = nn.Linear(64, 64)
er.peak(lambda: net(torch.randn(64, 64)).sum().backward())
child = os.fork()
if child == 0:
    atexit.register(lambda: print("atexit"))
    net(torch.randn(64, 64)).sum().backward()
    ctypes.CDLL(None).printf(b"buffered by C\\n")
    sys.exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_ends_with_its_own_exit_code() -> None:
    """PyTorch's profiler alone would let it wait for ever for a thread that it does not have."""
    found = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=True
    )
    assert sorted(found.stdout.splitlines()) == ["atexit", "buffered by C", "child 7"]
