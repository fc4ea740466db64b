"""C++ kernels of a region are compiled once its code is known to fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.compiled import elbowroom
from elbowroom.compiled.deferred import DeferredKernels
from elbowroom.compiled.written import Check
from uncompiled import nothing_compiled as nothing_compiled

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources of kernels that go to the C++ compiler, which is not there."""
    from torch._inductor.async_compile import AsyncCompile

    sources: list[str] = []

    def compile_source(_: Any, argtypes: list[str], source: str) -> Any:
        sources.append(source)
        return lambda *args: (source, *args)

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", compile_source)
    return sources


def module_with(deferred: DeferredKernels, source: str) -> dict[str, Any]:
    """What a module of Inductor's does as it is loaded."""
    from torch._inductor.async_compile import AsyncCompile

    with deferred.collecting():
        compiler = AsyncCompile()
        scope = {"fused": compiler.cpp_pybinding([], source), "other": 1}
        compiler.wait(scope)
    return scope


def test_kernels_wait_until_they_are_wanted(compiled: list[str]) -> None:
    deferred = DeferredKernels()
    one, two = module_with(deferred, "a"), module_with(deferred, "b")
    assert not compiled
    deferred.compile()
    assert compiled == ["a", "b"]
    assert one["fused"](1) == ("a", 1)
    assert two["fused"](2) == ("b", 2)
    assert one["other"] == 1
    deferred.compile()
    assert len(compiled) == 2


def test_a_kernel_that_is_called_before_compiles_itself_once(compiled: list[str]) -> None:
    scope = module_with(DeferredKernels(), "a")
    kernel = scope["fused"]  # as another thread may have it
    assert kernel(1) == kernel(1) == scope["fused"](1) == ("a", 1)
    assert compiled == ["a"]


def test_a_plan_that_does_not_fit_is_not_compiled(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.utils import fresh_cache

    real, graphs, before = Check.__call__, [], []

    def look(check: Check, lines: Any, graph: Any) -> None:
        graphs.append(graph.is_backward)
        if graphs != [False, True]:
            return real(check, lines, graph)
        before.append(len(compiled))
        check.over_nbytes = 1000  # of the first plan, when its forward has been written
        raise RuntimeError("too many bytes")

    monkeypatch.setattr(Check, "__call__", look)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    given = {"budget": 1_300_000}
    with fresh_cache():
        torch.compile(net, backend=elbowroom, options=given)(torch.randn(512, 64))
    assert graphs == [False, True, False, True]
    assert before == [0]
    assert compiled


def test_rates_are_measured_as_a_compiled_model_is_fitted(monkeypatch):
    """In the step in which the eager engine takes over they would take 32 MiB beside it."""
    measured = []
    monkeypatch.setattr(
        "elbowroom.fitting.compiled.rates", lambda *_, **given: measured.append(given)
    )
    model = er.fit(torch.compile(torch.nn.Linear(4, 4)), budget="1 GiB", exact=True)
    er.release(model)
    assert measured == [{"lossy": False, "moves": False}]


def test_a_second_refusal_compiles_nothing_though_forward_is_in_the_cache(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    said = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        step = torch.compile(net, backend=elbowroom, options={"budget": 1000, "exact": True})
        with pytest.raises(er.errors.BudgetTooSmall) as caught:
            step(torch.randn(256, 64)).sum().backward()
        said.append(str(caught.value))
        assert not compiled
    assert counters["inductor"]["fxgraph_cache_hit"]
    assert said[0] == said[1]
