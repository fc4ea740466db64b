"""fit: each kind of forward has its own plan, found from its own steps, and never a wrong one."""

import copy

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.fitting.plan_cache import _MAX
from elbowroom.fitting.signature import signature_of
from elbowroom.measure import peak
from elbowroom.runtime.attach import opener_of

pytestmark = pytest.mark.usefixtures("nothing_stays_attached")

WIDTH, DEPTH = 32, 4


class Reader(nn.Module):
    """Sequences of any length; `tail` is another branch."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
            )
            for _ in range(DEPTH)
        )
        self.tail = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, tail=False):
        for block in self.blocks:
            x = x + block(x)
        return self.tail(x).tanh() if tail else x


def make(budget=None, **settings):
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is not None:
        er.fit(model, budget=budget, optimizer=optimizer, min_nbytes=4096, **settings)
    return model, optimizer


def step(model, optimizer, length, **flags):
    torch.manual_seed(length)
    loss = model(torch.randn(8, length, WIDTH), **flags).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def static_nbytes(model, optimizer):
    states = [v for s in optimizer.state.values() for v in s.values()]
    return sum(t.untyped_storage().nbytes() for t in [*model.parameters(), *states])


def needs(length):
    model, optimizer = make()
    step(model, optimizer, length)
    static = static_nbytes(model, optimizer)
    return static, static + peak(lambda: step(model, optimizer, length))


def share_of(length, share):
    static, plain = needs(length)
    return static + int(share * (plain - static))


def total(model, optimizer, length):
    return static_nbytes(model, optimizer) + peak(lambda: step(model, optimizer, length))


def test_two_lengths_have_two_plans_within_the_budget_and_plain_in_every_bit():
    budget, lengths = share_of(256, 0.7), (256, 96)
    plain, run = make(), make(budget, exact=True)
    losses = [[step(*one, lengths[i % 2]) for i in range(14)] for one in (plain, run)]
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
    for length in lengths:
        assert total(*run, length) <= budget
        assert opener_of(run[0]).planner.settled
    assert opener_of(run[0]).planner.plan is None  # 96 fits as it is
    step(*run, 256)
    assert opener_of(run[0]).planner.plan is not None


def test_the_plan_of_a_bucket_grows_with_its_largest_and_knows_all_its_sites():
    budget = share_of(250, 0.7)
    model, optimizer = make(budget, exact=True)
    for _ in range(5):
        step(model, optimizer, 200)
    for length in (140, 230, 180, 250, 250, 250, 131):
        assert total(model, optimizer, length) <= budget
    planner = opener_of(model).planner
    assert planner.largest.shapes == ((8, 250, WIDTH),)
    assert planner.plan is not None
    planner.plan.unknown_sites.clear()
    for length in (129, 250, 199):
        step(model, optimizer, length)
        assert opener_of(model).planner is planner
    assert not planner.plan.unknown_sites


def test_a_growth_that_no_estimate_fits_is_learned_again():
    """From 130 to 256 the profile says twice as much; it is never taken for a refusal."""
    budget = share_of(256, 0.62)
    model, optimizer = make(budget, exact=True)
    for length in (130, 130, 130, 130, 256, 256, 256, 256, 256):
        step(model, optimizer, length)
    assert total(model, optimizer, 256) <= budget


def test_random_lengths_stay_within_the_budget_and_plain_in_every_bit():
    budget = share_of(256, 0.6)
    plain = make()
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 257, (60,), generator=generator).tolist()
    expected = [step(*plain, length) for length in lengths]
    run = make(budget, exact=True)  # not beside: all that a thread does is measured
    assert torch.equal(torch.stack([step(*run, n) for n in lengths]), torch.stack(expected))
    fitting = opener_of(run[0])
    assert fitting.highest_nbytes <= budget
    settled = [one for one in fitting._plan_cache if one.settled]
    assert settled
    for one in settled:
        assert total(*run, one.largest.shapes[0][1]) <= budget


def test_a_branch_and_evaluation_with_gradients_have_plans_of_their_own():
    model, optimizer = make(share_of(256, 0.8), exact=True)
    seen = []
    for _ in range(6):
        step(model, optimizer, 256)
        seen.append(opener_of(model).planner)
        step(model, optimizer, 256, tail=True)
        seen.append(opener_of(model).planner)
        model.eval()
        model(torch.randn(8, 256, WIDTH))
        seen.append(opener_of(model).planner)
        model.train()
    assert len(set(map(id, seen))) == 3
    for planner in seen[-3:]:
        assert planner.plan is None or not planner.plan.unknown_sites


def test_shapes_that_never_end_are_bounded():
    model, _ = make("1 GiB")
    for n in range(3 * _MAX):
        model(torch.randn(1 << (n % 5), 1 << (n // 5), WIDTH))
    assert len(list(opener_of(model)._plan_cache)) == _MAX


def test_what_makes_two_calls_one_kind():
    model = Reader()
    x = torch.randn(4, 100, WIDTH)

    def kind(*args, **kwargs):
        return signature_of(model, args, kwargs)

    one = kind(x)
    assert one.bucket == kind(x[:, :65]).bucket
    assert one.bucket == kind(x[:3]).bucket
    assert one.bucket != kind(x[:, :64]).bucket
    assert one.covers(kind(x[:, :65]))
    assert not kind(x[:, :65]).covers(one)
    assert kind(x, 3).bucket == kind(x, 4).bucket  # a count
    assert kind({"a": x, "b": [x]}).shapes == (tuple(x.shape),) * 2
    for other in (
        kind(x.double()),
        kind(x, True),
        kind(x, tail=True),
        kind(x[None]),
        kind(x.requires_grad_()),
        kind([x]),
    ):
        assert other.structure != one.structure
        assert not other.covers(one)
    model.tail.requires_grad_(False)
    assert signature_of(model, (x.detach(),), {}).structure != one.structure
    model.requires_grad_(True).eval()
    assert signature_of(model, (x.detach(),), {}).structure != one.structure


@pytest.mark.parametrize("x", [torch.zeros(0, 3), torch.tensor(1.0), torch.zeros(2, 2).to_sparse()])
def test_odd_arguments_have_a_kind(x):
    signature = signature_of(nn.Linear(2, 2), (x,), {"none": None})
    assert signature.covers(signature)
    assert signature.joined(signature) == signature
    assert signature.numel >= 1


def test_a_plan_for_larger_tensors_does_the_same_and_knows_them():
    layer = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(512, 64)
    profile = er.measure(lambda: layer(x).sum().backward(), min_nbytes=4096)
    plan = er.plan(profile, budget=profile.peak)
    grown = plan.grown(1.5, profile.static, plan.budget)
    assert grown.recompute == plan.recompute
    for name, known in plan.sites.items():
        assert grown.sites[name].preset == known.preset
        assert grown.sites[name].nbytes >= 1.5 * known.nbytes
    with er.following(grown, min_nbytes=4096):
        layer(torch.randn(768, 64)).sum().backward()
    assert not grown.unknown_sites


# --- The longest batch, first


class Noisy(Reader):
    """With statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x, **flags):
        return self.norm(super().forward(x, **flags).flatten(0, 1))


def test_the_worst_batch_is_planned_before_training_begins():
    budget = share_of(256, 0.6)
    torch.manual_seed(0)
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.eval()
    model.norm.train()
    before = [t.clone() for t in (*model.state_dict().values(), torch.get_rng_state())]
    worst = {"x": torch.randn(8, 256, WIDTH), "tail": True}
    torch.set_rng_state(before[-1])
    er.fit(model, budget=budget, optimizer=optimizer, min_nbytes=4096, exact=True, worst=worst)
    after = [*model.state_dict().values(), torch.get_rng_state()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not model.training
    assert model.norm.training
    fitting = opener_of(model)
    planned = fitting.planner
    assert planned.from_rehearsal
    assert fitting.context.step == 0
    model.train()
    step(model, optimizer, 64)
    assert fitting.planner is not planned
    model(**worst).square().mean().backward()
    assert fitting.planner is planned
    fitting._step.end()
    assert fitting._step.peak <= budget


def test_a_worst_batch_that_never_fits_is_refused_at_once():
    model, optimizer = make()
    budget = share_of(64, 1.0)
    for worst in (torch.randn(8, 512, WIDTH), (torch.randn(8, 512, WIDTH),)):
        with pytest.raises(er.errors.BudgetTooSmall, match="that should suffice for this step"):
            er.fit(model, budget=budget, optimizer=optimizer, exact=True, worst=worst)
        assert opener_of(model) is None
    with pytest.raises(er.errors.PlanError, match="worst=list is not possible; it is a tensor"):
        er.fit(model, budget=budget, worst=[torch.randn(8, 512, WIDTH)])


def test_a_worst_batch_with_room_changes_nothing():
    model, _ = make()
    er.fit(model, budget="1 GiB", worst=torch.randn(8, 256, WIDTH))
    assert opener_of(model).planner.plan is None
    assert not opener_of(model).planner.settled


# --- Evaluation and checkpoints are part of a training


def test_evaluation_and_saving_between_steps_break_neither_measurement_nor_budget(tmp_path):
    budget = share_of(256, 0.7)
    ends = []
    for fitted in (False, True):
        model, optimizer = make(budget if fitted else None, exact=True)
        losses = []
        for _ in range(8):
            losses.append(step(model, optimizer, 256))
            model.eval()
            with torch.no_grad():  # four times the size of a step's batch
                losses.append(model(torch.randn(32, 256, WIDTH)).mean())
            model.train()
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                tmp_path / "checkpoint.pt",
            )
            losses += [
                loaded.sum() for loaded in torch.load(tmp_path / "checkpoint.pt")["model"].values()
            ]
        ends.append(torch.stack(losses))
    assert torch.equal(*ends)
    fitting = opener_of(model)
    assert fitting.planner.settled
    assert fitting.planner.plan is not None
    assert fitting.highest_nbytes <= budget
    assert total(model, optimizer, 256) <= budget


def test_a_look_without_gradients_before_backward_does_not_end_the_step():
    budget = share_of(256, 0.7)
    model, optimizer = make(budget, exact=True)
    for _ in range(6):
        x = torch.randn(8, 256, WIDTH)
        loss = model(x).square().mean()
        with torch.no_grad():
            model(x[:1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert opener_of(model).planner.settled
    assert opener_of(model).planner.plan is not None
    assert total(model, optimizer, 256) <= budget


def test_the_number_of_boxes_in_each_image_makes_no_kind_of_its_own() -> None:
    """Each batch of a detection training was a first step of its size."""
    model, images = nn.Linear(2, 2), torch.randn(2, 3, 64, 64)

    def kind(*numbers: int, **settings: bool):
        boxes = [torch.randn(n, 4) for n in numbers]
        return signature_of(model, (images, boxes), {}, **settings)

    assert kind(5, 12).bucket == kind(9, 8).bucket == kind(17, 0).bucket
    assert kind(5, 12) == kind(9, 8)
    assert kind(5, 12, joins_small=False) != kind(9, 8, joins_small=False)
    assert kind(5, 40).bucket != kind(5, 12).bucket  # in all there are twice as many
    assert kind(5, 12).numel == images.numel() + 17 * 4
    few = signature_of(model, (torch.randn(8, 4), [torch.randn(5, 4), torch.randn(2, 4)]), {})
    assert few.shapes == ((8, 4), (5, 4), (2, 4))


class Attends(nn.Module):
    """What attention holds, written out, grows with the square of the length."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.qkv:
            q, k, v = layer(x).chunk(3, -1)
            x = x + (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return x.square().mean()


def test_a_plan_that_fits_for_a_shorter_text_is_measured_for_a_longer_one():
    """By numbers of elements the longer one would fit, too. It was above the budget in each step,
    and nothing was said of it after the first ones."""
    torch.manual_seed(0)
    model = Attends()
    texts = [torch.randn(2, length, 16) for length in (200, 256)]

    def peaks(model: nn.Module, count: int) -> list[int]:
        found = []
        for x in texts * count:
            model.zero_grad()
            found.append(er.peak(lambda: model(x).backward()))  # noqa: B023
        return found

    weights = sum(p.nbytes for p in model.parameters())
    plain = peaks(copy.deepcopy(model), 1)[1]
    least = None
    for share in (0.3, 0.36, 0.42, 0.48, 0.54):
        budget = weights + int(share * plain)
        fitted = er.fit(copy.deepcopy(model), budget=budget, exact=True, min_nbytes=0)
        try:
            for x in texts * 15:
                fitted.zero_grad()
                fitted(x).backward()
        except er.errors.BudgetTooSmall as error:
            least = error.least_nbytes
            er.release(fitted)
            continue
        assert max(peaks(fitted, 2)) + weights <= budget
        er.release(fitted)
    assert least is not None  # one of them was too small
