"""Parameters that are spread over processes: DTensors, as `fully_shard` makes them.

    p [D, ...] in whole rows, some on each rank -> codes [D, ...] and bounds [D, ...] likewise

No group crosses a row, so a rank encodes its rows as one process would encode all of them. And as
states are DTensors over the same mesh, `torch.distributed.checkpoint` can give each rank of any
number of processes the rows that are its own, bit for bit. Only noise knows the shard.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, distributed, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_PLAIN = Tensor, nn.Parameter  # to ask them for an attribute that they lack takes longer


def is_sharded(x: Tensor) -> "TypeGuard[DTensor]":
    """Returns whether x is a DTensor; without importing what makes one."""
    return type(x) not in _PLAIN and hasattr(x, "to_local")


def local(x: Tensor) -> Tensor:
    """Returns this rank's part, which shares memory with x; or x itself, where that is all."""
    return x if type(x) in _PLAIN else x.to_local() if is_sharded(x) else x


def in_whole_rows(p: Tensor) -> bool:
    """Returns whether each rank has all rows, or some whole ones."""
    return not is_sharded(p) or all(at.is_replicate() or at.is_shard(0) for at in p.placements)


def spread(part: Tensor, p: Tensor) -> Tensor:
    """A state of this rank's rows -> the state of p, spread as p is."""
    if not is_sharded(p):
        return part
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*p.shape[:1], *part.shape[1:]))
    stride = p.stride() if shape == p.shape else torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride
    )


def aligned(grad: Tensor, p: Tensor) -> Tensor:
    """Returns the gradient with the placements of its parameter, over the same mesh."""
    if is_sharded(p) and is_sharded(grad):
        return grad.redistribute(placements=p.placements)
    return grad


def shard_of(p: Tensor) -> int:
    """Returns which of the shards of p is this rank's, from 0; replicas have the same one."""
    if not is_sharded(p):
        return 0
    number = 0
    for dim, placement in enumerate(p.placements):
        if placement.is_shard():
            number = number * p.device_mesh.size(dim) + p.device_mesh.get_local_rank(dim)
    return number


def agreed(params: Iterable[Tensor], flag: Tensor | None) -> Tensor | None:
    """The largest flag (int32 []; None: 0) of all ranks that have a part of these parameters.

    All must ask. Where no parameter is spread it is the flag itself. Nothing waits for it on CUDA.
    """
    meshes = list({p.device_mesh: None for p in params if is_sharded(p)})
    for mesh in (*meshes, *meshes[:-1]):  # what the last one knows, the first ones must hear
        flag = (
            torch.zeros((), dtype=torch.int32, device=mesh.device_type)
            if flag is None
            else flag.to(mesh.device_type)
        )
        for dim in range(mesh.ndim):
            distributed.all_reduce(flag, distributed.ReduceOp.MAX, mesh.get_group(dim))
    return flag
