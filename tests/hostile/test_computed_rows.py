"""Functions of gathered rows, which are computed as they are read: no program can tell."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.measure import peak
from elbowroom.runtime.context import PROCESS
from elbowroom.runtime.gathered import Gathered, here
from elbowroom.runtime.replay.replay import Replay

EDGES, NODES, D = 20001, 700, 64  # rows of 4.9 MiB, in five parts

pytestmark = pytest.mark.filterwarnings("ignore:this saving context changed nothing")


@pytest.fixture(autouse=True)
def rows_wait(monkeypatch):
    monkeypatch.setattr(PROCESS, "rows_wait", True)


PROGRAMS: dict[str, Callable] = {}


def program(run: Callable) -> Callable:
    """Adds a program: (h, k, small, large, i, j, a) -> loss, and what it looks at afterwards.

    h, k: of the nodes [N, D]; small [E, 1], large [E, D]: of the edges; i, j, a: indices [E]
    """
    PROGRAMS[run.__name__] = run
    return run


def added(rows: Tensor, at: Tensor) -> Tensor:
    return rows.new_zeros(NODES, *rows.shape[1:]).index_add_(0, at, rows)


def reduced(rows: Tensor, at: Tensor, kind: str = "amax", **given: bool) -> Tensor:
    index = at.view(-1, 1).expand_as(rows)
    return rows.new_zeros(NODES, D).scatter_reduce_(0, index, rows, kind, **given)


UNARY = {
    "relu": torch.relu,
    "f_relu": F.relu,
    "leaky": lambda r: F.leaky_relu(r, 0.2),
    "elu": F.elu,
    "silu": F.silu,
    "gelu": F.gelu,
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "tanh": lambda r: r.tanh(),
    "exp": torch.exp,
    "negative": lambda r: -r,
    "square": lambda r: r.square(),
    "absolute": abs,
    "shifted": lambda r: 2 - r,
    "half": lambda r: r / 2 + 1,
    "inverse": lambda r: 1 / (r.exp() + 1),
    "scaled": lambda r: torch.mul(r, 3.0),
    "alpha": lambda r: torch.add(r, r.new_ones(1, D), alpha=2),
    "shared": lambda r: r * torch.linspace(0, 1, D) - torch.ones(1, D),
    "power": lambda r: r**2,
    "root": lambda r: (r.abs() + 1).sqrt().log(),
}


def of_one(run: Callable) -> Callable:
    return lambda h, k, small, large, i, j, a: (
        added(run(h.index_select(0, i)), a).sin().sum(),
        list,
    )


def over_two(run: Callable) -> Callable:
    return lambda h, k, small, large, i, j, a: (
        added(run(h.index_select(0, i), k.index_select(0, j)), a).sin().sum(),
        list,
    )


PROGRAMS.update({f"unary_{name}": of_one(run) for name, run in UNARY.items()})
PAIRS = {
    "sum": lambda r, s: r + s,
    "difference": lambda r, s: r - s,
    "product": lambda r, s: r * s,
    "quotient": lambda r, s: r / (s.exp() + 1),
    "gate": lambda r, s: torch.sigmoid(r + s) * s,
    "joined": lambda r, s: torch.cat([r, s - r], dim=-1),
    "joined_thrice": lambda r, s: torch.cat((r, s, r * s), 1).relu(),
    "products_summed": lambda r, s: (r * s).sum(-1, keepdim=True) * s,
    "means": lambda r, s: (r - s).mean(dim=-1, keepdim=True),
    "twice": lambda r, s: r * r + s * r,
    "softmax_like": lambda r, s: (r - s).exp() / ((r - s).exp() + 1),
    "deep": lambda r, s: ((((r + s).relu() * s).tanh() + r).exp() * 0.1 + s).sigmoid() * r + s,
}
PROGRAMS.update({f"pair_{name}": over_two(run) for name, run in PAIRS.items()})


@program
def small_factor(h, k, small, large, i, j, a):
    r = F.leaky_relu(h.index_select(0, i) * small + k.index_select(0, j))
    return added(r * small, a).sin().sum(), list


@program
def rows_of_edges(h, k, small, large, i, j, a):
    return added((h.index_select(0, i) + large).relu() * large, a).sin().sum(), list


@program
def parameter_of_all_rows(h, k, small, large, i, j, a):
    w = torch.linspace(-1, 1, D, requires_grad=True)
    s = ((h.index_select(0, i) + k.index_select(0, j)).tanh() * w).sum(-1, keepdim=True)
    return added(s * h.index_select(0, j), a).sin().sum(), lambda: [w.grad]


@program
def attention(h, k, small, large, i, j, a):
    q, v = h.view(NODES, 4, 16).index_select(0, i), k.view(NODES, 4, 16).index_select(0, j)
    s = (q * v).sum(dim=-1) / 4
    e = s.exp()
    w = e / (added(e, a) + 1).index_select(0, a)
    return added((v * w.unsqueeze(-1)).view(-1, D), a).sin().sum(), list


@program
def attention_without_view(h, k, small, large, i, j, a):
    q, v = h.view(NODES, 4, 16).index_select(0, i), k.view(NODES, 4, 16).index_select(0, j)
    s = (q * v).sum(dim=-1, keepdim=True).tanh()
    return added(v * s, a).sin().sum(), list


for kind in ("amax", "amin"):
    for include in (True, False):

        def extreme(h, k, small, large, i, j, a, kind=kind, include=include):
            r = (h.index_select(0, i) - k.index_select(0, j)).relu()
            return reduced(r, a, kind, include_self=include).sin().sum(), list

        PROGRAMS[f"extreme_{kind}_{include}"] = extreme


@program
def extreme_of_gathered(h, k, small, large, i, j, a):
    return reduced(h.index_select(0, i), a, include_self=False).sin().sum(), list


@program
def extreme_of_scaled(h, k, small, large, i, j, a):
    return reduced(h.index_select(0, i) * small, a, include_self=False).sin().sum(), list


@program
def extreme_with_ties_and_no_number(h, k, small, large, i, j, a):
    h = h.round()
    h = torch.where(h == 2, float("nan"), h)
    made = reduced(h.index_select(0, i), a, "amin", include_self=False)
    return made.nan_to_num().sin().sum(), list


@program
def extreme_out_of_place(h, k, small, large, i, j, a):
    r, start = h.index_select(0, i), k * 1
    index = a.view(-1, 1).expand_as(r)
    return (torch.scatter_reduce(start, 0, index, r, "amax") + start).sin().sum(), list


@program
def extremes_and_sum(h, k, small, large, i, j, a):
    r = h.index_select(0, i).sigmoid()
    most, least = reduced(r, a, include_self=False), reduced(r, a, "amin", include_self=False)
    return (most.sin() + least.cos() * added(r, a)).sum(), list


@program
def result_is_looked_at(h, k, small, large, i, j, a):
    r = h.index_select(0, i).tanh()
    s = added(r, a)
    return (s.sum() + (r * 2).sum()), lambda: [r.detach().clone(), type(r), r.shape]


@program
def intermediate_keeps_its_gradient(h, k, small, large, i, j, a):
    r = h.index_select(0, i)
    s = r.sigmoid()
    s.retain_grad()
    return added(s * r, a).sin().sum(), lambda: [s.grad]


@program
def intermediate_is_hooked(h, k, small, large, i, j, a):
    seen, r = [], h.index_select(0, i)
    r.register_hook(lambda g: (seen.append(g.clone()), 2 * g)[1])
    s = r.sigmoid()
    s.register_hook(lambda g: seen.append(g.sum()))
    return added(s * r, a).sin().sum(), lambda: seen


@program
def intermediate_changes_in_place(h, k, small, large, i, j, a):
    r = h.index_select(0, i) + k.index_select(0, j)
    r.mul_(2)
    r.relu_()
    s = F.relu(r - 1, inplace=True)
    return added(s * r, a).sin().sum(), list


@program
def source_changes_in_place(h, k, small, large, i, j, a):
    r = h.index_select(0, i).sin() + k.index_select(0, j)
    h.mul_(3)
    s = r.tanh()
    k.data.zero_()
    return (added(s, a) + h + k).sin().sum(), list


@program
def factor_changes_in_place(h, k, small, large, i, j, a):
    f = small.detach().clone()
    r = h.index_select(0, i).exp() + f
    f.zero_()
    return added(r, a).sin().sum(), list


@program
def a_view_of_the_source_changes(h, k, small, large, i, j, a):
    h = h.clone()
    r = h.index_select(0, i).tanh()
    h[3:5].zero_()
    return added(r, a).sin().sum(), list


@program
def without_gradient_inside(h, k, small, large, i, j, a):
    with torch.no_grad():
        r = h.index_select(0, i).relu()
    s = h.index_select(0, i).relu()
    with torch.no_grad():
        t = s * 2
    return added(s, a).sin().sum() + t.sum() + r.sum(), list


@program
def detached(h, k, small, large, i, j, a):
    r = h.index_select(0, i) + k.index_select(0, j)
    d = r.detach()
    d.mul_(2)  # which changes r, too
    return added(r.detach() + r, a).sin().sum(), lambda: [d]


@program
def backward_twice(h, k, small, large, i, j, a):
    r = (h.index_select(0, i) * k.index_select(0, j)).sigmoid()
    loss = added(r, a).sin().sum()
    loss.backward(retain_graph=True)
    return loss, list


def penalty(h, k, small, large, i, j, a):
    r = (h.index_select(0, i) * k.index_select(0, j)).tanh() * small + large
    loss = added(r, a).sin().sum() + reduced(r, a).square().sum() * 0.01
    wanted = [x for x in (h, k, small, large) if x.requires_grad]
    grads = torch.autograd.grad(loss, wanted, create_graph=True)
    return loss + sum(g.square().sum() for g in grads), list


@program
def gradient_for_rows_alone(h, k, small, large, i, j, a):
    r = h.index_select(0, i).tanh()
    s = r * k.index_select(0, j)
    loss = added(s, a).sin().sum()
    grads = torch.autograd.grad(loss, [r, s], retain_graph=True)
    return loss, lambda: list(grads)


@program
def autocast_inside(h, k, small, large, i, j, a):
    with torch.autocast("cpu", torch.bfloat16):
        r = h.index_select(0, i).tanh() * k.index_select(0, j)
        s = added(r, a) @ torch.eye(D)
    return s.float().sin().sum(), list


@program
def another_dtype(h, k, small, large, i, j, a):
    r = h.index_select(0, i) * small.double()
    return added(r, a).sin().sum(), list


@program
def in_a_checkpoint(h, k, small, large, i, j, a):
    def run(h, k, small):
        r = torch.sigmoid(h.index_select(0, i) + k.index_select(0, j)) * small
        return added(r, a) + reduced(r, a) + (r * r).sum(-1, keepdim=True).mean()

    return checkpoint(run, h, k, small, use_reentrant=False).sin().sum(), list


@program
def a_constant_of_another_dtype(h, k, small, large, i, j, a):
    r = h.index_select(0, i) * torch.ones(D, dtype=torch.float64)
    s = h.index_select(0, i) * torch.tensor(2.0, dtype=torch.float64) + torch.ones(D).long()
    return added(r, a).sin().sum() + added(s, a).sin().sum(), list


@program
def shapes_do_not_fit(h, k, small, large, i, j, a):
    return added(h.index_select(0, i) + torch.ones(D + 1), a).sum(), list


@program
def wider_by_broadcasting(h, k, small, large, i, j, a):
    r = h.index_select(0, i).unsqueeze(1) * torch.ones(1, 2, 1)
    return added((r + 1).sum(1), a).sin().sum(), list


@program
def over_the_edges(h, k, small, large, i, j, a):
    r = h.index_select(0, i).sigmoid()
    return added(r - r.mean(0) + r.sum(dim=(0, 1)) * 1e-6, a).sin().sum(), list


@program
def joined_by_edges(h, k, small, large, i, j, a):
    r, s = h.index_select(0, i).relu(), k.index_select(0, j)
    return added(torch.cat([r, s]), torch.cat([a, a])).sin().sum(), list


@program
def saved_by_others(h, k, small, large, i, j, a):
    r = torch.cat([h.index_select(0, i), k.index_select(0, j) - h.index_select(0, i)], -1)
    w = torch.linspace(-1, 1, 2 * D * D).view(D, 2 * D).requires_grad_()
    return added(F.linear(r, w).relu(), a).sin().sum(), lambda: [w.grad]


def found(run: Callable, context, *, wants: bool) -> list:
    torch.manual_seed(0)
    h, k = torch.randn(2, NODES, D).unbind()
    small, large = torch.rand(EDGES, 1), torch.randn(EDGES, D)
    leaves = [h, k, small, large]
    for at, x in enumerate(leaves):
        x.requires_grad_(wants or at == 1)
    i, j, a = torch.randint(NODES, (3, EDGES)).unbind()
    try:
        with context:
            loss, look = run(*(x * 1 for x in leaves), i, j, a)
        loss.backward()
    except RuntimeError as error:
        return [type(error).__mro__[-3], str(error).split(":")[0][:40]]
    return [loss.detach(), *(x.grad for x in leaves), *look()]


def alike(one, other) -> bool:
    if isinstance(one, Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize("wants", [True, False], ids=["all", "one"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_cannot_tell(name, wants):
    plain = found(PROGRAMS[name], nullcontext(), wants=wants)
    for _ in range(3):
        ours = found(PROGRAMS[name], er.saving(), wants=wants)
        assert [alike(x, y) for x, y in zip(ours, plain, strict=True)] == [True] * len(plain)
    assert here.rows is None
    assert here.call is None


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("width", [1, 7, 50, 300])
@pytest.mark.parametrize("name", [*UNARY, *PAIRS])
def test_bits_do_not_depend_on_where_a_part_ends(name, width, threads):
    """The last elements of a thread's share may be rounded by another kernel than vectors are."""
    edges, before = 400_003 // width, torch.get_num_threads()
    torch.set_num_threads(threads)

    def run(context) -> list[Tensor]:
        torch.manual_seed(0)
        h, k = torch.randn(2, NODES, width).unbind()
        i, j, a = torch.randint(NODES, (3, edges)).unbind()
        h.requires_grad_()
        k.requires_grad_()
        with context:
            r = (h * 1).index_select(0, i)
            if name in PAIRS:
                r = PAIRS[name](r, (k * 1).index_select(0, j))
            elif name in ("shared", "alpha"):
                r = r * torch.linspace(0, 1, width)
            else:
                r = UNARY[name](r)
            loss = added(r, a).sin().sum()
        loss.backward()
        return [loss.detach(), h.grad, *([k.grad] if name in PAIRS else [])]

    try:
        plain = run(nullcontext())
        assert all(map(torch.equal, plain, run(nullcontext()))), "plain does not repeat its bits"
        assert all(map(torch.equal, plain, run(er.saving())))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("wants", [True, False], ids=["all", "one"])
def test_a_gradient_of_a_gradient_is_right(wants):
    """It sums in another order: rows are computed again for it, from what they are made of."""
    plain = found(penalty, nullcontext(), wants=wants)
    ours = found(penalty, er.saving(), wants=wants)
    for one, other in zip(ours, plain, strict=True):
        assert one is other or torch.allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("pair_")])
def test_results_wait(name):
    with er.saving():
        x = torch.randn(NODES, D, requires_grad=True) * 1
        i, j = torch.randint(NODES, (2, EDGES)).unbind()
        r = PAIRS[name[5:]](x.index_select(0, i), x.index_select(0, j))
        assert type(r) is (Tensor if "means" in name else Gathered)


class Gated(nn.Module):
    """Messages behind a gate, as in a residual gated graph network, and their extreme."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.queries, self.values = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        gate = torch.sigmoid(self.keys(x).index_select(0, i) + self.queries(x).index_select(0, j))
        rows = gate * self.values(x).index_select(0, j)
        return added(rows, i) + reduced(rows, i, include_self=False) + x


@pytest.mark.parametrize("way", [{}, {"policy": "dither", "levels": 16}])
def test_peaks_have_no_edges_and_steps_are_replayed(way, monkeypatch):
    left, begun = [], []
    enter = Replay.__enter__
    monkeypatch.setattr(Replay, "_diverge", lambda self, *_: left.append(self))
    monkeypatch.setattr(Replay, "__enter__", lambda self: (begun.append(self), enter(self))[1])
    torch.manual_seed(0)
    model = nn.ModuleList(Gated() for _ in range(3))
    x = torch.randn(NODES, D)
    i, j = torch.randint(NODES, (2, EDGES)).unbind()

    def step(context) -> list[Tensor]:
        model.zero_grad()
        with context:
            h = x
            for layer in model:
                h = layer(h, i, j)
            loss = h.square().mean()
        loss.backward()
        return [p.grad for p in model.parameters()]

    plain = step(nullcontext())
    for _ in range(4):
        ours = step(er.saving(**way))
    assert len(begun) >= 2
    assert not left
    if not way:
        assert all(map(torch.equal, ours, plain))
    off = sum((o - p).square().sum() for o, p in zip(ours, plain, strict=True))
    assert off <= 0.01 * sum(p.square().sum() for p in plain)
    del plain, ours, off
    model.zero_grad()
    rows = EDGES * D * 4
    assert peak(lambda: step(nullcontext())) > 12 * rows
    model.zero_grad()
    assert peak(lambda: step(er.saving(**way))) < 4 * rows
