"""elbowroom run: scripts that call torch.compile stay compiled, inside the budget."""

from pathlib import Path

import pytest
import torch

from elbowroom.cli.run import _ScriptRun
from elbowroom.cli.script import run_script
from elbowroom.errors import BudgetTooSmall
from elbowroom.runtime import compiler
from elbowroom.units import parse_budget
from uncompiled import nothing_compiled as nothing_compiled
from uncompiled import uncompiled as uncompiled

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    # Dynamo asks its inputs for their gradients, and hides the warning but from who raises it.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

TRAIN = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(2)))

    def forward(self, x):
        return self.blocks(x)

def loss_of(out):
    return out.square().mean()

def whole(x):
    optimizer.zero_grad()
    loss = loss_of(net(x))
    loss.backward()
    optimizer.step()

def in_one(x):
    return loss_of(net(x))

_, out, way = sys.argv
torch.manual_seed(0)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
called = net
if way == "model":
    called = torch.compile(net)
elif way == "in place":
    net.compile(fullgraph=True)
elif way == "forward":
    net.forward = torch.compile(net.forward)
elif way == "model and loss":
    called, loss_of = torch.compile(net), torch.compile(loss_of)
elif way == "model with loss":
    in_one = torch.compile(in_one)
elif way == "step":
    whole = torch.compile(whole)
for step in range(3):
    x = torch.randn(32, 64, 32, generator=torch.Generator().manual_seed(step))
    if way == "step":
        whole(x)
        continue
    optimizer.zero_grad()
    loss = in_one(x) if way == "model with loss" else loss_of(called(x))
    loss.backward()
    optimizer.step()
torch.save(net.state_dict(), out)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


WAYS = ["model", "in place", "forward", "model and loss", "model with loss", "step"]


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_script_is_planned_in_its_graphs_and_keeps_its_bits(
    way: str, script: Path, tmp_path: Path, uncompiled
) -> None:
    out, expected = tmp_path / "out.pt", tmp_path / "expected.pt"
    assert run_script(script, [str(expected), way]) == 0
    torch._dynamo.reset()
    uncompiled.clear()
    running = _ScriptRun("4 MiB", True, None, None)
    assert running.of(script, [str(out), way]) == 0
    assert any("custom_partitioner_fn" in options for options in uncompiled)
    (told,) = running.summaries()
    budget = parse_budget("4 MiB")
    assert told.predicted_nbytes <= budget < told.plain_nbytes
    rows = {row[0]: row for row in told.rows()}
    assert rows["peak, planned"][3] == "planned inside torch.compile"
    assert rows["exact"][3].endswith("against plain torch.compile")
    assert not compiler.ran_eagerly()
    states = torch.load(out), torch.load(expected)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


@pytest.mark.parametrize("way", ["model", "model with loss"])
def test_a_budget_that_graphs_cannot_reach_says_the_least(
    way: str, script: Path, tmp_path: Path, uncompiled
) -> None:
    running = _ScriptRun("1 MiB", True, None, None)
    with pytest.raises(BudgetTooSmall, match="this compiled region needs at least"):
        running.of(script, [str(tmp_path / "out.pt"), way])


def test_nothing_is_left_behind_in_torch(script: Path, tmp_path: Path, uncompiled) -> None:
    before = torch._TorchCompileInductorWrapper.__call__
    _ScriptRun("1 GiB", True, None, None).of(script, [str(tmp_path / "out.pt"), "model"])
    assert torch._TorchCompileInductorWrapper.__call__ is before
