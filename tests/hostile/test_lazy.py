"""Modules that make their parameters in the first forward."""

import torch
from torch import nn

import elbowroom as er


def test_lazy_modules_may_be_initialized_inside_a_context():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    )
    x = torch.randn(2, 3, 8, 8)
    with er.saving(min_nbytes=0):
        loss = model(x).square().sum()
    loss.backward()
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for a, b in zip(ours, model.parameters(), strict=True):
        assert torch.equal(a, b.grad)
