"""Offload: the bytes are in another tier, and are fetched in backward, or a little before.

Restore returns, in this order: 1. the tensor itself, as long as it is being moved, or something
else holds it (in which case the move was useless, and `on_survived` is called); 2. the result of an
earlier restore, if a reader still holds it; 3. the prefetched tensor; else a tensor that is fetched
now.

A tensor that was changed in place after it was saved is refused, as in plain autograd: it may have
been changed while it was being written.
"""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from elbowroom.errors import RestoreError
from elbowroom.plan import SiteName
from elbowroom.runtime.arena import ARENA
from elbowroom.runtime.normal import flat_of
from elbowroom.runtime.prefetcher import Prefetcher
from elbowroom.runtime.storage import (
    WeakStorage,
    changed_in_place,
    counted,
    counter_of,
    storage_nbytes,
    version_of,
)
from elbowroom.runtime.tiers import Arrival, Tier

_NOWHERE = SiteName("", "")


class OffloadHandle:
    """Holds the ticket of one dense tensor `base`. name: of its site, for errors and the order."""

    __slots__ = (
        "__weakref__",
        "_counter",
        "_device",
        "_dtype",
        "_early",
        "_full_nbytes",
        "_name",
        "_numel",
        "_offset",
        "_original",
        "_place",
        "_prefetcher",
        "_restored",
        "_shape",
        "_stride",
        "_ticket",
        "_version",
        "on_survived",
    )

    exact = True
    label = "offload"

    def __init__(
        self,
        tier: Tier,
        base: Tensor,
        prefetcher: Prefetcher | None = None,
        name: SiteName = _NOWHERE,
        on_survived: Callable[[], None] | None = None,
    ) -> None:
        self._shape, self._stride = tuple(base.shape), base.stride()
        self._offset, self._numel = int(base.storage_offset()), base.numel()
        self._dtype, self._device = base.dtype, base.device
        self._name = name
        self._original = WeakStorage(base)
        self._counter = counter_of(base)
        self._version = version_of(base)
        self._full_nbytes = storage_nbytes(base)
        self._restored: tuple[WeakStorage, Tensor, int] | None = None
        self._early: list[tuple[Tensor, Arrival]] = []  # at most one; its popper owns it
        self.on_survived = on_survived
        self._ticket = tier.put(flat_of(base.detach()).view(torch.uint8))
        self._prefetcher = Prefetcher() if prefetcher is None else prefetcher
        self._place = self._prefetcher.put(self, name[:2])

    def __del__(self) -> None:
        ticket = getattr(self, "_ticket", None)
        if ticket is not None:
            self.let_go()
            ticket.drop()

    @property
    def nbytes(self) -> int:
        """Bytes on the tensor's own device: all of them until the move has ended."""
        return 0 if self._ticket.source is None else self._full_nbytes

    @property
    def away(self) -> "OffloadHandle":
        """The object whose tensor is moved: this handle itself."""
        return self

    @property
    def full_nbytes(self) -> int:
        """Bytes of the tensor, wherever they are."""
        return self._full_nbytes

    def when_away(self, call: Callable[[], None]) -> None:
        """Calls `call` once `nbytes` is 0, from any thread."""
        self._ticket.when_away(call)

    def restore(self, *, private: bool = False) -> Tensor:
        """The tensor with base's shape and strides."""
        now = version_of(self._counter)
        if now != self._version:
            raise changed_in_place(self._shape, self._dtype, self._version, now)
        there = self._still_there()
        if there is None:
            flat = self._fetched()
            x = flat.as_strided(self._shape, self._stride, 0)
            if not private and not ARENA.owns(flat):
                self._restored = WeakStorage(x), counter_of(x), x._version
            return x
        self._prefetcher.asked(self._place, self, was_early=None)
        return there.clone() if private else there

    def _still_there(self) -> Tensor | None:
        source = self._ticket.source
        original = self._original.tensor(self._dtype)
        if original is not None and storage_nbytes(original) == self._full_nbytes:
            if source is None and self.on_survived is not None:
                self.on_survived()
            return counted(
                self._counter, original.as_strided(self._shape, self._stride, self._offset)
            )
        if source is not None:
            raise RestoreError(
                f"{self._description} cannot be given back: its memory was freed by hand before it "
                "was "
                "written. Leave it alone until backward, or use er.saving('exact')."
            )
        if self._restored is None:
            return None
        storage, counter, version = self._restored
        restored = storage.tensor(self._dtype) if counter._version == version else None
        if restored is None:
            return None
        return counted(counter, restored.as_strided(self._shape, self._stride, 0))

    def _fetched(self) -> Tensor:
        """The bytes, as a private flat tensor."""
        try:
            flat, arrival = self._early.pop()
            was_early = True
        except IndexError:
            flat, arrival = self._fetch()
            was_early = False
        try:
            self._prefetcher.asked(self._place, self, was_early=was_early)
        except BaseException:
            arrival.drop()
            raise
        try:
            arrival.wait()
        except OSError as error:
            raise RestoreError(
                f"{self._description} cannot be brought back: {error.strerror or error}. Run the "
                "step again; if the error returns, check the disk, or name another directory=."
            ) from error
        return flat

    def _fetch(self) -> tuple[Tensor, Arrival]:
        flat = ARENA.take(self._numel, self._dtype, self._device)
        return flat, self._ticket.fetch(flat.view(torch.uint8))

    @property
    def _description(self) -> str:
        dtype = str(self._dtype).removeprefix("torch.")
        return f"{dtype} {self._shape} of '{self._name.consumer}' in '{self._name.module}'"

    # --- For the prefetcher

    @property
    def away_nbytes(self) -> int:
        """Bytes that must be fetched; 0 where a tensor still exists."""
        if self._ticket.source is not None or not self._original.expired():
            return 0
        if self._restored is not None and not self._restored[0].expired():
            return 0
        return self._full_nbytes

    @property
    def is_early(self) -> bool:
        return bool(self._early)

    def prefetch(self) -> None:
        """Starts to fetch the tensor. Without memory for it, it is fetched later."""
        with suppress(RuntimeError, MemoryError):
            self._early.append(self._fetch())

    def let_go(self) -> None:
        """Drops the prefetched tensor, whose memory may be reused at once."""
        with suppress(IndexError):
            while True:
                _, arrival = self._early.pop()
                arrival.drop()
