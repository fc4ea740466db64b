"""Losses whose gradients are what is left of larger terms: no code's error may outlive these."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.compiled.partition import Partitioner
from uncompiled import without_codegen

ROWS, WIDTH = 1024, 128
torch.manual_seed(0)
X, OTHERS = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def decay(h: Tensor) -> Tensor:
    """Gates of linear attention: the gradient is summed over all later positions."""
    return (F.logsigmoid(h).cumsum(1).exp() * OTHERS).mean()


def scan(h: Tensor) -> Tensor:
    logs = (-F.softplus(h) * 0.01).cumsum(0)
    return (torch.exp(logs - logs.amax(0, keepdim=True)) * h.cumsum(0) * OTHERS).mean() * 0.01


def likelihood(h: Tensor) -> Tensor:
    return (h.exp() + (OTHERS - h) ** 2 / h.exp()).clamp(max=1e6).mean()


def mixed(h: Tensor) -> Tensor:
    """Attention of a log-softmax, of logits up to a standard deviation of 6: rows add up to 0."""
    weights = F.log_softmax(h[:256] @ h[256:512].T / WIDTH**0.5 / 6, 1).exp()
    return (weights @ OTHERS[:256]).square().mean()


def determinant(h: Tensor) -> Tensor:
    h = h[:512].view(-1, 32, 32)
    return torch.linalg.cholesky(h @ h.mT + torch.eye(32)).diagonal(dim1=1, dim2=2).log().sum()


def solved(h: Tensor) -> Tensor:
    h = h[:512].view(-1, 32, 32)
    return torch.linalg.solve(h @ h.mT + torch.eye(32), OTHERS[:512].view(-1, 32, 32)).sum()


def triplets(h: Tensor) -> Tensor:
    return F.triplet_margin_loss(h, OTHERS, OTHERS.roll(1, 0))


def own_triplets(h: Tensor) -> Tensor:
    near, far = ((h - y).norm(dim=1) for y in (OTHERS, OTHERS.roll(1, 0)))
    return F.relu(near - far + 1).mean()


LOSSES = (decay, scan, likelihood, mixed, determinant, solved, triplets, own_triplets)


def network(spread: float) -> nn.Sequential:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        net[0].weight.normal_(0, 1.4 / WIDTH**0.5)
        net[2].weight.normal_(0, spread / WIDTH**0.5)
    return net


def gradient(net: nn.Module, loss: Tensor) -> Tensor:
    parameters = torch.autograd.grad(loss, [*net.parameters()])
    return torch.cat([g.double().flatten() for g in parameters])


@pytest.mark.parametrize("spread", [0.5, 2, 5])
@pytest.mark.parametrize("loss_of", LOSSES)
def test_an_error_does_not_outlive_what_cancels(loss_of, spread: float) -> None:
    net = network(spread)
    exact = gradient(net, loss_of(net(X)))
    errors = []
    for _ in range(4):  # the mean of several draws, as the test before may have drawn any number
        with er.saving("dither", levels=16, min_nbytes=4096):
            loss = loss_of(net(X))
        errors.append((gradient(net, loss) - exact).square().sum() / exact.square().sum())
    assert sum(errors) / len(errors) < 0.05


@pytest.mark.parametrize("loss_of", LOSSES)
def test_in_compiled_graphs_neither(loss_of) -> None:
    net = network(5)
    exact = gradient(net, loss_of(net(X)))
    torch._dynamo.reset()
    partitioner = Partitioner(None, codes="dither, 16 levels", min_nbytes=4096)
    compiled = torch.compile(lambda: loss_of(net(X)), backend=without_codegen(partitioner))
    assert (gradient(net, compiled()) - exact).square().sum() < 0.05 * exact.square().sum()
