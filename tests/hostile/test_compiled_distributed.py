"""Compiled DDP and FSDP2 in two processes with gloo, fitted: the bits that they have without us."""

import os
import shutil
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.errors import BudgetTooSmall
from elbowroom.runtime.attach import opener_of
from uncompiled import inductor_without_codegen

pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed"),
]
D = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def work(rank: int, way: str, port: int, out: str, generates: bool) -> None:
    """One of two processes: trains plainly compiled, then fitted, and compares.

    generates: with the code of Inductor, but for the run that looks for the budget
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 2**15  # so that there are buckets
    import torch._inductor.compile_fx as compile_fx

    inductor, graphs = compile_fx.compile_fx, inductor_without_codegen([])
    budget, states, said = None, [], []
    for fits, runs_code in ((False, generates), (True, False), (True, generates)):
        compile_fx.compile_fx = inductor if runs_code else graphs
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = Net()
        held = sum(p.nbytes for p in net.parameters())
        called = wrapped(net, way)
        if fits:
            er.fit(called, budget=budget or "1 GiB", exact=True)
        train(net, called, rank)
        states.append([full(p).clone() for p in net.parameters()])
        if fits:
            regions = opener_of(called).regions
            said.append([(one.peak_nbytes, one.saved_nbytes) for one in regions])
            if budget is None:  # FSDP2's hooks break graphs: each block is compiled by itself
                runs = said[0] if way == "ddp" else [said[0][-1]] * 4
                peak = max(sum(s for _, s in runs[:n]) + p for n, (p, _) in enumerate(runs))
                budget = held + int(0.8 * peak)
            assert opener_of(called).eager is None
    if generates:  # what cannot fit is refused by both, at once
        torch._dynamo.reset()
        called = wrapped(Net(), way)
        er.fit(called, budget=held + 1000 if way == "ddp" else held // 2 + 1000, exact=True)
        with pytest.raises(BudgetTooSmall, match="Give"):
            train(called, called, rank)
    if rank == 0:
        torch.save((states, said), out)
    dist.destroy_process_group()


def wrapped(net: nn.Module, way: str) -> nn.Module:
    if way == "ddp":
        return torch.compile(nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.05))
    from torch.distributed.fsdp import fully_shard

    for block in net.blocks:
        fully_shard(block)
    return torch.compile(fully_shard(net))


def train(net: nn.Module, called: nn.Module, rank: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        called(torch.randn(8, 64, D)).square().mean().backward()
        optimizer.step()


def full(p: Tensor) -> Tensor:
    return p.full_tensor() if hasattr(p, "full_tensor") else p.detach()


needs_a_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="Inductor needs a C++ compiler"
)


@pytest.mark.parametrize(
    ("way", "generates"),
    [
        ("ddp", False),
        ("fully_shard", False),
        pytest.param("ddp", True, marks=needs_a_compiler),
        pytest.param("fully_shard", True, marks=needs_a_compiler),
    ],
)
def test_two_processes_keep_their_bits_at_a_smaller_peak(
    way: str, generates: bool, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = str(tmp_path / "out.pt")
    torch.multiprocessing.spawn(work, (way, port, out, generates), nprocs=2)
    (plain, roomy, tight), (regions, decided) = torch.load(out)
    for state in (tight,) if generates else (roomy, tight):
        assert all(torch.equal(a, b) for a, b in zip(state, plain, strict=True))
    assert len(decided) == len(regions) > 1 or way != "ddp"
    assert sum(s for _, s in decided) < sum(s for _, s in regions)
