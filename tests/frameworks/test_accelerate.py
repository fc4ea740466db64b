"""A loop that Accelerate has prepared: the same weights in less memory, the optimizer counted."""

import pytest
import torch
from torch import nn

accelerate = pytest.importorskip("accelerate")

from elbowroom.integrations.accelerate import fit, release  # noqa: E402
from elbowroom.runtime.attach import attached, opener_of  # noqa: E402


def trained(budget=None, *, accumulates=1, precision="no"):
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=accumulates, mixed_precision=precision
    )
    torch.manual_seed(0)
    parts = [(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(6)]
    net = nn.Sequential(*(part for block in parts for part in block))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(net, optimizer)
    if budget is not None:
        assert fit(accelerator, model, optimizer, budget=budget, exact=True) is model
    for n in range(14):
        x = torch.randn(512, 64, generator=torch.Generator().manual_seed(n))
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    fitting = opener_of(accelerator.unwrap_model(model))
    release(accelerator, model)
    return [p.detach() for p in net.parameters()], fitting


@pytest.mark.parametrize("how", [{}, {"accumulates": 2}, {"precision": "bf16"}])
def test_the_same_weights_inside_a_tight_budget(how):
    plain, _ = trained(**how)
    _, ample = trained("60 GiB", **how)
    budget = int(0.8 * ample.peak_nbytes)
    ours, fitting = trained(budget, **how)
    assert all(map(torch.equal, plain, ours))
    assert fitting.peak_nbytes <= budget
    assert fitting.model_state.states  # the optimizer's
    assert not attached()
