"""A payload whose size is not known beforehand, in memory of a fixed size, and what does not fit.

    payload  [C]            a tile after the other, as long as a tile ends within C
    spill    [most - C + T] the tiles after that, each at (its start - C + T)

`most` is what the payload of the whole tensor never exceeds, T what that of a tile never does, so
every tile has its place, none lies in two, and where it lies follows from where it starts. The
spill may be host memory that a GPU writes to: it is hardly ever used. Where C = most it is empty.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def divide(whole: Tensor, sizes: Sequence[int], payload: Tensor, spill: Tensor, most: int) -> None:
    """Writes `whole`, tiles of these sizes one after the other, to payload and spill.

    most: what no tile exceeds.
    """
    start = 0
    for size in sizes:
        part, at = whole[start : start + size], start - len(payload) + most
        if start + size <= len(payload):
            payload[start : start + size] = part
        else:
            spill[at : at + size] = part
        start += size


def unite(payload: Tensor, spill: Tensor, sizes: Sequence[int], most: int) -> Tensor:
    """Inverse of `divide`: the tiles one after the other."""
    parts, start = [payload[:0]], 0
    for size in sizes:
        at = start - len(payload) + most
        fits = start + size <= len(payload)
        parts.append(payload[start : start + size] if fits else spill[at : at + size])
        start += size
    return torch.cat(parts)
