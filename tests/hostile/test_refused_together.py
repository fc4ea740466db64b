"""Two processes with gloo: a budget that one of them refuses ends the forward of both."""

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.errors import BudgetTooSmall

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed")
D, STEPS = 64, 6
BATCHES = (8, 24)  # of the two processes: one needs more memory than the other


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def wrapped(net: nn.Module, way: str) -> nn.Module:
    if way != "fully_shard":
        return nn.parallel.DistributedDataParallel(net)
    from torch.distributed.fsdp import fully_shard

    for block in net[:4]:
        fully_shard(block)
    return fully_shard(net)


def train(rank: int, way: str, budget: int | None) -> tuple[list[Tensor], int | None, int]:
    """The weights in the end; the budget that was asked for instead; steps that were made."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(4)), nn.BatchNorm1d(64), nn.Linear(D, 8))
    inner = way == "DDP around a fitted model"
    fitted = net if inner else wrapped(net, way)
    if budget is not None:
        er.fit(fitted, budget=budget, exact=True, min_nbytes=4096)
    called = wrapped(net, way) if inner else fitted
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    least, step = None, 0
    try:
        for step in range(STEPS):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            called(torch.randn(BATCHES[rank], 64, D)).square().mean().backward()
            optimizer.step()
    except BudgetTooSmall as error:
        least = error.least_nbytes
    peak = None if budget is None else er.summary(fitted).highest_nbytes
    er.release(fitted)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return [w.detach().clone() for w in weights], least, (peak or 0) if least is None else step


WAYS = ("fully_shard", "DDP", "DDP around a fitted model")


def work(rank: int, port: int, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=40))
    torch.save({way: refusals(rank, way) for way in WAYS}, f"{out}{rank}.pt")
    dist.destroy_process_group()


def refusals(rank: int, way: str) -> list[tuple[int | None, int]]:
    """What became of three budgets: the one that was asked for instead, and in which step."""
    plain, _, _ = train(rank, way, None)
    _, _, needed = train(rank, way, 2**30)
    both = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
    dist.all_gather(both, torch.tensor(needed))
    small, large = map(int, both)
    refused = []
    for budget in (small, int(0.3 * large), int(0.15 * large)):
        weights, least, step = train(rank, way, budget)
        refused.append((least, step))
        if least is None:
            assert all(map(torch.equal, plain, weights)), budget
    named = max(least for least, _ in refused if least is not None)
    weights, least, _ = train(rank, way, named)  # the processes go on, and the budget holds
    assert least is None
    assert all(map(torch.equal, plain, weights))
    return refused


def test_both_raise_in_the_same_step_and_name_the_same_budget(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = str(tmp_path / "out")
    torch.multiprocessing.spawn(work, (port, out), nprocs=2)
    one, other = (torch.load(f"{out}{rank}.pt") for rank in range(2))
    for way in WAYS:
        assert one[way][-1][0] is not None
        assert [least for least, _ in one[way]] == [least for least, _ in other[way]]
        refused = [i for i, (least, _) in enumerate(one[way]) if least is not None]
        assert [one[way][i] for i in refused] == [other[way][i] for i in refused]
