"""Capacities for payloads of unknown size, by the recent sizes at their site.

    step n      a kernel writes a payload, and its size to a slot in memory of the device
    step n + 1  the first known site starts a copy of all slots to pinned host memory
    later       once the copy is done, which is polled, sites learn their sizes

A capacity is the largest size of the last steps and a sixteenth; it changes only when it is nearly
used up, or much too large, so that the allocator meets the same sizes again. A payload that does
not fit has its rest in pinned host memory (`codecs/room.py`), and is counted. Without pinned
memory, or where a kernel cannot reach it (tested once), a payload gets its upper bound.

1. Slots and spills belong to one stream of one device: what is written there again is written after
   it was read.
2. A spill is returned from `__del__`, which may run anywhere: it takes no lock.
3. Pinned memory is never returned to torch, which does not know that kernels use it, and would
   reuse it while one still writes.
"""

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Hashable

import torch
from torch import Tensor

from elbowroom.codecs.room import Space
from elbowroom.kernels import ops
from elbowroom.kernels.layout import TILE
from elbowroom.runtime import late
from elbowroom.runtime.tiers.slabs import SlabPart, Slabs

_MAX_SITES = 8192
_SLOTS = 1024
_HEADROOM = 16  # a capacity is a size, and so large a part of it
_MARGIN = 32  # it grows when less than such a part of it is free
_STEPS = 64  # after which one that is much too large shrinks
_SHRINKS = 0.8
_GRANULE = 512  # bytes: the allocator of a GPU rounds up to it
_SLAB_NBYTES = 16 << 20
_SHARE_OF_MEMORY = 8  # of the host's, for spills of all devices


class Capacities:
    """Capacities of the sites of one training.

    spills         payloads that did not fit
    spilled_nbytes bytes of them that were in host memory
    """

    def __init__(self) -> None:
        self.spills = self.spilled_nbytes = 0
        self._known: OrderedDict[Hashable, _SiteSizes] = OrderedDict()
        self._places: dict[tuple[torch.device, int], _StreamSlots] = {}
        self._lock = threading.Lock()

    def room(self, site: Hashable) -> "SiteRoom":
        """The memory for payloads of one site, which any hashable key identifies."""
        return SiteRoom(self, site)

    def space(
        self, site: Hashable, max_nbytes: int, tile_nbytes: int, device: torch.device
    ) -> Space | None:
        """See `Room.space`."""
        with self._lock:
            place = self._place(device)
            self._learn(place)
            known = self._known.get(site)
            if known is None:
                return None
            self._known.move_to_end(site)
            capacity = min(known.capacity, max_nbytes)
            spill = place.pool.take(max_nbytes - capacity, tile_nbytes)
            if spill is None:
                capacity, spill = max_nbytes, NoSpill(place.pool.nothing)
            used = place.slot(known, capacity)
        return Space(torch.empty(capacity, dtype=torch.uint8, device=device), spill, used)

    def first(
        self, site: Hashable, payload: Tensor, max_nbytes: int
    ) -> "tuple[Tensor, NoSpill | HostSpill]":
        """See `Room.first`."""
        known = _SiteSizes(payload.numel())
        with self._lock:
            self._place(payload.device).pool.try_spills()
            self._known[site] = known
            if len(self._known) > _MAX_SITES:
                self._known.popitem(last=False)
        memory = payload.new_empty(min(known.capacity, max_nbytes))
        memory[: payload.numel()] = payload
        return memory, NoSpill(payload[:0])

    def _place(self, device: torch.device) -> "_StreamSlots":
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = device, stream
        place = self._places.get(key)
        if place is None:
            pool = _POOLS.setdefault(key, _SpillMemory(device))
            place = self._places[key] = _StreamSlots(device, pool)
        return place

    def _learn(self, place: "_StreamSlots") -> None:
        for known, capacity, used in place.arrived():
            known.learn(used)
            self.spills += used > capacity
            self.spilled_nbytes += max(used - capacity, 0)


class SiteRoom:
    """The room of one site (`codecs/room.py`)."""

    __slots__ = ("_capacities", "_site")

    def __init__(self, capacities: Capacities, site: Hashable) -> None:
        self._capacities, self._site = capacities, site

    def space(self, max_nbytes: int, tile_nbytes: int, device: torch.device) -> Space | None:
        """Memory for the site's next payload."""
        return self._capacities.space(self._site, max_nbytes, tile_nbytes, device)

    def first(self, payload: Tensor, max_nbytes: int) -> "tuple[Tensor, NoSpill | HostSpill]":
        """Takes over the site's first payload."""
        return self._capacities.first(self._site, payload, max_nbytes)


class _SiteSizes:
    """Sizes that the payloads of one site have needed."""

    __slots__ = ("capacity", "highest", "steps", "waits")

    def __init__(self, used: int) -> None:
        self.capacity = _roomy(used)
        self.highest, self.steps = used, 1
        self.waits = False  # it has a slot that was not copied yet

    def learn(self, used: int) -> None:
        self.highest = max(self.highest, used)
        self.steps += 1
        if used > self.capacity - self.capacity // _MARGIN:
            self.capacity = _roomy(used)
        elif self.steps >= _STEPS:
            if _roomy(self.highest) < _SHRINKS * self.capacity:
                self.capacity = _roomy(self.highest)
            self.highest = self.steps = 0


def _roomy(used: int) -> int:
    return -(-(used + used // _HEADROOM + 1) // _GRANULE) * _GRANULE


class NoSpill:
    """Stand-in for a spill where all fits."""

    __slots__ = ("memory",)

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory


class HostSpill:
    """A part of a slab of pinned host memory."""

    __slots__ = ("_dropped", "_part", "memory")

    def __init__(self, part: SlabPart, dropped: deque[SlabPart]) -> None:
        self.memory, self._part, self._dropped = part.flat, part, dropped

    def __del__(self) -> None:
        self._dropped.append(self._part)


class _SpillMemory:
    """Host memory for the spills of one stream; it lives as long as the process (rule 3).

    nothing  an empty spill
    """

    def __init__(self, device: torch.device) -> None:
        self._slabs = Slabs(_memory_nbytes(), _within_share, _SLAB_NBYTES)
        self._dropped: deque[SlabPart] = deque()
        self._lock = threading.Lock()
        self._can_spill: bool | None = None  # not tested yet
        self.nothing = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def pinned_nbytes(self) -> int:
        return self._slabs.pinned_nbytes

    def try_spills(self) -> bool:
        """Returns whether kernels can reach host memory.

        This is tested in a step that waits anyway.
        """
        if self._can_spill is None:
            self._can_spill = can_spill(self.nothing.device)
        return self._can_spill

    def take(self, nbytes: int, tile_nbytes: int) -> NoSpill | HostSpill | None:
        """Returns memory for so many bytes, and one tile; None: there is none."""
        if not nbytes:
            return NoSpill(self.nothing)
        if not self.try_spills():
            return None
        with self._lock:
            while self._dropped:
                self._slabs.give_back(self._dropped.popleft())
            part = self._slabs.take_pinned(nbytes + tile_nbytes)
        return None if part is None else HostSpill(part, self._dropped)


_POOLS: dict[tuple[torch.device, int], _SpillMemory] = {}


def _memory_nbytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _within_share(nbytes: int) -> Tensor:
    """Allocates pinned memory.

    RuntimeError: there is none, or spills use their whole share of the host's.
    """
    held = sum(pool.pinned_nbytes for pool in list(_POOLS.values()))
    if held + nbytes > _memory_nbytes() // _SHARE_OF_MEMORY:
        raise RuntimeError("the share of host memory for spills is used up")
    return late.pinned(nbytes)


class _StreamSlots:
    """The slots of one stream, and its pool."""

    def __init__(self, device: torch.device, pool: _SpillMemory) -> None:
        self.pool = pool
        self._slots = torch.zeros(_SLOTS, dtype=torch.int64, device=device)
        self._waiting: list[tuple[_SiteSizes, int]] = []  # whose slots were not copied yet
        self._sent: deque[tuple[late.Sent, list[tuple[_SiteSizes, int]]]] = deque()

    def slot(self, known: _SiteSizes, capacity: int) -> Tensor:
        """Returns the slot to which the size of the next payload of a site is written."""
        if known.waits or len(self._waiting) == _SLOTS:
            self._send()
        at = len(self._waiting)
        self._waiting.append((known, capacity))
        known.waits = True
        return self._slots[at : at + 1]

    def arrived(self) -> list[tuple[_SiteSizes, int, int]]:
        """Returns sites, capacities and sizes that have arrived at the host."""
        found = []
        while self._sent and self._sent[0][0].has_arrived:
            sizes, sites = self._sent.popleft()
            for (known, capacity), used in zip(sites, sizes.numbers(), strict=True):
                found.append((known, capacity, used))
        return found

    def _send(self) -> None:
        sites, self._waiting = self._waiting, []
        for known, _ in sites:
            known.waits = False
        if sites:
            self._sent.append((late.Sent(self._slots[: len(sites)]), sites))


def can_spill(device: torch.device) -> bool:
    """Returns whether a kernel on the device can write and read pinned host memory.

    The host waits for it.
    """
    words = torch.arange(1, 5, dtype=torch.int32, device=device)
    kept, again = words[:0], torch.zeros_like(words)  # none fits
    try:
        spill = late.pinned((len(words) + TILE) * words.element_size()).view(words.dtype)
        used = torch.empty(1, dtype=torch.int64, device=device)
        bits = ops.sparse_pack_into(words, kept, spill, used)
        ops.sparse_unpack(bits, kept, spill, again)
    except (RuntimeError, ValueError):  # no pinned memory; Triton refuses what it cannot reach
        return False
    return torch.equal(words, again)
