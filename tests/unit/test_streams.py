"""Offloading beside several streams of computation, simulated: no byte is read or written early.

A stream runs what it was asked for in order, at any time; the host asks and goes on. Memory that is
let go belongs to the stream that it was taken on, and is taken there again at once, as with torch's
caching allocator; what another stream was said to use, once that has done so.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from elbowroom.runtime.handles import OffloadHandle, offload
from elbowroom.runtime.storage import WeakStorage
from elbowroom.runtime.tiers import HostTier, StagedTier, copier
from elbowroom.runtime.tiers.slabs import Slabs
from elbowroom.runtime.tiers.unlinked import bytes_of

N = 64


class Event:
    def __init__(self, world: "World") -> None:
        self.world, self.done = world, False

    def record(self, stream: "Stream") -> None:
        stream.queue.append(self.happen)

    def happen(self) -> bool:
        self.done = True
        return True

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        while not self.done:
            self.world.run()


class Stream:
    def __init__(self, world: "World") -> None:
        self.world, self.queue = world, deque[Callable[[], bool]]()
        world.streams.append(self)

    def wait_event(self, event: Event) -> None:
        self.queue.append(event.query)

    def wait_stream(self, other: "Stream") -> None:
        event = Event(self.world)
        event.record(other)
        self.wait_event(event)


class Block:
    """Memory of one stream. taken: by whom; used_on: other streams that were said to use it."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.memory = stream, np.zeros(N, np.float32)
        self.taken: WeakStorage | None = None
        self.used_on: list[Stream] = []
        self.ends: list[Event] = []

    def is_free(self) -> bool:
        if self.taken is not None and self.taken.expired():
            self.taken = None
            for stream in self.used_on:
                self.ends.append(Event(stream.world))
                self.ends[-1].record(stream)
            self.used_on = []
        return self.taken is None and all(event.done for event in self.ends)


class World:
    """A device, its streams, and what stands for `torch.cuda`."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.streams = draw, list[Stream]()
        self.blocks: list[Block] = []
        self.jobs: list[Callable[[], bool]] = []  # of the host's workers; whether one is done
        self.current = Stream(self)
        self.wrong: list[str] = []

    # torch.cuda

    def current_stream(self, device: object = None) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # memory

    def take(self, numel: int, dtype: torch.dtype, device: object) -> Tensor:
        mine = [b for b in self.blocks if b.stream is self.current]
        free = [block for block in mine if block.is_free()]
        if not free:
            free = [Block(self.current)]
            self.blocks += free
        x = torch.from_numpy(free[-1].memory)
        free[-1].taken = WeakStorage(x)
        return x

    def owns(self, x: Tensor) -> bool:
        return True  # so that nothing restored is remembered

    def block_of(self, x: Tensor) -> Block | None:
        return next((b for b in self.blocks if b.memory.ctypes.data == x.data_ptr()), None)

    def used_on(self, x: Tensor, stream: Stream) -> None:
        self.block_of(x).used_on.append(stream)

    # work

    def ask(self, work: Callable[[], object]) -> None:
        self.current.queue.append(lambda: (work(), True)[1])

    def copy(self, source: Tensor, into: Tensor) -> None:
        read, write = bytes_of(source), bytes_of(into)
        host = [x for x in (source, into) if self.block_of(x) is None]  # torch's host allocator
        self.ask(lambda: (write.__setitem__(slice(None), read), host))

    def fill(self, x: Tensor, value: float) -> None:
        memory = self.block_of(x).memory
        self.ask(lambda: memory.fill(value))

    def check(self, x: Tensor, value: float, what: str) -> None:
        memory = self.block_of(x).memory
        self.ask(lambda: None if (memory == value).all() else self.wrong.append(what))

    def run(self) -> None:
        """One piece of work of one stream, or of a worker."""
        if self.jobs and self.draw.random() < 0.3:
            job = self.draw.choice(self.jobs)
            if job():
                self.jobs.remove(job)
            return
        stream = self.draw.choice(self.streams)
        if stream.queue and stream.queue[0]():
            stream.queue.popleft()

    def finish(self) -> None:
        while self.jobs or any(stream.queue for stream in self.streams):
            self.run()


class File:
    """A file tier whose worker writes some time after the copy to the host is done."""

    refusal = ""

    def __init__(self, world: World) -> None:
        self.world = world

    def put(self, host: Tensor, before: Callable[[], None]) -> "FileTicket":
        return FileTicket(self.world, host, before)


class FileTicket:
    def __init__(self, world: World, host: Tensor, before: Callable[[], None]) -> None:
        self.source: Tensor | None = host
        self.written: Tensor | None = None
        copy = before.__self__._copy

        def write() -> bool:
            if not copy.is_done():
                return False
            before()
            self.written, self.source = self.source.clone(), None
            return True

        world.jobs.append(write)

    def fetch(self, into: Tensor) -> "FileTicket":
        into.copy_(self.written)
        return self

    def wait(self) -> None:
        """It has come."""

    def drop(self) -> None:
        """Nobody asks any more."""


def run_program(seed: int, monkeypatch: pytest.MonkeyPatch, kind: str, streams: int) -> list[str]:
    """Random requests from so many streams; what was found wrong."""
    draw = random.Random(seed)
    world = World(draw)
    fake = SimpleNamespace(
        current_stream=world.current_stream,
        stream=world.stream,
        Stream=lambda device: Stream(world),
        Event=lambda: Event(world),
    )
    monkeypatch.setattr(copier, "torch", SimpleNamespace(cuda=fake, device=torch.device))
    monkeypatch.setattr(copier, "begin", world.copy)
    monkeypatch.setattr(copier, "used_on", world.used_on)
    monkeypatch.setattr(offload, "ARENA", world)
    plain = lambda n: torch.empty(n, dtype=torch.uint8)  # noqa: E731
    side = copier.CudaCopier(torch.device("cpu"))
    if kind == "host":
        tier = HostTier(side, Slabs(1 << 20, plain, slab=1 << 16))
    else:
        tier = StagedTier(side, File(world), plain)
    computes = [world.current, *(Stream(world) for _ in range(streams - 1))]
    handles: dict[int, tuple[OffloadHandle, Stream]] = {}
    mine: list[tuple[Tensor, float, Stream]] = []
    for number in range(30):
        world.current = now = draw.choice(computes)
        action = draw.choice(["put", "prefetch", "let go", "drop", "restore", "restore", "compute"])
        if action == "compute" or (action != "put" and not handles):
            x = world.take(N, torch.float32, None)
            world.fill(x, 100.0 + number)
            mine.append((x, 100.0 + number, now))
            if len(mine) > 2:
                x, value, world.current = mine.pop(0)
                world.check(x, value, "what another stream was computing was overwritten")
            del x
        elif action == "put":
            x = world.take(N, torch.float32, None)
            world.fill(x, float(number))
            handles[number] = OffloadHandle(tier, x), now
            del x
        else:
            i = draw.choice(list(handles))
            handle, made_on = handles[i]
            if action == "prefetch" and not handle.is_early and handle.away_nbytes:
                handle.prefetch()
            elif action == "let go":
                handle.let_go()
            elif action == "drop":
                del handles[i]
            elif action == "restore":
                now.wait_stream(made_on)  # as autograd does
                x = handle.restore()
                block = world.block_of(x)
                if handle._ticket.source is not None and block.stream is not now:
                    block.used_on.append(now)  # the program's own tensor, and its duty
                world.check(x, float(i), "what came back is not what went")
                del x
            del handle
        for _ in range(draw.randrange(8)):
            world.run()
    for x, value, world.current in mine:
        world.check(x, value, "what a stream was computing was overwritten")
    x = None
    mine.clear()
    handle = None
    handles.clear()
    world.finish()
    return world.wrong


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("kind", ["host", "file"])
def test_no_stream_reads_or_writes_too_early(kind, streams, monkeypatch):
    """Of 400 programs with two streams, 26 did before copies knew whose memory is let go."""
    args = monkeypatch, kind, streams
    found = [run_program(seed, *args) for seed in range(400)]
    wrong = [one for one in found if one]
    assert not wrong, f"{len(wrong)} of {len(found)} programs, the first: {wrong[0]}"
