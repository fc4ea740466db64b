"""What a forward changes besides its outputs, so that it can be run as if for the first time."""

import torch
from torch import Tensor, nn

_LARGEST_BUFFER = 1 << 20  # bytes; a larger one is not copied


class Rewind:
    """RNG states and small buffers of a module, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._cpu = torch.get_rng_state()
        in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state_all() if in_use else []
        small = [b for b in module.buffers() if b.nbytes <= _LARGEST_BUFFER]
        self._buffers: list[tuple[Tensor, Tensor]] = [(b, b.detach().clone()) for b in small]

    @torch.no_grad()
    def back(self) -> None:
        """Make them what they were."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for buffer, before in self._buffers:
            buffer.copy_(before)
