"""fit: saved-tensor hooks that the program sets around the model keep their effect."""

import contextlib
import logging

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.errors import BudgetTooSmall
from elbowroom.runtime.attach import opener_of

STEPS = 4


def to_half(x):
    return x.half()


def to_float(x):
    return x.float()


def copy(x):
    return x.clone()


def same(x):
    return x


def train(hooks, budget=None, forwards=1, steps=STEPS):
    """Trains a small network; returns it and its weights."""
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if budget is not None:
        er.fit(model, budget=budget, optimizer=optimizer, exact=True, min_nbytes=1024)
    for _ in range(steps):
        with hooks():
            loss = sum(model(torch.randn(256, 32)).square().mean() for _ in range(forwards))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, [p.detach().clone() for p in model.parameters()]


def lossy():
    return saved_tensors_hooks(to_half, to_float)


def lossless():
    return saved_tensors_hooks(copy, same)


def said(caplog):
    return [one for one in caplog.messages if "saved-tensor hooks" in one]


@pytest.mark.parametrize("forwards", [1, 2])
def test_hooks_that_change_values_stay(caplog, forwards):
    """They had no effect, so that weights were not those of plain training."""
    _, plain = train(lossy, forwards=forwards)
    model, weights = train(lossy, budget=1 << 20, forwards=forwards)
    assert all(map(torch.equal, weights, plain))
    first, then = said(caplog)
    assert "to_half" in first
    assert "is not known yet" in first
    assert "elbowroom leaves to them" in then
    summary = er.summary(model)
    assert summary.exact
    assert summary.setting == "hooks"
    assert summary.highest_nbytes > 0  # steps are measured all the same
    er.release(model)


def test_hooks_that_give_back_what_they_got_are_replaced(caplog):
    model, weights = train(lossless, budget=340 << 10, steps=8)
    _, plain = train(lossless, steps=8)
    assert all(map(torch.equal, weights, plain))
    first, then = said(caplog)
    assert "is not known yet" in first
    assert "elbowroom replaces them" in then
    fitted = opener_of(model)
    assert fitted.peak_nbytes <= 340 << 10 < fitted.highest_nbytes
    assert er.summary(model).setting != "hooks"
    er.release(model)


def test_hooks_of_torch_itself_are_not_waited_for(caplog):
    model, _ = train(save_on_cpu, budget="1 GiB")
    assert said(caplog) == []
    er.release(model)


def test_hooks_that_are_asked_by_no_backward_stay_until_they_are():
    model, _ = train(lossless, budget="1 GiB", steps=0)
    calls = []

    def pack(x):
        calls.append(x)
        return x

    for _ in range(3):
        with saved_tensors_hooks(pack, same):
            out = model(torch.randn(256, 32))
        assert calls
        calls.clear()
    out.sum().backward()
    with saved_tensors_hooks(pack, same):
        model(torch.randn(256, 32)).sum().backward()
    assert not calls
    er.release(model)


@pytest.mark.parametrize("change", [torch.neg, torch.Tensor.double, lambda x: x.mT.contiguous().mT])
def test_other_signs_dtypes_and_layouts_are_changes(change):
    model, _ = train(lossless, budget="1 GiB", steps=0)

    def pack(x):
        return change(x) if x.dim() == 2 else x

    for _ in range(2):
        with saved_tensors_hooks(pack, same):
            out = model(torch.randn(256, 32))
        try:
            out.sum().backward()
        except RuntimeError:  # of another dtype
            model.zero_grad()
    assert er.summary(model).setting == "hooks"
    er.release(model)


def test_hooks_around_the_loss_alone_stay():
    torch.manual_seed(0)
    grads = []
    for fits in (False, True):
        model, criterion = nn.Linear(64, 64), nn.KLDivLoss(reduction="sum", log_target=True)
        torch.manual_seed(1)
        nn.init.normal_(model.weight)
        x, y = torch.randn(64, 64), torch.randn(64, 64)
        if fits:
            er.fit(model, budget="1 GiB", exact=True, loss=criterion)
        for _ in range(2):
            model.zero_grad()
            out = model(x)
            with lossy():
                loss = criterion(out, y)
            loss.backward()
        grads.append(model.weight.grad)
        er.release(model)
    assert torch.equal(*grads)


def test_what_nothing_is_done_for_may_be_above_the_budget_but_not_in_silence(caplog):
    with caplog.at_level(logging.WARNING):
        model, _ = train(lossy, budget=100 << 10)
    summary = er.summary(model)
    assert summary.last_nbytes > summary.budget_nbytes
    assert "does nothing to keep to the budget" in said(caplog)[1]
    er.release(model)
    with pytest.raises(BudgetTooSmall):  # without the hooks it is refused
        train(contextlib.nullcontext, budget=100 << 10)


def _pair() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    return net, torch.randn(128, 64)


def _halved():
    return saved_tensors_hooks(lambda x: x.half(), lambda x: x.float())


def _coded():
    return er.saving("dither", levels=4, min_nbytes=0)


@pytest.mark.parametrize("around", [_halved, _coded])
@pytest.mark.parametrize("policy", ["exact", "keep"])
def test_hooks_around_a_context_get_nothing_of_a_replayed_step(policy, around):
    """What it only keeps went to them from the second step on: exact gradients had an error."""
    net, x = _pair()
    weights = torch.linspace(0, 1, 64)
    expected = torch.autograd.grad((net(x) * weights).sum(), net.parameters())
    for _ in range(4):
        with around(), er.saving(policy, min_nbytes=0):
            y = net(x)
        got = torch.autograd.grad((y * weights).sum(), net.parameters())
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("budget", ["64 MiB", "400 KiB"])  # nothing to do: no hooks, or all kept
def test_hooks_around_a_fitted_model_get_nothing_once_it_has_settled(budget):
    net, x = _pair()
    weights = torch.linspace(0, 1, 64)
    expected = torch.autograd.grad((net(x) * weights).sum(), net.parameters())
    er.fit(net, budget=budget, exact=True, min_nbytes=0)
    for _ in range(12):
        net.zero_grad()
        (net(x) * weights).sum().backward()
    for _ in range(3):
        with _coded():
            y = net(x)
        got = torch.autograd.grad((y * weights).sum(), net.parameters())
        assert all(map(torch.equal, got, expected))


class Longer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.more = _pair()[0], False

    def forward(self, x):
        y = self.net(x)
        return y.sin() * y if self.more else y


@pytest.mark.parametrize("budget", ["64 MiB", "400 KiB"])
def test_a_checkpoint_around_a_fitted_model_whose_forward_changes(budget):
    """The checkpoint held what the followed part kept, and its second run, examined, saved none."""
    net, (_, x) = Longer(), _pair()
    x.requires_grad_()
    er.fit(net, budget=budget, exact=True, min_nbytes=0)
    for step in range(16):
        net.more = step > 12
        net.zero_grad()
        checkpoint(net, x, use_reentrant=False).sum().backward()
