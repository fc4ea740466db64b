"""What backward takes, by the graph that a forward has built: beside what it really takes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elbowroom.fitting.model_state import ModelState
from elbowroom.fitting.options import FitOptions
from elbowroom.fitting.planning import Planning
from elbowroom.fitting.rehearse import rehearsed
from elbowroom.fitting.signature import Signature
from elbowroom.measure.peak import peak
from elbowroom.plan.backward import Graph, Node, run
from elbowroom.plan.make import plain_peak
from elbowroom.plan.rehearsal import CAREFUL, LIKELY, with_backward
from elbowroom.runtime.context import Context

END = ((-1, 0),)  # the op's input needs no gradient


def chain(*takes: int) -> Graph:
    """Ops of these sizes, the first of forward first."""
    nodes = [Node(k, "Mul", (n,), ((k - 1, 0),)) for k, n in enumerate(takes)]
    return Graph(tuple(nodes), ((len(nodes) - 1, 0),))


def test_an_op_takes_what_comes_in_and_what_it_makes():
    assert [one.nbytes for one in run(chain(10, 30, 20))] == [50, 40, 10]


def test_a_view_hands_on_what_it_was_given():
    view = Node(1, "ViewBackward0", (10,), ((0, 0),))
    graph = Graph((Node(0, "Mul", (10,), END), view), ((1, 0),))
    assert [one.nbytes for one in run(graph)] == [10, 10]


def test_a_shortcut_waits_for_the_branch_beside_it():
    nodes = (
        Node(0, "Mul", (10,), END),
        Node(1, "Mul", (10,), ((0, 0),)),
        Node(2, "AddBackward0", (10,), ((0, 0), (1, 0))),
    )
    # The sum hands one gradient to both; what comes back is added to it, when nobody else has it.
    assert [one.nbytes for one in run(Graph(nodes, ((2, 0),)))] == [10, 20, 10]


def test_a_gradient_of_a_leaf_stays():
    nodes = (
        Node(7, "AccumulateGrad", (100,), stays=True),
        Node(0, "Mul", (10,), END),
        Node(1, "Mul", (20,), ((1, 0), (0, 0))),
    )
    moments = run(Graph(nodes, ((2, 0),)))
    assert [(one.nbytes, one.stay) for one in moments] == [(130, 0), (10, 100), (10, 100)]


def test_what_a_checkpoint_puts_back_goes_as_it_is_read():
    nodes = [Node(k, "Mul", (10,), ((k - 1, 0),), saves=True) for k in range(4)]
    graph = Graph(tuple(nodes), ((3, 0),), hidden=((1, 3),))
    assert [one.hidden for one in run(graph)] == [0, 20, 10, 0]


class Block(nn.Module):
    """A part of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 300)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x).logsumexp(-1).mean()


class Attends(nn.Module):
    """Messages along edges, weighted, as a graph attention network sends them."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.score = nn.Linear(32, 64), nn.Linear(64, 1)
        self.register_buffer("edges", torch.randint(0, 500, (2, 4000)))

    def forward(self, x: Tensor) -> Tensor:
        h, (to, by) = self.lift(x), self.edges
        weight = torch.sigmoid(self.score(h)[by])
        out = torch.zeros_like(h).index_add(0, to, h[by] * weight)
        return out.square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0].square().mean()
        return out


class Convolves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depth = nn.Conv2d(3, 32, 4, 4), nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.depth(x).permute(0, 2, 3, 1)
        x = x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)
        return x.square().mean()


NETS = {
    "checkpointed": (Checkpointed, (8, 64, 64)),
    "graph attention": (Attends, (500, 32)),
    "recurrent": (Recurrent, (16, 64, 32)),
    "convolution": (Convolves, (8, 3, 96, 96)),
}


@pytest.mark.parametrize("name", NETS)
def test_a_forward_alone_tells_the_peak_of_the_step(name):
    make, shape = NETS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    owned = ModelState(model, None)
    static = owned.nbytes
    model(x).backward()
    model.zero_grad()
    took = static + peak(lambda: model(x).backward())
    model.zero_grad()
    planning = Planning(FitOptions(1 << 40, min_nbytes=1), owned, Context())
    planning.begin(owned.stock(), Signature(None))
    heard = rehearsed(planning, owned, lambda: model(x))
    assert heard is not None
    born = owned.unborn_gradients(), 0
    likely, careful = (plain_peak(with_backward(heard, *born, care)) for care in (LIKELY, CAREFUL))
    assert 0.85 * took <= likely <= careful <= 1.25 * took, (took, likely, careful)
