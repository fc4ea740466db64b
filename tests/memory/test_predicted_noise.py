"""What codes add is said under a tight budget, too, without a limit: predicted, and true."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import elbowroom as er
from prices import draw_prices

WIDTH, BATCH = 64, 2048


class Blocks(nn.Module):
    """Linear, GELU and linear layers, with norms and residuals or without."""

    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        self.normed = normed
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            given = F.layer_norm(x, (WIDTH,)) if self.normed else x
            made = down(F.gelu(up(given)))
            x = x + made if self.normed else made
        return self.head(x)


def gradient(net, x, y):
    net.zero_grad()
    F.cross_entropy(net(x), y).backward()
    return torch.cat([weight.grad.flatten().double() for weight in net.parameters()])


# One batch, which a training comes to know by heart: its gradients cancel, and errors do not.
@pytest.mark.parametrize(("normed", "pre"), [(False, 100), (True, 0)])
def test_a_prediction_without_a_limit_is_what_is_measured(caplog, monkeypatch, normed, pre):
    draw_prices(monkeypatch, 0)
    monkeypatch.setattr("elbowroom.fitting.planned.room_nbytes", lambda plan: 1 << 30)
    torch.manual_seed(0)
    net = Blocks(normed=normed)
    x, y = torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    for _ in range(pre):
        gradient(net, x, y)
        optimizer.step()
    exact = gradient(net, x, y)
    net.zero_grad()
    peak = er.peak(lambda: gradient(net, x, y))
    static = sum(weight.nbytes for weight in net.parameters())
    net.zero_grad()
    budget = int(static + 0.33 * peak)
    er.fit(net, budget=budget)
    caplog.set_level("INFO", logger="elbowroom")
    for _ in range(8):
        gradient(net, x, y)
    told = er.summary(net)
    errors = [gradient(net, x, y) - exact for _ in range(4)]
    er.release(net)
    added = sum(float(error @ error / (exact @ exact)) for error in errors) / 4
    assert told.predicts_noise
    assert added / 2.5 < told.noise < 2.5 * added
    assert told.last_nbytes <= budget
    said = [one for one in caplog.records if "predicted from 3 steps" in one.getMessage()]
    assert len(said) == 1
    assert "% of its square" in said[0].getMessage()
    assert "noise=0.1" in said[0].getMessage()
    assert (said[0].levelname == "WARNING") == (told.noise > 0.1)
    assert not re.search("change gradients a little", caplog.text)
