"""Memory that large restored tensors reuse, one after another, during one backward.

A restored tensor lives for one op. glibc hands freed blocks of up to 32 MiB out again, but takes
larger ones fresh from the kernel every time, and their pages cost more than decoding (49 MiB: 36 ms
into fresh memory, 7 ms into a warm block; at 24 MiB no difference). So for these, and only these,
the next restored tensor gets the block of the last one. A block is reused only when the use count
of its storage shows that nobody outside holds it, and only for about its own size. All blocks are
dropped when backward ends: nothing is held between steps. Measured: benchmarks/arena.py.

On a GPU torch's caching allocator does this already, and the arena steps aside.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_SMALLEST_NBYTES = 32 << 20  # from this size on glibc always maps fresh memory (mallopt(3))
_use_count = torch._C._storage_Use_Count


class Arena:
    """Blocks of bytes for restored tensors. One for the process: backward runs on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[_ArenaBlock] = []
        self._task = -1
        self.enabled = True

    @property
    def nbytes(self) -> int:
        """Bytes held just now."""
        return sum(block.memory.numel() for block in self._blocks)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat uninitialized tensor [numel]: an unused block, or fresh memory."""
        nbytes = numel * dtype.itemsize
        if (
            not self.enabled
            or device.type != "cpu"
            or nbytes < _SMALLEST_NBYTES
            or not self._backward_runs()
        ):
            return torch.empty(numel, dtype=dtype, device=device)
        with self._lock:
            return self._block(nbytes).memory[:nbytes].view(dtype)

    @contextmanager
    def unused(self) -> Iterator[None]:
        """Allocates fresh memory inside this context, so that none is held after the step.

        It is for a step that is profiled.
        """
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def owns(self, x: Tensor) -> bool:
        """Returns whether x lies in a block, so that it may be overwritten once it is unused."""
        address = x.untyped_storage()._cdata
        return any(block.address == address for block in self._blocks)

    def clear(self) -> None:
        """Forgets all blocks. Blocks in use are freed with the tensors that use them."""
        with self._lock:
            self._blocks.clear()
            self._task = -1

    def _block(self, nbytes: int) -> "_ArenaBlock":
        """The smallest free block of at least this size, and at most twice.

        Else a new one, in place of all free ones.
        """
        free = [block for block in self._blocks if block.is_free()]
        fitting = [block for block in free if nbytes <= block.memory.numel() <= 2 * nbytes]
        if fitting:
            return min(fitting, key=lambda block: block.memory.numel())
        self._blocks = [block for block in self._blocks if not block.is_free()]
        del free
        self._blocks.append(_ArenaBlock(nbytes))
        return self._blocks[-1]

    def _backward_runs(self) -> bool:
        """Returns whether a backward runs.

        If one does, a callback calls `clear` when it ends; it is queued once for each backward.
        """
        task = torch._C._current_graph_task_id()
        if task == -1:
            return False
        if task != self._task:
            torch.autograd.Variable._execution_engine.queue_callback(self.clear)
            self._task = task
        return True


class _ArenaBlock:
    """Flat bytes, and the use count of their storage when it is not used elsewhere."""

    __slots__ = ("address", "idle", "memory")

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.address = self.memory.untyped_storage()._cdata
        self.idle = _use_count(self.address)

    def is_free(self) -> bool:
        return _use_count(self.address) == self.idle


ARENA = Arena()
