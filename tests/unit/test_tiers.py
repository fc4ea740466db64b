"""Where offloaded bytes go: extents, windows, files, slabs, and copies that are done later."""

import itertools
import os
import random
import threading
import weakref

import pytest
import torch
from torch import Tensor

from elbowroom.errors import RestoreError
from elbowroom.plan import Need, Offload
from elbowroom.runtime.handles import KeepHandle, OffloadHandle, offload
from elbowroom.runtime.ledger import Ledger
from elbowroom.runtime.serving import perform
from elbowroom.runtime.slot import CountedSlot
from elbowroom.runtime.tiers import CLOCK, FileTier, HostTier, StagedTier, Traffic, unlinked
from elbowroom.runtime.tiers.extents import PAGE, Extents
from elbowroom.runtime.tiers.slabs import Slabs
from elbowroom.runtime.tiers.window import RoomGate

# --- Extents


def test_extents_never_overlap_and_all_come_back():
    draw, extents = random.Random(0), Extents()
    taken: dict[int, int] = {}
    for _ in range(3000):
        if taken and draw.random() < 0.5:
            offset = draw.choice(list(taken))
            extents.give_back(offset, taken.pop(offset))
        else:
            nbytes = draw.randint(0, 9 * PAGE)
            offset = extents.take(nbytes)
            assert offset % PAGE == 0
            assert all(
                offset + max(nbytes, 1) <= other or other + max(size, 1) <= offset
                for other, size in taken.items()
            )
            taken[offset] = nbytes
        last = max((at + max(size, 1) for at, size in taken.items()), default=0)
        assert extents.end == -(-last // PAGE) * PAGE
        free = extents._free
        assert all(sum(a) < b[0] for a, b in itertools.pairwise(free))
    for offset, nbytes in taken.items():
        extents.give_back(offset, nbytes)
    assert (extents.end, extents._free) == (0, [])


def test_extents_reuse_what_is_free_and_keep_to_their_limit():
    extents = Extents(limit=4 * PAGE)
    a, b, c = (extents.take(PAGE) for _ in range(3))
    extents.give_back(a, PAGE)
    extents.give_back(b, PAGE)
    assert extents.take(2 * PAGE) == 0
    assert extents.take(2 * PAGE) is None
    assert extents.take(1) == 3 * PAGE
    assert c == 2 * PAGE


def test_a_window_lets_one_through_however_large():
    window = RoomGate(max_tensors=2, max_nbytes=100)
    window.enter(1000)
    entered = []
    other = threading.Thread(target=lambda: (window.enter(10), entered.append(1)))
    other.start()
    other.join(0.05)
    assert not entered
    window.leave(1000)
    other.join(10)
    assert entered
    window.leave(10)
    window.wait_until_empty()


# --- Files


@pytest.mark.parametrize("numel", [0, 1, 4096, (1 << 20) + 1])
def test_bytes_go_and_come(tmp_path, numel):
    x = torch.randint(0, 256, (numel,), dtype=torch.uint8)
    descriptor = FileTier(str(tmp_path))
    checksum = unlinked.write(descriptor.descriptor, x, 4096)
    back = torch.zeros_like(x)
    assert unlinked.read(descriptor.descriptor, back, 4096) == checksum
    assert torch.equal(back, x)
    x.untyped_storage().resize_(0)  # its buffer did not forbid it


def test_calls_that_move_a_part_have_the_same_checksum(tmp_path, monkeypatch):
    x = torch.randint(0, 256, (10_007,), dtype=torch.uint8)
    tier, put, get = FileTier(str(tmp_path)), os.pwrite, os.preadv
    whole = unlinked.write(tier.descriptor, x, 0)
    monkeypatch.setattr(os, "pwrite", lambda fd, part, at: put(fd, part[:1500], at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: get(fd, [parts[0][:777]], at))
    assert unlinked.write(tier.descriptor, x, 0) == whole
    assert unlinked.read(tier.descriptor, torch.zeros_like(x), 0) == whole


@pytest.mark.parametrize("swap", [(0, 4096, 4096), (4096, 12_288, 4096), (12_288, 12_289, 1)])
def test_bytes_in_another_place_have_another_checksum(tmp_path, swap):
    one, other, n = swap
    x = torch.randint(0, 256, (12_300,), dtype=torch.uint8)
    x[[12_288, 12_289]] = torch.tensor([3, 4], dtype=torch.uint8)
    tier = FileTier(str(tmp_path))
    before = unlinked.write(tier.descriptor, x, 0)
    n = min(n, len(x) - other)
    x[one : one + n], x[other : other + n] = (
        x[other : other + n].clone(),
        x[one : one + n].clone(),
    )
    assert unlinked.write(tier.descriptor, x, 0) != before
    assert unlinked.write(tier.descriptor, torch.zeros_like(x), 0) != before


DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.int8]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(tmp_path, dtype):
    x = (torch.randn(3, 50, 7) * 3).to(dtype).transpose(0, 2)
    kept, tier = x.clone(), FileTier(str(tmp_path))
    handle = OffloadHandle(tier, x)
    tier.flush()
    del x
    restored = handle.restore()
    assert torch.equal(restored, kept)
    assert restored.dtype is dtype


def test_bits_of_nan_survive(tmp_path):
    bits = torch.tensor([0x7FC12345, -1, 0x7F800001], dtype=torch.int32)
    tier = FileTier(str(tmp_path))
    handle = OffloadHandle(tier, bits.clone().view(torch.float32))
    tier.flush()
    assert torch.equal(handle.restore().view(torch.int32), bits)


def test_the_ledger_counts_what_is_away_apart(tmp_path):
    ledger, tier = Ledger(), FileTier(str(tmp_path))
    x = torch.randn(1000)
    slot = CountedSlot(x, ledger.open("conv", "conv2d", "float32", 4000))
    slot.hold(OffloadHandle(tier, x))
    assert ledger.held_nbytes + ledger.held_away_nbytes == 4000
    tier.flush()
    assert (ledger.held_nbytes, ledger.held_away_nbytes) == (0, 4000)
    slot.hold_bits(torch.zeros(125, dtype=torch.uint8))
    assert (ledger.held_nbytes, ledger.held_away_nbytes) == (125, 4000)
    assert (ledger.after_nbytes, ledger.away_nbytes) == (125, 4000)
    assert "and 3.91 KiB away" in str(ledger)
    (row,) = ledger.rows
    assert (row.action, row.after_nbytes, row.away_nbytes) == ("offload", 125, 4000)
    del slot
    assert (ledger.held_nbytes, ledger.held_away_nbytes) == (0, 0)


def test_an_outlived_tensor_is_given_back_and_told(tmp_path):
    x, told, tier = torch.randn(100), [], FileTier(str(tmp_path))
    handle = OffloadHandle(tier, x, on_survived=lambda: told.append(1))
    tier.flush()
    assert handle.restore().data_ptr() == x.data_ptr()
    assert told == [1]


def test_on_the_cpu_the_host_tier_makes_no_sense():
    kept = perform(Offload("host"), torch.ones(8), Need.EXACT, None, 0)
    assert isinstance(kept, KeepHandle)
    assert "it is in host memory already: er.saving('offload', tier='file')" in kept.why


# --- Devices. A copy is made when it is asked whether it is done, or waited for: as late as may be.


class LateCopy:
    def __init__(self, copier: "LateCopier", source: Tensor, into: Tensor) -> None:
        self.copier, self.source, self.into = copier, source, into
        self.made = False

    def make(self) -> None:
        """All copies before, and this one: a stream."""
        for copy in self.copier.stream[: self.copier.stream.index(self) + 1]:
            if not copy.made:
                copy.into.copy_(copy.source)
                copy.made, copy.source = True, None

    def is_done(self) -> bool:
        if not self.copier.is_stuck:
            self.make()
        return self.made

    def order(self, into: Tensor) -> None:
        self.let_go()

    def let_go(self) -> None:
        self.copier.ordered += 1
        self.make()

    def wait(self) -> None:
        self.make()


class LateCopier:
    def __init__(self) -> None:
        self.stream: list[LateCopy] = []
        self.is_stuck = True
        self.ordered = 0

    def home(self) -> None:
        """There is one stream."""

    def copy(self, source: Tensor, into: Tensor, home: None = None) -> LateCopy:
        self.stream.append(LateCopy(self, source, into))
        return self.stream[-1]


def plain(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture
def copier():
    return LateCopier()


@pytest.fixture
def host(copier):
    return HostTier(copier, Slabs(1 << 20, plain, slab=1 << 16))


def test_to_the_host_and_back(host, copier):
    xs = [torch.randn(1000 * (i + 1)) for i in range(5)]
    handles = [OffloadHandle(host, x.clone()) for x in xs]
    assert [handle.nbytes for handle in handles] == [0, 0, 0, 16000, 20000]  # two on their way
    assert copier.ordered == 3
    assert handles[4].restore().data_ptr() == handles[4].restore().data_ptr()  # still there
    copier.is_stuck = False
    assert [handle.nbytes for handle in handles] == [0] * 5
    for handle, x in zip(handles, xs, strict=True):
        assert torch.equal(handle.restore(), x)
        assert torch.equal(handle.restore(private=True), x)
    assert host.slabs.nbytes == 1 << 16
    handles.clear()
    handle = None
    assert all(not slab.parts.end for slab in host.slabs._slabs)


def test_the_host_tells_the_ledger(host, copier):
    ledger, x = Ledger(), torch.randn(1000)
    slot = CountedSlot(x, ledger.open("", "", "float32", 4000))
    slot.hold(OffloadHandle(host, x))
    assert (ledger.held_nbytes, ledger.held_away_nbytes) == (4000, 0)
    copier.is_stuck = False
    assert slot.value.nbytes == 0
    assert (ledger.held_nbytes, ledger.held_away_nbytes) == (0, 4000)


def test_a_tensor_that_dies_on_its_way_to_the_host(host, copier):
    handle = OffloadHandle(host, torch.randn(1000))
    del handle
    assert copier.ordered == 1  # its memory may be taken by what comes after
    assert not host.slabs._slabs[0].parts.end


class Device:
    """Memory of which a block that is freed is taken at once by whom asks next."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []
        self.taken: list[tuple[weakref.ref[Tensor], Tensor]] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        free = [block for ref, block in self.taken if ref() is None and block.numel() == numel]
        self.taken = [(ref, block) for ref, block in self.taken if ref() is not None]
        block = free[-1] if free else torch.zeros(numel, dtype=dtype)
        self.taken += [(lambda: None, other) for other in free[:-1]]
        x = block.view(numel)  # another object, which may die
        self.taken.append((weakref.ref(x), block))
        return x

    def owns(self, x: Tensor) -> bool:
        return True  # so that nothing restored is remembered


def run_beside_a_stream(program: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random requests, while copies are made as late as may be."""
    copier, device = LateCopier(), Device()
    copier.is_stuck = False
    monkeypatch.setattr(offload, "ARENA", device)
    tier = HostTier(copier, Slabs(1 << 20, plain, slab=1 << 16))
    handles: dict[int, OffloadHandle] = {}
    mine: list[tuple[Tensor, float]] = []  # what the compute stream has written, and still reads
    for i in range(4):
        handles[i] = OffloadHandle(tier, torch.full((64,), float(i + 1)))
    assert all(handle.nbytes == 0 for handle in handles.values())
    for number in range(14):
        i = program.choice(list(handles) or [0])
        kind = program.choice(["prefetch", "let go", "drop", "restore", "take", "free", "side"])
        if kind == "take" or not handles:
            x = device.take(64, torch.float32, torch.device("cpu")).fill_(100.0 + number)
            mine.append((x, 100.0 + number))
        elif kind == "prefetch" and not handles[i].is_early:
            handles[i].prefetch()
        elif kind == "let go":
            handles[i].let_go()
        elif kind == "drop":
            del handles[i]
        elif kind == "restore":
            x = handles[i].restore(private=True)
            assert torch.equal(x, torch.full((64,), float(i + 1)))
            del x
        elif kind == "free" and mine:
            mine.pop(program.randrange(len(mine)))
        elif kind == "side":
            for copy in copier.stream:
                copy.is_done()
        assert all(bool((x == value).all()) for x, value in mine)
    for copy in copier.stream:
        copy.is_done()
    assert all(bool((x == value).all()) for x, value in mine)


def test_memory_that_is_let_go_is_not_written_by_a_copy_that_is_still_on_its_way(monkeypatch):
    """Of 4,000 such programs 244 read wrong bytes before arrivals were dropped in order."""
    for seed in range(400):
        run_beside_a_stream(random.Random(seed), monkeypatch)


def test_slabs_are_pinned_within_their_budget_then_pageable_with_one_message():
    slabs = Slabs(1 << 17, plain, slab=1 << 16)
    parts = [slabs.take(50_000) for _ in range(4)]
    assert [part.slab.pinned for part in parts] == [True, True, False, False]
    assert slabs.pinned_nbytes == 1 << 17
    with pytest.warns(UserWarning, match=r"no more pinned memory after 128 KiB \(its budget"):
        slabs.say_trouble()
    slabs.say_trouble()
    for part in parts:
        slabs.give_back(part)
    assert slabs.nbytes == slabs.pinned_nbytes == 1 << 17  # pageable slabs are let go
    assert slabs.take(100_000).flat.numel() == 100_000


def test_a_system_that_pins_no_more():
    def refuse(nbytes: int) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nand much more")

    slabs = Slabs(1 << 30, refuse, slab=1 << 16)
    assert not slabs.take(100).slab.pinned
    with pytest.warns(UserWarning, match=r"after 0 B \(CUDA error: out of memory\)"):
        slabs.say_trouble()


def test_through_the_host_to_a_file_and_back(tmp_path, copier):
    tier = StagedTier(copier, FileTier(str(tmp_path)), plain)
    xs = [torch.randn(3000) for _ in range(5)]
    handles = [OffloadHandle(tier, x.clone()) for x in xs]
    tier.file.flush()
    assert [handle.nbytes for handle in handles] == [0] * 5
    handles[1].prefetch()
    handles[2].prefetch()
    handles[2].let_go()
    for handle, x in zip(handles, xs, strict=True):
        assert torch.equal(handle.restore(), x)
    del handle
    handles.clear()
    assert tier.file.end == 0


def test_what_a_file_does_not_take_stays_on_the_host(tmp_path, copier, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(unlinked, "write", full)
    tier = StagedTier(copier, FileTier(str(tmp_path)), plain)
    x = torch.randn(3000)
    handle = OffloadHandle(tier, x.clone())
    tier.file.flush()
    assert handle.nbytes == 0
    assert torch.equal(handle.restore(), x)
    with pytest.warns(UserWarning, match="No space left"):
        tier.say_trouble()


def test_an_error_on_the_way_from_a_file_to_a_device(tmp_path, copier):
    import os

    tier = StagedTier(copier, FileTier(str(tmp_path)), plain)
    handle = OffloadHandle(tier, torch.randn(3000))
    tier.file.flush()
    os.ftruncate(tier.file.descriptor, 0)
    with pytest.raises(RestoreError, match="the file ends after 0 of 12000 bytes"):
        handle.restore()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["host", "file"])
def test_on_a_gpu_several_steps_change_no_bit(kind):
    import elbowroom as er

    torch.manual_seed(0)
    layers = [torch.nn.Linear(1024, 1024), torch.nn.Sigmoid()] * 6
    net, x = torch.nn.Sequential(*layers).cuda(), torch.randn(2048, 1024, device="cuda")

    def grads(context) -> list[Tensor]:
        net.zero_grad()
        with context:
            loss = net(x).square().sum()
        loss.backward()
        return [p.grad.clone() for p in net.parameters()]

    exact = grads(er.saving("keep"))
    for _ in range(10):
        saved = er.saving("offload", tier=kind)
        got = grads(saved)
        assert all(torch.equal(a, b) for a, b in zip(got, exact, strict=True))
        assert saved.ledger.away_nbytes > 0


# --- How much of the moving is hidden


def test_the_share_of_the_moving_that_nobody_waits_for():
    assert Traffic().hidden_fraction is None
    assert Traffic(10, 2.0, 0.5).hidden_fraction == 0.75
    assert Traffic(10, 2.0, 3.0).hidden_fraction == 0.0  # waits of several threads
    assert Traffic(30, 2.5, 1.0) - Traffic(10, 0.5, 0.5) == Traffic(20, 2.0, 0.5)


def test_a_file_tier_counts_what_it_moves_and_who_waits(tmp_path):
    tier, before = FileTier(str(tmp_path)), CLOCK.now()
    ticket = tier.put(torch.arange(1 << 20, dtype=torch.uint8))
    tier.flush()
    into = torch.empty(1 << 20, dtype=torch.uint8)
    ticket.fetch(into).wait()
    traffic = CLOCK.now() - before
    assert traffic.nbytes == 2 << 20
    assert traffic.moved_s > 0
    assert traffic.waited_s > 0
    ticket.drop()
