"""grow_batch: the batch grows into the budget between epochs, and learning rates follow."""

import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elbowroom as er
from elbowroom.errors import BudgetTooSmall, PlanError
from elbowroom.tools.grow_batch import GrowingBatch, Grown

WIDTH = 64


def make():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data(n=2048):
    x = torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, 0] > 0).long())


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def growing_of(optimizer, find, **settings):
    given = {"batch": 16, "rule": "none", "most": None, "growth": 2.0, "schedulers": ()}
    given |= settings
    loader = lambda n: DataLoader(data(128), batch_size=n)  # noqa: E731
    return GrowingBatch(loader, optimizer, find, **given)


def sizes(growing, epochs):
    found = []
    for _ in range(epochs):
        found.append(max(len(x) for x, _ in growing))
    return found


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 8.0), ("sqrt", 8.0**0.5)])
def test_learning_rates_follow_by_the_rule(rule, factor):
    _, optimizer = make()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    growing = growing_of(optimizer, lambda make: 1000, rule=rule, schedulers=[scheduler])
    assert sizes(growing, 1) == [16]
    assert sizes(growing, 5) == [32, 64, 128, 128, 128]  # an epoch has 128 samples
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * factor)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * factor * 0.5)
    assert [one[:2] for one in growing.grown] == [(1, 32), (2, 64), (3, 128)]


def test_it_stops_at_what_fits_and_asks_no_more():
    _, optimizer = make()
    asked = []

    def find(make_batch):
        asked.append([len(x) for x in make_batch(300)])
        return 40

    growing = growing_of(optimizer, find, growth=10)
    assert sizes(growing, 4) == [16, 40, 40, 40]
    assert asked == [[300, 300]] * 2  # a loader of 128 samples, repeated; the second finds no more


def test_no_room_leaves_the_batch_and_says_so(caplog):
    _, optimizer = make()

    def find(make_batch):
        raise BudgetTooSmall("budget 1 MiB is below the 2 MiB it needs", least_nbytes=2 << 20)

    assert sizes(growing_of(optimizer, find), 3) == [16, 16, 16]
    assert "the batch stays at 16: budget 1 MiB" in caplog.text


def test_an_epoch_that_ends_early_is_taken_for_what_the_loader_has():
    """Without samples to count, the batch, and the learning rate with it, had no bound."""
    _, optimizer = make()
    growing = growing_of(optimizer, lambda make: 10**6, rule="linear", growth=100.0)
    found = [len(next(iter(growing))[0]) for _ in range(3)]
    assert found == [16, 112, 112]  # of 128: eight batches, of which the last may be smaller
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 7)


def test_of_a_loader_without_a_length_samples_that_were_taken_are_the_most():
    _, optimizer = make()
    growing = growing_of(optimizer, lambda make: 10**6, growth=100.0)
    whole = growing.loader_factory
    growing.loader_factory = lambda n: (batch for batch in whole(n))
    for expected in (16, 48, 128):
        for _, (x, _) in zip(range(3), growing, strict=False):
            assert len(x) <= expected
        assert growing.batch == expected


def test_a_small_growth_adds_up():
    _, optimizer = make()
    growing = growing_of(optimizer, lambda make: 1000, growth=1.02)
    found = sizes(growing, 8)
    assert found == [int(16 * 1.02**epoch) for epoch in range(8)]
    state = growing.state_dict()
    resumed = growing_of(optimizer, lambda make: 1000, growth=1.02)
    resumed.load_state_dict(state)
    assert sizes(resumed, 3) == sizes(growing, 3)


def test_learning_rates_that_are_tensors_and_other_groups_follow():
    model, _ = make()
    pairs = enumerate(model[0][0].parameters(), 1)
    groups = [{"params": [p], "lr": torch.tensor(0.1 * i)} for i, p in pairs]
    optimizer = torch.optim.Adam(groups, foreach=False)
    sizes(growing_of(optimizer, lambda make: 32, rule="linear"), 2)
    found = [float(group["lr"]) for group in optimizer.param_groups]
    assert found == pytest.approx([0.2, 0.4])


def test_a_checkpoint_goes_on():
    _, optimizer = make()
    growing = growing_of(optimizer, lambda make: 64, rule="linear")
    sizes(growing, 2)
    state = pickle.loads(pickle.dumps(growing.state_dict()))
    _, again = make()
    again.load_state_dict(optimizer.state_dict())
    resumed = growing_of(again, lambda make: 64, rule="linear")
    resumed.load_state_dict(state)
    assert resumed.batch == 32
    assert resumed.grown == [Grown(1, 32, 2.0)]
    assert sizes(resumed, 1) == sizes(growing, 1) == [64]
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(0.4)


def test_a_batch_that_fits_by_a_plan_alone_is_said_of_a_model_that_follows_none(caplog):
    model, optimizer = make()
    growing = er.grow_batch(
        lambda n: DataLoader(data(), batch_size=n, drop_last=True),
        model,
        optimizer,
        batch=64,
        budget=2 << 20,
        loss=loss_of,
        rule="none",
        min_nbytes=4096,
    )
    for _ in range(2):
        for _ in growing:
            pass
    assert "this model is not fitted" in caplog.text
    assert "call er.fit(model, budget=2097152" in caplog.text
    caplog.clear()
    er.fit(model, budget=2 << 20, optimizer=optimizer, min_nbytes=4096)
    for _ in growing:
        pass
    assert "not fitted" not in caplog.text


def test_a_training_really_grows_inside_its_budget():
    """By codes the batch becomes larger than plain training could have; the peak keeps to it."""
    model, optimizer = make()
    budget = 2 << 20
    er.fit(model, budget=budget, optimizer=optimizer, min_nbytes=4096)
    growing = er.grow_batch(
        lambda n: DataLoader(data(), batch_size=n, drop_last=True),
        model,
        optimizer,
        batch=64,
        budget=budget,
        loss=loss_of,
        rule="sqrt",
        growth=4,
        min_nbytes=4096,
    )
    batches, losses = [], []
    for _ in range(4):
        for batch in growing:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
        batches.append(growing.batch)
        losses.append(float(loss.detach()))
    assert batches[0] == 64
    assert batches[-1] >= 256
    assert batches == sorted(batches)
    lr = 0.1
    for one in growing.grown:
        lr *= one.lr_factor
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr)
    assert lr == pytest.approx(0.1 * (batches[-1] / 64) ** 0.5)
    assert losses[-1] < losses[0]
    last = next(iter(DataLoader(data(), batch_size=batches[-1])))

    def step():
        optimizer.zero_grad()
        loss_of(model, last).backward()
        optimizer.step()

    standing = sum(p.nbytes for p in model.parameters()) * 2  # and momentum
    optimizer.zero_grad()
    assert standing + er.peak(step) <= budget


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"rule": "half"}, r"rule='half' is not possible; .*'none', 'linear', 'sqrt'"),
        ({"batch": 0}, "batch=0 is not possible"),
        ({"batch": True}, "batch=True is not possible"),
        ({"most": 8}, "most=8 is not possible; it is an int, at least batch=32"),
        ({"growth": 1}, "growth=1 is not possible; it is a finite number above 1"),
        ({"growth": float("inf")}, "growth=inf is not possible"),
        ({"optimizer": 3}, r"grow_batch takes a torch\.optim\.Optimizer; got int"),
        ({"optimizer": None}, "takes a torch.optim.Optimizer, whose learning rates follow; got N"),
        ({"schedulers": "cosine"}, "schedulers='cosine' is not possible; .* with `base_lrs`"),
        ({"loader_factory": 3}, "loader_factory"),
    ],
)
def test_wrong_arguments_say_what_is_possible(settings, match):
    model, optimizer = make()
    given = {"loader_factory": DataLoader, "model": model, "optimizer": optimizer, "batch": 32}
    given |= {"budget": "1 GiB", "loss": loss_of, "rule": "none"}
    with pytest.raises(PlanError, match=match):
        er.grow_batch(**(given | settings))


def test_a_loader_without_batches_is_refused():
    model, optimizer = make()
    growing = er.grow_batch(
        lambda n: [[]], model, optimizer, batch=4, budget="1 GiB", loss=loss_of, rule="none"
    )
    with pytest.raises(PlanError, match="first tensor has one row per sample"):
        next(iter(growing))
