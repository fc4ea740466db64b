"""DDP and FSDP2 in two processes with gloo, fitted: the weights that they have without us."""

import contextlib
import importlib.util
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed"),
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None,
        reason="takes a minute: it runs with ./scripts/test --frameworks",
    ),
]
D, STEPS = 64, 5
SHARES = (0.9, 0.75)  # of what the step takes where nothing is done


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.unused, self.head = nn.Linear(D, D), nn.Linear(D, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def wrapped(net: nn.Module, way: str) -> nn.Module:
    if way == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        for block in net.blocks:
            fully_shard(block)
        return fully_shard(net)
    unused, static = way != "static graph", way == "static graph"
    return nn.parallel.DistributedDataParallel(
        net, find_unused_parameters=unused, static_graph=static, bucket_cap_mb=0.05
    )


def train(rank: int, way: str, is_fitted_first: bool, budget: int | None):
    """The weights in the end, and what became of the budget."""
    torch.manual_seed(0)
    net = Net()
    if budget and is_fitted_first:
        er.fit(net, budget=budget, exact=True, min_nbytes=4096)
    called = wrapped(net, way)
    fitted = net if is_fitted_first else called
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    if budget and is_fitted_first:
        er.add_optimizer(fitted, optimizer)
    elif budget:
        er.fit(fitted, budget=budget, exact=True, optimizer=optimizer, min_nbytes=4096)
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        if way == "no_sync":
            with called.no_sync():
                called(torch.randn(8, 64, D)).square().mean().backward()
        called(torch.randn(8, 64, D)).square().mean().backward()
        optimizer.step()
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    told = er.summary(fitted) if budget else None
    er.release(fitted)
    return [w.detach().clone() for w in weights], told


def work(rank: int, way: str, port: int, out: str) -> None:
    """One of two processes: trains plainly, then fitted, and says what differs."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = []
    plain, _ = train(rank, way, True, None)
    for is_fitted_first in (True, False):
        roomy, told = train(rank, way, is_fitted_first, 2**30)
        assert all(map(torch.equal, plain, roomy))
        for share in SHARES:
            budget = torch.tensor(int(share * told.highest_nbytes))
            dist.broadcast(budget, 0)  # the same for both
            tight, tells = train(rank, way, is_fitted_first, int(budget))
            assert all(map(torch.equal, plain, tight)), (way, is_fitted_first, share)
            found.append((tells.last_nbytes / int(budget), tells.setting))
    torch.save(found, f"{out}{rank}.pt")
    with contextlib.suppress(RuntimeError):  # the other may have left
        dist.destroy_process_group()


@pytest.mark.parametrize("way", ["find unused", "static graph", "no_sync", "fully_shard"])
def test_two_processes_have_the_weights_of_plain_training_inside_tight_budgets(
    way: str, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = str(tmp_path / "out")
    torch.multiprocessing.spawn(work, (way, port, out), nprocs=2)
    for rank in range(2):
        for share, setting in torch.load(f"{out}{rank}.pt"):
            assert share <= 1
            assert setting != "keep"
