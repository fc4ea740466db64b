"""Loops of planned graphs end the rows that fill no vector as plain torch.compile has them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.codegen.cpp import KernelOpStats, TilingSelect

from elbowroom.compiled import Regions, Settings, backend
from elbowroom.compiled.tails import (
    Tails,
    _computed,
    _end_of,
    _ended,
    _leaves_few,
    ends_as_forward,
    ends_as_gradients,
)

PART = ([16], [1], KernelOpStats({"exp": 1, "load": 19}, {}, 2))
FEW = ([16], [1], KernelOpStats({"exp": 1, "load": 19}, {"load": 2}, 1))
SCALAR = ([], [], KernelOpStats())


def no_vectors() -> Any:
    return SCALAR


def test_how_a_loop_ends_is_read_and_changed() -> None:
    ends = {"part": PART, "few": FEW, "scalar": SCALAR}
    for end, tiling in ends.items():
        assert _end_of(tiling) == end
        assert _ended(tiling, end, no_vectors) is tiling
    for other in ("part", "few", "scalar"):
        assert _end_of(_ended(PART, other, no_vectors)) == other
        assert _end_of(_ended(FEW, other, no_vectors)) == other
    assert _end_of(_ended(SCALAR, "part", no_vectors)) == "scalar"  # it can have none
    assert _ended(SCALAR, "part", lambda: PART)[:2] == PART[:2]
    assert PART[2].mask_op_count == 2  # a copy was changed


@pytest.mark.parametrize(("size", "few"), [(33, True), (40, True), (48, False), (43, False)])
def test_rows_of_which_little_is_left(size: int, few: bool, monkeypatch) -> None:
    isa = SimpleNamespace(nelements=lambda dtype: 16)
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", lambda: isa)
    assert _leaves_few(torch.empty(16, size)) is few
    assert not _leaves_few(torch.empty(16, size, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_rows_of_dtypes_for_which_inductor_has_no_number(dtype: torch.dtype, monkeypatch) -> None:
    """A model in float64 ran in the eager engine, by a KeyError."""
    isa = SimpleNamespace(nelements=lambda dtype: {torch.float32: 16}[dtype])
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", lambda: isa)
    assert _leaves_few(torch.empty(16, 33, dtype=dtype))
    assert not _leaves_few(torch.empty(16, 48, dtype=dtype))


def test_what_is_known_of_forward_holds_for_what_backward_computes_again(monkeypatch) -> None:
    tails, seen = Tails(), []
    tails.ends = {(False, "log"): "scalar", (False, "exp"): "part", (True, "exp"): "few"}
    monkeypatch.setattr(
        "elbowroom.compiled.tails._selecting", lambda act: seen.append(act) or _none()
    )
    with tails.following():
        follow = seen[0]
    assert follow([(True, "log")], PART, no_vectors)[1] == []
    assert _end_of(follow([(True, "exp")], PART, no_vectors)) == "few"
    assert follow([(True, "exp"), (True, "log")], PART, no_vectors) is PART  # plain has two loops
    assert follow([(True, "erf")], PART, no_vectors) is PART


def test_a_copy_for_gradients_ends_as_in_plain_backward_and_its_original_as_in_forward() -> None:
    """Sines of a rotary embedding: one by one in forward, in vectors in backward."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    given, copied = (graph.call_function(torch.ops.aten.sin.default, (x,)) for _ in range(2))

    def names_of(node: fx.Node) -> list[tuple[bool, str]]:
        made = SimpleNamespace(get_origins=lambda: {node})
        body = SimpleNamespace(_body=SimpleNamespace(op_counts={"sin": 1}), node=made)
        return _computed(SimpleNamespace(args=[body]), is_backward=True)

    assert names_of(given) == [(True, given.name)]
    ends_as_gradients(copied, given)
    ends_as_forward(given)
    assert names_of(given) == [(False, given.name)]
    assert names_of(copied) == [(True, given.name)]
    tails = Tails()
    tails.ends = {(False, "sin"): "scalar", (True, "sin"): "part", (True, "cos"): "few"}
    assert tails.apart == ("sin",)


def _none():
    from contextlib import nullcontext

    return nullcontext()


def test_without_plain_code_the_plan_is_compiled_and_a_warning_says_so(monkeypatch, caplog) -> None:
    """The whole model ran in the eager engine."""
    given: list[Tails | None] = []

    def compile_plan(*args: Any, fills: bool, tails: Tails | None = None) -> Any:
        given.append(tails)
        if tails is None:
            args[-1].wants_tails = True
            raise RuntimeError("the code of plain torch.compile has to be known first")
        return len

    def fail(*_: Any) -> Tails:
        raise ZeroDivisionError("an error of Inductor\nwith a long story")

    monkeypatch.setattr(backend, "_compiled", compile_plan)
    monkeypatch.setattr(backend, "_plain_tails", fail)
    gm = fx.symbolic_trace(torch.nn.Identity())
    assert backend.compile_region(gm, [torch.ones(2)], Regions(Settings(1000)), {}) is len
    assert given[0] is None
    select = TilingSelect.select_tiling
    with given[1].following():
        assert TilingSelect.select_tiling is select
    assert "(ZeroDivisionError: an error of Inductor)" in caplog.text
    assert "may differ by a rounding, though exact=True" in caplog.text
