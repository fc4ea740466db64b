"""The peak of a GPU's allocator over a stretch of a program that resets the counter itself."""

import gc

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from elbowroom.measure.clocks import CudaMemory
from elbowroom.measure.cuda_peak import CudaPeak, allocated_nbytes
from elbowroom.measure.interval import Interval

CUDA = torch.device("cuda", 0)


class Allocator:
    """A caching allocator's two numbers, in bytes."""

    def __init__(self):
        self.now = self.peak = 0

    def rise(self, nbytes):
        """Allocates so much, and lets go of it."""
        self.peak = max(self.peak, self.now + nbytes)

    def reset(self, device=None):
        self.peak = self.now

    def stats(self, device=None):
        return {"allocated_bytes": {"all": {"current": self.now, "peak": self.peak}}}


@pytest.fixture
def allocator(monkeypatch):
    found = Allocator()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", found.reset)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", found.stats)
    return found


@pytest.fixture
def optimizer():
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def test_a_reset_by_the_program_hides_no_peak(allocator, optimizer):
    interval = Interval.start(0, CUDA)
    allocator.rise(700)  # forward and backward
    optimizer.step()
    torch.cuda.reset_peak_memory_stats()  # the next step of the program begins
    allocator.rise(30)
    assert interval.stop() == 700


def test_the_peak_of_an_optimizers_step_counts(allocator, optimizer):
    interval = Interval.start(0, CUDA)
    allocator.rise(700)
    optimizer.register_step_post_hook(lambda *_: None)
    optimizer.register_step_pre_hook(lambda *_: allocator.rise(900))
    optimizer.step()
    torch.cuda.reset_peak_memory_stats()
    assert interval.stop() == 900


def test_what_follows_the_stop_does_not_count(allocator, optimizer):
    peak = CudaPeak(CUDA)
    allocator.rise(700)
    assert peak.close() == 700
    allocator.rise(900)
    optimizer.step()
    assert peak.read() == peak.close() == 700


@pytest.mark.gpu
def test_levels_are_those_of_torch():
    x = torch.zeros(1 << 20, device="cuda")
    found = allocated_nbytes(x.device)
    assert found == (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())


def test_each_moment_has_its_own_peak(allocator, optimizer):
    memory = CudaMemory(CUDA)
    memory.begin(0)
    allocator.rise(500)
    memory.begin(1)
    allocator.now = 100
    allocator.rise(300)
    optimizer.step()
    torch.cuda.reset_peak_memory_stats()
    assert memory.levels() == ([500, 400], [0, 0])


@pytest.mark.parametrize("ends", [lambda peak: peak.close(), lambda peak: None])
def test_no_hook_is_left(allocator, ends):
    before = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    peak = CudaPeak(CUDA)
    ends(peak)
    del peak
    gc.collect()
    assert before == (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks))
