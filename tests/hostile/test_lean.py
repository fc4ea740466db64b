"""`er.saving("lean")`: the input of a norm waits for a ReLU, and nothing goes wrong meanwhile.

The tests of all modes (test_runtime.py, test_leaks.py, test_ledger.py, test_gradients.py) have
"lean" among them; here is what only it does.
"""

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.codecs import Dither, Sided
from elbowroom.codecs.compact import Coders
from elbowroom.errors import CodecError, RestoreError
from elbowroom.plan import Encode, Exact, Keep, Lean, Need
from programs import looking

FINE = {"upper": 256, "lower": 256, "plain": 256, "fold": 1}


@pytest.fixture(autouse=True)
def seeded(one_thread):
    torch.manual_seed(0)


def lean(**fields: Any):
    return looking("lean", min_nbytes=0, seed=1, **fields)


class Block(nn.Module):
    """conv, norm, then what `after` makes of (norm's output, the block's input), conv."""

    def __init__(self, after, norm=None, inner=None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if norm is None else norm
        self.after, self.inner = after, inner

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        h = self.norm(h if self.inner is None else self.inner(h))
        return self.two(self.after(h, x)).square().mean()


def images(**kwargs: Any) -> Tensor:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(6, 4, 8, 8, generator=draw).to(**kwargs)


def grads(net: nn.Module, x: Tensor, context: Any, autocast: bool = False) -> list[Tensor]:
    net.zero_grad()
    with context, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = net(x)
    loss.float().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def error(got: list[Tensor], exact: list[Tensor]) -> float:
    wrong = sum((a - b).double().square().sum() for a, b in zip(got, exact, strict=True))
    return float(wrong / sum(b.double().square().sum() for b in exact))


def of_norms(saved: Any) -> list[str]:
    """What was done to the inputs of norms (their statistics are smaller)."""
    rows = (row for row in saved.ledger.rows if row.consumer == "batch_norm")
    return [row.action for row in rows if row.before_nbytes > 200 * row.count]


def actions(saved: Any) -> set[tuple[str, str]]:
    return {(row.consumer, row.action) for row in saved.ledger.rows}


# --- who gets the mask ---

# WHOLE: the next op reads the norm's output exactly, which is rebuilt from the norm's input
ONE, TWO, WHOLE = "sided", "dither", "keep"
AFTER = {
    "relu": (lambda h, x: F.relu(h), ONE),
    "relu in place": (lambda h, x: F.relu(h, inplace=True), ONE),
    "relu method": (lambda h, x: h.relu(), ONE),
    "relu_ method": (lambda h, x: h.relu_(), ONE),
    "torch.relu": (lambda h, x: torch.relu(h), ONE),
    "metadata are asked for between": (lambda h, x: F.relu(h) if h.is_floating_point() else x, ONE),
    "relu and another reader after it": (lambda h, x: F.relu(h) + h, ONE),
    "two relus": (lambda h, x: F.relu(h) + torch.relu(h), ONE),
    "an op that saves nothing between, beside it": (lambda h, x: (h + 1, F.relu(h))[1], ONE),
    "another reader before": (lambda h, x: F.silu(h) + F.relu(h), TWO),
    "no relu": (lambda h, x: h, TWO),
    "add, then relu": (lambda h, x: F.relu(h + x), TWO),
    "add in place, then relu": (lambda h, x: F.relu(h.add_(x)), TWO),
    "relu6": (lambda h, x: F.relu6(h), TWO),
    "leaky_relu": (lambda h, x: F.leaky_relu(h), TWO),
    "leaky_relu in place": (lambda h, x: F.leaky_relu(h, inplace=True), TWO),
    "gelu": (lambda h, x: F.gelu(h), TWO),
    "clamp": (lambda h, x: h.clamp(min=0), TWO),
    "abs": (lambda h, x: h.abs(), WHOLE),
    "view, then relu": (lambda h, x: F.relu(h.view(6, -1)).view(h.shape), TWO),
    "transpose, then relu": (lambda h, x: F.relu(h.transpose(2, 3)), TWO),
    "half of it, then relu": (lambda h, x: torch.cat([F.relu(h[:3]), h[3:]]), TWO),
    "relu of the input of the block": (lambda h, x: F.relu(x * 2) + h, TWO),
    "expanded, then relu": (lambda h, x: F.relu(h[:1].expand(6, 4, 8, 8)), None),
}  # fmt: skip


@pytest.mark.parametrize(("after", "expected"), AFTER.values(), ids=AFTER.keys())
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "channels_last"])
def test_the_mask_is_taken_where_relu_follows_and_nowhere_else(after, expected, last):
    net, x = Block(after), images()
    if last and after is not AFTER["view, then relu"][0]:
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    exact = grads(net, x, contextlib.nullcontext())
    saved = lean(**FINE)
    near = grads(net, x, saved)
    assert error(near, exact) < 1e-3
    assert expected is None or of_norms(saved) == [expected]
    if expected == ONE:
        masks = {(op, how) for op in ("relu", "relu_") for how in ("bits", "rebuild")}
        assert actions(saved) & masks
    coarse = error(grads(net, x, lean()), exact)
    assert 0 < coarse < 0.5 or expected == WHOLE
    assert saved.ledger.held_nbytes == 0


def test_the_next_convolution_shares_the_code():
    net, saved = Block(AFTER["relu in place"][0]), lean()
    loss = net(images())
    with saved:
        loss = net(images())
    rows = {(row.consumer, row.action): row.after_nbytes for row in saved.ledger.rows}
    n = 6 * 4 * 8 * 8
    assert rows["batch_norm", "sided"] < n * 2.1 / 8
    assert rows["relu", "rebuild"] == n / 8  # the mask alone, for ReLU and for the convolution
    assert not any(row.consumer == "conv2d" and row.action == "dither" for row in saved.ledger.rows)
    loss.backward()


NORMS = {
    "eval": lambda: nn.BatchNorm2d(4).eval(),
    "not affine": lambda: nn.BatchNorm2d(4, affine=False),
    "no running statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "negative weights": lambda: negative(nn.BatchNorm2d(4)),
}


def negative(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    """ReLU then lets pass what lies below a threshold."""
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([-1.0, 1.0, 0.0, -0.5]))
        norm.bias.copy_(torch.tensor([0.3, -2.0, 1.0, 0.0]))
    return norm


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())
def test_every_batch_norm(norm):
    net, x = Block(AFTER["relu"][0], norm()), images()
    exact = grads(net, x, contextlib.nullcontext())
    saved = lean(**FINE)
    assert error(grads(net, x, saved), exact) < 1e-3
    assert of_norms(saved) == ["sided"]


def test_one_dimension_and_three():
    for net, x in (
        (nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)), (32, 8)),
        (nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU()), (5, 2, 30)),
        (nn.Sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.ReLU()), (2, 2, 7, 6, 5)),
    ):
        net = nn.Sequential(net, nn.Flatten(), nn.LazyLinear(1), Mean())
        data = torch.randn(x)
        net(data)
        exact = grads(net, data, contextlib.nullcontext())
        saved = lean(**FINE)
        assert error(grads(net, data, saved), exact) < 1e-3
        assert of_norms(saved) == ["sided"]


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_two_norms_in_a_row():
    net, x = Block(AFTER["relu"][0], inner=nn.BatchNorm2d(4)), images()
    exact = grads(net, x, contextlib.nullcontext())
    saved = lean(**FINE)
    assert error(grads(net, x, saved), exact) < 1e-3
    assert sorted(of_norms(saved)) == ["dither", "rebuild"]


@pytest.mark.parametrize("after", ["relu", "relu in place"])
def test_autocast(after):
    net, x = Block(AFTER[after][0]), images()
    exact = grads(net, x, contextlib.nullcontext(), autocast=True)
    saved = lean(**FINE)
    assert error(grads(net, x, saved, autocast=True), exact) < 2e-3
    assert of_norms(saved) == ["sided"]


# --- what stays exact ---


@pytest.mark.parametrize("after", [name for name, (_, kind) in AFTER.items() if kind == ONE])
@pytest.mark.parametrize("levels", [2, 4])
def test_relus_own_gradient_is_exact(after, levels):
    """Before the error of the next convolution's input comes in, there is only the mask."""
    x, weight = images(), torch.randn(6, 4, 8, 8)

    def gradient_of_norms_output(context: Any) -> Tensor:
        norm, start = nn.BatchNorm2d(4), (x * 1).requires_grad_()
        found = []
        with context:
            h = norm(start * 1)
            h.register_hook(found.append)
            y = AFTER[after][0](h, x)
        (y * weight).sum().backward()
        return found[0]

    exact = gradient_of_norms_output(contextlib.nullcontext())
    got = gradient_of_norms_output(lean(upper=levels, lower=levels, plain=levels))
    assert torch.equal(got, exact)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_is_held_raw(bad):
    net, x = Block(AFTER["relu"][0]), images()
    x[0, 0, 0, 0] = bad
    exact = grads(net, x, contextlib.nullcontext())
    saved = lean()
    got = grads(net, x, saved)
    assert of_norms(saved) == ["raw"]
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(got, exact, strict=True))


def test_one_that_is_needed_exactly_by_then_stays():
    """Between norm and ReLU another op asks for the norm's input as it is."""
    start = images()

    def run(context: Any) -> Tensor:
        x = start.clone().requires_grad_()
        norm = nn.BatchNorm2d(4)
        with context:
            h = x * 1
            y = norm(h)
            z = torch.sinh(h / 8).sum() + torch.sinh(h).sum()
            y = F.relu(y)
        (y.sum() + z).backward()
        return x.grad

    assert torch.equal(run(lean()), run(contextlib.nullcontext()))


# --- while it waits ---


def waiting_norm(context: Any) -> tuple[Tensor, Tensor]:
    """A norm has just ended inside the context; its input and its output."""
    h = images().requires_grad_() * 1
    out = nn.BatchNorm2d(4)(h)
    assert len(context._serving.waiting) == 1
    return h, out


def test_the_context_is_left_right_after_the_norm():
    saved = lean()
    with saved:
        h, out = waiting_norm(saved)
        del h
    assert not saved._serving.waiting
    assert of_norms(saved) == ["dither"]
    out.square().sum().backward()
    assert saved.ledger.held_nbytes == 0


def test_an_error_right_after_the_norm():
    saved, kept = lean(), []

    def fails() -> None:
        kept.extend(waiting_norm(saved))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), saved:
        fails()
    assert saved._open is None
    assert not saved._serving.waiting
    assert of_norms(saved) == ["keep"]  # nothing more is done while an error is on its way
    kept[1].sum().backward()
    with saved:  # and it can be opened again
        Block(AFTER["relu"][0])(images()).backward()


def test_an_error_in_relu_itself():
    saved = lean()
    with saved:
        _, out = waiting_norm(saved)
        with pytest.raises(TypeError):
            F.relu(out, wrong=1)
        F.relu(out).sum().backward()
    assert of_norms(saved) == ["sided"]


def test_an_error_of_the_codec_closes_the_context(monkeypatch):
    def refuse(*args: Any) -> None:
        raise CodecError("no")

    monkeypatch.setattr(Coders, "of", refuse)
    saved = lean()
    where = r"no \(saving float32 \(6, 4, 8, 8\) for 'batch_norm'"
    with pytest.raises(CodecError, match=where), saved:
        _graph = waiting_norm(saved)
    assert saved._open is None
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_graph_that_dies_while_it_waits_is_freed_at_once():
    gc.disable()
    try:
        saved = lean()
        with saved:
            h, out = waiting_norm(saved)
            slot = saved._serving.waiting[0].slot
            seen = weakref.ref(h)
            del h
            assert saved.ledger.held_nbytes > 0
            del out
            assert seen() is None
            assert slot() is None
            assert saved.ledger.held_nbytes == 0
            F.relu(torch.ones(4, requires_grad=True) * 2).sum().backward()
    finally:
        gc.enable()


def test_backward_while_it_waits_is_exact_and_frees():
    saved, x = lean(), images().requires_grad_()
    norm, upstream = nn.BatchNorm2d(4), torch.randn(6, 4, 8, 8)
    (exact,) = torch.autograd.grad(norm(x * 1), x, upstream)
    with saved:
        for _ in range(3):
            out = norm(x * 1)
            assert saved.ledger.held_nbytes > 0
            (got,) = torch.autograd.grad(out, x, upstream)
            assert saved.ledger.held_nbytes == 0
            assert torch.equal(got, exact)
    assert not saved._serving.waiting


def test_a_change_in_place_while_it_waits_is_refused():
    saved = lean()
    with saved:
        h, out = waiting_norm(saved)
        h.detach().mul_(2)
        y = F.relu(out)
    with pytest.raises(RestoreError, match="modified by an inplace operation"):
        y.sum().backward()


def test_tightening_while_it_waits():
    saved = looking("lean", min_nbytes=0, seed=1)
    with saved:
        h, out = waiting_norm(saved)
        del h
        saved.tighten(Lean(plain=256))
        assert saved._sources.slots()[0].value.label == "dither"
        F.relu(out).sum().backward()
    assert of_norms(saved) == ["dither"]


def test_tightening_from_keep_to_lean():
    net, x = Block(AFTER["relu"][0]), images()
    exact = grads(net, x, contextlib.nullcontext())
    net.zero_grad()
    saved = looking("keep", min_nbytes=0)
    with saved:
        loss = net(x)
        saved.tighten(Lean(**FINE))
    loss.backward()
    assert of_norms(saved) == ["dither"]
    assert error([p.grad for p in net.parameters()], exact) < 1e-3


# --- several backwards, several graphs ---


def test_retain_graph_gives_the_same_bits_twice():
    net = Block(AFTER["relu in place"][0])
    with lean():
        loss = net(images())
    one, two = (
        torch.autograd.grad(loss, list(net.parameters()), retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
def test_double_backward(inside):
    def penalty(context: Any) -> list[Tensor]:
        net, x = Block(AFTER["relu"][0]), images().requires_grad_()
        with contextlib.ExitStack() as stack:
            stack.enter_context(context)
            loss = net(x)
            if not inside:
                stack.close()
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
            (1e3 * g).square().sum().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    assert error(penalty(lean(**FINE)), penalty(contextlib.nullcontext())) < 0.01


def test_two_graphs_in_flight_in_one_context():
    net = Block(AFTER["relu"][0])
    xs = images(), images().flip(0) * 2
    exact = [grads(net, x, contextlib.nullcontext()) for x in xs]
    net.zero_grad()
    saved = lean(**FINE)
    with saved:
        one, two = (net(x) for x in xs)
    parameters = list(net.parameters())
    first = torch.autograd.grad(one, parameters)
    second = torch.autograd.grad(two, parameters)
    assert error(list(first), exact[0]) < 1e-3
    assert error(list(second), exact[1]) < 1e-3
    assert of_norms(saved) == ["sided"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_inside(reentrant):
    """The norm lies before the checkpoint, the ReLU in it: nobody saves there, so it waits on."""
    net, x = Block(AFTER["relu"][0]), images().requires_grad_()

    def run(context: Any) -> tuple[Any, list[Tensor]]:
        net.zero_grad()
        with context:
            h = net.norm(net.one(x))
            y = checkpoint(lambda h: net.two(F.relu(h)), h, use_reentrant=reentrant)
            loss = F.silu(y).mean()
        loss.backward()
        return context, [p.grad.clone() for p in net.parameters()]

    _, exact = run(contextlib.nullcontext())
    saved, near = run(lean(**FINE))
    assert not saved._serving.waiting
    assert error(near, exact) < 1e-3
    assert saved.ledger.held_nbytes == 0


# --- a policy of the user's own ---


def test_any_policy_may_ask_for_the_mask():
    def policy(site: Any) -> Any:
        exact = Exact()(site)
        if site.need is Need.LOSSY and site.consumer == "batch_norm":
            return Encode(Dither(levels=256), site.facts, Sided(256, 2))
        return exact if not isinstance(exact, Keep) else Keep("mine")

    net, x = Block(AFTER["relu"][0]), images()
    saved = looking(policy, min_nbytes=0)
    grads(net, x, saved)
    assert of_norms(saved) == ["sided"]


def test_it_is_smaller_than_three_levels():
    sizes = {}
    for name, settings in {"lean": {}, "dither": {"levels": 3}}.items():
        torch.manual_seed(0)
        net = nn.Sequential(*(_conv_norm_relu(4 if i else 1) for i in range(4)))
        saved = er.saving(name, min_nbytes=0, seed=1, **settings)
        with saved:
            loss = net(torch.randn(4, 1, 32, 32)).mean()
        sizes[name] = saved.ledger.after_nbytes
        loss.backward()
    assert sizes["lean"] < sizes["dither"]


def _conv_norm_relu(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
    )
