"""Skip connections: maps that are interpolated and concatenated are made again in plans, too."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er


def block(before: int, after: int) -> nn.Sequential:
    conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after), nn.ReLU())


class Skips(nn.Module):
    """Two levels; each block of the way up reads maps of below beside those of the way down."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [3, width, 2 * width, 4 * width]
        self.down = nn.ModuleList(block(*two) for two in pairwise(widths))
        self.up = nn.ModuleList((block(6 * width, 2 * width), block(3 * width, width)))

    def forward(self, x: Tensor) -> Tensor:
        maps = [x := self.down[0](x)]
        for one in self.down[1:]:
            maps.append(x := one(F.max_pool2d(x, 2)))
        for one, beside in zip(self.up, maps[-2::-1], strict=True):
            x = one(torch.cat([F.interpolate(x, scale_factor=2), beside], 1))
        return x.square().mean()


def test_an_exact_plan_takes_no_more_room_than_exact_saving_by_hand() -> None:
    x, net = torch.randn(4, 3, 96, 96), Skips()
    weights = sum(p.nbytes for p in net.parameters())

    def gradients() -> list[Tensor]:
        net.zero_grad(set_to_none=True)
        net(x).backward()
        return [p.grad for p in net.parameters()]

    def by_hand() -> None:
        net.zero_grad(set_to_none=True)
        with er.saving(min_nbytes=0):
            loss = net(x)
        loss.backward()

    want, plain = gradients(), er.peak(gradients) + weights
    by_hand()
    budget = int(1.02 * (er.peak(by_hand) + weights))
    assert budget < 0.85 * plain
    er.fit(net, budget=budget, exact=True, min_nbytes=0)
    for _ in range(6):
        assert all(map(torch.equal, gradients(), want))
    assert er.peak(gradients) + weights <= budget
    er.release(net)


def test_codes_of_parts_do_not_reach_what_is_made_of_them() -> None:
    """The concatenated maps have a code of their own: one error in four elements adds up."""
    net = Skips()
    with er.saving("dither", levels=16, min_nbytes=0) as saved:
        net(torch.randn(4, 3, 96, 96))
    joined = [row for row in saved.ledger.rows if row.module in ("up.0.0", "up.1.0")]
    assert {row.action for row in joined if row.consumer == "conv2d"} == {"dither"}
