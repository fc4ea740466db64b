"""Codes of residual streams in compiled graphs, and how a step with codes comes into its room."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elbowroom.compiled import codable, lossy, order
from elbowroom.compiled.decide import Search
from elbowroom.compiled.joint import Step
from elbowroom.compiled.noise import ErrorReach
from elbowroom.compiled.partition import Decision, Partitioner, listening
from elbowroom.compiled.readers import Extent, reading_of
from uncompiled import without_codegen

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS = 64, 1024
SUMS = torch.ops.aten.add.Tensor, torch.ops.aten.addmm.default


class Gated(nn.Module):
    """A gated block behind a norm, beside a residual stream."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act, self.norm = act, nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(self.act(self.gate(h)) * self.up(h))


def gradient(
    depth: int, act: Callable[[Tensor], Tensor] = F.silu, **settings: Any
) -> tuple[Tensor, Decision]:
    """The gradient of all weights under a partitioner's settings, and its decision."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, x = nn.Sequential(*(Gated(act) for _ in range(depth))), torch.randn(ROWS, WIDTH)
    found: list[Decision] = []
    with listening(found.append):
        compiled = torch.compile(net, backend=without_codegen(Partitioner(**settings)))
        compiled(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()]), found[0]


@pytest.mark.parametrize(
    ("act", "is_exact"), [(F.silu, False), (lambda g: torch.exp(-g), True)], ids=["silu", "exp"]
)
def test_a_residual_sum_has_a_code_where_products_of_it_gate_themselves(
    act: Callable[[Tensor], Tensor], is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exponential that gates nothing has a slope in a small range only."""
    seen: list[Extent] = []

    def code(search: Search, step: Step, *_: Any, **__: Any) -> tuple[Step, int, float]:
        joint = search.joint
        ends = {
            n for n in joint.required if n.target in SUMS and n.meta["val"].numel() == ROWS * WIDTH
        }
        base = search.judge({*ends, *joint.inputs})
        assert base is not None
        one = lossy._with_statistics(search, base)
        after, gradients = joint.parts(one.saved)[1], joint.gradients()
        seen.extend(reading_of(n, after, gradients).use for n in one.saved if n in ends)
        return step, 0, 0.0

    monkeypatch.setattr("elbowroom.compiled.partition.code", code)
    gradient(3, act, room_nbytes=10**6, exact=False)
    assert len(seen) == 2
    assert (Extent.EXACT in seen) is is_exact


@pytest.mark.parametrize("exact", [False, None])
def test_both_gradients_of_a_gated_product_are_made_before_what_reads_them(
    exact: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its operands and their gradients stand while the products of one of these run."""
    peaks = []

    def code(search: Search, step: Step, *_: Any, **__: Any) -> tuple[Step, int, float]:
        kept = [n for n in search.joint.required if n.target is torch.ops.aten.mm.default]
        base = search.judge({*kept, *search.joint.inputs})
        assert base is not None
        peaks.append(base.curves[1].peak_nbytes)
        return step, 0, 0.0

    monkeypatch.setattr("elbowroom.compiled.partition.code", code)
    for moves in (True, False):
        if not moves:
            monkeypatch.setattr(order, "_loops_first", lambda *_: None)
        got, _ = gradient(3, room_nbytes=10**6, exact=exact)
        monkeypatch.setattr("elbowroom.compiled.partition.code", code)
        plain, _ = gradient(3, exact=True)
        assert torch.allclose(got, plain, rtol=1e-4, atol=1e-7)
    assert peaks[0] < peaks[1]


def test_codes_that_nearly_fit_lose_what_is_computed_again_soonest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def code(search: Search, step: Step, *_: Any, **__: Any) -> tuple[Step, int, float]:
        joint, base = search.joint, search.plain
        reach, variants = ErrorReach(joint, base), codable.ladder()
        coded = list(codable.codes_of(joint, base, variants[-1]))
        start = lossy._choice(joint, reach, base, coded, None, variants, 10**9)
        assert start is not None
        room = int(0.97 * start.peak_nbytes)
        found = list(lossy._emptied(search, reach, [start], room, 10**9, None, variants))
        tried.append((start, room, found))
        return step, 0, 0.0

    monkeypatch.setattr("elbowroom.compiled.partition.code", code)
    gradient(4, room_nbytes=10**6, exact=False)
    start, room, found = tried[0]
    assert found
    assert all(one.peak_nbytes <= room for one in found)
    assert all(len(one.coded) < len(start.coded) for one in found)
    assert min(one.base.seconds for one in found) < 1.25 * start.base.seconds
