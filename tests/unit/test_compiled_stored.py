"""What a second start knows of the plans of graphs that come from Inductor's cache."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import elbowroom as er
from elbowroom.compiled.decision import Decision, Loaded, store
from elbowroom.compiled.written import Check
from elbowroom.runtime.attach import opener_of

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
MADE = Decision(700, 300, 900, 50, 3, 400, is_lossy=True, is_plain=False, noise=0.125)


def loaded(*, forward: int = 0, backward: int = 0, regions: int = 1) -> Loaded:
    """What is read back of a decision, and of the peaks of both graphs."""
    with Loaded() as found:
        for _ in range(regions):
            store(MADE, forward, is_backward=False)
        store(MADE, backward, is_backward=True)
    return found


def test_a_decision_comes_back_with_the_code() -> None:
    counters["inductor"]["elbowroom_noise"] += 7  # of an earlier region
    found = loaded(forward=600, backward=720)
    assert found.decision == MADE
    assert found.peak_nbytes == 720
    assert loaded(regions=2).decision is None
    with Loaded() as nothing:
        pass
    assert nothing.decision is None


def test_what_was_above_the_room_is_known_again() -> None:
    for peak_nbytes, above in ((720, 20), (700, 0), (0, 0)):
        check = Check(700, False, raises=True)
        check.load(loaded(backward=peak_nbytes))
        assert check.made == [MADE]
        assert check.above_nbytes() == above
    check = Check(2000, False, raises=True)
    check.made.append(replace(MADE, noise=0.5))  # was decided now
    check.load(loaded())
    assert [one.noise for one in check.made] == [0.5]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.square().mean()


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of loops do nothing, so that nothing is compiled by C++; a cache of its own."""
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    with fresh_cache():
        yield
    torch._dynamo.reset()


def test_a_graph_with_symbols_from_the_cache_serves_what_its_plan_is_for(
    no_kernels,
) -> None:
    """It served calls of any size, and a larger call had the plan of a smaller one."""

    def start() -> tuple[Any, list[Decision]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net()
        standing = sum(p.nbytes for p in model.parameters())
        called = torch.compile(model, dynamic=True)
        er.fit(called, budget=standing + 330 * 2**10, exact=True)
        for rows in (512, 768):
            called(torch.randn(rows, 32)).backward()
            model.zero_grad()
        fitting = opener_of(called)
        found = [twin.limit // 32 for twin in fitting._plans.twins], fitting.regions
        assert er.summary(called).predicted_nbytes is not None
        er.release(called)
        return found

    limits, first = start()
    assert len(limits) == 2
    assert 512 <= limits[0] < 768 <= limits[1] < 2048
    before = counters["aot_autograd"]["autograd_cache_hit"]
    assert start() == (limits, first)
    assert counters["aot_autograd"]["autograd_cache_hit"] == before + 2
