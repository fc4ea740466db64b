"""Products of activations pass the error of a code on upstream: a chain of them stays right.

A delta rule that is written as matrices has some 24 products a layer: with 16 levels, two layers
had a gErr2 of 0.084.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er

pytestmark = pytest.mark.usefixtures("one_thread")
BAR, LAYERS = 0.05, 6


class DeltaRule(nn.Module):
    """Layers x -> inv(I + L(x)) v(x) k(x), with nothing beside them that would dilute an error."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maps = nn.ModuleList(nn.Linear(32, 96) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for one in self.maps:
            q, k, v = (torch.tanh(y) for y in one(x).chunk(3, -1))
            lower = (k @ k.transpose(1, 2) / 32).tril(-1)
            whole = lower + torch.eye(lower.shape[-1])
            v = torch.linalg.solve_triangular(whole, v, upper=False)
            x = q @ (k.transpose(1, 2) @ v) / 4
        return x


def test_a_delta_rule_of_several_layers() -> None:
    net = DeltaRule()
    x, read = torch.randn(2, 8, 64, 32).unbind()

    def gradient(around) -> Tensor:
        net.zero_grad()
        with around:
            loss = (net(x) * read).sum()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in net.parameters()])

    true = gradient(nullcontext())
    contexts = [er.saving("dither", levels=16, min_nbytes=0, seed=seed) for seed in range(3)]
    noisy = [gradient(one) for one in contexts]
    error2 = sum(float((one - true).square().sum()) for one in noisy) / len(noisy)
    assert error2 <= BAR * float(true.square().sum())
    solved = [row for row in contexts[0].ledger.rows if "solve" in row.consumer]
    assert {row.action for row in solved} == {"dither", "keep"}  # the matrix itself is kept
