"""A seed for what one call draws, from torch's own generator on the CPU.

So `torch.manual_seed` determines it, checkpointing restores it, and the host need not wait for a
GPU.
"""

import torch

from elbowroom.kernels.fakes import has_values


def next_seed(x: torch.Tensor) -> int:
    """Returns a seed of 63 bits for what happens to x.

    It is 0 where x has no values that could be dropped or coded.
    """
    if not has_values(x):
        return 0
    return int(torch.randint(2**63 - 1, ()).item())
