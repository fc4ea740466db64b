"""A dry run is what a real step would be: the same tensors at the same moments, without any."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.demo.models import GPT, ResNet18, UNet
from elbowroom.errors import PlanError
from elbowroom.measure import Speed
from elbowroom.measure.rates import Rates
from elbowroom.measure.record import record
from elbowroom.plan import KeepAll
from elbowroom.plan.profile import Profile, Save, Storage
from elbowroom.runtime.storage import PLAIN

MIN_NBYTES = 4096
SPEED = Speed(flops=1e10, nbytes=1e10, overhead_s=1e-6)


@pytest.fixture(autouse=True)
def unrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here asks how fast codecs are; to measure that is slow."""
    for module in ("record", "dry"):
        monkeypatch.setattr(
            import_module(f"elbowroom.measure.{module}"),
            "rates",
            lambda device_type: Rates(torch.device(device_type)),
        )


class MLP(nn.Module):
    """Tied weights, dropout, and a mask that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)
        self.again = nn.Linear(32, 64)
        self.again.weight = self.up.weight
        self.mask = torch.linspace(0, 1, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.dropout(F.gelu(self.norm(self.up(x))) * self.mask, 0.1))
        return self.again(torch.relu_(x))


def converted() -> nn.Module:
    """Each module of er.nn, reading one another's output; er.optim trains it."""
    model = nn.Sequential(
        *(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)),
        *(nn.Linear(64, 64), nn.RMSNorm(64), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)),
    )
    er.convert(model, activations=True)
    er.nn.fp8(model, keep=["0", "9"])
    return model


def draw(kind: str, n: int = 16) -> tuple[Tensor, Tensor]:
    if kind == "gpt":
        return torch.randint(0, 256, (n, 64)), torch.randint(0, 256, (n, 64))
    if kind in ("mlp", "converted"):
        return torch.randn(16 * n, 32), torch.randint(0, 64, (16 * n,))
    labels = torch.randint(0, 10, (n, 28, 28) if kind == "unet" else (n,))
    return torch.randn(n, 1, 28, 28), labels


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    scores = model(batch[0])
    return F.cross_entropy(scores.transpose(1, 2) if isinstance(model, GPT) else scores, batch[1])


# and how far the peak may be off: convolutions take workspaces on a CPU, which are not seen
MODELS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "mlp": (MLP, 0.001),
    "converted": (converted, 0.001),
    "gpt": (lambda: GPT(width=32, depth=2, context=64), 0.001),
    "resnet": (lambda: ResNet18(width=8), 0.03),
    "unet": (lambda: UNet(width=8), 0.18),  # oneDNN copies maps
}
KINDS = pytest.mark.parametrize("kind", MODELS)


def training(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MODELS[kind][0]()
    optim = er.optim if kind == "converted" else torch.optim
    return model, optim.AdamW(model.parameters())


@cache
def dry(kind: str) -> Profile:
    model, optimizer = training(kind)
    return dry_run(kind, model, optimizer)


def dry_run(kind: str, model: nn.Module, optimizer: Any = None, n: int = 16) -> Profile:
    return er.dry_run(
        model,
        lambda: draw(kind, n),
        loss=loss,
        optimizer=optimizer,
        min_nbytes=MIN_NBYTES,
        speed=SPEED,
    )


@cache
def measured(kind: str) -> Profile:
    """The same step, really run, with all kept."""
    model, optimizer = training(kind)
    batch = draw(kind)

    def step() -> None:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return record(step, policy=KeepAll(), min_nbytes=MIN_NBYTES)


def _saves(storage: Storage) -> list[Save]:
    return [replace(save, site=replace(save.site, least_levels=16)) for save in storage.saves]


def facts_of(profile: Profile) -> list[Any]:
    """All that does not depend on a clock, an allocator or values."""
    storages = [
        (s.nbytes, s.held, s.kept, s.born, s.used, s.needs, s.freed, s.made_in, _saves(s))
        for s in profile.storages
    ]
    calls = [
        (c.name, c.kind, c.inputs, c.extra_nbytes, c.first, c.last, c.why_not)
        for c in profile.modules
    ]
    return [storages, calls, len(profile.level), profile.backward]


@KINDS
def test_a_dry_run_writes_down_what_a_real_one_does(kind: str) -> None:
    """Every save with its op, module, need, facts and moments; every call of a module."""
    assert facts_of(dry(kind)) == facts_of(measured(kind))
    assert measured(kind).measured
    assert not dry(kind).measured


@KINDS
def test_the_peak_is_that_of_a_real_step(kind: str) -> None:
    said, was = dry(kind), measured(kind)
    own = was.level[0] - was.static  # what else is held in this process is no part of the step
    assert said.level[0] - said.static == own
    above = said.peak - said.static, was.peak - was.static
    assert above[0] == pytest.approx(above[1], rel=MODELS[kind][1])
    assert above[0] <= above[1]


def test_another_batch_has_another_peak() -> None:
    """The negative control."""
    model, optimizer = training("mlp")
    assert dry_run("mlp", model, optimizer, n=17).peak != dry("mlp").peak


def test_all_that_stands_between_steps_is_counted() -> None:
    """Parameters, the tied one once; two states and a step count each; a mask; the batch."""
    model, _ = training("mlp")
    nbytes = sum(p.nbytes for p in model.parameters())
    steps = 4 * len(list(model.parameters()))
    batch = sum(x.nbytes for x in draw("mlp"))
    assert dry("mlp").static == 3 * nbytes + steps + model.mask.nbytes + batch


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
@pytest.mark.parametrize("share", [0.85, 0.7])
def test_a_plan_of_it_is_followed_by_a_real_step(kind: str, share: float) -> None:
    """At the peak that it predicts, as near as a plan of a measured step has to be."""
    said = dry(kind)
    plan = er.plan(said, budget=said.static + int(share * (said.peak - said.static)))
    model, optimizer = training(kind)
    batch = draw(kind)

    def step() -> None:
        with er.following(plan, min_nbytes=MIN_NBYTES):
            value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    assert said.static + er.peak(step) == pytest.approx(plan.peak, rel=0.05)
    assert not plan.changes_nothing
    assert not plan.unknown_sites


def test_nothing_of_the_users_changes() -> None:
    model, optimizer = training("mlp")
    loss(model, draw("mlp")).backward()
    optimizer.step()
    tensors = [
        *(model.mask, *model.parameters(), *(p.grad for p in model.parameters())),
        *(x for state in optimizer.state.values() for x in state.values()),
        torch.get_rng_state(),
    ]
    before = [x.clone() for x in tensors]
    again = dry_run("mlp", model, optimizer)
    after = [*tensors[:-1], torch.get_rng_state()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert again.static == dry("mlp").static  # the states were there, and the gradients are not
    assert facts_of(again) == facts_of(dry("mlp"))
    assert {Tensor, nn.Parameter} == PLAIN


def test_terabytes_take_no_memory() -> None:
    with torch.device("meta"):
        model = GPT(width=1 << 15, depth=8, context=1 << 13)
    profiles: list[Profile] = []
    taken = er.peak(lambda: profiles.append(dry_run("gpt", model, n=1 << 12)))
    assert profiles[0].static > 1 << 38
    assert profiles[0].peak > 1 << 42
    assert taken < 1 << 20
    assert er.plan(profiles[0], budget=profiles[0].peak).changes_nothing


def test_a_faster_device_takes_less_time() -> None:
    model, _ = training("mlp")
    run = {"loss": loss, "min_nbytes": MIN_NBYTES}
    slow, fast = (
        er.dry_run(model, lambda: draw("mlp"), speed=Speed(f, f), **run) for f in (1e9, 1e10)
    )
    assert slow.seconds == pytest.approx(10 * fast.seconds)
    assert 0 < slow.starts_s[slow.backward] < slow.seconds
    assert sum(call.seconds for call in slow.modules) < slow.seconds
    assert er.dry_run(model, lambda: draw("mlp"), **run).seconds > 0  # measured on this machine


def test_a_sparse_gradient() -> None:
    model = nn.Embedding(1000, 64, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    profile = er.dry_run(
        model,
        lambda: torch.arange(8),
        loss=lambda model, x: model(x).square().sum(),
        optimizer=optimizer,
        min_nbytes=0,
        speed=SPEED,
    )
    assert profile.peak - profile.static < model.weight.nbytes / 8


def test_it_is_kept_as_json(tmp_path: Any) -> None:
    dry("mlp").save(tmp_path / "dry.json")
    assert Profile.load(tmp_path / "dry.json") == dry("mlp")


# --- What cannot run dry


@pytest.mark.parametrize(
    "looks",
    [lambda x: x * x.sum().item(), lambda x: x[x > 0], lambda x: x if x.sum() > 0 else 2 * x],
)
def test_a_step_that_looks_at_values(looks: Callable[[Tensor], Tensor]) -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(PlanError, match=r"a dry run has shapes but no values.*er\.measure"):
        er.dry_run(model, lambda: torch.ones(8), loss=lambda m, x: looks(m(x)).sum(), speed=SPEED)
    assert {Tensor, nn.Parameter} == PLAIN


def test_bad_arguments() -> None:
    model = nn.Linear(8, 8)
    give: dict[str, Any] = {"loss": lambda m, x: m(x).sum(), "speed": SPEED}
    with pytest.raises(PlanError, match=r"dry_run takes a torch\.nn\.Module; got Tensor"):
        er.dry_run(torch.ones(1), lambda: torch.ones(8), **give)
    with pytest.raises(PlanError, match="make_batch is a function; got Tensor"):
        er.dry_run(model, torch.ones(8), **give)
    with pytest.raises(PlanError, match="device='xpu' is not on this machine"):
        er.dry_run(model, lambda: torch.ones(8), device="xpu", **give)
    sparse = torch.ones(8).to_sparse()
    with pytest.raises(PlanError, match=r"got a tensor of layout torch\.sparse_coo"):
        er.dry_run(model, lambda: sparse, **give)
    x = nn.Parameter(torch.ones(8))
    with pytest.raises(PlanError, match="saves nothing for backward"):
        er.dry_run(model, lambda: x, loss=lambda m, x: x.sum(), speed=SPEED)
    model.lock = threading.Lock()  # cannot be copied
    with pytest.raises(PlanError, match=r"a copy of the model.*cannot pickle.*er\.measure"):
        er.dry_run(model, lambda: torch.ones(8), **give)
