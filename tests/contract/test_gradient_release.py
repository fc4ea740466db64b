"""Released gradients: the bits of an ordinary step, or an error before a parameter is wrong."""

import copy
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.errors import InvalidSetting, PlanError, UnsupportedGradient
from elbowroom.optim import SGD, STATES, AdamW, Lion
from elbowroom.optim.release import TOGETHER_NBYTES
from elbowroom.plan import Exact
from elbowroom.runtime.context import Context
from elbowroom.runtime.saving import Saving

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = [
    (cls, state)
    for cls, state in itertools.product((AdamW, Lion, SGD), STATES)
    if cls is AdamW or state != "int4"
]
every = pytest.mark.parametrize(("cls", "state"), CASES, ids=lambda x: getattr(x, "__name__", x))


class Tied(nn.Module):
    """One weight is read three times, one is frozen, one is left out by every second step."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(100, 150)
        self.middle = nn.Linear(150, 150)
        self.now_and_then = nn.Linear(150, 100)
        self.frozen = nn.Linear(100, 100).requires_grad_(False)
        self.again = nn.Linear(150, 150)
        self.again.weight = self.middle.weight
        self.to(dtype)

    def forward(self, x: Tensor, more: bool = True) -> Tensor:
        x = torch.tanh(self.first(self.frozen(x)))
        x = self.again(torch.tanh(self.middle(torch.tanh(self.middle(x)))))
        return self.now_and_then(x) if more else x


def groups(net: Tied) -> list[dict[str, Any]]:
    small = [p for p in net.parameters() if p.dim() < 2]
    return [
        {"params": [p for p in net.parameters() if p.dim() >= 2]},
        {"params": small, "weight_decay": 0.0, "lr": 3e-3},
    ]


def batch(step: int) -> Tensor:
    return torch.randn(16, 100, generator=torch.Generator().manual_seed(step))


def train(
    net: Tied,
    optimizer: torch.optim.Optimizer,
    forward: Callable[[Tensor, bool], Tensor] | None = None,
    steps: int = 4,
) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run = net if forward is None else forward
    for step in range(steps):
        x = batch(step).to(net.first.weight.dtype)
        loss = run(x, step % 2 == 0).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        if getattr(optimizer, "released", None) is not None:
            assert all(p.grad is None for p in net.parameters())
        optimizer.step()
        schedule.step()


def bits(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [t.clone() for s in optimizer.state.values() for t in s.values()]
    return [*(p.detach().clone() for p in net.parameters()), *states]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def in_order(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Like `bits`, states in the order of parameters: with release they come about in backward."""
    states = [optimizer.state[p] for p in net.parameters() if p in optimizer.state]
    return [*net.parameters(), *(s[key] for s in states for key in sorted(s))]


@every
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.float32, "nearest"), (torch.bfloat16, "residual"), (torch.bfloat16, "sr")],
    ids=str,
)
def test_bits_are_those_of_an_ordinary_step(cls, state, dtype, weights):
    ends = []
    for released in (False, True):
        net = Tied(dtype)
        optimizer = cls(groups(net), lr=1e-2, weight_decay=0.1, state=state, weights=weights)
        if released:
            optimizer.release_gradients()
        train(net, optimizer)
        assert optimizer.state[net.middle.weight]["step"] == 4
        assert optimizer.state[net.now_and_then.weight]["step"] == 2
        assert net.frozen.weight not in optimizer.state
        assert optimizer.skipped == 0
        ends.append(in_order(net, optimizer))
    assert same(*ends)


def recomputing(net: Tied) -> Callable[[Tensor, bool], Tensor]:
    def forward(x: Tensor, more: bool) -> Tensor:
        names = frozenset({"first", "middle", "again"})
        with Saving(Exact(), min_nbytes=0, context=Context(learns=False), recompute=names):
            return net(x, more)

    return forward


def saving(net: Tied) -> Callable[[Tensor, bool], Tensor]:
    def forward(x: Tensor, more: bool) -> Tensor:
        with er.saving(min_nbytes=0):
            return net(x, more)

    return forward


AROUND = {
    "checkpoint": lambda net: lambda x, more: checkpoint(net, x, more, use_reentrant=False),
    "recompute": recomputing,
    "saving": saving,
    "compile": lambda net: torch.compile(net, backend="aot_eager"),
}


@pytest.mark.parametrize("how", AROUND)
def test_what_runs_again_or_is_rebuilt_in_backward_has_the_weights_of_forward(how):
    ends = []
    for released in (False, True):
        net = Tied()
        optimizer = AdamW(groups(net), lr=1e-2, state="int8")
        if released:
            optimizer.release_gradients()
        train(net, optimizer, AROUND[how](net))
        ends.append(in_order(net, optimizer))
    assert same(*ends)


def test_a_recomputed_module_that_ends_by_adding_a_parameter_has_that_of_forward():
    """Its gradient is complete first, so it has been updated when the module runs again."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.bias = nn.Linear(100, 100), nn.Parameter(torch.zeros(100))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.linear(x)) + self.bias
            return y.sin() + self.bias

    def trained(recompute: frozenset[str]) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(Added(), nn.Linear(100, 10))
        optimizer = AdamW(net.parameters(), lr=0.1)
        optimizer.release_gradients()
        context = Context(learns=False)
        for n in range(3):
            with Saving(Exact(), min_nbytes=0, context=context, recompute=recompute):
                loss = net(batch(n)).sum()
            loss.backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    assert all(map(torch.equal, trained(frozenset("0")), trained(frozenset())))


def released(state: str = "int8", **settings: Any) -> tuple[Tied, AdamW, er.optim.GradientRelease]:
    net = Tied()
    optimizer = AdamW(groups(net), lr=1e-2, state=state, **settings)
    release = optimizer.release_gradients()
    train(net, optimizer, steps=2)
    return net, optimizer, release


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_spares_its_parameter_only(cls, state, bad):
    net = Tied()
    optimizer = cls(groups(net), lr=1e-2, state=state)
    optimizer.release_gradients()
    train(net, optimizer, steps=2)
    before = [p.detach().clone() for p in net.parameters()]
    states = {key: t.clone() for key, t in optimizer.state[net.middle.weight].items()}
    hook = net.middle.weight.register_hook(lambda grad: grad * bad)
    net(batch(0)).sum().backward()
    optimizer.step()
    hook.remove()
    assert optimizer.skipped == 1
    for (name, p), q in zip(net.named_parameters(), before, strict=True):
        assert torch.equal(p, q) == (name.startswith("frozen") or p is net.middle.weight)
    assert all(map(torch.equal, states.values(), optimizer.state[net.middle.weight].values()))
    train(net, optimizer, steps=1)
    assert optimizer.skipped == 1
    assert optimizer.state[net.middle.weight]["step"] == 3


# --- small gradients wait for each other ---


def layers(depth: int) -> nn.Sequential:
    """One layer of 1 MiB, and `depth` of 16 KiB."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4096, 64), *(nn.Linear(64, 64) for _ in range(depth)))


def calls_of(optimizer: AdamW, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Bytes of the gradients of each update, as they come."""
    calls, apply = [], optimizer.apply

    def noting(complete: list[Any]) -> int:
        calls.append([one.grad.nbytes for one in complete])
        return apply(complete)

    monkeypatch.setattr(optimizer, "apply", noting)
    return calls


def test_small_gradients_are_applied_together_and_large_ones_alone(monkeypatch):
    net = layers(40)
    optimizer = AdamW(net.parameters(), lr=1e-3, state="int8")
    optimizer.release_gradients()
    calls = calls_of(optimizer, monkeypatch)
    net(torch.randn(4, 4096)).square().mean().backward()
    assert all(p.grad is None for p in net.parameters())
    assert sum(map(len, calls)) == len(list(net.parameters()))  # before step()
    small = [call for call in calls if max(call) < TOGETHER_NBYTES]
    assert len(small) <= 4  # 640 KiB in all
    assert all(sum(call) < TOGETHER_NBYTES + max(call) for call in calls)
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


def test_what_waits_as_a_backward_fails_is_applied_by_the_step(monkeypatch):
    def fails(grad: Tensor) -> None:
        raise ArithmeticError("so it is")

    net, twin = layers(4), layers(4)
    optimizer = AdamW(net.parameters(), lr=1e-3)
    optimizer.release_gradients()
    ordinary = AdamW(twin.parameters(), lr=1e-3)
    x = torch.randn(4, 4096)
    twin(x).square().mean().backward()
    for p in twin[:2].parameters():
        p.grad = None
    ordinary.step()
    hook = net[1].register_full_backward_hook(lambda *_: fails(x))
    calls = calls_of(optimizer, monkeypatch)
    with pytest.raises(ArithmeticError):
        net(x).square().mean().backward()
    hook.remove()
    net.zero_grad()
    assert not calls
    optimizer.step()
    assert len(calls) == 1
    assert same([*net[2:].parameters()], [*twin[2:].parameters()])
    for _ in range(2):  # in the next backward all is as before
        net(x).square().mean().backward()
        assert all(p.grad is None for p in net.parameters())
        optimizer.step()
    assert optimizer.state[net[1].weight]["step"] in (2, 3)
    assert optimizer.state[net[2].weight]["step"] == 3


def test_an_update_that_is_refused_gives_its_gradients_back(monkeypatch):
    net, optimizer, _ = released()
    before = bits(net, optimizer)

    def refuses(*args: Any) -> None:
        raise UnsupportedGradient("so it is")

    with monkeypatch.context() as patched:
        patched.setattr(optimizer, "_due_one", refuses)
        with pytest.raises(UnsupportedGradient, match="so it is"):
            net(batch(0)).square().mean().backward()
    assert any(p.grad is not None for p in net.parameters())
    assert same(before, bits(net, optimizer))
    optimizer.step()  # of what was left
    assert not same(before, bits(net, optimizer))


# --- what needs all gradients ---


def test_a_second_backward_is_refused_before_it_changes_anything():
    net, optimizer, release = released()
    net(batch(0)).sum().backward()
    before = bits(net, optimizer)
    with pytest.raises(InvalidSetting, match=r"\(.*\) has been updated.* step\(\).*remove\(\)"):
        net(batch(1)).sum().backward()
    with pytest.raises(InvalidSetting, match=r"second gradient before step\(\)"):
        optimizer.step()
    assert same(before, bits(net, optimizer))
    optimizer.zero_grad()
    optimizer.step()
    assert same(before, bits(net, optimizer))
    train(net, optimizer, steps=1)
    release.remove()
    accumulated, ordinary = copy.deepcopy((net, optimizer)), (net, optimizer)
    for twin, one in (accumulated, ordinary):
        for step in range(2):
            twin(batch(step)).sum().backward()
        one.step()
    assert same(bits(*accumulated), bits(*ordinary))


def test_losses_of_different_parameters_have_a_backward_each():
    net, optimizer, _ = released()
    (net.first.weight * 2).sum().backward()
    (net.again.bias * 2).sum().backward()
    optimizer.step()
    assert optimizer.state[net.first.weight]["step"] == 3
    assert optimizer.state[net.again.bias]["step"] == 3


def test_a_graph_that_is_kept_is_stopped_by_autograd():
    net, optimizer, _ = released()
    loss = net(batch(0)).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    before = bits(net, optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert same(before[2:], bits(net, optimizer)[2:])


def test_what_reads_a_weight_beside_the_graph_is_stopped():
    def sum_of_both(width: int) -> tuple[AdamW, Tensor, Tensor, Tensor]:
        weight = nn.Parameter(torch.randn(width, width))
        optimizer = AdamW([weight], lr=1e-2)
        optimizer.release_gradients()
        x = torch.randn(width, width, requires_grad=True)
        late = (x @ weight.detach()).tanh()  # its backward reads the weight after the update
        return optimizer, x, weight, (late + weight).sum()

    _alive, _, _, both = sum_of_both(300)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        both.backward()
    _alive, x, weight, both = sum_of_both(
        80
    )  # the update of few bytes waits until backward has ended
    (exact,) = torch.autograd.grad(both, [x], retain_graph=True)
    before = weight.detach().clone()
    both.backward()
    assert torch.equal(x.grad, exact)
    assert not torch.equal(weight, before)


def test_double_backward_is_refused():
    net, optimizer, _ = released()
    before = bits(net, optimizer)
    with (
        pytest.warns(UserWarning, match="create_graph"),
        pytest.raises(UnsupportedGradient, match="without create_graph"),
    ):
        net(batch(0)).square().sum().backward(create_graph=True)
    assert same(before, bits(net, optimizer))
    net.zero_grad()
    torch.autograd.grad(net(batch(0)).sum(), [net.first.weight, net.again.weight])
    assert same(before, bits(net, optimizer))


def test_a_scaler_is_told_why_it_cannot():
    net, optimizer, release = released()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(net(batch(0)).sum()).backward()
    with pytest.raises(InvalidSetting, match=r"GradScaler's are scaled\. Train in bfloat16"):
        scaler.step(optimizer)
    off = torch.amp.GradScaler("cpu", enabled=False)
    optimizer.step()
    off.scale(net(batch(0)).sum()).backward()
    off.step(optimizer)
    release.remove()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(net(batch(0)).sum()).backward()
    scaler.step(optimizer)
    assert optimizer.state[net.first.weight]["step"] == 5


def test_clipping_finds_nothing_to_clip():
    net, optimizer, _ = released()
    net(batch(0)).sum().backward()
    before = bits(net, optimizer)
    assert nn.utils.clip_grad_norm_(net.parameters(), 1e-3) == 0
    assert same(before, bits(net, optimizer))


def test_processes_that_add_gradients_up_later_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    optimizer = AdamW(Tied().parameters())
    with pytest.raises(InvalidSetting, match=r"over its 4 processes only then.*fully_shard"):
        optimizer.release_gradients()
    assert optimizer.released is None


def test_the_largest_batch_is_not_looked_for_by_training():
    net = Tied()
    optimizer = AdamW(net.parameters())
    optimizer.release_gradients()
    before = bits(net, optimizer)
    with pytest.raises(PlanError, match=r"release_gradients\(\) of an optimizer.*remove\(\)"):
        er.largest_batch(
            *(net, lambda n: torch.randn(n, 100)),
            budget="1 GiB",
            loss=lambda net, x: net(x).sum(),
            optimizer=optimizer,
        )
    assert same(before, bits(net, optimizer))


# --- how it begins and ends ---


def test_it_ends_as_a_context_and_with_its_optimizer():
    net = Tied()
    optimizer = AdamW(groups(net), lr=1e-2)
    with optimizer.release_gradients() as release:
        with pytest.raises(InvalidSetting, match="released already"):
            optimizer.release_gradients()
        train(net, optimizer, steps=1)
    assert optimizer.released is None
    release.remove()
    net(batch(0)).sum().backward()
    assert net.first.weight.grad is not None
    optimizer.zero_grad()
    optimizer.release_gradients()
    before = [p.detach().clone() for p in net.parameters()]
    del optimizer, release
    gc.collect()
    net(batch(0)).sum().backward()
    assert same(before, list(net.parameters()))
    assert net.first.weight.grad is not None


def test_a_copy_is_an_ordinary_optimizer():
    net, optimizer, _ = released()
    twin, other = copy.deepcopy((net, optimizer))
    twin(batch(0)).sum().backward()
    assert twin.first.weight.grad is not None
    other.step()
    net(batch(0)).sum().backward()
    optimizer.step()
    assert same(in_order(net, optimizer), in_order(twin, other))


def test_groups_that_come_later_parameters_unfrozen_later_and_a_loaded_state():
    ends = []
    for release in (False, True):
        net = Tied()
        optimizer = AdamW(groups(net)[:1], lr=1e-2)
        if release:
            optimizer.release_gradients()
        optimizer.add_param_group(groups(net)[1])
        train(net, optimizer, steps=2)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        net.frozen.requires_grad_(True)
        for step in range(2):
            optimizer.param_groups[1]["lr"] *= 2
            optimizer.zero_grad()
            net(batch(step)).sum().backward()
            assert (net.first.bias.grad is None) == release
            assert net.frozen.weight.grad is not None
            optimizer.step()
        assert optimizer.state[net.frozen.weight]["step"] == 2
        ends.append(in_order(net, optimizer))
    assert same(*ends)


def test_a_closure_runs_backward_inside_the_step():
    ends = []
    for release in (False, True):
        net = Tied()
        optimizer = AdamW(groups(net), lr=1e-2)
        if release:
            optimizer.release_gradients()

        def closure(net=net, optimizer=optimizer):
            optimizer.zero_grad()
            loss = net(batch(0)).square().mean()
            loss.backward()
            return loss.detach()

        losses = [optimizer.step(closure) for _ in range(3)]
        ends.append([*losses, *in_order(net, optimizer)])
    assert same(*ends)
    assert ends[0][0] != ends[0][2]
