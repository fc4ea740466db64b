"""Inductor without its code generation, which takes 10 s a net on a CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from elbowroom.fitting.compiled_steps import CompiledSteps
from elbowroom.fitting.region_steps import RegionSteps
from elbowroom.runtime import compiler


def without_codegen(partition: Callable[..., Any]) -> Callable[..., Any]:
    """A backend that partitions as Inductor does, and runs the graphs as they are written."""

    def compile_graph(gm, inputs):
        return torch._functorch.aot_autograd.make_boxed_func(gm.forward)

    return aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )


def inductor_without_codegen(seen: list[dict[str, Any]]) -> Callable[..., Any]:
    """What stands in for Inductor's compile_fx; the options of each graph go to `seen`."""

    def run(gm, inputs, *, config_patches=None, **_):
        options = config_patches or {}
        seen.append(options)
        partition = options.get("custom_partitioner_fn") or min_cut_rematerialization_partition
        return without_codegen(partition)(gm, inputs)

    return run


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test of a module that imports this begins and ends without compiled code."""
    monkeypatch.setattr(compiler, "_said", False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Meanwhile all that goes to Inductor runs so. Gives the options of each graph, as it comes.

    Its peaks are none of the code that plans are made for, so none is measured.
    """
    import torch._inductor.compile_fx as compile_fx

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(compile_fx, "compile_fx", inductor_without_codegen(seen))
    monkeypatch.setattr(CompiledSteps, "wants", lambda *_: False)
    monkeypatch.setattr(RegionSteps, "watch", lambda _, region: region)
    return seen
