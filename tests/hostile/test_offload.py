"""Disks fill up, fail and lie; processes fork. A gradient is exact, or there is a clear error."""

import errno
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import elbowroom as er
from elbowroom.errors import PlanError, RestoreError
from elbowroom.plan import Offload, SiteName
from elbowroom.runtime.handles import KeepHandle, OffloadHandle
from elbowroom.runtime.saving import Saving
from elbowroom.runtime.serving import perform
from elbowroom.runtime.tiers import FileTier, choose, unlinked
from elbowroom.runtime.tiers.choose import file_tier


@pytest.fixture(autouse=True)
def seeded(one_thread):
    torch.manual_seed(0)


@pytest.fixture
def tier(tmp_path):
    return FileTier(str(tmp_path))


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Sigmoid()) for _ in range(6)))


def saving(directory: Path) -> Saving:
    return er.saving("offload", directory=str(directory), from_nbytes=0, min_nbytes=0)


def step(context, net: nn.Module | None = None) -> list[Tensor]:
    net = make_net() if net is None else net
    net.zero_grad()
    torch.manual_seed(1)
    with context:
        loss = net(torch.randn(64, 32)).square().sum()
    loss.backward()
    return [p.grad.clone() for p in net.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def away(tier: FileTier, x: Tensor) -> OffloadHandle:
    handle = OffloadHandle(tier, x, name=SiteName("net.3", "conv2d"))
    tier.flush()
    assert handle.nbytes == 0
    return handle


# --- The disk is full


def test_a_full_disk_keeps_tensors_in_memory_and_says_so_once(tmp_path, monkeypatch):
    plain = step(er.saving("keep"))
    write, written = os.pwrite, []

    def full(descriptor, part, offset):
        if len(written) >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(offset)
        return write(descriptor, part, offset)

    monkeypatch.setattr(os, "pwrite", full)

    def steps() -> None:
        for _ in range(4):
            saved = saving(tmp_path)
            assert same(step(saved), plain)
            assert saved.ledger.held_nbytes == saved.ledger.held_away_nbytes == 0
            file_tier(str(tmp_path)).flush()
            written.clear()

    with pytest.warns(UserWarning, match=r"writing 8.00 KiB to '.*' failed: No space left") as said:
        steps()
    assert len(said) == 1
    assert "stays in memory" in str(said[0].message)
    monkeypatch.setattr(os, "pwrite", write)
    saved = saving(tmp_path)
    assert same(step(saved), plain)
    assert "failed" not in " ".join(saved.ledger.totals("why"))  # once empty, it is used again


def test_what_is_not_put_any_more_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(choose, "_FILES", {})
    tier = file_tier(str(tmp_path))
    first = away(tier, torch.ones(100))
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    x = torch.randn(2000)
    handle = OffloadHandle(tier, x)
    tier.flush()
    assert handle.nbytes == 8000
    with pytest.warns(UserWarning, match="failed: full"):
        second = perform(Offload(directory=str(tmp_path)), x, None, None, 0)
    assert isinstance(second, KeepHandle)
    assert "writing 7.81 KiB to" in second.why
    kept = x.clone()
    del x
    assert torch.equal(handle.restore(), kept)
    del handle
    assert tier.refusal
    assert torch.equal(first.restore(), torch.ones(100))
    del first
    assert not tier.refusal


_LIMITED = """
import resource, sys, warnings, torch
from torch import nn
import elbowroom as er
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Sigmoid()) for _ in range(8)))
x = torch.randn(512, 256)
def grads(context):
    net.zero_grad()
    with context:
        loss = net(x).square().sum()
    loss.backward()
    return [p.grad.clone() for p in net.parameters()]
plain = grads(er.saving("keep"))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(3):
        got = grads(er.saving("offload", directory=sys.argv[1], from_nbytes=0))
        assert all(map(torch.equal, got, plain))
print(len(said), said[0].message)
"""


def run(source: str, *args: str) -> str:
    path = os.path.dirname(os.path.dirname(er.__file__))
    done = subprocess.run(
        [sys.executable, "-c", source, *args],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_a_limit_of_the_system_on_the_size_of_files(tmp_path):
    assert "1 offload: writing 512 KiB" in run(_LIMITED, str(tmp_path))


# --- The disk fails, or lies


def test_an_error_in_reading_names_the_tensor(tmp_path, monkeypatch):
    plain = step(er.saving("keep"))
    read, asked = os.preadv, []

    def failing(*args):
        asked.append(1)
        if len(asked) == 2:
            raise OSError(errno.EIO, "Input/output error")
        return read(*args)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(
        RestoreError,
        match=r"float32 \(64, 32\) of '\w+' in '[\d.]+' cannot be brought back: Input/output error",
    ):
        step(saving(tmp_path))
    assert same(step(saving(tmp_path)), plain)


def test_a_failed_prefetch_is_an_error_only_where_it_is_asked_for(tmp_path, monkeypatch):
    tier = FileTier(str(tmp_path))
    handle = away(tier, torch.randn(100))
    monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
    handle.prefetch()
    with pytest.raises(RestoreError, match="brought back: broken"):
        handle.restore()
    monkeypatch.undo()
    assert handle.restore().shape == (100,)  # a second attempt reads again


def test_altered_bytes(tier):
    handle, other = away(tier, torch.randn(3000)), away(tier, torch.ones(3000))
    os.pwrite(tier.descriptor, b"\x01", 7)
    with pytest.raises(
        RestoreError, match=r"\(3000,\) of 'conv2d' in 'net.3' .*: the checksum differs"
    ):
        handle.restore()
    assert torch.equal(other.restore(), torch.ones(3000))


def test_a_file_that_ends_too_early(tier):
    handle = away(tier, torch.randn(3000))
    os.ftruncate(tier.descriptor, 5000)
    with pytest.raises(RestoreError, match="the file ends after 5000 of 12000 bytes"):
        handle.restore()


def test_short_reads_and_writes_are_gone_on_with(tier, monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, part, at: write(fd, part[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: read(fd, [parts[0][:700]], at))
    x = torch.randn(5000)
    kept = x.clone()
    handle = away(tier, x)
    del x
    assert torch.equal(handle.restore(), kept)


def test_a_directory_that_cannot_be_used(tmp_path):
    with pytest.raises(PlanError, match=r"no file can be made in .*gone.* \(No such file"):
        FileTier(str(tmp_path / "gone"))


def test_a_directory_that_is_removed_later(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    tier = FileTier(str(place))
    handle = away(tier, torch.ones(100))
    place.rmdir()
    assert torch.equal(handle.restore(), torch.ones(100))


def test_without_unnamed_files_a_named_one_is_unlinked_at_once(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    tier = FileTier(str(tmp_path))
    assert os.listdir(tmp_path) == []
    assert torch.equal(away(tier, torch.ones(100)).restore(), torch.ones(100))
    assert os.fstat(tier.descriptor).st_mode & 0o777 == 0o600


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs here")
def test_a_file_system_in_memory_is_warned_of():
    with pytest.warns(UserWarning, match=r"lies in memory \(tmpfs\).*directory='/var/tmp'"):
        FileTier("/dev/shm")


def test_nothing_is_left_behind(tmp_path):
    step(saving(tmp_path))
    tier = file_tier(str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        saved = saving(tmp_path)
        with saved:
            loss = make_net()(torch.randn(64, 32)).sum()
        assert os.listdir(tmp_path) == []
        tier.flush()
        assert os.fstat(tier.descriptor).st_size >= 6 * 64 * 32 * 4
        del loss
    assert len(os.listdir("/proc/self/fd")) == before
    assert tier.end == 0
    until(lambda: os.fstat(tier.descriptor).st_size == 0)


def until(is_so) -> None:
    for _ in range(500):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError


# --- While a write is on its way


@pytest.fixture
def stuck(monkeypatch):
    """Writes wait until this is set."""
    go, write = threading.Event(), unlinked.write

    def waiting(*args):
        assert go.wait(20)
        return write(*args)

    monkeypatch.setattr(unlinked, "write", waiting)
    yield go
    go.set()


def test_what_is_on_its_way_is_given_back_as_it_is(tier, stuck):
    x = torch.randn(100)
    told = []
    handle = OffloadHandle(tier, x, on_survived=lambda: told.append(1))
    address = x.data_ptr()
    del x
    assert handle.restore().data_ptr() == address
    assert handle.restore(private=True).data_ptr() != address
    assert handle.nbytes == 400
    assert not told
    stuck.set()
    tier.flush()
    assert handle.nbytes == 0
    assert handle.restore().shape == (100,)


def test_a_handle_may_die_while_another_thread_has_the_lock(tier):
    handles, extents = [away(tier, torch.randn(100))], tier._extents

    class Dying:
        """Extents whose last handle dies as the worker that truncates looks at them."""

        give_back = staticmethod(extents.give_back)

        @property
        def end(self) -> int:
            handles.clear()
            return extents.end

    tier._extents = Dying()
    tier._truncate()
    assert extents.end == 0


def test_a_handle_may_die_while_it_is_written_or_read(tier, stuck):
    handles = [OffloadHandle(tier, torch.randn(100)) for _ in range(2)]
    handles.clear()
    stuck.set()
    tier.flush()
    until(lambda: tier.end == 0)
    handle = away(tier, torch.randn(1 << 20))
    handle.prefetch()
    del handle
    until(lambda: tier.end == 0)
    assert torch.equal(away(tier, torch.ones(100)).restore(), torch.ones(100))


def test_too_much_on_its_way_waits(tier, stuck):
    handles = [OffloadHandle(tier, torch.randn(100)) for _ in range(2)]
    third = threading.Thread(target=lambda: handles.append(OffloadHandle(tier, torch.ones(100))))
    third.start()
    third.join(0.1)
    assert len(handles) == 2
    stuck.set()
    third.join(20)
    assert len(handles) == 3


def test_a_change_while_it_is_written_is_refused(tier, stuck):
    x = torch.randn(100)
    handle = OffloadHandle(tier, x)
    x.add_(1)
    stuck.set()
    tier.flush()
    with pytest.raises(RestoreError, match="modified by an inplace operation"):
        handle.restore()


def test_running_statistics_that_instance_norm_repeats_and_changes_stay(tmp_path, monkeypatch):
    """They are saved before the op changes them: a slow writer would find others than it wrote."""
    write, changed = unlinked.write, []

    def late(descriptor: int, flat: Tensor, offset: int) -> int:
        early = unlinked.bytes_of(flat).tobytes()
        time.sleep(0.1)
        if unlinked.bytes_of(flat).tobytes() != early:
            changed.append(flat.numel())
        return write(descriptor, flat, offset)

    monkeypatch.setattr(unlinked, "write", late)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True))
    with er.saving("offload", from_nbytes=0, min_nbytes=0, directory=str(tmp_path)) as saved:
        loss = net(torch.randn(3, 1, 512, 512)).square().sum()
    loss.backward()
    assert not changed
    assert "a copy of running statistics, which its op changes" in {
        row.why for row in saved.ledger.rows
    }


def test_memory_freed_by_hand(tier, stuck):
    lost, written = torch.randn(100), torch.ones(100)
    handle = OffloadHandle(tier, lost)
    lost.untyped_storage().resize_(0)
    with pytest.raises(RestoreError, match="freed by hand before it was written"):
        handle.restore()
    stuck.set()
    with warnings.catch_warnings(record=True):
        tier.flush()
    tier = FileTier(tier.directory)
    handle = away(tier, written)
    written.untyped_storage().resize_(0)
    assert torch.equal(handle.restore(), torch.ones(100))


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own, in its AD
def test_zeros_without_memory_stay(tmp_path):
    """Forward-mode AD makes them; there is nothing to write."""
    norm, x = nn.LayerNorm(512), torch.randn(64, 512, requires_grad=True)

    def tangent(context) -> list[Tensor]:
        with context, forward_ad.dual_level():
            y = norm(forward_ad.make_dual(x, torch.ones_like(x)))
            out = forward_ad.unpack_dual(y).tangent.clone()
        return list(torch.autograd.grad(out.square().sum(), [x, norm.weight]))

    plain = tangent(er.saving("keep"))
    for _ in range(5):  # a warning would be an error here
        assert same(tangent(saving(tmp_path)), plain)


# --- Threads and forks


def test_backward_on_another_thread(tmp_path):
    net, plain = make_net(), step(er.saving("keep"))
    torch.manual_seed(1)
    with saving(tmp_path):
        loss = net(torch.randn(64, 32)).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert same([p.grad for p in net.parameters()], plain)


def test_many_threads_train_at_once(tmp_path):
    plain, wrong = step(er.saving("keep")), []

    def train(net: nn.Module) -> None:
        torch.set_num_threads(1)
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
        for _ in range(10):
            net.zero_grad()
            with saving(tmp_path):
                loss = net(x).square().sum()
            loss.backward()
            wrong.append(not same([p.grad for p in net.parameters()], plain))

    threads = [threading.Thread(target=train, args=(make_net(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [False] * 40
    file_tier(str(tmp_path)).flush()  # a write that was under way has its part until it is done
    assert file_tier(str(tmp_path)).end == 0


def test_one_handle_is_restored_by_many_threads(tier):
    x = torch.randn(1 << 16)
    handle, wrong = away(tier, x.clone()), []

    def restore(private: bool) -> None:
        for _ in range(20):
            handle.prefetch()
            y = handle.restore(private=private)
            wrong.append(not torch.equal(y, x))
            if private:
                y.zero_()

    threads = [threading.Thread(target=restore, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(wrong)


_FORK = """
import os, sys, threading, warnings, torch
import numpy as np
from elbowroom.runtime.handles import OffloadHandle
from elbowroom.runtime.tiers import unlinked
from elbowroom.runtime.tiers.choose import file_tier
warnings.simplefilter("ignore")
tier = file_tier(sys.argv[1])
make = lambda i: torch.full((1 << 16,), float(i))
same = lambda handle, i: bool((handle.restore().numpy() == i).all())
parents = [OffloadHandle(tier, make(i)) for i in range(5)]
tier.flush()
parents[1].prefetch()
go, write = threading.Event(), unlinked.write
unlinked.write = lambda *args: go.wait(20) and write(*args)
parents += [OffloadHandle(tier, make(5)), OffloadHandle(tier, make(6))]
child = os.fork()
if not child:
    unlinked.write = write
    ok = all(same(handle, i) for i, handle in enumerate(parents))
    own = file_tier(sys.argv[1])
    mine = [OffloadHandle(own, make(-i)) for i in range(20)]
    own.flush()
    ok &= all(same(handle, -i) for i, handle in enumerate(mine)) and own is not tier
    parents.clear()
    mine.clear()
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
go.set()
tier.flush()
print(status, all(same(handle, i) for i, handle in enumerate(parents)))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_reads_its_parents_tensors_and_harms_none(tmp_path):
    assert run(_FORK, str(tmp_path)).split() == ["0", "True"]


_CRASH = """
import os, sys, torch
from elbowroom.runtime.handles import OffloadHandle
from elbowroom.runtime.tiers.choose import file_tier
held = [OffloadHandle(file_tier(sys.argv[1]), torch.randn(1 << 18)) for _ in range(5)]
if sys.argv[2] == "crash":
    os._exit(0)
"""


@pytest.mark.parametrize("how", ["crash", "exit"])
def test_a_process_that_ends_leaves_no_file(tmp_path, how):
    run(_CRASH, str(tmp_path), how)
    assert os.listdir(tmp_path) == []
