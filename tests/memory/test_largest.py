"""largest_batch: predicted, confirmed, and nothing of the user's is changed."""

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.errors import BudgetTooSmall, PlanError
from elbowroom.runtime import attach
from elbowroom.runtime.attach import opener_of
from elbowroom.tools.largest_batch import _BatchTrial
from elbowroom.units import show_nbytes

WIDTH = 64


def make():
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.SiLU(), nn.Dropout(0.1))
        for _ in range(4)
    ]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(8, WIDTH)).sum().backward()  # gradients stand
    return model, optimizer


def batch_of(n):
    return torch.randn(64 * n, WIDTH)


def loss_of(model, batch):
    return model(batch).square().mean()


def everything(model, optimizer):
    states = [v for s in optimizer.state.values() for v in s.values()]
    return [*model.state_dict().values(), *states, torch.get_rng_state()] + [
        p.grad for p in model.parameters()
    ]


def find(model, optimizer, budget, **settings):
    return er.largest_batch(
        model,
        batch_of,
        budget=budget,
        loss=loss_of,
        optimizer=optimizer,
        min_nbytes=4096,
        **settings,
    )


class Uneven(nn.Sequential):
    def forward(self, x):
        return super().forward(x) if len(x) < 200 else self[0](x)


@pytest.mark.parametrize("exact", [True, None])
def test_the_largest_batch_fits_as_measured_and_one_much_larger_does_not(exact):
    model, optimizer = make()
    before = [t.clone() for t in everything(model, optimizer)]
    gradients = [p.grad for p in model.parameters()]
    found = find(model, optimizer, "8 MiB", exact=exact)
    assert all(map(torch.equal, before, everything(model, optimizer)))
    assert all(p.grad is one for p, one in zip(model.parameters(), gradients, strict=True))
    assert not optimizer.state
    assert not attach._attached
    assert found.measured_nbytes <= 8 << 20
    assert found.measured_nbytes == pytest.approx(found.predicted_nbytes, rel=0.1)
    assert found.measured_nbytes > 0.85 * (8 << 20)
    assert found.seconds_per_sample > 0
    assert found.exact or exact is None
    assert f"batch {found.batch} fits 8.00 MiB" in str(found)
    er.fit(model, budget="8 MiB", optimizer=optimizer, exact=exact, min_nbytes=4096)
    for n in (found.batch, int(1.5 * found.batch)):
        optimizer.zero_grad(set_to_none=True)
        try:
            for _ in range(4):
                loss_of(model, batch_of(n)).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        except BudgetTooSmall:
            assert n > found.batch
        else:
            assert n == found.batch
    er.release(model)


def test_a_fitted_model_stays_fitted():
    model, optimizer = make()
    er.fit(model, budget="1 GiB", optimizer=optimizer)
    fitting = opener_of(model)
    find(model, optimizer, "2 MiB")
    assert opener_of(model) is fitting
    assert fitting.context.step == 0
    er.release(model)


def test_what_cannot_be_found_is_said_and_harms_nothing():
    model, optimizer = make()
    before = [t.clone() for t in everything(model, optimizer)]
    with pytest.raises(BudgetTooSmall, match="needs with a batch of 1 at the least") as refused:
        find(model, optimizer, "100 KiB")
    assert find(model, optimizer, int(1.05 * refused.value.least_nbytes)).batch >= 1

    with pytest.raises(PlanError, match="saves other tensors than one with batch"):
        er.largest_batch(Uneven(*model), batch_of, budget="8 MiB", loss=loss_of, min_nbytes=4096)
    with pytest.raises(PlanError, match="a step with batch 2 cannot be profiled"):
        er.largest_batch(model, batch_of, budget="8 MiB", loss=lambda model, x: model[0](x).sum())
    with pytest.raises(PlanError, match="make_batch is a function; got int"):
        er.largest_batch(model, 3, budget="8 MiB", loss=loss_of)
    with pytest.raises(ZeroDivisionError):
        er.largest_batch(model, batch_of, budget="8 MiB", loss=lambda *_: 1 / 0)
    assert all(map(torch.equal, before, everything(model, optimizer)))
    assert not attach._attached


@pytest.mark.parametrize("exact", [True, None])
def test_a_refusal_after_a_correction_says_what_the_first_one_would(monkeypatch, exact):
    """The user's budget, what was measured, and the ways out."""
    model, optimizer = make()
    with pytest.raises(BudgetTooSmall) as refused:
        find(model, optimizer, "100 KiB", exact=exact)
    budget = int(1.2 * refused.value.least_nbytes)
    monkeypatch.setattr(_BatchTrial, "peak", lambda trial, batch, plan: plan.peak + budget)
    with pytest.raises(BudgetTooSmall, match="weights and what else") as corrected:
        find(model, optimizer, budget, exact=exact)
    assert str(corrected.value).startswith(f"budget {show_nbytes(budget)} is below")
    assert ("Allow lossy codes with exact=None" in str(corrected.value)) == (exact is True)
    assert corrected.value.least_nbytes >= refused.value.least_nbytes + budget


def test_a_run_that_fits_after_a_correction_predicts_with_it(monkeypatch):
    model, optimizer = make()
    over, real = [1 << 20], _BatchTrial.peak

    def once(trial, batch, plan):
        return plan.peak + over.pop() if over else real(trial, batch, plan)

    monkeypatch.setattr(_BatchTrial, "peak", once)
    found = find(model, optimizer, "8 MiB")
    assert found.measured_nbytes <= found.budget_nbytes == 8 << 20
    assert found.predicted_nbytes == pytest.approx(found.measured_nbytes + (1 << 20), rel=0.05)


def test_a_batch_that_leaves_room_is_tried_again_larger(monkeypatch):
    model, optimizer = make()
    plain = find(model, optimizer, "8 MiB")
    monkeypatch.setattr(_BatchTrial, "peak", lambda trial, batch, plan: int(0.7 * plan.peak))
    found = find(model, optimizer, "8 MiB")
    assert found.batch > 1.2 * plain.batch
    assert 0.9 * (8 << 20) < found.measured_nbytes <= found.budget_nbytes == 8 << 20
    assert found.predicted_nbytes == pytest.approx(found.measured_nbytes, rel=0.15)
    assert found.plan.budget == 8 << 20 >= found.plan.peak


def test_what_was_seen_to_fit_stays_when_a_larger_one_does_not(monkeypatch):
    model, optimizer = make()
    seen = {}

    def too_much_if_larger(trial, batch, plan):
        seen.setdefault("batch", batch)
        return plan.peak // 2 if batch == seen["batch"] else 16 << 20

    monkeypatch.setattr(_BatchTrial, "peak", too_much_if_larger)
    found = find(model, optimizer, "8 MiB")
    assert found.batch == seen["batch"]
    assert found.measured_nbytes < 5 << 20
