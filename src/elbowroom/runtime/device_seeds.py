"""Seeds of a settled step, computed on the device of its codes.

    count [1]  --mixed-->  seeds [n], a seed for each code of the forward;  count += n

A CUDA graph launches its kernels with the arguments of their capture, so a seed from the host would
be the same in each launch, and so would the noise. Here the device counts itself. The host counts
in parallel, and sets the device's count only after a step that was not settled, or belonged to
another context: never between two settled steps. The seeds equal those that the host would have
drawn.
"""

import threading

import torch
from torch import Tensor

_INCREMENT, _FIRST, _SECOND = (
    x - (x >> 63 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_SIGNLESS = (1 << 63) - 1


class DeviceSeeds:
    """Counts of the devices, each with the host's copy of its value."""

    def __init__(self) -> None:
        self._counts: dict[torch.device, tuple[Tensor, int]] = {}
        self._lock = threading.Lock()

    def take(self, device: torch.device, before: int, n: int) -> tuple[Tensor, ...]:
        """Returns the seeds (int64 [1]) of the counts before + 1 .. before + n."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            count, expected = self._counts.get(device, (None, 0))
            if count is None or expected != before:
                count = torch.tensor([_signed(before)]).to(device)
            seeds = mixed(count + torch.arange(1, n + 1, device=device))
            count += n
            self._counts[device] = count, before + n
        return torch.split(seeds, 1)


def mixed(x: Tensor) -> Tensor:
    """`context.mixed` of each element of x (int64)."""
    x = x + _INCREMENT
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return (x ^ _shifted(x, 31)) & _SIGNLESS


def _shifted(x: Tensor, by: int) -> Tensor:
    """x >> by, without its sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    return (x + 2**63) % 2**64 - 2**63
