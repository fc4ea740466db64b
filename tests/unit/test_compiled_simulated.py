"""Choices that were simulated for a region are known when it is traced again."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elbowroom.compiled import joint
from elbowroom.compiled.decision import Decision
from elbowroom.compiled.partition import Partitioner, listening
from elbowroom.compiled.simulated import remembering
from uncompiled import nothing_compiled as nothing_compiled
from uncompiled import without_codegen

pytestmark = pytest.mark.usefixtures("nothing_compiled")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("exact", [True, None])
def test_a_second_search_simulates_little_and_finds_the_same(exact, monkeypatch) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(512, 32)
    simulated = 0
    curve_of = joint.curve_of

    def counted(*args, **given):
        nonlocal simulated
        simulated += 1
        return curve_of(*args, **given)

    monkeypatch.setattr(joint, "curve_of", counted)

    def decide(room: int | None) -> tuple[Decision, int]:
        nonlocal simulated
        simulated = 0
        torch._dynamo.reset()
        found: list[Decision] = []
        with listening(found.append):
            backend = without_codegen(Partitioner(room, False, exact))
            torch.compile(net, backend=backend)(x).square().mean().backward()
        return found[0], simulated

    room = int(0.45 * decide(None)[0].plain_nbytes)
    alone, many = decide(room)
    assert not alone.is_plain
    with remembering():
        first, as_many = decide(room)
        second, few = decide(room)
        other, more = decide(int(1.2 * room))
    assert first == second == alone
    assert as_many == many
    assert few < many / 4
    assert other == decide(int(1.2 * room))[0]
    assert more > few
