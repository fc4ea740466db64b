"""What backward takes, by the graph that a forward has built: beside what it really takes."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.fitting.model_state import ModelState
from elbowroom.fitting.options import FitOptions
from elbowroom.fitting.planner import Planner
from elbowroom.fitting.rehearse import rehearse
from elbowroom.fitting.signature import Signature
from elbowroom.measure.clocks import levels_of
from elbowroom.measure.graph import graph_of
from elbowroom.measure.peak import peak
from elbowroom.plan.backward import BackwardOp, Graph, run
from elbowroom.plan.build_problem import build_problem
from elbowroom.plan.make import plain_peak
from elbowroom.plan.rehearsal import CAREFUL, LIKELY, with_backward
from elbowroom.plan.site import Rebuildable
from elbowroom.runtime.context import Context
from elbowroom.runtime.storage import WeakStorage

END = ((-1, 0),)  # the op's input needs no gradient


def chain(*takes: int) -> Graph:
    """Ops of these sizes, the first of forward first."""
    nodes = [BackwardOp(k, "Mul", (n,), ((k - 1, 0),)) for k, n in enumerate(takes)]
    return Graph(tuple(nodes), ((len(nodes) - 1, 0),))


def test_an_op_takes_what_comes_in_and_what_it_makes():
    assert [one.nbytes for one in run(chain(10, 30, 20))] == [50, 40, 10]


def test_a_cross_entropy_of_ours_takes_the_place_of_what_it_has_saved():
    first = BackwardOp(1, "_LogProbabilitiesBackward", (10,), ((0, 0),), workspace=2 - 10)
    loss = BackwardOp(2, "_NegativeLogLikelihoodBackward", (1,), ((1, 0),))
    graph = Graph((BackwardOp(0, "Mul", (10,), END), first, loss), ((2, 0),))
    # What is saved is counted apart: 10 of it become the gradient.
    assert [one.nbytes for one in run(graph)] == [1, 2, 10]


def test_a_view_hands_on_what_it_was_given():
    view = BackwardOp(1, "ViewBackward0", (10,), ((0, 0),))
    graph = Graph((BackwardOp(0, "Mul", (10,), END), view), ((1, 0),))
    assert [one.nbytes for one in run(graph)] == [10, 10]


def test_a_shortcut_waits_for_the_branch_beside_it():
    nodes = (
        BackwardOp(0, "Mul", (10,), END),
        BackwardOp(1, "Mul", (10,), ((0, 0),)),
        BackwardOp(2, "AddBackward0", (10,), ((0, 0), (1, 0))),
    )
    # The sum hands one gradient to both; what comes back is added to it, when nobody else has it.
    assert [one.nbytes for one in run(Graph(nodes, ((2, 0),)))] == [10, 20, 10]


def test_a_root_alone_runs_all_that_it_leads_to_beside_what_it_does_not():
    nodes = (
        BackwardOp(0, "Mul", (30,), END),
        BackwardOp(
            1, "Mul", (20,), ((0, 0),)
        ),  # another output of the same trunk: it gets no gradient
        BackwardOp(2, "Mul", (10,), ((0, 0),)),
    )
    assert [one.nth for one in run(Graph(nodes, ((1, 0), (2, 0))))] == [2, 1, 0]
    assert [one.nth for one in run(Graph(nodes, ((2, 0),)))] == [2, 0]


def test_a_gradient_of_a_leaf_stays():
    nodes = (
        BackwardOp(7, "AccumulateGrad", (100,), stays=True),
        BackwardOp(0, "Mul", (10,), END),
        BackwardOp(1, "Mul", (20,), ((1, 0), (0, 0))),
    )
    moments = run(Graph(nodes, ((2, 0),)))
    assert [(one.nbytes, one.stay) for one in moments] == [(130, 0), (10, 100), (10, 100)]


def saving(nth: int, nbytes: int, *reads: tuple[int, int], name: str = "Mul") -> BackwardOp:
    return BackwardOp(nth, name, (nbytes,), ((nth - 1, 0),), reads=reads)


def test_what_a_checkpoint_puts_back_goes_as_it_is_read():
    nodes = (saving(0, 10), saving(1, 20, (1, 0)), saving(2, 30, (2, 0)), saving(3, 40))
    graph = Graph(nodes, ((3, 0),), hidden=(((1, 3),),))
    assert [one.hidden for one in run(graph)] == [0, 50, 20, 0]


def test_what_two_ops_of_a_checkpoint_have_saved_counts_once_whatever_view_they_saved():
    nodes = (
        saving(0, 10),
        saving(1, 20),
        saving(2, 20, name="ViewBackward0"),
        saving(3, 5, (1, 0)),
        saving(4, 5, (2, 0), (3, 0)),
    )
    graph = Graph(nodes, ((4, 0),), hidden=(((1, 5),),))
    assert [one.hidden for one in run(graph)] == [25, 20, 0, 0, 0]


def test_what_a_checkpoint_begins_with_stays_once_it_was_asked_for():
    nodes = (saving(0, 10), saving(1, 20, (0, 0)), saving(2, 30, (1, 0)))
    graph = Graph(nodes, ((2, 0),), hidden=(((1, 3),),))
    # The storage of it is counted with the op that asks for it first, by whoever holds it.
    assert [one.hidden for one in run(graph)] == [20, 10, 0]


def test_a_checkpoint_puts_back_what_those_inside_of_it_begin_with():
    nodes = (
        saving(0, 1),
        saving(1, 10, (0, 0)),
        saving(2, 20, (1, 0)),
        saving(3, 30, (2, 0)),
        saving(4, 40, (3, 0)),
    )
    # The outer one runs ops 1 to 4; the first inner one 2, the second 3 and 4.
    graph = Graph(nodes, ((4, 0),), hidden=(((1, 2), (4, 5)), ((2, 3),), ((3, 4),)))
    # Op 4 needs 30 of the outer one, and 10 and 20, which the inner ones begin with, are back, too.
    assert [one.hidden for one in run(graph)] == [60, 31, 11, 1, 0]


def test_parameters_that_a_checkpoint_reads_are_there_anyway():
    nodes = (
        BackwardOp(9, "AccumulateGrad", (100,), stays=True),
        BackwardOp(1, "TBackward0", (100,), ((0, 0),)),
        BackwardOp(2, "MmBackward0", (10,), ((-1, 0), (1, 0)), reads=((1, 0),)),
    )
    graph = Graph(nodes, ((2, 0),), hidden=(((1, 3),),))
    assert {one.hidden for one in run(graph)} == {0}


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


class Nested(nn.Module):
    """Checkpoints inside of checkpoints, of blocks with a product that reads two results."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for k in range(0, 6, 3):
            x = checkpoint(self.piece, x, k, use_reentrant=False)
        return self.head(x).logsumexp(-1).mean()

    def piece(self, x: Tensor, k: int) -> Tensor:
        for block in self.blocks[k : k + 3]:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class HandMade(nn.Module):
    """A GELU of single ops in checkpoints, each of which makes more than it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(64, 256) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(256, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = checkpoint(self.block, x, up, down, use_reentrant=False)
        return x.logsumexp(-1).mean()

    def block(self, x: Tensor, up: nn.Module, down: nn.Module) -> Tensor:
        y = up(x)
        y = 0.5 * y * (1 + torch.tanh(0.8 * (y + 0.04 * y.pow(3))))
        out: Tensor = x + down(y)
        return out


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


class Strided(nn.Module):
    """Maps of half the size cost backward twice what they are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x).mean()
        return out


class Pointwise(nn.Module):
    """Pixels times matrices: no map is copied into another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 96, 1), nn.ReLU(), nn.Conv2d(96, 32, 1), nn.ReLU()),
            *(nn.Conv2d(32, 128, 1), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x).mean()
        return out


class Mixes(nn.Module):
    """Pixels times matrices, in the moment that takes most: oneDNN copies maps of many samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 64, 1), nn.Conv2d(64, 64, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x).mean()
        return out


class ChannelsLast(nn.Module):
    """Maps that lie as the library wants them. convolution: the second, of 64 channels."""

    def __init__(self, convolution: nn.Conv2d, *, weights: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(8, 64, 3), nn.ReLU(), convolution, nn.ReLU())
        if weights:
            self.layers.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x.contiguous(memory_format=torch.channels_last)).mean()
        return out


class Widens(nn.Module):
    """What a convolution makes is larger than what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 128, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x).mean()
        return out


class Sees(nn.Module):
    """A first convolution that reads more than it makes: of images, which need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(4, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x / 255).mean()
        return out


class Scans(nn.Module):
    """A first convolution of one channel, whose maps are the largest of all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.AvgPool2d(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x).mean()
        return out


class Normalized(nn.Module):
    """A batch norm, whose backward makes a map beside its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 64, 1), nn.BatchNorm2d(64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x).mean()
        return out


class Functions(nn.Module):
    """A derivative of several factors, each of which is a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 256)

    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(self.up(x)).mean()


class Biased(nn.Module):
    """Attention with a learned bias for every pair, as of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(64, 192), nn.Parameter(torch.zeros(4, 4, 128, 128))
        self.lift = nn.Linear(16, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, self.bias)
        out: Tensor = F.gelu(self.lift(y)).mean()
        return out


class Outer(nn.Module):
    """A product of two factors that are both smaller than it, as in a state-space model's step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Linear(32, 128), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.rows(x)[:, :, None] * self.columns(x)[:, None]).mean()
        return out


class Masked(nn.Module):
    """Each layer reads a window onto a large buffer, which stands whatever is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.register_buffer("mask", torch.ones(256, 1024))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.mask[:64, :64]
        return x.mean()


NETS = {
    "checkpointed": (Checkpointed, (8, 64, 64)),
    "nested checkpoints": (Nested, (16, 64, 64)),
    "checkpointed by hand": (HandMade, (16, 64, 64)),
    "graph attention": (Attends, (500, 32)),
    "recurrent": (Recurrent, (16, 64, 32)),
    "convolution": (Convolves, (8, 3, 96, 96)),
    "outer product": (Outer, (64, 32)),
    "masked": (Masked, (8, 64, 64)),
    "strided": (Strided, (8, 3, 64, 64)),
    "images": (Sees, (16, 4, 84, 84)),
    "pointwise": (Pointwise, (8, 3, 48, 48)),
    "mixes few": (Mixes, (15, 3, 32, 32)),
    "mixes many": (Mixes, (16, 3, 32, 32)),
    "channels last": (lambda: ChannelsLast(nn.Conv2d(64, 64, 3)), (8, 8, 48, 48)),
    "wide, channels last": (lambda: ChannelsLast(nn.Conv2d(64, 256, 3)), (4, 8, 8, 8)),
    "wide, channels of maps last": (
        lambda: ChannelsLast(nn.Conv2d(64, 256, 3), weights=False),
        (4, 8, 8, 8),
    ),
    "depthwise, channels last": (
        lambda: ChannelsLast(nn.Conv2d(64, 64, 7, groups=64)),
        (8, 8, 16, 16),
    ),
    "small depthwise, channels last": (
        lambda: ChannelsLast(nn.Conv2d(64, 64, 3, groups=64)),
        (8, 8, 16, 16),
    ),
    "groups, channels last": (
        lambda: ChannelsLast(nn.Conv2d(64, 64, 5, groups=32)),
        (8, 8, 12, 12),
    ),
    "widens": (Widens, (8, 3, 48, 48)),
    "biased attention": (Biased, (4, 128, 64)),
    "scans": (Scans, (8, 1, 32, 96)),
    "normalized": (Normalized, (8, 3, 32, 32)),
    "erf": (Functions, (512, 32)),
}


ROWS, WIDTH, SLOTS = 4000, 16, 200
PLACES = torch.arange(ROWS) % SLOTS
COLUMNS = PLACES[:, None].expand(-1, WIDTH)


def reduced(x: Tensor, kind: str) -> Tensor:
    return torch.zeros(SLOTS, WIDTH).scatter_reduce(0, COLUMNS, x, kind)


def indexed(x: Tensor, kind: str) -> Tensor:
    return torch.zeros(SLOTS, WIDTH).index_reduce(0, PLACES, x, kind)


OPS = {  # of values between 0.1 and 0.9 [4000, 16]
    **{f"scatter {kind}": partial(reduced, kind=kind) for kind in ("amax", "amin", "mean", "prod")},
    **{f"index {kind}": partial(indexed, kind=kind) for kind in ("amax", "amin", "mean")},
    **{
        name: partial(getattr(torch, name), dim=1)
        for name in ("amax", "amin", "std", "var", "logsumexp", "norm", "cumprod", "logcumsumexp")
    },
    **{
        name: getattr(torch, name)
        for name in (
            *("abs", "asin", "atan", "cos", "cosh", "erf", "erfinv", "expm1", "log10", "log1p"),
            *("log2", "reciprocal", "rsqrt", "sin", "sinc", "sinh", "sqrt", "tan", "sigmoid"),
            *("max", "min", "prod", "neg", "exp", "log", "tanh", "relu", "square"),
        )
    },
    "var and mean": lambda x: torch.var_mean(x, 1)[0],
    "vector norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "clamp": lambda x: x.clamp(0.3, 0.6),
    "less something": lambda x: x - 1,
    "of something less": lambda x: torch.ones(ROWS, WIDTH) - x,
    "a row less": lambda x: torch.ones(ROWS, WIDTH) - x[:1],
    "a quotient": lambda x: x / torch.ones(ROWS, WIDTH),
    "of both": lambda x: x / (x * 2),
    "a divisor": lambda x: torch.ones(ROWS, WIDTH) / x,
    "a divisor of rows": lambda x: x / x[:, :1],
    "power": lambda x: x**3.5,
    "exponent": lambda x: 2**x,
    "maximum": lambda x: torch.maximum(x, torch.ones(ROWS, WIDTH)),
    "minimum": lambda x: torch.minimum(x, torch.ones(ROWS, WIDTH)),
    "atan2": lambda x: torch.atan2(x, torch.ones(ROWS, WIDTH)),
    "logaddexp": lambda x: torch.logaddexp(x, torch.ones(ROWS, WIDTH)),
    "addcmul": lambda x: torch.addcmul(torch.ones(1, WIDTH), x, x * 2),
    "distances": lambda x: torch.cdist(x[:600], torch.ones(600, WIDTH)),
    "prelu": lambda x: F.prelu(x, torch.ones(WIDTH, requires_grad=True)),
}


MATRICES = {
    **{name: getattr(torch.linalg, name) for name in ("cholesky", "det", "inv", "pinv")},
    "exponential": lambda x: 5e-3 * torch.matrix_exp(x - x.detach()),
    "qr": lambda x: torch.linalg.qr(x)[0],
    "lu": lambda x: torch.linalg.lu_factor(x)[0],
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "reflections": lambda x: torch.linalg.householder_product(x, torch.ones(len(x))),
    "solve": lambda x: torch.linalg.solve(x, torch.eye(len(x))),
    "triangle": lambda x: torch.linalg.solve_triangular(x, torch.eye(len(x)), upper=False),
}


@pytest.mark.parametrize("name", MATRICES)
def test_what_a_formula_makes_of_a_matrix_is_counted(name):
    noise = 0.02 * torch.randn(200, 200) + torch.eye(200)
    x = (noise @ noise.mT).requires_grad_()
    counted, took = counted_and_taken(x, MATRICES[name](x))
    assert 0.88 * took <= counted <= 1.12 * took, (took, counted)


def counted_and_taken(x: Tensor, y: Tensor) -> tuple[int, int]:
    """Returns the bytes that the backward of an op is thought to take, and those that it takes."""
    counted = max(one.nbytes for one in run(graph_of([y])))
    grad = torch.ones_like(y)
    return counted, grad.nbytes + peak(lambda: torch.autograd.grad(y, x, grad, retain_graph=True))


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
@pytest.mark.parametrize("name", OPS)
def test_what_a_formula_makes_beside_its_results_is_counted(name):
    x = (torch.rand(ROWS, WIDTH) * 0.8 + 0.1).requires_grad_()
    counted, took = counted_and_taken(x, OPS[name](x))
    assert 0.88 * took <= counted <= 1.12 * took, (took, counted)


def estimated(name: str) -> tuple[int, int, int]:
    """Returns the peak of a step, and its likely and its careful estimate, in bytes."""
    make, shape = NETS[name]
    torch.manual_seed(0)
    return estimated_of(make(), torch.randn(shape))


def estimated_of(model: nn.Module, x: Tensor) -> tuple[int, int, int]:
    """Returns the same of a model and what it is handed."""
    model_state = ModelState(model, None)
    static = model_state.nbytes
    model(x).backward()
    model.zero_grad()
    took = static + peak(lambda: model(x).backward())
    model.zero_grad()
    planner = Planner(FitOptions(1 << 40, min_nbytes=1), model_state, Context())
    planner.begin(model_state.memory(), Signature(None))
    forward_profile = rehearse(planner, model_state, lambda: model(x))
    assert forward_profile is not None
    born = model_state.unallocated_gradients(), 0
    likely, careful = (
        plain_peak(with_backward(forward_profile, *born, care)) for care in (LIKELY, CAREFUL)
    )
    return took, likely, careful


@pytest.mark.parametrize("name", NETS)
def test_a_forward_alone_tells_the_peak_of_the_step(name):
    took, likely, careful = estimated(name)
    assert 0.85 * took <= likely <= careful <= 1.27 * took, (took, likely, careful)
    assert likely <= 1.12 * took or "checkpoint" not in name, (took, likely)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", ["pointwise", "mixes few"])
def test_a_forward_alone_tells_the_peak_of_the_step_on_two_threads(name):
    took, likely, careful = estimated(name)
    assert 0.85 * took <= likely <= careful <= 1.27 * took, (took, likely, careful)


class HalfUsed(nn.Module):
    """Two branches, of which one gives nothing that the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 512)

    def forward(self, x: Tensor) -> Tensor:
        found = {"a": torch.tanh(self.used(x)), "b": torch.tanh(self.unused(x)).exp()}
        del found["b"]
        return found["a"].mean()


def test_what_a_branch_has_saved_goes_with_its_result():
    """As forward ends, nothing holds it any more; it was counted to the end of backward."""
    took, likely, _ = estimated_of(HalfUsed(), torch.randn(512, 64))
    assert 0.97 * took <= likely <= 1.03 * took, (took, likely)


def test_nothing_is_made_again_of_what_only_signs_are_held_of():
    """Of a leaky ReLU's input backward reads the signs; its output then stays as it is."""
    wide = [nn.Linear(64, 64) for _ in range(3)]
    model = nn.Sequential(wide[0], nn.LeakyReLU(), wide[1], nn.LeakyReLU(), wide[2])
    x = torch.randn(512, 64)
    model_state = ModelState(model, None)
    planner = Planner(FitOptions(1 << 40, min_nbytes=1), model_state, Context())
    planner.begin(model_state.memory(), Signature(None))
    forward_profile = rehearse(planner, model_state, lambda: model(x))
    assert forward_profile is not None
    built = build_problem(with_backward(forward_profile, (), 0), exact=True, recompute=False)
    least = sum(min(option.nbytes for option in item.options) for item in built.problem.items)
    with er.saving() as saved:
        loss = model(x).sum()
    assert least == saved.ledger.after_nbytes - x.nbytes  # which is there anyway
    loss.backward()


def test_a_rehearsal_lets_go_of_what_was_saved_last_at_once():
    """Else it would stand in the next moment, and be counted twice by plans that keep it."""
    model_state = ModelState(model := nn.Linear(8, 8), None)
    planner = Planner(FitOptions(1 << 40, min_nbytes=1), model_state, Context())
    planner.begin(model_state.memory(), Signature(None))
    gone = []

    def forward() -> Tensor:
        x = torch.randn(64, 8, requires_grad=True) * 2
        storage = WeakStorage(x)
        out: Tensor = model(x)
        del x
        gone.append(storage.expired())
        return out

    assert rehearse(planner, model_state, forward) is not None
    assert gone == [True]


def test_what_goes_as_a_moment_begins_counts_in_the_one_before():
    changes = [10, 30, 12, 4, 9, 8]
    assert levels_of(changes, [0, 2, 5], [False] * 3) == ([30, 9, 8], [0, 30, 9])


class Leaks(nn.Module):
    """A leaky ReLU of a sum that nobody else saves, whose result a product reads."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
        self.gate = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(self.one(x) + self.other(x)) * self.gate


def test_a_rehearsal_makes_nothing_again_from_bits_alone():
    """A plan that counted on that kept the tensor, which it had no room for."""
    model, x = Leaks(), torch.randn(256, 64)
    model_state = ModelState(model, None)
    planner = Planner(FitOptions(1 << 40, min_nbytes=1, exact=True), model_state, Context())
    planner.begin(model_state.memory(), Signature(None))
    forward_profile = rehearse(planner, model_state, lambda: model(x))
    assert forward_profile is not None
    sites = [save.site for storage in forward_profile.profile.storages for save in storage.saves]
    (read,) = [one for one in sites if one.consumer == "mul" and one.shape == (256, 64)]
    assert read.producer == "leaky_relu"
    assert read.rebuildable is Rebuildable.NO


def test_the_least_that_a_loss_reads_are_results_that_no_other_one_is_made_of():
    w = torch.randn(4, 4, requires_grad=True)
    hidden = torch.tanh(w)
    main, extra = hidden.exp(), hidden.sin()

    def names(*results: Tensor) -> set[str]:
        graph = graph_of(results)
        return {graph.nodes[at].name for at, _ in graph.least_roots}

    assert names(hidden, main) == names(main, hidden) == {"ExpBackward0"}
    assert names(main, extra, hidden) == {"ExpBackward0", "SinBackward0"}
    assert names(main, main.view(16)) == {"ViewBackward0"}
    values, indices = w.max(0)
    assert names(values) == {"MaxBackward0"}
    assert not graph_of([indices.float()]).least_roots
    assert names(main, extra.sum()) == {"SumBackward0"}  # one number is the loss
    pair = torch.linalg.qr(w)  # two results of one node
    assert len(graph_of(pair).least_roots) == 1
