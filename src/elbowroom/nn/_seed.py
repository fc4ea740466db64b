"""A seed for what one call draws, from torch's own generator on the CPU.

So torch.manual_seed decides it, checkpointing restores it, and a GPU is not waited for.
"""

import torch


def next_seed() -> int:
    """63 bits."""
    return int(torch.randint(2**63 - 1, ()).item())
