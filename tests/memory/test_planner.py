"""measure -> plan -> following: what is predicted is what the allocator sees, to a few percent.

Networks each of another kind; small, so that a peak is a matter of kilobytes. What is predicted is
checked on all of them, the rest on the first six.
"""

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.demo.models import GPT, ResNet18, UNet
from elbowroom.errors import BudgetTooSmall, DataError, PlanError, UnknownField
from elbowroom.measure.recording import Recording
from elbowroom.plan import KeepAll, menu
from elbowroom.plan.build_problem import BuiltProblem, build_problem, profiled_level
from elbowroom.plan.plan import Plan, difference
from elbowroom.plan.problem import Choice, keep_all, levels, option_spans, summed
from elbowroom.plan.profile import Profile
from elbowroom.plan.site import Need, Reads, Site, SiteName
from elbowroom.runtime import calls, modules
from elbowroom.runtime import direct as direct_ops
from elbowroom.runtime.saving import Saving
from elbowroom.runtime.slot import View
from elbowroom.units import budget_argument, show_nbytes, show_seconds

BATCH = 16
MIN_NBYTES = 4096
NEAR = 0.05  # of the measured peak: as near as a prediction has to be
OVER = 1.02  # so much of the budget a plan may take that was not measured (1.010 was seen)
Batch = tuple[Any, Tensor]


@pytest.fixture(autouse=True)
def put_back(one_thread: None) -> Iterator[None]:
    """Nothing of ours is left."""
    if opened() != (0, 0):
        gc.collect()  # a model that another test has fitted may have died in a cycle
    users = opened()
    yield
    if opened() > users:
        gc.collect()
    assert opened() <= users


def opened() -> tuple[int, int]:
    """How many contexts watch calls, and modules, just now."""
    return calls._users, modules._users


class LSTM(nn.Module):
    """Tokens [B, T] -> scores [B, 64, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(64, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.token(x))[0]).transpose(1, 2)


class Encoder(nn.Module):
    """Vectors [B, T, 16] -> scores [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.inputs = nn.Linear(16, 32)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.inputs(x)).mean(1))


class Recommender(nn.Module):
    """Numbers [B, 13] and indices [B, 4] -> scores [B, 2]: embeddings, their products, two MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(100, 16, mode="sum") for _ in range(4))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
        self.top = nn.Sequential(
            *(nn.Linear(16 + 10, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()),
            nn.Linear(64, 2),
        )

    def forward(self, numbers: Tensor, indices: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        sparse = [table(indices[:, i : i + 1]) for i, table in enumerate(self.tables)]
        z = torch.stack([dense, *sparse], 1)  # [B, 5, 16]
        products = torch.bmm(z, z.transpose(1, 2))
        row, column = torch.tril_indices(5, 5, -1)
        return self.top(torch.cat([dense, products[:, row, column]], 1))


class UNet3d(nn.Module):
    """Volumes [B, 1, 16, 16, 16] -> scores [B, 3, 16, 16, 16]: two levels and a skip."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = self._twice(1, width, nn.InstanceNorm3d(width, affine=True))
        self.bottom = self._twice(width, 2 * width, nn.GroupNorm(2, 2 * width), stride=2)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.join = self._twice(2 * width, width, nn.InstanceNorm3d(width, affine=True))
        self.head = nn.Conv3d(width, 3, 1)

    @staticmethod
    def _twice(inputs: int, outputs: int, norm: nn.Module, stride: int = 1) -> nn.Sequential:
        return nn.Sequential(
            *(nn.Conv3d(inputs, outputs, 3, stride, 1), norm, nn.LeakyReLU(0.01, inplace=True)),
            *(nn.Conv3d(outputs, outputs, 3, 1, 1), nn.LeakyReLU(0.01)),
        )

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.head(self.join(torch.cat([skip, self.up(self.bottom(skip))], 1)))


class ViTBlock(nn.Module):
    """Attention and an MLP, each after a norm and beside a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Images [B, 1, 28, 28] -> scores [B, 10], by patches of 4 x 4 and a class token."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, 50, width))
        self.blocks = nn.Sequential(*(ViTBlock(width) for _ in range(2)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.blocks(x)[:, 0])


class MessagePassing(nn.Module):
    """Nodes [N, 16] and edges [2, E] -> scores [N, 4]: messages along edges, summed by node."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inputs, self.head = nn.Linear(16, width), nn.Linear(width, 4)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(3))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x, (source, target) = self.inputs(nodes), edges
        for message, norm in zip(self.messages, self.norms, strict=True):
            ends = torch.cat([x.index_select(0, source), x.index_select(0, target)], 1)
            sent = torch.relu(message(ends))
            into = target[:, None].expand_as(sent)
            x = x + torch.relu(norm(torch.zeros_like(x).scatter_add(0, into, sent)))
        return self.head(x)


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1 convolutions beside a skip: ResNet-50's block."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU(True)),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        self.skip = nn.Sequential(
            nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.body(x) + self.skip(x))


class ResNet50(nn.Module):
    """Images [B, 1, 28, 28] -> scores [B, 10]: the stages of ResNet-50, thin and half as deep."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        blocks, inputs = [], width
        for stage, depth in enumerate((2, 2, 3, 2)):
            for nth in range(depth):
                stride = 2 if stage and not nth else 1
                blocks.append(Bottleneck(inputs, width << stage, stride))
                inputs = 4 * (width << stage)
        self.stem = nn.Sequential(
            *(nn.Conv2d(1, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)),
            nn.MaxPool2d(3, 2, 1),
        )
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inputs, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def draw(kind: str, n: int, seed: int = 0) -> Batch:
    """A batch of n."""
    g = torch.Generator().manual_seed(seed)
    match kind:
        case "resnet" | "vit" | "resnet50":
            return torch.randn(n, 1, 28, 28, generator=g), torch.randint(0, 10, (n,), generator=g)
        case "gpt":
            return tuple(torch.randint(0, 256, (n, 64), generator=g) for _ in range(2))
        case "unet":
            x = torch.randn(n, 1, 28, 28, generator=g)
            return x, torch.randint(0, 11, (n, 28, 28), generator=g)
        case "lstm":
            return tuple(torch.randint(0, 64, (n, 48), generator=g) for _ in range(2))
        case "encoder":
            return torch.randn(n, 64, 16, generator=g), torch.randint(0, 10, (n,), generator=g)
        case "unet3d":
            x = torch.randn(n // 8, 1, 16, 16, 16, generator=g)
            return x, torch.randint(0, 3, (n // 8, 16, 16, 16), generator=g)
        case "gnn":
            nodes = torch.randn(32 * n, 16, generator=g)
            edges = torch.randint(0, 32 * n, (2, 128 * n), generator=g)
            return (nodes, edges), torch.randint(0, 4, (32 * n,), generator=g)
    numbers = torch.randn(64 * n, 13, generator=g), torch.randint(0, 100, (64 * n, 4), generator=g)
    return numbers, torch.randint(0, 2, (64 * n,), generator=g)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: ResNet18(width=8),
    "gpt": lambda: GPT(width=32, depth=3, context=64),
    "unet": lambda: UNet(width=8),
    "lstm": LSTM,
    "encoder": Encoder,
    "recommender": Recommender,
    "unet3d": UNet3d,
    "vit": ViT,
    "gnn": MessagePassing,
    "resnet50": ResNet50,
}
KINDS = pytest.mark.parametrize("kind", list(MODELS)[:6])
ALL = pytest.mark.parametrize("kind", MODELS)


@dataclass
class Training:
    """A model in training."""

    kind: str
    n: int = BATCH
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    batch: Batch = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = MODELS[self.kind]()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = draw(self.kind, self.n)

    def loss(self, n: int | None = None) -> Tensor:
        x, y = self.batch if n is None else draw(self.kind, n)
        scores = self.model(*(x if isinstance(x, tuple) else (x,)))
        return F.cross_entropy(scores.transpose(1, 2) if self.kind == "gpt" else scores, y)

    def step(
        self, context: AbstractContextManager[Any] | None = None, n: int | None = None
    ) -> Tensor:
        """One step, the gradients of which are gone at its end."""
        with context or nullcontext():
            loss = self.loss(n)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @property
    def held_nbytes(self) -> int:
        """What stands between steps, as `measure` counts it."""
        return profiled(self.kind).static

    def peak(self, context: Callable[[], AbstractContextManager[Any]], n: int | None = None) -> int:
        """Bytes of a step at its worst, all counted."""
        self.step(context(), n)
        return self.held_nbytes + er.peak(lambda: self.step(context(), n))


@cache
def profiled(kind: str) -> Profile:
    """A step of it, written down once for all tests."""
    return er.measure(Training(kind).step, min_nbytes=MIN_NBYTES)


@cache
def plain_peak(kind: str) -> int:
    return Training(kind).peak(lambda: er.saving("keep", min_nbytes=MIN_NBYTES))


def budget_of(kind: str, share: float) -> int:
    """Bytes: a share of what plain autograd takes above what stands between steps."""
    static = profiled(kind).static
    return static + int(share * (plain_peak(kind) - static))


def following(plan: Plan) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: er.following(plan, min_nbytes=MIN_NBYTES)


def planned(kind: str, share: float, **settings: Any) -> Plan | None:
    """A plan, or None where nothing fits."""
    try:
        return er.plan(profiled(kind), budget=budget_of(kind, share), **settings)
    except BudgetTooSmall:
        return None


# --- What is predicted


@KINDS
def test_a_problem_gives_back_what_was_measured(kind: str) -> None:
    """Base + what the profiled step held = its levels: to the byte."""
    profile = profiled(kind)
    built = build_problem(profile, exact=True)
    held = sum(profiled_level(profile.storages[i], len(profile.level)) for i in built.storages)
    assert np.array_equal(np.array(built.problem.base) + held, profile.level)
    assert max(profile.level) == profile.peak


def profiled_choice(profile: Profile, built: BuiltProblem) -> Choice:
    """What the profiled step did, as options."""
    options = []
    for index, item in zip(built.storages, built.problem.items, strict=True):
        names = [option.name for option in item.options]
        options.append(0 if profile.storages[index].kept else names.index("exact"))
    return Choice(tuple(options))


@KINDS
def test_the_options_of_the_profiled_step_are_what_it_held(kind: str) -> None:
    """What the menu says of "exact" is what the runtime did: in bytes, moment by moment.

    In forward a storage may be read and asked for by ops in turn: an option counts from its birth
    what is held at the end. So it is never less than measured, and equal in backward.
    """
    profile = profiled(kind)
    built = build_problem(profile, exact=True)
    choice = profiled_choice(profile, built)
    for index, item, option in zip(
        built.storages, built.problem.items, choice.options, strict=True
    ):
        restored = profile.storages[index].restored  # it is written down without nodes of ours
        direct = tuple(one for one in item.options[option].direct if one[0] not in restored)
        chosen = replace(item.options[option], direct=direct)
        written = replace(item, options=(item.options[0], chosen))
        said = summed(option_spans(written, min(option, 1)), len(profile.level))
        was = profiled_level(profile.storages[index], len(profile.level))
        assert np.array_equal(said, was), profile.storages[index].saves[0].site
        assert np.all(summed(option_spans(item, option), len(profile.level)) <= was)


@pytest.mark.sampled(2)
@KINDS
@pytest.mark.parametrize("menu_of", [{"exact": True}, {}, {"codecs": ["group"]}], ids=str)
def test_what_backward_reads_as_it_is_held_is_not_restored(
    kind: str, menu_of: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many tensors fewer are restored as the options say."""
    profile = profiled(kind)
    plan = next(plan for share in (0.5, 0.7, 0.9, 1.0) if (plan := planned(kind, share, **menu_of)))
    said = 0
    for storage in profile.storages:
        names = {save.site.name for save in storage.saves} & plan.sites.keys()
        for preset in {plan.sites[name].preset for name in names}:
            direct = dict(menu.option(profile, storage, menu.preset_named(preset)).direct)
            saves = (save for save in storage.saves if save.site.reads is not Reads.SIZES)
            said += sum(save.asked in direct for save in saves)

    def restored() -> int:
        asked: list[View] = []
        restore = View.restore
        with monkeypatch.context() as patch:
            patch.setattr(View, "restore", lambda view: asked.append(view) or restore(view))
            Training(kind).step(following(plan)())
        # Torch's own cross entropy asks for a shape more than the node in its place.
        return sum(view.need is not Need.SHAPE for view in asked)

    restored()  # the first step under a plan looks at all, the others at what has to do with it
    found = restored()
    monkeypatch.setattr(direct_ops, "_OPS", {})
    assert restored() - found == said


@ALL
def test_plain_autograd_is_predicted(kind: str) -> None:
    built = build_problem(profiled(kind), exact=True)
    said = int(levels(built.problem, keep_all(built.problem)).max())
    assert said == pytest.approx(plain_peak(kind), rel=0.01)


@pytest.mark.sampled(2)
@ALL
@pytest.mark.parametrize("exact", [True, None])
def test_the_predicted_peak_is_the_measured_one(kind: str, exact: bool | None) -> None:
    """At budgets from nine tenths of plain autograd down to the least."""
    plans = {
        plan.peak: plan
        for share in (0.9, 0.75, 0.6, 0.45)
        if (plan := planned(kind, share, exact=exact)) is not None
    }
    assert plans or kind == "lstm"
    for plan in plans.values():
        measured = Training(kind).peak(following(plan))
        assert plan.peak == pytest.approx(measured, rel=NEAR), str(plan)
        assert plan.peak <= plan.budget
        assert measured <= OVER * plan.budget, str(plan)
        assert not plan.unknown_sites


def clocked_otherwise(profile: Profile, seed: int) -> Profile:
    """The same step where all seconds are others: other plans are best then."""
    factors = iter(np.random.default_rng(seed).lognormal(0, 0.7, 10_000).tolist())
    return replace(
        profile,
        storages=tuple(
            replace(s, producer_s=s.producer_s * next(factors)) for s in profile.storages
        ),
        modules=tuple(replace(m, seconds=m.seconds * next(factors)) for m in profile.modules),
        rates={name: rate * next(factors) for name, rate in profile.rates.items()},
    )


@pytest.mark.parametrize("kind", ["vit", "encoder", "gpt"])
def test_a_prediction_is_right_whatever_the_clock_said(kind: str) -> None:
    """Attention's projections copy their input: only a region's second run needs the original."""
    profiles = [clocked_otherwise(profiled(kind), seed) for seed in range(6)]
    plans = [er.plan(p, budget=budget_of(kind, s)) for p in profiles for s in (0.75, 0.6)]
    for plan in {(plan.recompute, frozenset(plan.sites.items())): plan for plan in plans}.values():
        measured = Training(kind).peak(following(plan))
        assert plan.peak == pytest.approx(measured, rel=NEAR), str(plan)


@pytest.mark.sampled(3)
@KINDS
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_what_is_cheapest_takes_no_more_time_than_exact_first(kind: str, share: float) -> None:
    first, cheapest = planned(kind, share), planned(kind, share, exact=False)
    if first is None or cheapest is None:
        assert first is cheapest
        return
    worth = profiled(kind).seconds * (cheapest.noise - first.noise)
    assert cheapest.seconds + worth <= 1.005 * first.seconds  # a solver's gap
    assert cheapest.peak <= budget_of(kind, share)


@pytest.mark.filterwarnings("ignore:this saving context changed nothing")
@KINDS
def test_exact_actions_never_take_more_than_plain_autograd(kind: str) -> None:
    """A tensor that is kept for one op serves another as its mask: nothing is decoded for that."""
    exact = Training(kind).peak(lambda: er.saving("exact", min_nbytes=MIN_NBYTES))
    assert exact <= plain_peak(kind)


def test_what_was_wrong_by_so_much_would_be_seen() -> None:
    """The negative control: a plan that is not followed misses its prediction."""
    plan = planned("gpt", 0.6, exact=True)
    assert plan is not None
    measured = Training("gpt").peak(lambda: er.saving("keep", min_nbytes=MIN_NBYTES))
    assert plan.peak != pytest.approx(measured, rel=NEAR)


@KINDS
def test_a_tighter_budget_never_predicts_a_higher_peak_than_it_allows(kind: str) -> None:
    last = None
    for share in (1.1, 0.95, 0.8, 0.65, 0.5):
        plan = planned(kind, share)
        if plan is None:
            assert planned(kind, share / 2) is None  # and never fits again
            break
        assert plan.peak <= plan.budget
        assert last is None or plan.peak <= last.peak
        last = plan
    assert last is not None


@KINDS
def test_a_budget_too_small_names_one_that_does(kind: str) -> None:
    profile = profiled(kind)
    with pytest.raises(
        BudgetTooSmall, match=r"this step needs at the least \(estimated\)"
    ) as error:
        er.plan(profile, budget=profile.static + 1)
    least = error.value.least_nbytes
    assert f"give {budget_argument(least)}" in str(error.value)
    plan = er.plan(profile, budget=least)
    assert plan.peak <= least
    assert Training(kind).peak(following(plan)) <= OVER * least
    with pytest.raises(BudgetTooSmall):
        er.plan(profile, budget=least - 1)


# --- Nothing else changes


@pytest.mark.sampled(2)
@KINDS
@pytest.mark.parametrize("share", [0.8, 0.6])
def test_an_exact_plan_changes_no_bit(kind: str, share: float) -> None:
    plan = planned(kind, share, exact=True)
    if plan is None:
        pytest.skip("no exact plan fits")
    assert plan.exact
    plain, other = Training(kind), Training(kind)
    ends = []
    for training, context in ((plain, nullcontext), (other, following(plan))):
        torch.manual_seed(1)
        losses = [training.step(context()) for _ in range(3)]
        ends.append([*losses, *training.model.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_measuring_is_training() -> None:
    """A measured step is the user's: no bit of it differs, dropout and BatchNorm included."""
    for kind in ("gpt", "resnet"):
        plain, other = Training(kind), Training(kind)
        torch.manual_seed(1)
        for _ in range(3):
            plain.step()
        torch.manual_seed(1)
        er.measure(other.step, min_nbytes=MIN_NBYTES)  # warm up, clock, sizes
        one, two = plain.model.state_dict().values(), other.model.state_dict().values()
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_what_nobody_holds_is_no_part_of_what_stands() -> None:
    net = nn.Linear(8, 8)

    def step() -> None:
        net(torch.ones(8, 8, requires_grad=True)).square().sum().backward()

    def litter() -> list[object]:
        ring: list[object] = [torch.zeros(1 << 20)]
        ring.append(ring)
        return ring

    gc.collect()
    gc.disable()  # it could come between
    try:
        clean = er.measure(step, min_nbytes=0).static
        litter()
        assert er.measure(step, min_nbytes=0).static < clean + (1 << 20)
    finally:
        gc.enable()


def least(kind: str, **settings: Any) -> int:
    """Bytes: the smallest budget that any plan fits."""
    with pytest.raises(BudgetTooSmall) as refused:
        er.plan(profiled(kind), budget=1, **settings)
    assert refused.value.least_nbytes is not None
    return refused.value.least_nbytes


def test_a_lossy_plan_says_so() -> None:
    budget = (least("resnet") + least("resnet", exact=True)) // 2  # which no exact plan fits
    plan = er.plan(profiled("resnet"), budget=budget)
    assert not plan.exact
    assert any(line.error > 0 for line in plan.lines)
    assert "lossy" in str(plan)
    assert any(codec.id in plan.explain() for codec in plan.codecs)
    with pytest.raises(BudgetTooSmall):
        er.plan(profiled("resnet"), budget=budget, exact=True)


def test_the_table_of_a_plan_adds_up_to_the_plan() -> None:
    plan = planned("gpt", 0.6)
    assert plan is not None
    rows = [[cell.strip() for cell in row.split("│")] for row in plan.explain().splitlines()]
    _, *last, why, _ = next(row for row in rows if row[1:2] == ["sum"])
    assert last[3:5] == [
        show_nbytes(sum(one.nbytes for one in plan.lines)),
        show_nbytes(plan.held_nbytes),
    ]
    assert last[6] == show_seconds(plan.seconds - plan.plain_seconds)
    assert not why
    small = [one for one in plan.lines if one.why == "small"]
    assert [row[2] for row in rows if "others" in "".join(row[2:3])] == [f"{len(small)} others"]
    shared_s = plan.seconds - plan.plain_seconds - sum(one.seconds for one in plan.lines)
    assert shared_s == pytest.approx(0.0, abs=1e-9)
    slower = replace(plan, seconds=plan.seconds + 0.25)
    assert "250.0 ms" in slower.explain()  # what no line has by itself is a line of its own


def test_without_recomputing() -> None:
    plan = planned("gpt", 0.6)
    assert plan is not None
    assert plan.recompute
    other = planned("gpt", 0.6, recompute=False)
    assert other is None or not other.recompute
    assert other is None or other.seconds != plan.seconds


# --- Files


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    for kind in list(MODELS)[:6]:
        profile = profiled(kind)
        profile.save(tmp_path / "profile.json")
        again = er.Profile.load(tmp_path / "profile.json")
        for name in ("level", "floor", "modules", "static", "backward", "device", "rates"):
            assert getattr(again, name) == getattr(profile, name), name
        budget = budget_of(kind, 1.0)
        assert er.plan(again, budget=budget).sites == er.plan(profile, budget=budget).sites
        assert not list(tmp_path.glob("*.part"))


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    for share in (0.8, 0.6):
        plan = planned("gpt", share)
        assert plan is not None
        plan.save(tmp_path / "plan.json")
        again = er.Plan.load(tmp_path / "plan.json")
        assert again == plan
        assert difference(plan, again) == []
    training = Training("gpt")
    assert training.peak(following(again)) == Training("gpt").peak(following(plan))


def test_what_two_plans_do_in_another_way() -> None:
    mild, tight = planned("gpt", 0.9), planned("gpt", 0.6)
    assert mild is not None
    assert tight is not None
    found = difference(mild, tight)
    assert any("->" in line for line in found)
    assert any("recompute" in line for line in found)
    assert len(found) == len(difference(tight, mild))


def other_files(good: str, key: str) -> dict[str, str]:
    """Texts that are no such file."""
    data = json.loads(good)
    lists = [name for name, value in data.items() if isinstance(value, list) and value]
    return {
        "empty": "",
        "half of it": good[: len(good) // 2],
        "another kind": json.dumps({"hello": 1}),
        "a list": "[]",
        "a number": "3",
        "null": "null",
        "a newer version": json.dumps(data | {key: 99}),
        "no version": json.dumps({k: v for k, v in data.items() if k != key}),
        "an unknown field": json.dumps(data | {"surprise": 1}),
        "a field short": json.dumps({k: v for k, v in data.items() if k != lists[0]}),
        "another type": json.dumps(data | {lists[-1]: 5}),
        "other elements": json.dumps(data | {lists[-1]: ["x"]}),
        "elements of another kind": json.dumps(data | {name: [1] for name in lists}),
    }


@pytest.mark.parametrize(
    ("kind", "key"), [(Profile, "elbowroom_profile"), (Plan, "elbowroom_plan")]
)
def test_other_files_are_refused(kind: Any, key: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    good = profiled("gpt") if kind is Profile else planned("gpt", 0.8)
    assert good is not None
    good.save(path)
    for name, text in other_files(path.read_text(), key).items():
        path.write_text(text)
        with pytest.raises(DataError, match=r"file\.json is") as error:
            pytest.fail(f"{name}: {kind.load(path)}")
        assert ("version 99" in str(error.value)) == (name == "a newer version"), name
    path.write_bytes(b"\xff\xfe\x00PK")
    with pytest.raises(DataError):
        kind.load(path)
    with pytest.raises(DataError):
        kind.load(tmp_path / "nothing.json")
    with pytest.raises(DataError):
        kind.load(tmp_path)


def test_a_plan_with_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    plan = planned("gpt", 0.8)
    assert plan is not None
    name, known = next(iter(plan.sites.items()))
    strange = replace(plan, sites={**plan.sites, name: replace(known, preset="magic")})
    strange.save(tmp_path / "plan.json")
    with pytest.raises(DataError, match="magic"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_with_a_field_of_a_wrong_type_is_refused_by_name(tmp_path: Path) -> None:
    plan, path = planned("gpt", 0.8), tmp_path / "plan.json"
    assert plan is not None
    plan.save(path)
    good = json.loads(path.read_text())
    numbers = {"budget", "peak", "plain_peak", "seconds", "plain_seconds", "watched"}
    for name in numbers | {"exact", "solver", "recompute"}:
        for wrong in ({}, None, [1], True if name in numbers else 1):
            path.write_text(json.dumps(good | {name: wrong}))
            with pytest.raises(DataError, match=f"{name} is"):
                Plan.load(path)
    for name, wrong in (("budget", -5), ("peak", 1.5), ("seconds", float("nan"))):
        path.write_text(json.dumps(good | {name: wrong}))
        with pytest.raises(DataError, match=f"{name} is"):
            Plan.load(path)
    for name in good["lines"][0]:
        path.write_text(json.dumps(good | {"lines": [good["lines"][0] | {name: {"a": 1}}]}))
        with pytest.raises(DataError, match=name):
            Plan.load(path)
    *site, known = good["sites"][0]
    for name in known:
        path.write_text(json.dumps(good | {"sites": [[*site, known | {name: {}}]]}))
        with pytest.raises(DataError, match=name):
            Plan.load(path)


# --- Other steps than the one that was measured


def test_a_larger_batch_is_a_stranger_and_exact() -> None:
    plan = planned("resnet", 0.6)  # lossy
    assert plan is not None
    plain, other = Training("resnet"), Training("resnet")
    assert torch.equal(plain.step(n=2 * BATCH), other.step(following(plan)(), n=2 * BATCH))
    one, two = plain.model.state_dict().values(), other.model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert sum(plan.unknown_sites.values()) > 20
    assert all(isinstance(name, SiteName) for name in plan.unknown_sites)


@pytest.mark.parametrize("kind", ["resnet", "gpt", "unet"])
def test_a_smaller_last_batch_follows_the_plan(kind: str) -> None:
    plan = planned(kind, 0.7)
    assert plan is not None
    training = Training(kind)
    assert training.peak(following(plan), n=BATCH // 2) < plan.peak
    assert not plan.unknown_sites


def test_another_model_is_held_exactly() -> None:
    plan = planned("resnet", 0.6)
    assert plan is not None
    training = Training("encoder")
    plain = Training("encoder")
    torch.manual_seed(1)
    plain.step()
    torch.manual_seed(1)
    training.step(following(plan)())
    one, two = plain.model.parameters(), training.model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert plan.unknown_sites


def test_asking_for_a_setting_counts_no_stranger() -> None:
    plan = planned("resnet", 0.8)
    assert plan is not None
    site = Site("nowhere", "linear", "", (4,), torch.float32, 16, Need.EXACT)
    action = plan.look_up(site)
    assert not plan.unknown_sites
    assert plan(site) == action
    assert sum(plan.unknown_sites.values()) == 1
    plan.unknown_sites.clear()


def test_two_runs_of_one_step_that_differ() -> None:
    training, runs = Training("gpt"), iter(range(3))

    def step() -> None:
        training.step()
        if next(runs) == 2:
            training.loss().backward()

    with pytest.raises(PlanError, match="two runs of the step saved different tensors"):
        er.measure(step, min_nbytes=MIN_NBYTES)


def test_shapes_that_differ_from_run_to_run() -> None:
    training, sizes = Training("resnet"), iter((16, 16, 12))
    with pytest.raises(PlanError, match="two runs of the step saved different tensors"):
        er.measure(lambda: training.step(n=next(sizes)), min_nbytes=MIN_NBYTES)


def test_a_step_that_saves_nothing() -> None:
    training = Training("lstm")
    for step in (lambda: None, torch.no_grad()(training.loss)):
        with pytest.raises(PlanError, match="saves nothing for backward"):
            er.measure(step)


def test_a_step_that_fails_leaves_nothing_open() -> None:
    training, runs = Training("lstm"), iter(range(3))

    def step() -> None:
        training.step()
        if next(runs) == 2:
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        er.measure(step)
    assert torch._C._len_torch_function_stack() == 0
    assert not torch._C._autograd._profiler_enabled()


def test_gradient_accumulation_is_one_step() -> None:
    """As it was measured, so it is followed: one context around the whole step, backward inside."""
    training = Training("gpt", n=8)

    def step() -> None:
        for _ in range(3):
            (training.loss() / 3).backward()
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)

    profile = er.measure(step, min_nbytes=MIN_NBYTES)
    for share in (0.8, 0.6):
        budget = profile.static + int(share * (profile.peak - profile.static))
        plan = er.plan(profile, budget=budget)

        def planned_step(plan: Plan = plan) -> None:
            with following(plan)():
                step()

        planned_step()
        measured = profile.static + er.peak(planned_step)
        assert plan.peak == pytest.approx(measured, rel=NEAR)
        assert measured <= OVER * budget
        assert not plan.unknown_sites


# --- Arguments


def test_bad_arguments() -> None:
    profile = profiled("lstm")
    with pytest.raises(PlanError, match="measure takes a function"):
        er.measure(3)
    with pytest.raises(PlanError, match=r"a function that runs one training step; got LSTM"):
        er.measure(LSTM())
    with pytest.raises(UnknownField, match="min_nbytes"):
        er.measure(lambda: None, min_nbytes=-1)
    with pytest.raises(PlanError, match=r"plan takes a profile from er\.measure"):
        er.plan("profile.json", budget="1 GiB")
    with pytest.raises(ValueError, match="size"):
        er.plan(profile, budget="much")
    with pytest.raises(UnknownField, match="exact='yes'"):
        er.plan(profile, budget="1 GiB", exact="yes")
    with pytest.raises(PlanError, match="no solver 'gredy'"):
        er.plan(profile, budget="1 GiB", solver="gredy")
    with pytest.raises(PlanError, match=r"following takes a plan from er\.plan"):
        er.following("plan.json")
    with pytest.raises(UnknownField, match="min_nbytes"):
        er.following(er.plan(profile, budget="1 GiB"), min_nbytes="1 KiB")


@pytest.mark.parametrize("warm_up", [-1, 1.5, True])
def test_a_bad_warm_up(warm_up: Any) -> None:
    step = Training("lstm").step
    with pytest.raises(UnknownField, match="warm_up="):
        er.measure(step, warm_up=warm_up)


@pytest.mark.parametrize("recompute", ["no", 1, None])
def test_a_bad_recompute(recompute: Any) -> None:
    profile = profiled("lstm")
    with pytest.raises(UnknownField, match="recompute="):
        er.plan(profile, budget="1 GiB", recompute=recompute)


def test_a_generous_budget_changes_nothing() -> None:
    plan = er.plan(profiled("gpt"), budget="1 GiB")
    assert plan.changes_nothing
    assert plan.exact
    assert plan.slowdown == 0
    assert {known.preset for known in plan.sites.values()} == {"keep"}


@pytest.mark.parametrize("solver", ["greedy", "uniform", "rounding"])
def test_other_solvers_keep_their_promise_too(solver: str) -> None:
    plan = planned("resnet", 0.85, solver=solver)
    assert plan is not None
    assert plan.solver == solver
    measured = Training("resnet").peak(following(plan))
    assert plan.peak == pytest.approx(measured, rel=NEAR)


class Gate(nn.Module):
    """What is saved outside of it, it makes from what is saved inside."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x))


@pytest.mark.parametrize("between", [nn.Dropout(0.0), nn.Identity(), nn.Flatten(0, 1)])
def test_what_a_module_that_runs_again_has_made_is_not_rebuilt_outside(between: nn.Module) -> None:
    """Nor where an op in between hands on what it was given: that makes nothing."""
    torch.manual_seed(0)
    net = nn.Sequential(Gate(), between, nn.Linear(256, 64))
    x = torch.randn(32, 64, 64)
    profile = er.measure(lambda: net(x).square().mean().backward(), min_nbytes=MIN_NBYTES)
    built = build_problem(profile, exact=True)
    (region,) = (one for one in built.problem.regions if one.name == "0")
    outside = [
        at
        for at, i in enumerate(built.storages)
        if any(save.site.module == "2" for save in profile.storages[i].saves)
    ]
    assert outside
    assert set(outside) <= set(region.inputs)
    gelu = next(i for i, s in enumerate(profile.storages) if s.saves[0].site.consumer == "gelu")
    assert [profile.storages[built.storages[at]].made_of for at in outside] == [(gelu,)]


def test_a_class_is_found_out_once() -> None:
    """Of blocks that cannot run again, the first tells of all; a container tells of nobody."""
    profile = profiled("resnet")
    name, kind = next((one.name, one.kind) for one in profile.modules if "." in one.name)
    left = {one.name for one in profile.never_again([name], alike=True).modules if one.why_not}
    assert left >= {one.name for one in profile.modules if one.kind == kind}
    containers = [one for one in profile.modules if one.kind == "Sequential"]
    left = profile.never_again([containers[0].name], alike=True)
    left = {one.name for one in left.modules if one.why_not}
    before = {one.name for one in profile.modules if one.why_not}
    assert left - before <= {containers[0].name}


def test_each_node_of_a_call_asks_for_its_own() -> None:
    """Cross entropy makes two: the log-softmax, whose result is asked for second, and the loss."""
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 500), torch.randn(64, 32)
    target = torch.randint(0, 500, (64,))
    recording = Recording.start([x], torch.device("cpu"))
    assert recording is not None
    try:
        with Saving(KeepAll(), min_nbytes=0, recorder=recording.recorder):
            loss = F.cross_entropy(layer(x), target)
        nodes = recording.recorder.asks()
        storages = recording.recorder.storages()
    finally:
        recording.close()
    of_call = {s.nbytes: n for s, n in zip(storages, nodes, strict=True)}
    assert of_call[64 * 500 * 4] < of_call[64 * 8]  # the probabilities, the targets
    del loss
