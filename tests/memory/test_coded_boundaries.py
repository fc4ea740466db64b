"""Modules that a plan runs again from codes of their inputs."""

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.codecs import Dither
from elbowroom.plan.make import plain_peak
from elbowroom.plan.plan import Plan, PlanEntry
from elbowroom.plan.policy import Lossy
from elbowroom.plan.precision_floor import MIN_RECOMPUTED_LEVELS
from elbowroom.plan.site import RECOMPUTE, Rows, SiteName
from elbowroom.runtime.context import Context
from elbowroom.runtime.handles import EncodeHandle
from elbowroom.runtime.replay.replay import Replay
from elbowroom.runtime.replay.saving_context import forget_all
from elbowroom.runtime.saving import Saving

WIDTH, ROWS, DEPTH = 32, 512, 12
MIN_NBYTES = 1024

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    """A residual block of two wide linear layers behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Chooses(Block):
    """The same, of the largest half of its values: a small error may turn it around."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (y >= y.median(dim=-1, keepdim=True).values).float()


class Three(nn.Sequential):
    """Three blocks as one."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(3)))


def network(kind: type[nn.Module] = Block, depth: int = DEPTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), *(kind() for _ in range(depth)), nn.Linear(WIDTH, 4))


def batch() -> Tensor:
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def plan_of(levels: int | None, names: list[str]) -> Plan:
    """These modules run again, from codes of so many levels or from their exact inputs."""
    preset = "exact" if levels is None else f"dither, {levels} levels"
    sites = {
        SiteName(name, RECOMPUTE, 0): PlanEntry(preset, "float32", 4 * ROWS * WIDTH)
        for name in names
    }
    return Plan(
        1 << 40, 0, 0, 1.0, 1.0, levels is None, "by hand", sites, frozenset(names), lines=()
    )


def run(model: nn.Module, plan: Plan, seed: int = 0) -> tuple[Tensor, Tensor, int]:
    """The loss, the gradient, and the bytes that were held before backward."""
    model.zero_grad(set_to_none=True)
    context = Context(learns=False)
    context.seed = seed
    with Saving(plan, min_nbytes=MIN_NBYTES, context=context, recompute=plan.recompute) as saving:
        loss = model(batch()).square().mean()
    held = saving.ledger.after_nbytes
    loss.backward()
    return loss.detach(), gradient(model), held


BLOCKS = [str(n) for n in range(1, DEPTH + 1)]


def test_boundaries_hold_fewer_bytes_at_a_small_error() -> None:
    model = network()
    loss, exact, whole = run(model, plan_of(None, BLOCKS))
    for levels, most in ((256, 3e-5), (64, 5e-4), (MIN_RECOMPUTED_LEVELS, 2e-3)):
        other, found, held = run(model, plan_of(levels, BLOCKS))
        assert torch.equal(loss, other)
        error = float((found - exact).square().sum() / exact.square().sum())
        assert 0 < error < most, (levels, error)
        boundaries = 4 * ROWS * WIDTH * DEPTH
        coded = Dither(levels=levels).encoded_nbytes((ROWS, WIDTH), torch.float32) * DEPTH
        rows = Rows((ROWS, WIDTH), (WIDTH, 1)).nbytes * DEPTH  # each has a mean and a size
        assert whole - held == boundaries - coded - rows


def test_an_input_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    restore = EncodeHandle.restore

    def counting(self: EncodeHandle, *args: object, **kwargs: object) -> Tensor:
        decoded.append(self)
        return restore(self, *args, **kwargs)

    monkeypatch.setattr(EncodeHandle, "restore", counting)
    run(network(), plan_of(64, BLOCKS))
    assert len(decoded) == DEPTH


def test_steps_that_follow_a_script_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan, found, drawn = network(), plan_of(64, BLOCKS), [], []
    draw = Replay.draw

    def counting(self: Replay, nth: int) -> int:
        drawn.append(nth)
        return draw(self, nth)

    monkeypatch.setattr(Replay, "draw", counting)
    forget_all()
    for _ in range(6):
        model.zero_grad(set_to_none=True)
        with er.following(plan, min_nbytes=MIN_NBYTES, seed=5) as saving:
            loss = model(batch()).square().mean()
        loss.backward()
        found.append((gradient(model), saving.ledger.after_nbytes))
    assert all(torch.equal(found[0][0], one) for one, _ in found)
    assert len({held for _, held in found}) == 1
    assert len(drawn) >= 2 * DEPTH  # the last two steps at least made all codes by script


def test_a_module_that_chooses_starts_from_its_exact_input() -> None:
    model = network(Chooses)
    _, exact, whole = run(model, plan_of(None, BLOCKS))
    _, found, held = run(model, plan_of(64, BLOCKS))
    assert torch.equal(exact, found)
    assert held == whole


def test_a_profile_knows_what_chooses() -> None:
    for kind, rough in ((Block, False), (Chooses, True)):
        model = network(kind, depth=2)

        def step(model: nn.Module = model) -> None:
            model(batch()).square().mean().backward()

        profile = er.measure(step, min_nbytes=MIN_NBYTES)
        calls = {call.name: call for call in profile.modules}
        assert bool(calls["1"].rough) == rough
        assert not calls["1.up"].rough


def test_other_policies_leave_inputs_as_they_are() -> None:
    """Only a plan says that a module may start from a code."""
    model = network()
    with Saving(
        Lossy(Dither(levels=64)),
        min_nbytes=MIN_NBYTES,
        context=Context(learns=False),
        recompute=frozenset(BLOCKS),
    ):
        loss = model[1:-1](model[0](batch()))
    loss.backward(torch.ones_like(loss))
    coded = gradient(model[1:-1])
    model.zero_grad(set_to_none=True)
    loss = model[1:-1](model[0](batch()))
    loss.backward(torch.ones_like(loss))
    assert torch.equal(coded, gradient(model[1:-1]))


def test_plans_start_modules_from_codes_where_room_is_short() -> None:
    """They are taken for all that their modules save, and what the plan says is so."""
    model = network(Three, depth=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(2)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        x = torch.randn(ROWS, 8, generator=generator)
        (model(x) - x[:, :4].sin()).square().mean().backward()

    profile = er.measure(step, noise=True, min_nbytes=MIN_NBYTES)
    room = plain_peak(profile) - profile.static  # what other tests hold is static, too
    budget = profile.static + int(0.13 * room)  # too little to hold all as such codes
    plan = er.plan(profile, budget=budget, exact=False, codecs=[Dither(levels=64)])
    coded = [line for line in plan.lines if line.action == RECOMPUTE and line.error > 0]
    assert coded, plan.explain()
    assert "runs again from a code" in coded[0].why
    assert not plan.exact
    assert plan.peak <= budget
    _, exact, _ = run(model, plan_of(None, []))
    errors = [(run(model, plan, seed)[1] - exact).square().sum() for seed in range(4)]
    assert not plan.unknown_sites
    assert 0 < sum(errors) / len(errors) < 0.1 * exact.square().sum()
