"""A norm whose channels differ wildly keeps its input: a group code would drown the small ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elbowroom as er


def network(layout, spread, offset=0.0):
    torch.manual_seed(0)
    if layout == "1d":
        model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
        x = torch.randn(128, 32)
    else:
        conv = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
        model = nn.Sequential(conv, nn.Flatten(), nn.Linear(64 * 100, 4))
        x = torch.randn(8, 3, 12, 12)
        if layout == "channels_last":
            model, x = (
                model.to(memory_format=torch.channels_last),
                x.contiguous(memory_format=torch.channels_last),
            )
    first = model[0] if layout == "1d" else model[0][0]
    with torch.no_grad():
        first.weight[:8] *= spread
        first.bias += offset * torch.randn(64)
    return model, x


def error(model, x, **settings):
    def gradient(context=None):
        model.zero_grad()
        if context is None:
            loss = F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long))
        else:
            with context:
                loss = F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long))
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    exact = gradient()
    saved = er.saving("dither", min_nbytes=0, seed=1, **settings)
    lossy = gradient(saved)
    return float((lossy - exact).square().sum() / exact.square().sum()), saved.ledger


@pytest.mark.parametrize("layout", ["1d", "nchw", "channels_last"])
@pytest.mark.parametrize("spread", [0.1, 0.01, 0.001])
def test_small_channels_are_not_drowned(layout, spread):
    even, _ = error(*network(layout, 1.0), bits=4)
    uneven, _ = error(*network(layout, spread), bits=4)
    assert uneven < 10 * even


@pytest.mark.parametrize("layout", ["1d", "channels_last"])
def test_channels_with_far_means_are_not_drowned(layout):
    size, ledger = error(*network(layout, 1.0, offset=100.0), bits=8)
    assert size < 1e-3
    assert "its channels differ too much in scale or mean" in {row.why for row in ledger.rows}


def test_an_ordinary_norm_is_encoded():
    _, ledger = error(*network("nchw", 1.0), bits=4)
    assert ("batch_norm", "dither") in {(row.consumer, row.action) for row in ledger.rows}
