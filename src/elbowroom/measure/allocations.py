"""Reads what this thread allocates and frees, as PyTorch's allocator tells PyTorch's profiler.

The profiler has two sources: the allocator, which reports sizes, and callbacks that run whenever an
operator or a `record_function` begins and ends. Only the first is wanted here, and the second is
dangerous: a scope that began under one profiler and ends under the next writes to memory that is
freed already. DistributedDataParallel, Lightning and every optimizer's `step` call a model, or a
closure that does, inside such a scope, so a measurement that starts and stops at the forwards of a
model would corrupt the heap. So the profiler is asked for a kind of scope that no eager program
opens: then no callback is installed, no scope of anybody's is touched, and a step costs less.

Operators are not seen then, so moments are marked by allocations of our own: a block of an odd size
at one mark, which is freed at the next, as each report costs microseconds. Both are found again by
size and address, and count for nothing.

One profiler runs in a process. One that the program starts by itself ends ours first.
"""

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _ExperimentalConfig,
)
from torch.autograd import profiler as public

from elbowroom.measure.background import Background

_CPU = {ProfilerActivity.CPU}
_NOBODYS = {RecordScope.STATIC_RUNTIME_MODEL}  # of an interpreter that no eager program runs
_MARK_NBYTES = 4099  # of the first mark, odd, as those of floats are not; the next ones are larger
_MARKS = 32768  # different sizes of marks: all are small, so cheap


class Change(NamedTuple):
    """An allocation, or the release of one."""

    at_ns: int
    ptr: int
    nbytes: int  # negative: freed
    device_type: str


@dataclass(frozen=True)
class Freed:
    """Names a moment at which memory went that was there before: the allocator says nothing then.

    by  the measurement that it was there before
    """

    nbytes: int
    by: object


class NamedMoment(NamedTuple):
    """A moment that has a name: of the program's, or what was freed then."""

    at_ns: int
    name: str | Freed


class _ProfilerEvent(Protocol):
    """The fields that we use of a node of the profiler's event tree."""

    name: str
    start_time_ns: int
    extra_fields: Any  # of an allocation: ptr, device, alloc_size in bytes (negative: freed)


class Allocations:
    """Record of allocations and releases, from its creation to `stop`.

    One may begin and end while another runs that lets it: a step whose peak the user asks for is
    that of a model that is fitted, and measures by itself. They share the profiler, which is read
    whenever one begins or ends; each is given what came meanwhile.

    was_ended  by a profiler that the program has started: what came after is not known
    """

    _running: ClassVar[list["Allocations"]] = []
    # By address and size, negative where the block was freed; None: it was no mark.
    _marked: ClassVar[dict[tuple[int, int], str | Freed | None]] = {}
    _block: ClassVar[torch.UntypedStorage | None] = None  # of the last mark, to be freed

    def __init__(self, *, shares: bool = False) -> None:
        """shares: others may begin while this runs.

        Raises RuntimeError where a profiler runs already, and does not share, and in a backward.
        """
        if not may_begin():
            raise RuntimeError(
                "PyTorch has one profiler per process, and it is running already, or cannot start "
                "inside a backward"
            )
        quiet_profiler()
        _give_way_to_others()
        self.shares, self.thread = shares, threading.get_ident()
        self.was_ended = False
        self._changes: list[Change] = []
        self._marks: list[NamedMoment] = []
        if Allocations._running:
            _hand_out()
        else:
            _say_unknown_once()
        Allocations._running.append(self)
        _begin()

    @classmethod
    def sharing(cls) -> bool:
        """Returns whether something runs, and all of it lets another begin on this thread."""
        here = threading.get_ident()
        return bool(cls._running) and all(one.shares and one.thread == here for one in cls._running)

    @classmethod
    def mark(cls, name: str | Freed) -> None:
        """Name this moment, for all that run."""
        if not cls._running:
            return
        block = cls._block
        if block is not None:
            cls._marked[block.data_ptr(), -block.nbytes()] = name
            del block
            cls._block = None
            return
        nbytes = _MARK_NBYTES + len(cls._marked) % (2 * _MARKS) // 2 * 2
        # A storage, not a tensor: no mode that the user has opened may see it.
        block = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
        cls._marked[block.data_ptr(), nbytes] = name
        if cls._block is None:
            cls._block = block
        else:  # a collection of garbage has marked a moment meanwhile
            cls._marked[block.data_ptr(), -nbytes] = None

    @classmethod
    def give_way(cls) -> None:
        """Ends the measurement, because another profiler is about to start."""
        if cls._running:
            _hand_out()
            for one in cls._running:
                one.was_ended = True
            cls._running.clear()

    def stop(self) -> tuple[list[Change], list[NamedMoment]]:
        """Returns all changes and marks since the start, in order, or up to where it was ended."""
        if self in Allocations._running:
            try:
                _hand_out()
            finally:
                Allocations._running.remove(self)
                if Allocations._running:
                    _begin()
        return self._changes, self._marks

    def check(self) -> None:
        """Raises RuntimeError if not all was seen."""
        if self.was_ended:
            raise RuntimeError(
                "the step has started a profiler of its own, which ended the measurement of its "
                "peak: PyTorch has one in a process. Measure a step without it."
            )

    def take(self, changes: list[Change], marks: list[NamedMoment]) -> None:
        """Adds what has come since the last time."""
        self._changes += changes
        self._marks += marks


def _begin() -> None:
    Allocations._marked.clear()
    config = _config()
    _prepare(config)
    _enable(config)


def _hand_out() -> None:
    """Gives what has come to all that run; the profiler has ended then.

    Nothing of the program's may be freed before it runs again, so no garbage is collected.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        if Allocations._block is not None:
            block, Allocations._block = Allocations._block, None
            Allocations._marked[block.data_ptr(), -block.nbytes()] = None
            del block
        found = _read(_disable_profiler())
        for one in Allocations._running:
            one.take(*found)
    finally:
        if collects:
            gc.enable()


def _read(results: Any) -> tuple[list[Change], list[NamedMoment]]:
    events = [event for event in _roots(results) if event.name == "[memory]"]
    only = None if torch.accelerator.is_available() else "cpu"  # to ask takes a fifth of it all
    found = [
        Change(event.start_time_ns, fields.ptr, fields.alloc_size, only or fields.device.type)
        for event in events
        if (fields := event.extra_fields)
    ]
    found.sort(key=itemgetter(0))  # stable: ties keep their order
    marked = Allocations._marked
    changes: list[Change] = []
    marks: list[NamedMoment] = []
    for one in found:
        at = one.ptr, one.nbytes
        if at not in marked:
            changes.append(one)
        elif (name := marked.pop(at)) is not None:  # once: a tensor may come to lie there
            marks.append(NamedMoment(one.at_ns, name))
    return changes, marks


def is_busy() -> bool:
    """Returns whether a profiler runs, or has been prepared by other code."""
    return bool(Allocations._running) or _Others.prepared or torch._C._autograd._profiler_enabled()


def may_begin() -> bool:
    """Returns whether a measurement may begin: no profiler runs, or one of ours that shares.

    Within a backward none may.
    """
    if is_in_backward():
        return False
    return not is_busy() or (Allocations.sharing() and not _Others.prepared)


def is_in_backward() -> bool:
    """Returns whether this thread runs a backward: no measurement can begin or end there.

    The engine puts back, when backward is done, the profiler that ran when it began: one that began
    meanwhile would be lost, and one that ended would seem to run for ever.
    """
    return torch._C._current_graph_task_id() != -1


def quiet_profiler() -> None:
    """Keeps the profiler's own log lines ("USDT: ... profiler_start", torch 2.13) off stderr.

    It reads this once, when the first profiler of a process is prepared.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def _config() -> ProfilerConfig:
    """Configuration of a profiler that records memory alone, without shapes and stacks."""
    nothing = _ExperimentalConfig()
    return ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, nothing, "")


_was_prepared = False


def _prepare(config: ProfilerConfig) -> None:
    """Prepares the profiler; from now on, copies of this process need help to end."""
    global _was_prepared
    if not _was_prepared:
        _was_prepared = True
        os.register_at_fork(after_in_child=_end_copies)
    _prepare_profiler(config, _CPU)


def _end_copies() -> None:
    """Makes a forked process skip PyTorch's last destructors as it ends.

    Kineto has a thread that waits for a condition. The copy of a process does not have the thread,
    yet the destructor of the condition waits for it, so the copy would never end. What is
    registered here runs before that destructor: it writes out what C still buffers, and ends the
    process with its exit code. Python has ended by then, and has run its own exit handlers.
    """
    with suppress(OSError, AttributeError):  # a C library without these
        libc = ctypes.CDLL(None)
        end, write = libc._exit, libc.fflush  # called as end(code, None) and write(None)
        libc.on_exit(ctypes.cast(end, ctypes.c_void_p), None)
        getattr(libc, "__cxa_atexit")(ctypes.cast(write, ctypes.c_void_p), None, None)


def _enable(config: ProfilerConfig) -> None:
    """Starts the profiler.

    The third argument has been there since torch 1.12; its stub does not know it.
    """
    cast(Callable[..., None], _enable_profiler)(config, _CPU, _NOBODYS)


def _roots(results: Any) -> Sequence[_ProfilerEvent]:
    """Returns the profiler's events.

    They are private in torch 2.13: public ones give an allocation no time.
    """
    try:
        return cast(Sequence[_ProfilerEvent], results.experimental_event_tree())
    except AttributeError as error:
        raise RuntimeError(
            f"torch {torch.__version__} keeps the profiler's memory events elsewhere than 2.11 to "
            "2.14 do, so elbowroom cannot measure a peak on this CPU; use one of those versions"
        ) from error


class _Others:
    """Profilers of the program's own.

    prepared  one is, or runs; ours must not start before it has ended
    seen      their functions are wrapped
    """

    prepared = False
    seen = False


def _give_way_to_others() -> None:
    """Lets a profiler that the program starts from now on end ours first.

    PyTorch would not refuse it: it would let it run, and come out empty.
    """
    if _Others.seen:
        return
    _Others.seen = True
    _wrap("_prepare_profiler", begins=True)
    _wrap("_enable_profiler", begins=True)
    _wrap("_disable_profiler", begins=False)


def _wrap(name: str, *, begins: bool) -> None:
    """Makes a function that `torch.autograd.profiler` works by report that it is called."""
    original = getattr(public, name, None)
    if original is None:  # another version of torch: as before, the program's profiler must wait
        return

    def patched(*args: Any, **kwargs: Any) -> Any:
        if begins:
            Background.interrupt()
            Allocations.give_way()
            _Others.prepared = True
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            _Others.prepared = False

    setattr(public, name, patched)


_said_unknown = False


def _say_unknown_once() -> None:
    """Makes PyTorch log, unheard, what it says at the first release of a block from before.

    "Memory block of unknown size was allocated before the profiling started": true, of no use to
    anybody, and said again only after a thousand of them. So it happens here, once in a process, at
    a log level that leaves it out.
    """
    global _said_unknown
    if _said_unknown:
        return
    _said_unknown = True
    with suppress(
        OSError, ValueError
    ):  # a build of torch that names this otherwise, or logs by glog
        c10 = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")
        level = ctypes.c_int.in_dll(ctypes.CDLL(c10), "FLAGS_caffe2_log_level")
        block = torch.UntypedStorage(1)  # type: ignore[no-untyped-call]
        config = _config()
        _prepare(config)
        was, level.value = level.value, _ERROR
        try:
            _enable(config)
            del block
            _disable_profiler()
        finally:
            level.value = was


_ERROR = 2  # c10's name for it is GLOG_ERROR
