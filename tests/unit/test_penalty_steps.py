"""Steps with a gradient of a gradient whose forward has given results that nobody holds."""

import torch
from torch import nn

import elbowroom as er
from elbowroom.runtime.attach import opener_of
from elbowroom.runtime.ledger import Tally


def test_a_forward_waits_while_a_gradient_reads_what_it_has_saved():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(3, 4, requires_grad=True)
    before = model[0](x)  # another graph of the same weights
    tally = Tally(8, 8)
    out = model(x).sum()
    tally.follow(out)
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    assert tally.waits_again
    del out
    assert tally.waits_again
    assert tally.held_nbytes == 8
    gradient.square().sum().backward()
    assert not tally.waits_again
    assert tally.held_nbytes == 0
    assert before.grad_fn is not None


def test_a_forward_that_nothing_reads_any_more_waits_for_nothing():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(3, 4, requires_grad=True)
    before = model(x).sum()
    tally = Tally(8, 8)
    out = model(x).sum()
    tally.follow(out)
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    del out, gradient
    assert tally.held_nbytes == 0
    assert before.grad_fn is not None


def test_a_settled_step_with_a_penalty_has_all_of_its_forwards():
    """Or the second forward begins a step of its own, for which nothing needs to be done."""
    block = [nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.LeakyReLU(0.2)]
    model = nn.Sequential(*block, nn.Conv2d(8, 8, 3, padding=1), nn.LeakyReLU(), nn.Flatten(1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    er.fit(model, budget="8 MiB", optimizer=optimizer, exact=True)
    for _ in range(8):
        x = torch.randn(8, 8, 16, 16, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (model(torch.randn(8, 8, 16, 16)).mean() + gradient.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(list(opener_of(model)._plan_cache)) == 1
