"""A linear layer that reads a view of a large map sums over few rows, and has a fine code of it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.plan.make import make_plan

DRAWS = 8
MOST = 0.02  # of gErr2; without the floor it is 0.07 with 6 levels, and 0.2 with 4


class Net(nn.Module):
    """16 images become maps of 32 x 8 x 8: 4,096 rows by the last dimension, 16 of the view."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.conv, self.norm = way, nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.small = nn.Conv2d(32, 10, 3)
        self.linear = nn.Linear(32 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        y = self.norm(h)
        match self.way:
            case "copy":
                return self.linear(F.relu(y).flatten(1).clone())
            case "flatten":
                return self.linear(F.relu(y).flatten(1))
            case "reshape":
                return self.linear(F.relu(y).reshape(len(x), -1))
            case "view":
                return F.relu(y).view(len(x), -1) @ self.linear.weight.t()
            case "vector":
                return self.linear(F.relu(y[:1]).flatten())[None].expand(len(x), -1)
            case "a map first":
                z = F.relu(y)
                return self.small(z).mean((2, 3)) + self.linear(z.flatten(1))
            case "a map last":
                z = F.relu(y)
                flat = self.linear(z.flatten(1))
                return flat + self.small(z).mean((2, 3))
            case "norm":  # its input waits for a code while the linear layer saves its result
                return self.linear(y.flatten(1))
            case "input":  # ... of the norm, which it reads while it waits
                return self.linear(h.flatten(1)) + self.small(y).mean((2, 3))
        raise AssertionError(self.way)


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 3, 8, 8), torch.randint(0, 10, (16,))


def noise(net: Net, policy: object, **settings: object) -> tuple[float, float]:
    """The mean square error of gradients, and that of their mean, as shares of the gradient's."""
    x, y = data()

    def flat() -> Tensor:
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    net.zero_grad()
    F.cross_entropy(net(x), y).backward()
    exact, found = flat(), []
    for _ in range(DRAWS):
        net.zero_grad()
        with er.saving(policy, **settings):  # type: ignore[arg-type]
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        found.append(flat() - exact)
    off, size = torch.stack(found), exact.square().sum()
    return float(off.square().sum(1).mean() / size), float(off.mean(0).square().sum() / size)


WAYS = (
    *("copy", "flatten", "reshape", "view", "vector", "a map first", "a map last"),
    *("norm", "input"),
)


@pytest.mark.parametrize("way", WAYS)
def test_a_view_of_few_rows_has_a_fine_code(way: str) -> None:
    torch.manual_seed(0)
    error, bias = noise(Net(way), "dither", levels=4, min_nbytes=1024)
    assert 0 < error < MOST
    assert bias < 2 * error / DRAWS


@pytest.mark.parametrize("code", ["dither, 6 levels", "lean, 4 levels"])
@pytest.mark.parametrize("way", ["flatten", "norm"])
def test_so_it_has_in_a_plan(way: str, code: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, (x, y) = Net(way), data()
    profile = er.measure(lambda: F.cross_entropy(net(x), y).backward())
    sites = [save.site for storage in profile.storages for save in storage.saves]
    reads = next(site for site in sites if site.consumer == "linear")
    assert (reads.shape, reads.summed) in (((16, 32, 8, 8), 16), ((16, 2048), None))
    profile.save(tmp_path / "profile.json")
    profile = er.Profile.load(tmp_path / "profile.json")
    assert sites == [save.site for storage in profile.storages for save in storage.saves]
    plan = make_plan(profile, 2 * profile.peak, exact=False, recompute=False)
    coded = {name: replace(known, preset=code) for name, known in plan.sites.items()}
    error, _ = noise(net, replace(plan, sites=coded))
    assert 0 < error < MOST


def test_a_part_of_a_map_is_no_view_of_few_rows() -> None:
    """The other steps of a sequence may add to the same gradient."""
    linear, x = nn.Linear(64, 64), torch.randn(8, 256, 64, requires_grad=True)
    y = x.tanh() * 2

    def held(steps: list[Tensor]) -> int:
        with er.saving("dither", levels=4, rebuild=False) as saved:
            _ = [linear(step) for step in steps]
        return next(row.after_nbytes for row in saved.ledger.rows if row.consumer == "linear")

    assert held([y[:, t] for t in range(256)]) == held([y])
