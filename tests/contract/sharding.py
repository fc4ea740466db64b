"""What the processes of test_sharded_optimizers.py do; each prints what it has found, as JSON."""

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import elbowroom as er
from elbowroom.errors import StateMismatch, UnsupportedParameter

ROWS = 41  # of which one rank has 21, the other 20


def model(dtype: torch.dtype) -> nn.Sequential:
    """One weight of less rows than ranks, and rows that no group divides."""
    torch.manual_seed(0)
    layers = [nn.Linear(100, 150), nn.Tanh(), nn.Linear(150, ROWS), nn.Tanh(), nn.Linear(ROWS, 1)]
    return nn.Sequential(*layers).to(dtype)


def sharded(net: nn.Module) -> nn.Module:
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(net)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The same batch on all ranks: the mean of their gradients is that of one, bit for bit."""
    for step in steps:
        x = torch.randn(16, 100, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(x.to(next(net.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()


def whole(x: torch.Tensor) -> torch.Tensor:
    """All rows; not by full_tensor(), for gloo takes no int16."""
    if not isinstance(x, DTensor):
        return x.detach().clone()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x.to_local().detach())
    return torch.cat(parts)


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [optimizer.state[p] for p in net.parameters()]
    return [whole(x) for x in (*net.parameters(), *(s[k] for s in states for k in s))]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def optimizer_of(net: nn.Module, rule: str, state: str, **settings: Any) -> Any:
    return getattr(er.optim, rule)(net.parameters(), lr=1e-2, state=state, **settings)


def made(rule: str, state: str, *, shard: bool) -> tuple[nn.Module, Any]:
    """state: "int8", or "int8/bfloat16" for weights of that dtype."""
    state, _, dtype = state.partition("/")
    net = model(getattr(torch, dtype or "float32"))
    net = sharded(net) if shard else net
    return net, optimizer_of(net, rule, state)


def steps_are_those_of_one_process(rule: str, state: str) -> dict[str, Any]:
    net, optimizer = made(rule, state, shard=True)
    twin, other = made(rule, state, shard=False)
    train(net, optimizer, range(3))
    train(twin, other, range(3))
    differ = [
        ((p - q).norm() / q.norm()).item()
        for p, q in zip(everything(net, optimizer), everything(twin, other), strict=True)
        if p.is_floating_point() and q.norm() > 0
    ]
    first = next(net.parameters())
    held = sum(
        (x.to_local() if isinstance(x, DTensor) else x).nbytes
        for x in optimizer.state[first].values()
    )
    return {
        "same": same(everything(net, optimizer), everything(twin, other)),
        "worst": max(differ),
        "bytes": held == optimizer.state_nbytes(first),
        "kinds": sorted(optimizer.state[first]) == sorted(other.state[next(twin.parameters())]),
    }


def released_bits_are_the_same(rule: str, state: str) -> dict[str, Any]:
    net, optimizer = made(rule, state, shard=True)
    twin, other = made(rule, state, shard=True)
    optimizer.release_gradients()
    train(net, optimizer, range(3))
    train(twin, other, range(3))
    return {
        "freed": all(p.grad is None for p in net.parameters()),
        "same": same(everything(net, optimizer), everything(twin, other)),
    }


def all_ranks_skip_together(rule: str, state: str) -> dict[str, Any]:
    net, optimizer = made(rule, state, shard=True)
    train(net, optimizer, range(2))
    before = everything(net, optimizer)
    net(torch.ones(2, 100)).sum().backward()
    if dist.get_rank() == 1:
        net[0].weight.grad.to_local()[0, 0] = float("nan")
    optimizer.step()
    return {"skipped": optimizer.skipped, "same": same(before, everything(net, optimizer))}


def one_rank_has_no_gradient(rule: str, state: str) -> dict[str, Any]:
    """It must ask all the same whether gradients are finite: the other one waits for its answer."""
    net, optimizer = made(rule, state, shard=True)
    train(net, optimizer, range(2))
    before = [p.to_local().clone() for p in net.parameters()]
    net(torch.ones(2, 100)).sum().backward()
    if dist.get_rank() == 1:
        optimizer.zero_grad()
    optimizer.step()
    after = [p.to_local() for p in net.parameters()]
    return {"same": same(before, after), "rank": dist.get_rank()}


def save(rule: str, state: str, directory: str) -> dict[str, Any]:
    """Save after 2 steps; go on for 2; load, and go on again: the same bits."""
    net, optimizer = made(rule, state, shard=True)
    train(net, optimizer, range(2))
    saved = everything(net, optimizer)
    content = {"net": get_model_state_dict(net), "opt": get_optimizer_state_dict(net, optimizer)}
    dcp.save(content, checkpoint_id=directory)
    if dist.get_rank() == 0:
        torch.save(saved, Path(directory) / "whole.pt")
    train(net, optimizer, range(2, 4))
    twin, other = made(rule, state, shard=True)
    load(twin, other, directory)
    loaded = same(saved, everything(twin, other))
    train(twin, other, range(2, 4))
    return {
        "loaded": loaded,
        "resumed": same(everything(net, optimizer), everything(twin, other)),
    }


def load(net: nn.Module, optimizer: Any, directory: str) -> None:
    content = {"net": get_model_state_dict(net), "opt": get_optimizer_state_dict(net, optimizer)}
    dcp.load(content, checkpoint_id=directory)
    set_model_state_dict(net, content["net"])
    set_optimizer_state_dict(net, optimizer, content["opt"])


def load_on_one(rule: str, state: str, directory: str) -> dict[str, Any]:
    net, optimizer = made(rule, state, shard=False)
    load(net, optimizer, directory)
    saved = torch.load(Path(directory) / "whole.pt")
    loaded = same(saved, everything(net, optimizer))
    train(net, optimizer, range(2, 4))
    return {"loaded": loaded, "steps": optimizer.state[net[0].weight]["step"].item()}


def conversions_and_refusals(rule: str, state: str) -> dict[str, Any]:
    net, optimizer = made(rule, state, shard=True)
    train(net, optimizer, range(2))
    portable = optimizer.portable_state_dict()
    other = optimizer_of(net, rule, "int8")
    other.load_state_dict(portable)
    errors = [
        (whole(x[name]) - whole(y[name])).norm() / whole(y[name]).norm()
        for x, y in zip(
            other.portable_state_dict()["state"].values(), portable["state"].values(), strict=True
        )
        for name in optimizer.moments
    ]
    plain, refused = made(rule, state, shard=False), ""
    train(*plain, range(1))
    try:
        optimizer.load_state_dict(plain[1].state_dict())
    except StateMismatch as error:
        refused = str(error)
    mesh = init_device_mesh("cpu", (2,))
    columns, copies = (
        nn.Parameter(distribute_tensor(torch.ones(64, 64), mesh, [placement]))
        for placement in (Shard(1), Replicate())
    )
    uneven = ""
    try:
        er.optim.AdamW([columns])
    except UnsupportedParameter as error:
        uneven = str(error)
    copied = er.optim.AdamW([copies])
    copies.grad = distribute_tensor(torch.randn(64, 64), mesh, [Replicate()])
    copied.step()
    mine = copies.to_local().detach()
    theirs = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(theirs, mine)
    return {
        "converted": max(errors).item(),
        "refused": refused,
        "columns": uneven,
        "replicas": torch.equal(*theirs),
    }


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "steps": steps_are_those_of_one_process,
    "released": released_bits_are_the_same,
    "skip": all_ranks_skip_together,
    "lacking": one_rank_has_no_gradient,
    "save": save,
    "load": load_on_one,
    "convert": conversions_and_refusals,
}


def main(rank: int, world: int, store: str, jobs: list[list[str]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    for task, *arguments in jobs:
        results = TASKS[task](*arguments)
        sys.stdout.write(json.dumps([task, *arguments[:2], results]) + "\n")
    dist.destroy_process_group()
    # A thread of gloo that still wants the interpreter while it ends aborts the process ("terminate
    # called without an active exception", seen once in CI): everything is said, so leave at once.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
