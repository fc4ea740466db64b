"""A loss outside of the model is part of the plan, if `er.fit` is given it."""

import collections
import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.errors import BudgetTooSmall, PlanError
from elbowroom.fitting import Fitting
from elbowroom.fitting.loss import may_be_loss
from elbowroom.plan.make import plain_peak
from elbowroom.runtime.attach import opener_of
from elbowroom.tools import Discovery

WORDS, WIDTH = 1000, 32
Step = Callable[[], Tensor]


class Model(nn.Module):
    """An embedding and a head, so that the loss holds nearly all."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.mix(self.words(x)))
        return out


def made() -> tuple[Model, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randint(0, WORDS, (2, 512))
    return Model(), nn.CrossEntropyLoss(), x, y


def training(model: nn.Module, loss: Callable[..., Tensor], x: Tensor, y: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> Tensor:
        found = loss(model(x), y)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    return step


def weights_nbytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def plain_run(steps: int) -> tuple[list[Tensor], int]:
    """The losses of plain training, and the bytes that a step takes."""
    model, loss, x, y = made()
    step = training(model, loss, x, y)
    found = [step() for _ in range(steps)]
    return found, weights_nbytes(model) + er.peak(step)


def test_it_holds_what_the_model_alone_does_not_with_plains_bits() -> None:
    plain, peak = plain_run(8)
    budget = int(0.75 * peak)
    model, loss, x, y = made()
    er.fit(model, budget=budget, exact=True)
    step = training(model, loss, x, y)
    with pytest.raises(BudgetTooSmall):
        collections.deque((step() for _ in range(8)), maxlen=0)
    model, loss, x, y = made()
    er.fit(model, budget=budget, exact=True, loss=loss)
    step = training(model, loss, x, y)
    found: list[Tensor] = []
    first = weights_nbytes(model) + er.peak(lambda: found.append(step()))
    found += [step() for _ in range(7)]
    assert all(map(torch.equal, found, plain))
    assert first <= 1.05 * budget
    assert weights_nbytes(model) + er.peak(step) <= budget


def test_what_a_refusal_names_is_below_plains_need_and_holds() -> None:
    """Gradients of the loss go to the outputs of the model, each of which counts once."""
    _, peak = plain_run(1)
    model, loss, x, y = made()
    er.fit(model, budget=int(0.45 * peak), exact=True, loss=loss)
    step = training(model, loss, x, y)
    with pytest.raises(BudgetTooSmall) as refused:
        collections.deque((step() for _ in range(8)), maxlen=0)
    least = refused.value.least_nbytes
    assert least < 0.8 * peak
    model, loss, x, y = made()
    er.fit(model, budget=least, exact=True, loss=loss)
    step = training(model, loss, x, y)
    collections.deque((step() for _ in range(8)), maxlen=0)
    assert weights_nbytes(model) + er.peak(step) <= least


def test_codes_hold_it_in_less() -> None:
    plain, peak = plain_run(1)
    model, loss, x, y = made()
    er.fit(model, budget=int(0.8 * peak), exact=False, loss=loss)
    step = training(model, loss, x, y)
    found = [step() for _ in range(8)]
    assert torch.equal(found[0], plain[0])
    assert found[-1] < found[0]
    assert weights_nbytes(model) + er.peak(step) <= int(0.8 * peak)


def test_without_a_forward_that_waits_it_runs_plainly() -> None:
    model, loss, x, y = made()
    er.fit(model, budget="1 GiB", loss=loss)
    free = torch.randn(4, WORDS, requires_grad=True)
    assert torch.equal(loss(free, y[:4]), F.cross_entropy(free, y[:4]))
    step = training(model, loss, x, y)
    for _ in range(4):
        step()
        with torch.no_grad():
            loss(model(x), y)
        loss(free, y[:4]).backward()
    assert er.summary(model).exact


def test_two_models_may_share_one() -> None:
    """A call belongs to the model whose forward was the last one: both of a GAN, say."""

    def nets() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 64))
        return generator, nn.Sequential(nn.Linear(64, 256), nn.LeakyReLU(), nn.Linear(256, 1))

    def run(budgets: tuple[int, int] | None) -> list[Tensor]:
        generator, critic = nets()
        loss, seen = nn.BCEWithLogitsLoss(), []
        if budgets is not None:
            for net, budget in zip((generator, critic), budgets, strict=True):
                er.fit(net, budget=budget, exact=True, loss=loss)
        updates = [torch.optim.SGD(net.parameters(), lr=0.05) for net in (generator, critic)]
        real, noise, ones = torch.randn(256, 64), torch.randn(256, 16), torch.ones(256, 1)
        for _ in range(8):
            fake = generator(noise)
            of_critic = loss(critic(real), ones) + loss(critic(fake.detach()), 0 * ones)
            of_critic.backward()
            updates[1].step()
            of_generator = loss(critic(fake), ones)
            updates[0].zero_grad()
            of_generator.backward()
            updates[0].step()
            updates[1].zero_grad()
            seen += [of_critic.detach(), of_generator.detach()]
        return seen

    assert all(map(torch.equal, run((10 << 20, 10 << 20)), run(None)))


def test_several_losses_of_one_model() -> None:
    def run(*, fits: bool) -> list[Tensor]:
        model, one, x, y = made()
        two = nn.MSELoss()
        if fits:
            er.fit(model, budget="7 MiB", exact=True, loss=[one, two])
        step = training(model, lambda out, y: one(out, y) + two(out.mean(-1), y / WORDS), x, y)
        return [step() for _ in range(8)]

    assert all(map(torch.equal, run(fits=True), run(fits=False)))


def test_under_the_users_checkpoint_and_over_micro_batches() -> None:
    """Backward runs a checkpointed loss again: that is no forward of the next step."""

    def run(*, fits: bool) -> list[Tensor]:
        model, loss, x, y = made()
        if fits:
            er.fit(model, budget="24 MiB", exact=True, loss=loss)
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(8):
            for some in ((x[:256], y[:256]), (x[256:], y[256:])):
                found = checkpoint(loss, model(some[0]), some[1], use_reentrant=False)
                found.backward()
                seen.append(found.detach())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert all(map(torch.equal, run(fits=True), run(fits=False)))


def test_a_release_leaves_it_to_itself() -> None:
    model, loss, x, y = made()
    other = Model()
    er.fit(model, budget="1 GiB", loss=loss)
    er.fit(other, budget="1 GiB", loss=loss)
    training(model, loss, x, y)()
    er.release(model)
    assert opener_of(loss) is not None
    training(model, loss, x, y)()
    training(other, loss, x, y)()
    er.release(other)
    assert opener_of(loss) is None


def test_it_outlives_its_model() -> None:
    model, loss, _, y = made()
    er.fit(model, budget="1 GiB", loss=loss)
    del model
    gc.collect()
    free = torch.randn(4, WORDS, requires_grad=True)
    loss(free, y[:4]).backward()
    assert opener_of(loss) is None


def test_an_error_in_it_is_the_users_and_the_training_goes_on() -> None:
    model, loss, x, y = made()
    er.fit(model, budget="1 GiB", loss=loss)
    step = training(model, loss, x, y)
    step()
    for _ in range(3):
        with pytest.raises(ValueError, match="batch_size"):
            loss(model(x), y[:5])
        step()


class _Hiding(nn.Module):
    """Calls a module that is kept in a list, where PyTorch does not see its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [nn.Linear(2, 2)]


def test_what_might_be_a_loss_is_told_from_what_holds_parameters() -> None:
    assert may_be_loss(nn.CrossEntropyLoss())
    assert may_be_loss(nn.Sequential(nn.LogSoftmax(1), nn.NLLLoss()))
    assert not may_be_loss(nn.Linear(2, 2))
    assert not may_be_loss(_Hiding())
    assert not may_be_loss(nn.Sequential(nn.ReLU(), _Hiding()))


@pytest.mark.parametrize("by_turns", [True, False])
def test_parts_of_a_model_that_is_frozen_by_turns_are_no_losses(*, by_turns: bool) -> None:
    """`elbowroom run` meets the discriminator of a GAN while the generator learns."""
    judge, met = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(), nn.Linear(4, 1)), []

    def is_loss(module: nn.Module) -> bool:
        if may_be_loss(module):
            met.append(module)
        return False

    models: list[nn.Module] = []
    criterion, x = nn.MSELoss(), torch.ones(2, 4, requires_grad=True)
    with Discovery(models.append, loss=is_loss):
        kept = torch.optim.SGD(judge.parameters(), lr=0.1) if by_turns else None
        judge.requires_grad_(requires_grad=False)
        criterion(judge(x), torch.ones(2, 1))
        judge.requires_grad_()
        judge(x)
        del kept
    assert met == ([criterion] if by_turns else [judge[1], criterion])
    assert models == ([judge] if by_turns else [])


def test_a_call_inside_a_forward_is_a_part_of_it() -> None:
    criterion = nn.MSELoss()

    class Judged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.hidden = nn.Linear(4, 4), [criterion]

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.hidden[0](self.layer(x), x)
            return loss

    model, other = Judged(), nn.Linear(4, 4)
    for one in (model, other):
        er.fit(one, budget="1 GiB", loss=criterion)
    fitting = opener_of(other)
    assert isinstance(fitting, Fitting)
    went_on = []
    fitting.run_more = lambda *given: went_on.append(given)  # type: ignore[assignment]
    x = torch.ones(2, 4)
    (other(x).sum() + model(x)).backward()
    assert not went_on
    for one in (model, other):
        er.release(one)


def test_volumes_are_planned_with_a_loss_outside(caplog: pytest.LogCaptureFixture) -> None:
    """The first convolution's input is held by nobody that a later forward can ask."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 1, 24, 24, 24), torch.randn(2, 2, 24, 24, 24)

    def block(given: int, stride: int) -> nn.Module:
        return nn.Sequential(nn.Conv3d(given, 8, 3, stride, 1), nn.BatchNorm3d(8), nn.ReLU())

    down = nn.Sequential(block(1, 2), block(8, 1))
    model, loss = nn.Sequential(down, block(8, 1), nn.ConvTranspose3d(8, 2, 2, 2)), nn.MSELoss()
    budget = int(0.8 * er.peak(lambda: loss(model(x), y).backward()))
    model.zero_grad()
    er.fit(model, budget=budget, exact=True, loss=loss, min_nbytes=4096)
    training(model, loss, x, y)()
    assert "could not be planned" not in caplog.text


class _Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.scale * (x - y)).square().mean()


MODEL = Model()
WRONG: dict[str, tuple[Any, str]] = {
    "a function": (F.cross_entropy, "use its module"),
    "a name": ("cross_entropy", "got str"),
    "one of several": ([nn.MSELoss(), F.mse_loss], "got function"),
    "the model": (MODEL, "a part of the model"),
    "a part": (MODEL.mix[1], "a part of the model"),
    "a trained one": (_Trained(), "parameters that are trained"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_loss_is_refused(name: str) -> None:
    given, words = WRONG[name]
    with pytest.raises(PlanError, match=words):
        er.fit(MODEL, budget="1 GiB", loss=given)
    assert opener_of(MODEL) is None


def test_a_fitted_model_is_no_loss() -> None:
    frozen = Model().requires_grad_(requires_grad=False)
    er.fit(frozen, budget="1 GiB")
    with pytest.raises(PlanError, match="fitted model"):
        er.fit(Model(), budget="1 GiB", loss=frozen)
    er.release(frozen)


def test_the_output_stands_while_the_loss_is_computed() -> None:
    """So the first plan of both holds, and no measurement has to correct it."""
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    torch.manual_seed(0)
    x, y = torch.randint(0, WORDS, (2, 4, 256))

    def made() -> Step:
        model = nn.Sequential(nn.Embedding(WORDS, 64), *copy.deepcopy(blocks), nn.Linear(64, WORDS))
        criterion = nn.CrossEntropyLoss()
        step = training(model, lambda out, y: criterion(out.flatten(0, 1), y.flatten()), x, y)
        models.append((model, criterion))
        return step

    models: list[tuple[nn.Module, nn.Module]] = []
    plain = made()
    weights = weights_nbytes(models[0][0])
    budget = weights + int(0.75 * er.peak(plain))
    step = made()
    er.fit(models[1][0], budget=budget, exact=True, loss=models[1][1])
    step()  # the loss is met here, and the next step is planned with it
    peaks = [weights + er.peak(step) for _ in range(3)]
    assert max(peaks) <= 1.01 * budget, peaks


class Named(nn.Module):
    """A model that returns its loss, of a vocabulary much larger than its width."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, words)
        self.mix = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.mix(self.words(x))), y)


@pytest.mark.parametrize("exact", [True, None])
def test_a_large_vocabulary_takes_its_logits_once(exact: bool | None) -> None:
    def run(budget: int | None) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        x, y, model = torch.randint(0, 64, (1024,)), torch.randint(0, 8192, (1024,)), Named(8192)
        peak = weights_nbytes(model) + er.peak(lambda: model(x, y).backward())
        model.zero_grad()
        if budget is not None:
            er.fit(model, budget=budget, exact=exact)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses, peak

    plain, peak = run(None)
    ours, _ = run(int(0.55 * peak))
    assert all(map(torch.equal, plain, ours))


class Deep(nn.Module):
    """A model whose blocks need codes, below as many logits as the budget can hold once."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 64), nn.Linear(64, 2048)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
                for _ in range(6)
            )
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.words(x))), y)


def test_logits_are_kept_where_a_plan_encodes_other_tensors() -> None:
    torch.manual_seed(0)
    x, y, model = torch.randint(0, 64, (2048,)), torch.randint(0, 2048, (2048,)), Deep()
    peak = weights_nbytes(model) + er.peak(lambda: model(x, y).backward())
    model.zero_grad()
    budget = int(0.34 * peak)
    er.fit(model, budget=budget, exact=False)

    def step() -> None:
        model(x, y).backward()
        model.zero_grad()

    collections.deque((step() for _ in range(4)), maxlen=0)
    assert not er.summary(model).exact
    assert weights_nbytes(model) + er.peak(step) <= budget


@pytest.mark.parametrize("how", [{}, {"label_smoothing": 0.1}], ids=["ours", "torch's"])
@pytest.mark.parametrize("holds", [False, True], ids=["let go", "held"])
def test_a_profile_tells_what_torchs_own_cross_entropy_takes(how: dict, holds: bool) -> None:
    head, labels = nn.Linear(32, 2000), torch.arange(512) % 2000

    def step() -> None:
        logits = head(torch.ones(512, 32))
        loss = F.cross_entropy(logits, labels, **how)
        if not holds:
            del logits
        loss.backward()
        head.zero_grad()

    plain = er.peak(step)
    profile = er.measure(step)
    assert plain_peak(profile) - profile.static == pytest.approx(plain, rel=0.02)
