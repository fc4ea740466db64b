"""Nested tensors inside a fitted model: the graph does not tell the size of their gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elbowroom as er


class Rows(nn.Module):
    """Takes rows of several lengths as one nested tensor."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, rows):
        x = torch.nested.nested_tensor(rows, layout=self.layout)
        x = self.first(x)
        x = F.gelu(self.second(F.relu(x) * x))
        return torch.cat(x.unbind())


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_fitted_model_may_use_nested_tensors(layout):
    runs = []
    for fits in (False, True):
        torch.manual_seed(0)
        model = Rows(layout)
        if fits:
            er.fit(model, budget="64 MiB", exact=True, min_nbytes=0)
        for n in range(4):
            rows = [torch.randn(3 + n + k, 32) for k in range(4)]
            model(rows).square().mean().backward()
        if fits:
            er.release(model)
        runs.append([p.grad for p in model.parameters()])
    for ours, plain in zip(*runs, strict=True):
        assert torch.equal(ours, plain)
