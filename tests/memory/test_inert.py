"""Ops that nobody looks at any more: the same bits, the same bytes, errors where they are due."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.demo.models import GPT, ResNet18, UNet
from elbowroom.errors import BudgetTooSmall, RestoreError
from elbowroom.plan import Exact
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile
from elbowroom.runtime.attach import opener_of
from elbowroom.runtime.context import Context
from elbowroom.runtime.hooks import Saving
from elbowroom.runtime.inert import Inertness, OpName, Parts, inertness_of
from programs import looking

pytestmark = pytest.mark.usefixtures("one_thread")

MIN_NBYTES = 1024
NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "resnet": (lambda: ResNet18(width=8), lambda: torch.randn(8, 1, 28, 28)),
    "gpt": (
        lambda: GPT(width=32, depth=3, context=64),
        lambda: torch.randint(0, 256, (8, 64)),
    ),
    "unet": (lambda: UNet(width=8), lambda: torch.randn(8, 1, 28, 28)),
}
KINDS = pytest.mark.parametrize("kind", NETS)
SHARES = pytest.mark.parametrize("share", [0.95, 0.8, 0.65])
EXACT = pytest.mark.parametrize("exact", [True, False])


def made(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return NETS[kind][0](), NETS[kind][1]()


@cache
def profiled(kind: str) -> Profile:
    net, x = made(kind)

    def step() -> None:
        net.zero_grad()
        net(x).square().mean().backward()

    return er.measure(step, min_nbytes=MIN_NBYTES)


def planned(profile: Profile, share: float, *, exact: bool) -> Plan:
    """Within a share of what plain autograd takes, or the least that there is."""
    budget = profile.static + int(share * (profile.peak - profile.static))
    try:
        return er.plan(profile, budget=budget, exact=exact)
    except BudgetTooSmall as error:
        return er.plan(profile, budget=error.least_nbytes, exact=exact)


def followed(
    net: nn.Module, x: Tensor, plan: Plan, inertness: Inertness | None = None
) -> tuple[Saving, list[Tensor | None], Tensor]:
    """The closed context of one step, its gradients, and the RNG's state at its end."""
    torch.manual_seed(1)
    net.zero_grad()
    saving = Saving(
        plan,
        min_nbytes=MIN_NBYTES,
        context=Context(7, learns=False),
        recompute=plan.recompute,
        inertness=inertness,
    )
    with saving:
        loss = net(x).square().mean()
    held = saving.ledger.held_nbytes
    loss.backward()
    assert saving.ledger.held_nbytes < held or not held
    gradients = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    return saving, gradients, torch.get_rng_state()


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


@KINDS
@SHARES
@EXACT
def test_it_makes_no_difference_whether_somebody_looks(
    kind: str, share: float, exact: bool
) -> None:
    plan = planned(profiled(kind), share, exact=exact)
    inertness = Inertness(plan)
    steps = []
    for known in (None, inertness, inertness):  # looks; looks and learns; need not look
        net, x = made(kind)
        saving, gradients, rng = followed(net, x, plan, known)
        steps.append((gradients, [*net.state_dict().values(), rng], saving.ledger))
    assert inertness.ops
    for gradients, states, ledger in steps[1:]:
        assert same(gradients, steps[0][0])
        assert all(torch.equal(a, b) for a, b in zip(states, steps[0][1], strict=True))
        assert ledger.after_nbytes == pytest.approx(steps[0][2].after_nbytes, rel=0.01)
        assert ledger.before_nbytes == pytest.approx(steps[0][2].before_nbytes, rel=0.01)
    assert not any(plan.strangers.values())


@KINDS
def test_a_mild_plan_has_little_to_look_at(kind: str) -> None:
    plan = planned(profiled(kind), 0.95, exact=True)
    inertness = Inertness(plan)
    followed(*made(kind), plan, inertness)
    saving = {save.site.name[:2] for one in profiled(kind).storages for save in one.saves}
    assert inertness.ops is not None
    # Which actions are cheapest is measured: half of them here, a third on a busy machine.
    assert len(inertness.ops & saving) > len(saving) / 5


def found_inert(policy: str, forward: Callable[[], Tensor], **fields: int) -> frozenset[OpName]:
    """What one forward under a policy shows, backward included."""
    parts = Parts()
    saving = looking(policy, min_nbytes=0, **fields)
    with saving:
        saving._passing.parts = parts
        loss = forward()
        slots = saving._identity.slots()
    found = parts.inert(slots)
    loss.sum().backward()
    return found


def test_where_everything_is_encoded_only_what_saves_nothing_is_inert() -> None:
    net, x = made("resnet")
    found = found_inert("dither", lambda: net(x), bits=2)
    kept = {name for name in found if name[1] in ("conv2d", "batch_norm", "relu_")}
    assert kept <= {("stem.0", "conv2d")}  # whose input is the batch


def test_what_nobody_holds_any_more_was_not_seen_to_be_inert() -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def forward() -> Tensor:
        (x + 1).sin().cos()
        return (x * 2).exp()

    found = found_inert("keep", forward)
    assert ("", "exp") in found
    assert ("", "cos") not in found


def test_makers_and_sources_of_what_is_rebuilt_take_part() -> None:
    """relu's output is made again from the norm's input: all three are looked at, but not sin."""
    x = torch.randn(4, 8, 16, 16, requires_grad=True)
    conv, norm = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
    found = found_inert("exact", lambda: F.conv2d(F.relu(norm(conv(x))), conv.weight).sin())
    assert ("", "sin") in found
    assert not found & {("", "relu"), ("", "conv2d"), ("BatchNorm2d", "batch_norm")}


class Layered(nn.Module):
    """Blocks, any of which may be left out in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            for _ in range(6)
        )
        self.without: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = x if i in self.without else block(x) + x
        return x


@pytest.mark.parametrize("without", [{0}, {1, 2}, {3}, {0, 1, 2, 3, 4}])
def test_another_path_through_the_model_is_as_right_as_before(without: set[int]) -> None:
    torch.manual_seed(0)
    net, x = Layered(), torch.randn(4, 8, 16, 16)

    def step() -> None:
        net.zero_grad()
        net(x).square().mean().backward()

    profile = er.measure(step, min_nbytes=MIN_NBYTES)
    plan = planned(profile, 0.9, exact=True)
    inertness = Inertness(plan)
    followed(net, x, plan, inertness)
    net.without = without
    _, gradients, _ = followed(net, x, plan, inertness)
    net.zero_grad()
    net(x).square().mean().backward()
    assert same(gradients, [p.grad for p in net.parameters()])


def blind(*ops: str) -> Saving:
    """A context that does not look at these ops of no module."""
    inertness = Inertness(planned(profiled("gpt"), 0.9, exact=True))
    inertness.ops = frozenset(("", op) for op in ops)
    inertness._held_nbytes = inertness._highest_nbytes = 1 << 40
    return Saving(Exact(), min_nbytes=0, inertness=inertness)


def test_what_is_changed_in_place_is_still_noticed() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with blind("sin"):
        y = x * 2
        loss = y.sin().sum()
        y.add_(1)
    with pytest.raises(RestoreError, match="modified by an inplace operation"):
        loss.backward()


def test_a_storage_that_two_inert_ops_save_is_counted_once() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    saving = blind("sin", "cos")
    with saving:
        y = x * 2
        loss = (y.sin() + y.cos()).sum()
    assert saving.ledger.before_nbytes == y.nbytes
    assert [row.why for row in saving.ledger.rows] == ["the plan keeps it"]
    loss.backward()
    del loss, y
    assert saving.ledger.held_nbytes == 0


def test_each_of_two_inert_ops_keeps_what_both_have_saved_counted() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    saving = blind("sin", "cos")
    with saving:
        y = x * 2
        one, other = y.sin(), y.cos()
    nbytes = y.nbytes
    del y, one
    assert saving.ledger.held_nbytes == nbytes
    del other
    assert saving.ledger.held_nbytes == 0


def test_addresses_that_are_used_again_are_counted_again() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    saving = blind("sin")
    with saving:
        for _ in range(4):
            (x * 2).sin().sum().backward()
        kept = [(x * 2).sin() for _ in range(20)]
        assert saving.ledger.held_nbytes == 20 * x.nbytes
    del kept


def test_sparse_tensors_of_ops_that_nobody_looks_at() -> None:
    sparse = torch.eye(64).to_sparse()
    dense = torch.randn(64, 8, requires_grad=True)
    with blind("mm", "sum"):
        loss = torch.sparse.mm(sparse, dense * 2).sum() + torch.mm(sparse, dense * 3).sum()
    loss.backward()
    assert torch.equal(dense.grad, torch.full_like(dense, 5.0))


def test_statistics_of_a_norm_are_no_activations() -> None:
    norm, x = nn.BatchNorm1d(4096), torch.randn(8, 4096, requires_grad=True)
    inertness = Inertness(planned(profiled("gpt"), 0.9, exact=True))
    inertness.ops = frozenset({("BatchNorm1d", "batch_norm"), ("", "batch_norm")})
    inertness._highest_nbytes = 1 << 40
    saving = Saving(Exact(), min_nbytes=0, inertness=inertness)
    with saving:
        y = x * 2
        loss = norm(y).sum()
    assert saving.ledger.held_nbytes == y.nbytes
    loss.backward()


class Looping(nn.Module):
    """Activations, as often as it is told; before other layers, or behind them all."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.times, self.last = 1, last

    def loop(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = F.gelu(x) + x
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.convs[0](x)).relu()
        x = x if self.last else self.loop(x)
        x = self.convs[2](self.norms[1](self.convs[1](x)).relu())
        return self.loop(x) if self.last else x


@pytest.mark.parametrize("last", [False, True])
def test_a_longer_step_is_noticed_and_the_next_is_inside_again(last: bool) -> None:
    torch.manual_seed(0)
    net, x = Looping(last=last), torch.randn(16, 8, 32, 32)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    step()
    held = sum(p.nbytes for p in net.parameters()) + sum(b.nbytes for b in net.buffers())
    plain = er.peak(step)
    budget = held + int(0.85 * plain)
    optimizer.zero_grad()
    er.fit(net, budget=budget, optimizer=optimizer, min_nbytes=MIN_NBYTES)
    try:
        for _ in range(7):
            step()
        net.times = 6
        for _ in range(10):  # the first may need more, if what is held already was not looked at
            step()
        for _ in range(3):
            # What is learned anew after such a step is not measured (docs/limits.md).
            assert held + er.peak(step) <= 1.1 * budget
    finally:
        er.release(net)


def fitted(share: float) -> tuple[nn.Module, Callable[[int], None]]:
    """A network in training within a share of what it takes in plain autograd."""
    torch.manual_seed(0)
    net = Layered()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(16, 8, 32, 32)

    def step(n: int = 16) -> None:
        optimizer.zero_grad()
        net(x[:n]).square().mean().backward()
        optimizer.step()

    step()
    held = sum(p.nbytes for p in net.parameters()) + sum(b.nbytes for b in net.buffers())
    budget = held + int(share * er.peak(step))
    optimizer.zero_grad()
    er.fit(net, budget=budget, optimizer=optimizer, min_nbytes=MIN_NBYTES)
    return net, step


def test_a_fitted_model_learns_it_once_and_a_smaller_batch_teaches_nothing() -> None:
    net, step = fitted(0.75)
    try:
        for _ in range(5):
            step(16)
        plan = opener_of(net).planning.plan  # type: ignore[union-attr]
        inert = inertness_of(plan).ops
        assert inert
        step(12)
        assert inertness_of(plan).ops is inert
    finally:
        er.release(net)


def test_a_small_batch_does_not_teach() -> None:
    plan = planned(profiled("resnet"), 0.9, exact=True)
    inertness = Inertness(plan)
    net, x = made("resnet")
    followed(net, x[:4], plan, inertness)
    assert inertness.ops is None
    followed(net, x, plan, inertness)
    assert inertness.ops


def test_if_more_is_held_than_in_the_lesson_another_is_taken_but_not_for_ever() -> None:
    plan = planned(profiled("resnet"), 0.9, exact=True)
    inertness = Inertness(plan)
    for _ in range(3):
        followed(*made("resnet"), plan, inertness)
        assert inertness.ops
        inertness._held_nbytes //= 2  # as if that step had held less
        followed(*made("resnet"), plan, inertness)
    assert inertness.ops == frozenset()


def test_many_storages_teach_the_same_as_few(caplog):
    """Records of dead storages are purged, but what is held for one counts: 257 were too many."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(100)]
    model, x = nn.Sequential(*blocks), torch.randn(256, 64)

    def step():
        model(x).square().mean().backward()
        model.zero_grad(set_to_none=True)

    step()
    weights = sum(p.nbytes for p in model.parameters())
    budget = 2 * weights + int(0.7 * (er.peak(step) - weights))
    er.fit(model, budget=budget, exact=True)
    caplog.set_level("INFO", "elbowroom")
    for _ in range(8):
        step()
    settings = [one.getMessage() for one in caplog.records if "rung" in one.getMessage()]
    assert settings[-1].endswith("'plan' (exact)")
    assert len(settings) == len(dict.fromkeys(settings)), settings  # no way there and back
    fitting = opener_of(model)
    held = []
    for _ in range(2):
        out = model(x).square().mean()
        held.append(fitting._last.ledger.held_nbytes)
        out.backward()
    assert held[0] == pytest.approx(held[1], rel=0.01)
    er.release(model)


class Squashed(nn.Module):
    """tanh saves its result, which is made again by way of a product that saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h.sin() + torch.tanh(0.3 * h).flip(0)  # of which nobody else saves anything


def test_ops_that_a_result_is_made_by_are_looked_at(monkeypatch):
    monkeypatch.setattr("elbowroom.fitting.planning._MOST_UNWRITTEN", 0)  # no step is replayed
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Squashed() for _ in range(8))), torch.randn(1024, 64)

    def step() -> int:
        out = model(x).square().mean()
        fitting = opener_of(model)
        held = 0 if fitting is None else fitting._last.ledger.held_nbytes
        out.backward()
        model.zero_grad(set_to_none=True)
        return held

    step()
    weights = sum(p.nbytes for p in model.parameters())
    er.fit(model, budget=2 * weights + int(0.75 * (er.peak(step) - weights)), exact=True)
    held = [step() for _ in range(8)][4:]
    assert "rebuild" in {row.action for row in opener_of(model)._last.ledger.rows}
    assert max(held) <= 1.01 * min(held)
    er.release(model)
