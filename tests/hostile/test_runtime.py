"""Everything that a training script may do to the runtime.

Each works exactly, or is refused with a clear sentence. Never a silently wrong gradient: DESIGN,
section 2 ("Bad input") and section 4.
"""

import contextlib
import multiprocessing
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.modules import module as torch_modules
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import elbowroom as er
from elbowroom.errors import (
    CodecError,
    ElbowroomError,
    PlanError,
    RestoreError,
    UnknownCodec,
    UnknownField,
)
from elbowroom.plan import Encode, Keep, Rebuild

Nothing = contextlib.nullcontext
MODES: dict[str, Callable[[], Any]] = {
    "keep": lambda: er.saving("keep", min_nbytes=0),
    "exact": lambda: er.saving(min_nbytes=0),
    "exact, no rebuild": lambda: er.saving(min_nbytes=0, rebuild=False),
    "lossless": lambda: er.saving("sparse_lossless", min_nbytes=0),
    "offload": lambda: er.saving("offload", from_nbytes=0, min_nbytes=0),
}
EXACT_MODES = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
ALL_MODES = pytest.mark.parametrize(
    "mode",
    [
        *MODES.values(),
        lambda: er.saving("dither", bits=2, min_nbytes=0),
        lambda: er.saving("lean", min_nbytes=0),
    ],
    ids=[*MODES.keys(), "dither", "lean"],
)


@pytest.fixture(autouse=True)
def clean(one_thread):
    """A fixed seed; afterwards nothing of ours is left in torch."""
    torch.manual_seed(0)
    yield
    assert nothing_is_left()


def nothing_is_left() -> bool:
    return (
        torch._C._len_torch_function_stack() == 0
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and not torch_modules._global_forward_hooks
        and not torch_modules._global_forward_pre_hooks
    )


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.BatchNorm1d(16)),
        *(nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 4)),
    )


def grads_of(net: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in net.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def x_of(n: int = 8) -> Tensor:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(n))


def train(forward: Callable[[nn.Module, Tensor], Tensor], context: Any) -> list[Tensor]:
    """Gradients of one step; `forward` gives the loss, inside the context."""
    net = make_net()
    torch.manual_seed(1)
    with context:
        loss = forward(net, x_of())
    loss.backward()
    return grads_of(net)


def plainly(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().sum()


# --- Changed in place before backward


def relu_then_linear(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.relu(x * 1)
    return y, F.linear(y, w)


def gelu_then_linear(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    source = x * 1
    return source, F.linear(F.gelu(source), w)


def norm_then_linear(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    source = x * 1
    return source, F.linear(F.layer_norm(source, (8,)), w)


def unknown(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    source = x * 1
    return source, source.pow(3) @ w


CHANGED = {
    "a mask": relu_then_linear,
    "a source": gelu_then_linear,
    "a norm's source": norm_then_linear,
    "kept": unknown,
}


@pytest.mark.parametrize("forward", CHANGED.values(), ids=CHANGED.keys())
@pytest.mark.parametrize("no_grad", [True, False], ids=["no_grad", "detach"])
@EXACT_MODES
def test_a_saved_tensor_that_was_changed_is_refused_or_harmless(forward, no_grad, mode):
    start, w = torch.randn(8, 8), torch.randn(8, 8)

    def grad(context: Any, change: bool) -> Tensor:
        x = start.clone().requires_grad_()
        with context:
            saved, y = forward(x, w.clone().requires_grad_())
        if change and no_grad:
            with torch.no_grad():
                saved.mul_(3)
        elif change:
            saved.detach().mul_(3)
        return torch.autograd.grad(y.sum(), x)[0]

    exact = grad(Nothing(), False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad(Nothing(), True)
    try:
        changed = grad(mode(), True)
    except RestoreError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        assert torch.equal(changed, exact)


@pytest.mark.parametrize("which", ["weight", "bias", "norm.weight", "norm.bias"])
@ALL_MODES
def test_a_changed_parameter_is_refused_or_harmless(which, mode):
    def grads(context: Any, change: bool) -> list[Tensor]:
        torch.manual_seed(0)
        first, norm, last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        x = x_of().requires_grad_()
        with context:
            y = last(norm(first(x)))
        parameters = {**dict(last.named_parameters()), **dict(norm.named_parameters(prefix="norm"))}
        if change:
            with torch.no_grad():
                parameters[which].add_(1)
        return torch.autograd.grad(y.square().sum(), [x, first.weight, norm.weight, last.weight])

    exact = grads(Nothing(), False)
    try:
        changed = grads(mode(), True)
    except RestoreError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
        assert which != "bias"
    else:
        assert which in ("bias", "norm.bias")
        if mode in MODES.values():
            assert same(changed, exact)


@EXACT_MODES
@pytest.mark.parametrize("names", [("bias",), ("weight",), ("bias", "weight")])
def test_parameters_swapped_through_data(mode, names):
    """`p.data = other` is seen by no version counter. What forward saved must not follow it.

    But autograd saves a parameter as the parameter that it is, with the data that it has.
    """

    def grads(context: Any, swap: bool) -> list[Tensor]:
        torch.manual_seed(0)
        norm, last = nn.LayerNorm(8), nn.Linear(8, 8)
        x = x_of().requires_grad_()
        with context:
            y = last(F.relu(norm(x * 2)))
        if swap:
            for p in (getattr(module, name) for module in (norm, last) for name in names):
                p.data = torch.full_like(p, 7.0)
        wanted = [x, norm.weight, norm.bias, last.weight, last.bias]
        return torch.autograd.grad(y.square().sum(), wanted)

    assert same(grads(mode(), True), grads(Nothing(), True))


@ALL_MODES
def test_a_silent_change_between_producer_and_consumer(mode):
    """A no_grad write into the producer's output changes no grad_fn: only the version tells."""

    def grads(context: Any) -> list[Tensor]:
        x = x_of().requires_grad_()
        w = torch.eye(8, requires_grad=True)
        with context:
            for producer in (F.gelu, F.relu, F.silu, lambda x: F.layer_norm(x, (8,)), F.dropout):
                torch.manual_seed(0)
                y = producer(x * 1)
                with torch.no_grad():
                    y.mul_(2).add_(1)
                z = F.linear(y, w)
                F.linear(F.relu(z), w)
        return torch.autograd.grad(z.sum(), w)

    got, exact = grads(mode()), grads(Nothing())
    if mode in MODES.values():
        assert same(got, exact)
    else:
        assert (got[0] - exact[0]).norm() < exact[0].norm()


def _by_array(y: Tensor) -> None:
    y.detach().numpy()[:] *= 2


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda y: y.data.mul_(2),
    "again": lambda y: (y.data.mul_(2), y.data.add_(1)),
    "a part": lambda y: y.data[2:].mul_(2),
    "by index": lambda y: y.data.__setitem__(0, 3.0),
    "masked": lambda y: y.data.masked_fill_(y.data > 0.5, -1.0),
    "an array": _by_array,
}


@EXACT_MODES
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_change_through_data_between_producer_and_consumer(mode, write):
    """No version of the tensor tells of it: `y.data` counts its own."""

    def grads(context: Any) -> list[Tensor]:
        x = x_of().requires_grad_()
        w, loss = torch.eye(8, requires_grad=True), torch.zeros(())
        with context:
            for producer in (F.gelu, F.silu, lambda x: F.layer_norm(x, (8,)), lambda x: x * 0.7):
                y = producer(x * 1)
                write(y)
                loss = loss + F.linear(y, w).square().sum()
        return torch.autograd.grad(loss, [w, x])

    for _ in range(3):  # the later ones follow a script
        assert same(grads(mode()), grads(Nothing()))


@EXACT_MODES
def test_logits_that_are_masked_through_data(mode):
    """As older attention does it: `attn.data.masked_fill_(mask, -inf)`."""
    mask = torch.ones(8, 8, dtype=torch.bool).triu(1)

    def grads(context: Any) -> list[Tensor]:
        x = x_of().requires_grad_()
        w = torch.eye(8, requires_grad=True)
        with context:
            q = F.linear(x, w)
            logits = torch.bmm(q[None], q.t()[None])
            logits.data.masked_fill_(mask, -float("inf"))
            loss = torch.bmm(logits.softmax(-1), q[None]).square().sum()
        return torch.autograd.grad(loss, [w, x])

    for _ in range(3):
        assert same(grads(mode()), grads(Nothing()))


@EXACT_MODES
@pytest.mark.parametrize("copied", [Tensor.clone, Tensor.bfloat16], ids=["clone", "cast"])
def test_a_copy_of_the_users_that_was_changed_without_autograd(mode, copied):
    """Rounding it, say: it is no copy any more, though its node is still that of one."""

    def grads(context: Any) -> list[Tensor]:
        x = x_of().requires_grad_()
        with context:
            y = F.gelu(x * 1)
            rounded = copied(y)
            with torch.no_grad():
                rounded.mul_(4).round_().add_(1)
            loss = (y * rounded).sum()
        return torch.autograd.grad(loss, x)

    assert same(grads(mode()), grads(Nothing()))


@EXACT_MODES
def test_a_copy_of_the_same_dtype_leaves_the_original_as_it_is(mode):
    """What is rebuilt may be overwritten: it must not be the tensor that is held."""

    def outcome(context: Any) -> list[Tensor]:
        x, w = x_of().requires_grad_(), torch.eye(8, requires_grad=True)
        with context:
            h = x * 2
            square = h * h
            z = F.relu(h.to(h.dtype, copy=True)) @ w
            loss = z.square().sum() + square.sum()
        grads = torch.autograd.grad(loss, [x, w])
        return [h.detach(), *grads]

    assert same(outcome(mode()), outcome(Nothing()))


@EXACT_MODES
def test_a_mask_of_inference_mode_that_changes_between_two_uses(mode):
    """It has no version that would tell."""

    def grads(context: Any) -> list[Tensor]:
        x = x_of().requires_grad_()
        with torch.inference_mode():
            mask = torch.zeros(8)
        with context:
            h = x * 1
            square = h * h
            scores = h * 0.5
            first = torch.softmax(scores + mask, -1)
            with torch.inference_mode():
                mask[::2] = -3.0
            second = torch.softmax(scores + mask, -1)
            loss = (first * second).sum() + square.sum()
        return torch.autograd.grad(loss, x)

    assert same(grads(mode()), grads(Nothing()))


@EXACT_MODES
def test_a_parameter_changed_between_two_ops_of_a_chain(mode):
    """BatchNorm, then its weight changes, then ReLU: the chain must not use the new weight."""

    def grads(context: Any) -> list[Tensor]:
        torch.manual_seed(0)
        x = x_of().requires_grad_()
        norm, last = nn.BatchNorm1d(8), nn.Linear(8, 8)
        with torch.no_grad():
            last.weight.copy_(torch.eye(8))
        with context:
            h = norm(x * 1)
            with torch.no_grad():
                norm.bias.add_(5)
            y = last(F.relu(h))
        return torch.autograd.grad(y.square().sum(), [last.weight])

    try:
        got = grads(mode())
    except RestoreError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        assert same(got, grads(Nothing()))


@EXACT_MODES
def test_chains_of_changes_in_place(mode):
    net = make_net()

    def grads(context: Any) -> list[Tensor]:
        with context:
            h = net[0](x_of()).relu_()
            h = h + 1
            h.mul_(2).sigmoid_()
            h = F.silu(net[3](h), inplace=True).add_(1)
            buffer = torch.zeros(8, 32)
            buffer[:, :16] = h
            buffer[:, 16:] = h.clone().exp_()
            loss = net[7](buffer[:, ::2]).square().sum()
        return torch.autograd.grad(loss, [net[0].weight, net[3].weight, net[7].weight])

    assert same(grads(mode()), grads(Nothing()))


# --- Several backwards, or none


@EXACT_MODES
def test_retain_graph_twice_and_partial_losses(mode):
    def grads(context: Any) -> list[Tensor]:
        net = make_net()
        torch.manual_seed(1)
        with context:
            y = net(x_of())
            one, two = y[:4].square().sum(), y[4:].exp().sum()
        one.backward(retain_graph=True)
        one.backward(retain_graph=True)
        two.backward()
        return grads_of(net)

    assert same(grads(mode()), grads(Nothing()))


@EXACT_MODES
def test_the_gradient_of_an_inner_tensor(mode):
    def grads(context: Any) -> list[Tensor]:
        net = make_net()
        torch.manual_seed(1)
        with context:
            h = net[:5](x_of())
            loss = net[5:](h * 1).square().sum()
        (inner,) = torch.autograd.grad(loss, h, retain_graph=True)
        loss.backward()
        return [inner, *grads_of(net)]

    assert same(grads(mode()), grads(Nothing()))


@EXACT_MODES
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
def test_double_backward(mode, inside):
    def grads(context: Any) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(
            *(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten()),
            *(nn.Linear(12, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1)),
        )
        x = torch.randn(4, 2, 8, requires_grad=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(context)
            loss = net(x).sum()
            if not inside:
                stack.close()
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
            penalty = (g.norm(dim=1) - 1).square().sum()
        penalty.backward()
        return [g.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]

    assert same(grads(mode()), grads(Nothing()))


@EXACT_MODES
@pytest.mark.parametrize("kind", ["parameter", "frozen", "leaf"])
def test_data_exchanged_of_what_is_multiplied_by(mode, kind):
    def grad(context: Any) -> list[Tensor]:
        torch.manual_seed(0)
        x, factor = torch.randn(8, requires_grad=True), torch.randn(8)
        match kind:
            case "parameter" | "frozen":
                factor = nn.Parameter(factor, requires_grad=kind == "parameter")
            case "leaf":
                factor.requires_grad_()
        with context:
            y = x * factor
        factor.data = torch.full((8,), 7.0)
        return [*torch.autograd.grad(y.sum(), [x])]

    assert same(grad(mode()), grad(Nothing()))


@EXACT_MODES
@pytest.mark.parametrize("activation", [F.silu, F.gelu, torch.sigmoid, F.relu])
def test_third_derivatives(mode, activation):
    def derivatives(context: Any) -> list[Tensor]:
        torch.manual_seed(0)
        x, scale = torch.randn(2, 300, requires_grad=True).unbind()
        with context:
            g = activation(x * scale).sum()
        found = []
        for weights in torch.randn(3, 300):
            (d,) = torch.autograd.grad(g, x, create_graph=True)
            found.append(d.detach())
            g = (d * weights + 0 * x).sum()
        return found

    assert same(derivatives(mode()), derivatives(Nothing()))


@EXACT_MODES
def test_two_graphs_in_flight(mode):
    def grads(context: Callable[[], Any]) -> list[Tensor]:
        net = make_net()
        torch.manual_seed(1)
        with context():
            one = plainly(net, x_of(6))
        with context():
            two = plainly(net, x_of(9))
        one.backward()
        two.backward()
        return grads_of(net)

    assert same(grads(mode), grads(Nothing))


@EXACT_MODES
def test_accumulation_and_one_context_around_it_all(mode):
    def grads(context: Any) -> list[Tensor]:
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        torch.manual_seed(1)
        with context:
            for step in range(4):
                plainly(net, x_of(6 + step)).backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
        return [*grads_of(net), *(p.detach() for p in net.parameters())]

    assert same(grads(mode()), grads(Nothing()))


@EXACT_MODES
def test_a_graph_abandoned_and_the_model_moved(mode):
    def grads(context: Callable[[], Any]) -> list[Tensor]:
        net = make_net()
        torch.manual_seed(1)
        with context():
            plainly(net, x_of())
        net.double()
        with context():
            loss = plainly(net, x_of().double())
        loss.backward()
        net.zero_grad()
        net.float()
        with context():
            loss = plainly(net, x_of())
        loss.backward()
        return grads_of(net)

    assert same(grads(mode), grads(Nothing))


class Boom(Exception):
    pass


class Explodes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        F.relu(x)
        raise Boom


@ALL_MODES
def test_an_error_in_forward_leaves_nothing_behind(mode):
    net = nn.Sequential(make_net(), Explodes())
    saved = mode()
    with pytest.raises(Boom), saved:
        net(x_of())
    assert nothing_is_left()
    assert same(train(plainly, Nothing()), train(plainly, Nothing()))
    with saved:  # the same object can be opened again
        loss = plainly(net[0], x_of())
    loss.backward()


@ALL_MODES
def test_an_error_in_backward_leaves_nothing_behind(mode):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise Boom

    net = make_net()
    saved = mode()
    with saved:
        loss = plainly(nn.Sequential(net[:3], net[3:]), Fails.apply(net[0](x_of()))[:, :8])
    with pytest.raises(Boom):
        loss.backward()
    del loss
    assert saved.ledger.held_nbytes == 0
    if mode in MODES.values():
        assert same(train(plainly, mode()), train(plainly, Nothing()))


# --- Composition


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@EXACT_MODES
def test_checkpoint_inside(reentrant, mode):
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = checkpoint(net[:3], x.requires_grad_(), use_reentrant=reentrant)
        return checkpoint(net[3:], h, use_reentrant=reentrant).square().sum()

    assert same(train(forward, mode()), train(forward, Nothing()))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@EXACT_MODES
def test_checkpoint_outside(reentrant, mode):
    def forward(context: Callable[[], Any]) -> Callable[[nn.Module, Tensor], Tensor]:
        def segment(net: nn.Module, x: Tensor) -> Tensor:
            with context():
                return net(x)

        def whole(net: nn.Module, x: Tensor) -> Tensor:
            x.requires_grad_()
            h = checkpoint(segment, net[:3], x, use_reentrant=reentrant)
            return checkpoint(segment, net[3:], h, use_reentrant=reentrant).square().sum()

        return whole

    assert same(train(forward(mode), Nothing()), train(forward(Nothing), Nothing()))


@EXACT_MODES
def test_autocast(mode):
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = net(x)
        with torch.autocast("cpu", torch.float16):
            return (net(x) + h).float().square().sum()

    assert same(train(forward, mode()), train(forward, Nothing()))


@EXACT_MODES
def test_inside_and_outside_of_save_on_cpu(mode):
    def inner(net: nn.Module, x: Tensor) -> Tensor:
        with save_on_cpu():
            h = net[:3](x)
        return plainly(net[3:], h)

    def outer(net: nn.Module, x: Tensor) -> Tensor:
        with mode():
            h = net[:3](x)
        return plainly(net[3:], h)

    exact = train(plainly, Nothing())
    assert same(train(inner, mode()), exact)
    assert same(train(outer, save_on_cpu()), exact)


@EXACT_MODES
def test_nested(mode):
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        with er.saving(min_nbytes=0) as inner:
            h = net[:5](x)
        assert inner.ledger.before_nbytes > 0
        return plainly(net[5:], h)

    outer = mode()
    assert same(train(forward, outer), train(plainly, Nothing()))
    assert outer.ledger.before_nbytes > 0


def test_nested_lossy_inside_exact_stays_exact_outside():
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = net[:5](x)
        with er.saving("dither", bits=1, min_nbytes=0):
            z = net[5:](h)
        return z.square().sum() + h.exp().sum()

    exact, lossy = train(forward, Nothing()), train(forward, er.saving(min_nbytes=0))
    assert not same(lossy, exact)
    assert all(g.isfinite().all() for g in lossy)


def test_one_object_opened_twice():
    saved = er.saving(min_nbytes=0)
    with saved, pytest.raises(PlanError, match="open already; make another one"), saved:
        pass
    assert nothing_is_left()
    for _ in range(2):  # one after the other is fine
        with saved:
            loss = plainly(make_net(), x_of())
        loss.backward()
    assert saved.ledger.held_nbytes == 0


@ALL_MODES
def test_backward_and_forward_on_other_threads(mode):
    results: dict[str, list[Tensor]] = {}
    net = make_net()
    torch.manual_seed(1)
    with mode():
        loss = plainly(net, x_of())

        def other() -> None:  # its forward sees no hooks of ours
            results["forward"] = train(plainly, Nothing())

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    def backward() -> None:
        loss.backward()
        results["backward"] = grads_of(net)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    if mode in MODES.values():
        exact = train(plainly, Nothing())
        assert same(results["backward"], exact)
        assert same(results["forward"], exact)


def test_two_threads_at_once():
    exact = train(plainly, Nothing())
    failures: list[Any] = []

    def work() -> None:
        for _ in range(10):
            net = make_net_quietly()
            with er.saving("sparse_lossless", min_nbytes=0) as saved:
                loss = net(x_of()).square().sum()
            loss.backward()
            if saved.ledger.held_nbytes or not same(grads_of(net), quiet):
                failures.append(1)

    def make_net_quietly() -> nn.Module:
        net = nn.Sequential(*(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8)))
        for index, p in enumerate(net.parameters()):
            values = torch.randn(p.shape, generator=torch.Generator().manual_seed(index))
            p.data.copy_(values)
        return net

    net = make_net_quietly()
    net(x_of()).square().sum().backward()
    quiet = grads_of(net)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert same(train(plainly, Nothing()), exact)


def test_torch_func_refuses_and_leaves_nothing_behind():
    net = make_net().eval()
    parameters = dict(net.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        with er.saving(min_nbytes=0):
            return torch.func.functional_call(net, parameters, (x_of(),)).square().sum()

    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        torch.func.grad(loss)(parameters)
    assert nothing_is_left()


@EXACT_MODES
def test_vmap_and_functional_call(mode):
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        net.eval()
        y = torch.vmap(net)(x[:, None].expand(8, 3, 8))
        y = y + torch.func.functional_call(net, dict(net.named_parameters()), (x,))[:, None]
        target = torch.zeros(8, 3, dtype=torch.int64)
        pooled = torch.vmap(F.max_pool1d, (0, None))(y, 2)
        return torch.vmap(F.cross_entropy)(y, target).sum() + pooled.sum()

    assert same(train(forward, mode()), train(forward, Nothing()))


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:Sequential is compiled:UserWarning")
def test_compiled_inside_and_outside():
    net = make_net().eval()
    x = x_of()

    def grads(forward: Callable[[Tensor], Tensor], context: Any) -> list[Tensor]:
        net.zero_grad()
        with context:
            loss = forward(x).square().sum()
        loss.backward()
        return grads_of(net)

    exact = grads(net, Nothing())
    compiled = torch.compile(net, backend="eager")
    assert same(grads(compiled, er.saving(min_nbytes=0)), exact)
    saved = er.saving(min_nbytes=0)

    @torch.compile(backend="eager")
    def inside(x: Tensor) -> Tensor:
        with saved:
            return net(x)

    assert same(grads(inside, Nothing()), exact)  # not covered there, and not wrong
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*jit.*deprecated")
def test_a_traced_model():
    net = make_net().eval()
    traced = torch.jit.trace(net, x_of())

    def grads(context: Any) -> list[Tensor]:
        net.zero_grad()
        with context:
            loss = traced(x_of()).square().sum()
        loss.backward()
        return grads_of(net)

    # The nodes of its graph tell, as of any.
    assert same(grads(er.saving(min_nbytes=0)), grads(Nothing()))
    coded = grads(er.saving("dither", bits=8, min_nbytes=0))
    for one, other in zip(coded, grads(Nothing()), strict=True):
        assert (one - other).square().sum() < 1e-3 * other.square().sum()


# --- Unusual tensors


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def _nan(*shape: int) -> Tensor:
    x = _randn(*shape)
    x.view(-1)[::5] = float("nan")
    x.view(-1)[1::7] = float("inf")
    x.view(-1)[2::7] = -float("inf")
    return x


class Subclass(Tensor):
    pass


def _chain(x: Tensor, w: Tensor) -> Tensor:
    """Each kind of handling once."""
    h = F.linear(x * 1, w)
    h = F.relu(F.layer_norm(h, h.shape[-1:]))
    h = F.gelu(F.linear(h, w))
    return F.dropout(F.silu(F.linear(h, w)), 0.3)


def _on(x: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda w: _chain(x, w)


HARD: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "float64": (lambda: _randn(8, 8, dtype=torch.float64), _on(_randn(5, 8, dtype=torch.float64))),
    "bfloat16": (
        lambda: _randn(8, 8, dtype=torch.bfloat16),
        _on(_randn(5, 8, dtype=torch.bfloat16)),
    ),
    "float16": (lambda: _randn(8, 8, dtype=torch.float16), _on(_randn(5, 8, dtype=torch.float16))),
    "empty": (lambda: _randn(8, 8), _on(_randn(0, 8))),
    "0-d": (lambda: _randn(), lambda w: (w * 2).exp().relu().sqrt()),
    "one": (lambda: _randn(1, 1), lambda w: F.gelu(F.linear(w, w))),
    "NaN and Inf": (lambda: _randn(8, 8), _on(_nan(5, 8))),
    "huge": (lambda: _randn(8, 8) * 1e30, _on(_randn(5, 8))),
    "tiny": (lambda: _randn(8, 8) * 1e-38, _on(_randn(5, 8))),
    "constant": (lambda: torch.ones(8, 8), _on(torch.ones(5, 8))),
    "transposed": (lambda: _randn(8, 8), lambda w: _chain(w.t() * 1, w)),
    "non-contiguous": (
        lambda: _randn(8, 8),
        lambda w: _chain((_randn(9, 16) * w[0].repeat(2))[::2, ::2], w),
    ),
    "expanded": (lambda: _randn(8, 8), lambda w: _chain((w[:1] * 2).expand(9, 8), w)),
    "expanded from one": (lambda: _randn(8, 8), lambda w: F.gelu((w.sum() * 0.1).expand(4, 8)) @ w),
    "overlapping": (lambda: _randn(8, 8), lambda w: _chain((w * 2).flatten().unfold(0, 8, 3), w)),
    "far slice": (lambda: _randn(8, 8), lambda w: _chain((w.repeat(100, 1) * 2)[-5:], w)),
    "channels_last": (
        lambda: _randn(6, 6, 3, 3),
        lambda w: F.relu(
            F.batch_norm(
                F.conv2d(_randn(2, 6, 7, 7).to(memory_format=torch.channels_last), w),
                *(None, None),
                training=True,
            )
        ),
    ),
    "channels_last 3-D": (
        lambda: _randn(4, 4, 1, 2, 2),
        lambda w: F.silu(
            F.group_norm(
                F.conv3d(_randn(2, 4, 3, 5, 5).to(memory_format=torch.channels_last_3d), w), 2
            )
        ),
    ),
    "empty batch": (
        lambda: _randn(6, 6),
        lambda w: F.relu(F.batch_norm(F.linear(_randn(0, 6), w), torch.zeros(6), torch.ones(6))),
    ),
    "complex": (
        lambda: torch.complex(_randn(6, 6), _randn(6, 6).t()),
        lambda w: torch.view_as_real(F.linear(w, w) @ w.conj() + (w.mH @ w).tanh()).relu(),
    ),
    "real view of complex": (
        lambda: _randn(6, 6),
        lambda w: F.gelu(torch.view_as_real(torch.complex(w * 2, w) * 1j)).sum(-1) @ w,
    ),
    "product of complex seen as real": (
        lambda: torch.complex(_randn(6, 6), _randn(6, 6).t()),
        lambda w: F.gelu(torch.view_as_real(w.tanh() * w)),
    ),
    "output seen as complex": (
        lambda: _randn(6, 2),
        lambda w: torch.view_as_complex(F.silu(w * 3)) * torch.view_as_complex(F.relu(w * 2)),
    ),
    "negative view": (lambda: _randn(6, 6), lambda w: F.linear(torch.complex(w, w).conj().imag, w)),
    "sparse": (
        lambda: _randn(6, 6),
        lambda w: torch.sparse.mm(torch.relu(torch.eye(6).to_sparse() * 2), F.relu(w)),
    ),
    "sparse csr": (
        lambda: _randn(6, 6),
        lambda w: F.relu(torch.eye(6).to_sparse_csr() @ (w * 2)),
    ),
    "mkldnn": (
        lambda: _randn(6, 6),
        lambda w: F.relu((w * 2).to_mkldnn()).to_dense(),
    ),
    "jagged": (
        lambda: _randn(6, 6),
        lambda w: F.relu(
            F.linear(
                torch.nested.nested_tensor([_randn(2, 6), _randn(3, 6)], layout=torch.jagged), w
            )
        ).values(),
    ),
    "subclass": (
        lambda: _randn(6, 6),
        lambda w: F.gelu(F.linear((w * 1).as_subclass(Subclass), w).relu()).as_subclass(Tensor),
    ),
    "integers": (
        lambda: _randn(10, 6),
        lambda w: (
            F.embedding(torch.tensor([[1, 2, 9], [0, 0, 9]]), w, padding_idx=0)
            .gather(1, torch.tensor([[[1], [0]], [[2], [2]]]))
            .index_select(0, torch.tensor([1, 0]))
        ),
    ),
    "pooling indices": (
        lambda: _randn(2, 3, 9, 9),
        lambda w: F.max_unpool2d(*F.max_pool2d(w * 1, 3, return_indices=True), 3),
    ),
    "adaptive pooling": (
        lambda: _randn(2, 3, 9, 9),
        lambda w: (
            F.adaptive_max_pool2d(F.adaptive_avg_pool2d(w * 1, 5), 3) + F.adaptive_avg_pool2d(w, 1)
        ),
    ),
    "ignored labels": (
        lambda: _randn(6, 6),
        lambda w: (
            F.cross_entropy(w * 1, torch.tensor([0, 255, 5, 3, 255, 1]), None, None, 255).view(1)
            + F.cross_entropy(
                (w * 1).view(1, 6, 6), torch.tensor([[0, -7, 5, 3, -7, 1]]), ignore_index=-7
            )
        ),
    ),
    "masks of the caller's own": (
        lambda: _randn(6, 6),
        lambda w: (
            (w * 1).masked_fill(torch.eye(6, dtype=torch.bool), 0.0)
            + torch.where(torch.tril(torch.ones(6, 6)) > 0, w, -w)
        ),
    ),
    "attention with a mask": (
        lambda: _randn(2, 5, 8),
        lambda w: F.scaled_dot_product_attention(
            *((w * 2), (w * 3), (w * 4)), attn_mask=torch.ones(5, 5, dtype=torch.bool).tril()
        ),
    ),
    "attention with dropout": (
        lambda: _randn(2, 5, 8),
        lambda w: F.scaled_dot_product_attention(
            w * 2, w * 3, w * 4, dropout_p=0.3, is_causal=True
        ),
    ),
    "a view of a view in place": (
        lambda: _randn(6, 6),
        lambda w: F.linear((w * 1).view(36).view(4, 9).relu_().view(6, 6), w),
    ),
    "a slice in place": (
        lambda: _randn(6, 6),
        lambda w: F.linear(_slice_in_place(w * 1), w),
    ),
    "other dtypes on one storage": (
        lambda: _randn(6, 6),
        lambda w: F.gelu(w * 1) * ((w * 1).view(torch.int32) & 1).to(torch.float32),
    ),
    "in and out of half": (
        lambda: _randn(6, 6),
        lambda w: F.gelu(F.linear((w * 1).half(), w.half()).float()) @ w.double().float(),
    ),
    "inference inputs": (lambda: _randn(6, 6), lambda w: F.gelu(w * 2).mul(_inference().clone())),
}


def _slice_in_place(h: Tensor) -> Tensor:
    F.dropout(h[3:], 0.5, inplace=True)
    F.relu(h[:3], inplace=True)
    return h


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(6, 6)


def hard_grad(name: str, context: Any) -> Tensor:
    make, forward = HARD[name]
    w = make().requires_grad_()
    torch.manual_seed(3)
    with context:
        y = forward(w)
    y = torch.view_as_real(y) if y.is_complex() else y
    y.double().sum().backward()
    return w.grad


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.parametrize("name", HARD)
@EXACT_MODES
def test_a_hard_tensor_gives_the_exact_gradient(name, mode):
    exact, got = hard_grad(name, Nothing()), hard_grad(name, mode())
    assert (got.dtype, got.shape, got.stride()) == (exact.dtype, exact.shape, exact.stride())
    assert torch.equal(got.nan_to_num(nan=-77.0), exact.nan_to_num(nan=-77.0))


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("name", sorted(set(HARD) - {"NaN and Inf"}))
@pytest.mark.parametrize("codec", ["dither", "group", "cast"])
def test_a_hard_tensor_gives_a_near_gradient_with_a_fine_lossy_code(name, codec):
    fields = {"to": "bf16"} if codec == "cast" else {"bits": 8, "group_size": 32}
    exact = hard_grad(name, Nothing())
    got = hard_grad(name, er.saving(codec, min_nbytes=0, seed=0, **fields))
    error = (got - exact).abs().double()
    scale = float(exact.abs().double().nan_to_num().max()) if exact.numel() else 0.0
    if scale < 3e38:
        assert not error.numel() or float(error.nan_to_num().max()) <= 0.05 * scale


def test_nan_gradients_stay_where_they_were():
    exact = hard_grad("NaN and Inf", Nothing())
    got = hard_grad("NaN and Inf", er.saving("dither", bits=4, min_nbytes=0))
    assert torch.equal(got.isfinite(), exact.isfinite())


# --- Views on one storage


@EXACT_MODES
def test_chunks_are_decided_once_and_counted_once(mode):
    layer = nn.Linear(16, 48)
    x = torch.randn(2, 10, 16)

    def grads(context: Any) -> list[Tensor]:
        with context:
            q, k, v = (t.view(2, 10, 4, 4).transpose(1, 2) for t in layer(x).chunk(3, dim=-1))
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 10, 16)
        return torch.autograd.grad(y.square().sum(), list(layer.parameters()))

    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if not isinstance(t, nn.Parameter) and not isinstance(t._base, nn.Parameter):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t.detach()

    exact = grads(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
    saved = mode()
    assert same(grads(saved), exact)
    assert saved.ledger.before_nbytes == sum(storages.values())
    assert 2 * 10 * 48 * 4 in storages.values()  # q, k and v: one storage, three saved tensors


def test_slices_of_a_large_buffer_are_windows_and_stay():
    w = torch.randn(8, 8, requires_grad=True)

    def grads(context: Any) -> Tensor:
        with context:
            big = (w.repeat(200, 1) * 2).relu()
            y = sum(F.linear(big[i : i + 4], w).sum() for i in (0, 700, 1500))
        return torch.autograd.grad(y, w)[0]

    saved = er.saving("dither", bits=2, min_nbytes=0)
    assert grads(saved).isfinite().all()
    saved = er.saving(min_nbytes=0)
    assert torch.equal(grads(saved), grads(Nothing()))


def test_the_first_view_of_a_storage_does_not_decide_the_geometry_of_the_others():
    """A square matrix and its transpose: one storage, two geometries of the same shape."""
    w = torch.randn(6, 6)

    def grads(context: Any, order: int) -> list[Tensor]:
        x = w.clone().requires_grad_()
        with context:
            h = x * 1
            ops = [
                lambda: F.linear(h, w),
                lambda: h.t().pow(3),
                lambda: F.gelu(h.t()),
                lambda: h.log2(),
            ]
            ops = ops[order:] + ops[:order]
            y = torch.stack([op() for op in ops]).nan_to_num()
        return torch.autograd.grad(y.square().sum(), x)

    for order in range(4):
        for codec in ("dither", "group"):
            exact = grads(Nothing(), order)[0].nan_to_num()
            got = grads(er.saving(codec, bits=8, min_nbytes=0), order)[0].nan_to_num()
            assert torch.allclose(got, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))


# --- Custom functions


class SavesAll(torch.autograd.Function):
    """Saves inputs, an output, a mask, indices and nothing."""

    @staticmethod
    def forward(ctx, a, b):
        out = a * b
        order = a.flatten().argsort()
        ctx.save_for_backward(a, b, out, a > 0, order, None)
        return out

    @staticmethod
    def backward(ctx, grad):
        a, b, out, mask, order, nothing = ctx.saved_tensors
        assert nothing is None
        assert torch.equal(out, a * b)
        assert torch.equal(order, a.flatten().argsort())
        return grad * b * mask, grad * a


@ALL_MODES
def test_a_custom_function_gets_what_it_saved(mode):
    a, b = (torch.randn(6, 6, requires_grad=True) for _ in range(2))

    def grads(context: Any) -> list[Tensor]:
        with context:
            y = SavesAll.apply(F.linear(a, a), b)
        return torch.autograd.grad(y.sum(), [a, b])

    exact = grads(Nothing())
    got = grads(mode())
    assert torch.equal(got[1], exact[1])
    assert same(got, exact) or mode not in MODES.values()


class Overwrites(torch.autograd.Function):
    """Destroys what it saved, in backward."""

    @staticmethod
    def forward(ctx, a):
        mask = a > 0
        ctx.save_for_backward(a, mask)
        return a * mask

    @staticmethod
    def backward(ctx, grad):
        a, mask = ctx.saved_tensors
        grad = grad * mask * a
        mask.zero_()
        a.zero_()
        return grad


@EXACT_MODES
def test_a_backward_that_overwrites_what_it_saved(mode):
    def grads(context: Any) -> list[Tensor]:
        a = _randn(6, 6).requires_grad_()
        with context:
            y = Overwrites.apply(a * 1)
        first = torch.autograd.grad(y.sum(), a, retain_graph=True)
        return [*first, *torch.autograd.grad(y.sum(), a)]

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grads(Nothing())
    try:
        first, second = grads(mode())
    except RestoreError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        assert torch.equal(first, second)


# --- Forked workers


class Encodes(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        x = torch.randn(5000, generator=torch.Generator().manual_seed(index))
        return er.codec("dither", bits=4).encode(x, seed=index).decode()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_workers_encode_after_the_parent_did():
    torch.set_num_threads(2)
    data = Encodes()
    expected = torch.stack([data[i] for i in range(4)])
    big = torch.randn(1 << 20)
    er.codec("dither", bits=2).encode(big).decode()  # the parent's thread pool runs
    loader = DataLoader(
        data, batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    assert torch.equal(torch.cat(list(loader)), expected)


# --- Mistakes


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (
            {"policy": "dihter"},
            UnknownCodec,
            r"no policy or codec 'dihter'; there are exact, keep, .*Did you mean 'dither'",
        ),
        ({"policy": "dither", "bit": 2}, UnknownField, r"dither.*bit"),
        (
            {"policy": "dither", "bits": 99},
            UnknownField,
            "bits=99 is not possible; bits is an int from 1 to 8",
        ),
        (
            {"policy": "exact", "bits": 2},
            UnknownField,
            r"bits: fields go with a codec id, as in saving\('dither', bits=2\)",
        ),
        ({"bits": 2}, UnknownField, "fields go with a codec id"),
        (
            {"policy": 7},
            UnknownField,
            r"policy=7 is not possible; it is an id, a codec, or a function of a Site",
        ),
        (
            {"policy": type(er.codec("dither"))},
            UnknownField,
            r"policy=Dither is a class; give one of it, as Dither\(\)",
        ),
        (
            {"min_nbytes": -1},
            UnknownField,
            r"min_nbytes=-1 is not possible; it is an int of bytes, 0 or more",
        ),
        ({"min_nbytes": "64 KiB"}, UnknownField, "min_nbytes='64 KiB' is not possible"),
    ],
)
def test_a_mistake_is_answered_at_once(arguments, error, match):
    with pytest.raises(error, match=match) as raised:
        er.saving(**arguments)
    assert isinstance(raised.value, ElbowroomError)


@pytest.mark.parametrize(
    ("policy", "error", "match"),
    [
        (
            lambda site: "keep",
            PlanError,
            "a policy returns Keep, Encode, Rebuild or Offload; got 'keep'",
        ),
        (
            lambda site: None,
            PlanError,
            "a policy returns Keep, Encode, Rebuild or Offload; got None",
        ),
        (
            lambda site: Encode(er.codec("narrow")),
            CodecError,
            r"codec 'narrow' takes int64.*got float32 "
            r".*saving float32 \(8, 16\) for 'layer_norm' in '1'",
        ),
        (lambda site: 1 / 0, ZeroDivisionError, "division by zero"),
    ],
)
def test_a_bad_policy_is_answered_in_forward(policy, error, match):
    net = make_net()
    with pytest.raises(error, match=match), er.saving(policy, min_nbytes=0):
        net(x_of())
    assert nothing_is_left()


@pytest.mark.parametrize("policy", [lambda site: Rebuild(), lambda site: Keep("mine")])
def test_a_policy_that_asks_too_much_is_answered_with_keep(policy):
    saved = er.saving(policy, min_nbytes=0)
    assert same(train(plainly, saved), train(plainly, Nothing()))
    whys = {row.why for row in saved.ledger.rows}
    assert whys & {"mine", "the policy asked to rebuild what cannot be rebuilt"}


def test_an_unforeseen_error_in_unpack_is_ours(monkeypatch):
    from elbowroom.runtime.handles import KeepHandle

    x = torch.randn(8, requires_grad=True)
    with er.saving("keep", min_nbytes=0):
        y = x.exp().pow(2).sum()
    monkeypatch.setattr(KeepHandle, "restore", lambda self, private=False: 1 / 0)
    with pytest.raises(RestoreError, match="could not be given back to backward: division by zero"):
        y.backward()


@ALL_MODES
def test_no_warning(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(plainly, mode())


class MakesData(nn.Module):
    """Rows gathered from an input, by an index that is made here, and a mask that is, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(64, 64), nn.Parameter(torch.ones(64))

    def forward(self, x, order):
        rows = x.index_select(0, order)
        index = order[:, None].repeat(1, 64)
        mask = (rows > 0).float()
        y = self.layer(rows) + (rows.square() * mask) * self.scale
        return (y * mask).gather(0, index).square().mean()


def test_data_that_a_forward_has_made_is_no_input():
    """Nobody else holds it. Its zeros are exact, and no error of it reaches an activation."""
    torch.manual_seed(0)
    model, x, order = MakesData(), torch.randn(128, 64), torch.randperm(128)

    def grads(context):
        model.zero_grad()
        with context as saved:
            loss = model(x, order)
        loss.backward()
        return saved, [p.grad.clone() for p in model.parameters()]

    _, exact = grads(contextlib.nullcontext())
    saved, same = grads(er.saving(min_nbytes=0))
    assert all(map(torch.equal, exact, same))
    rows = {(row.consumer, row.dtype): row for row in saved.ledger.rows}
    assert rows["gather", "int64"].action == "narrow"
    saved, close = grads(er.saving("dither", levels=16, min_nbytes=0, seed=0))
    actions = {(row.consumer, row.action) for row in saved.ledger.rows if row.before_nbytes > 4096}
    assert ("linear", "dither") in actions
    for one, other in zip(exact, close, strict=True):
        assert float((one - other).norm() / one.norm()) < 0.1


def test_a_mask_that_a_forward_has_made_keeps_its_zeros():
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(256))
    x = torch.randn(256, 256)
    with er.saving("dither", bits=2, min_nbytes=0, seed=0):
        mask = (x > 1).float() * 3
        y = (w * mask).sum(0)
    y.backward(torch.ones_like(y))
    assert torch.equal(w.grad == 0, (mask == 0).all(0))
    assert torch.allclose(w.grad, mask.sum(0))
