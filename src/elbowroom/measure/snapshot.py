"""Reads the memory snapshot that PyTorch's CUDA allocator writes, as facts about one period.

    torch.cuda.memory._record_memory_history()
    ...                                                    # some steps
    torch.cuda.memory._dump_snapshot("snapshot.pickle")

    segments       the blocks that are allocated when the snapshot is taken
    device_traces  what was allocated and freed before, the oldest perhaps lost

The level over time is reconstructed backwards, from the blocks at the end. A block is

    before            there before the record began: weights, states, data
    by an optimizer   allocated below torch/optim
    in backward       allocated by autograd's engine, which has no line of Python or one of its own
    for backward      allocated elsewhere, and freed in backward: what autograd has saved, mostly
    else              outputs, workspaces, weights and data that were made meanwhile

A file of unknown origin is read by an unpickler that can make numbers, strings, lists, tuples and
dicts, and nothing else: no code of it runs. Its opcodes are examined before (`scan`), so
that it takes memory and time in proportion to its size.
"""

import pickle
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np

from elbowroom._checks import check_path
from elbowroom.errors import BudgetTooSmall, DataError, PlanError
from elbowroom.plan.plan import Plan
from elbowroom.plan.problem import Span, summed
from elbowroom.units import show_nbytes

BEFORE, OPTIMIZER = "held before the record", "allocated by an optimizer"
BACKWARD, SAVED, ELSE = "allocated in backward", "held for backward", "everything else"
_KNOWN = {
    *("alloc", "free", "free_requested", "free_completed", "segment_alloc", "segment_free"),
    *("segment_map", "segment_unmap", "snapshot", "oom"),
}
_FREES = ("free", "free_completed")
_ENGINE = ("_engine_run_backward", "autograd::Engine")
_UNREADABLE = (
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError),
    *(RecursionError, MemoryError),  # of lists in lists, which a comparison follows
)
_MAX_SHOWN = 200  # characters
_HINT = (
    "torch.cuda.memory._record_memory_history() before the steps, and "
    'torch.cuda.memory._dump_snapshot("snapshot.pickle") after them, write one'
)


@dataclass(frozen=True)
class Block:
    """One allocation. born, freed: the first and the last event at which it is there."""

    nbytes: int
    born: int
    freed: int
    kind: str
    line: str = ""
    function: str = ""


@dataclass(frozen=True)
class Snapshot:
    """Record of what one device held over a period.

    level     bytes allocated after each event; one event where no history was recorded
    starts_s  seconds from the first event to each; numbers of events where no times were kept
    blocks    all blocks that were allocated, in order
    is_timed  whether `starts_s` are seconds
    unknown   actions in the trace that this version does not know, and how many of each
    """

    device: int
    level: tuple[int, ...]
    starts_s: tuple[float, ...]
    blocks: tuple[Block, ...]
    is_timed: bool = True
    unknown: Counter[str] = field(default_factory=Counter)

    @property
    def peak(self) -> int:
        """The highest level, in bytes."""
        return max(self.level)

    @property
    def peak_event(self) -> int:
        """The event after which the level was highest."""
        return self.level.index(self.peak)

    def at_peak(self) -> list[Block]:
        """Returns the blocks that are held at the peak, the largest first."""
        at = self.peak_event
        held = (block for block in self.blocks if block.born <= at <= block.freed)
        return sorted(held, key=lambda block: -block.nbytes)

    def parts(self) -> dict[str, int]:
        """Returns the bytes at the peak, by kind of block."""
        found: Counter[str] = Counter()
        for block in self.at_peak():
            found[block.kind] += block.nbytes
        return dict(found.most_common())

    def bands(self) -> Iterator[tuple[str, Any]]:
        """Yield each kind of block, and the bytes that it takes after each event."""
        spans: dict[str, list[Span]] = {
            BEFORE: [],
            OPTIMIZER: [],
            SAVED: [],
            BACKWARD: [],
            ELSE: [],
        }
        for block in self.blocks:
            spans[block.kind].append((block.born, block.freed, block.nbytes))
        for kind, found in spans.items():
            if found:
                yield kind, summed(found, len(self.level))

    def plan(self, budget: int) -> Plan:
        """Returns the plan that changes nothing, if that fits.

        A snapshot does not say which op saved a tensor, so it is ground for a bound and no more.
        Raises BudgetTooSmall where no plan could fit, and PlanError, which says how to find one,
        where one may.
        """
        peak, parts = self.peak, self.parts()
        if peak <= budget:
            return Plan(budget, peak, peak, 0.0, 0.0, True, "none", {}, frozenset(), ())
        saved = parts.get(SAVED, 0)
        shown = ", ".join(f"{name} {show_nbytes(nbytes)}" for name, nbytes in parts.items())
        if peak - saved > budget:
            raise BudgetTooSmall(
                f"budget {show_nbytes(budget)} is below the memory at the peak of this snapshot "
                f"without all tensors held for backward, {show_nbytes(peak - saved)} (estimated): "
                f"{shown}. Halve the batch, or use smaller optimizer states "
                "(er.optim.AdamW(state=...))",
                least_nbytes=peak - saved,
                parts=parts,
            )
        raise PlanError(
            f"the snapshot's peak is {show_nbytes(peak)}, {show_nbytes(peak - budget)} above the "
            f"budget. {show_nbytes(saved)} of it are held for backward, so a plan may fit "
            "(estimated). A snapshot does not say which op saves what: er.measure(step), or "
            '"elbowroom profile train.py", does, and er.plan takes its profile'
        )

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {show_nbytes(nbytes)}" for name, nbytes in self.parts().items())
        others = f"; events of unknown kinds: {sum(self.unknown.values())}" if self.unknown else ""
        return (
            f"snapshot of GPU {self.device}: peak {show_nbytes(self.peak)} (measured by PyTorch): "
            f"{shown}{others}"
        )


def load_snapshot(path: str | Path, device: int | None = None) -> Snapshot:
    """Reads a file of `torch.cuda.memory._dump_snapshot`.

    device  the index of the GPU; None: the one that held most

    Raises DataError for what is no such file, or only a part of one.
    """
    path = check_path("path", path)
    try:
        with path.open("rb") as file:
            with mmap(file.fileno(), 0, access=ACCESS_READ) as mapped:
                scan(mapped)
            data = _Plain(file).load()
    except FileNotFoundError:
        raise DataError(f"there is no file {path}; {_HINT}") from None
    except _Hostile as error:
        raise DataError(
            f"{path} is no memory snapshot: it wants to run {error}, and was not read further. A "
            "snapshot holds numbers, strings, lists and dicts alone; do not open this file with "
            "pickle.load"
        ) from None
    except OSError as error:  # a folder, or no right to read it
        raise DataError(f"{path} cannot be read ({error.strerror}); {_HINT}") from error
    except Exception as error:  # a pickle can fail in any way that its bytes can think of
        raise DataError(
            f"{path} is truncated, or no memory snapshot ({type(error).__name__}: {error}); {_HINT}"
        ) from None
    try:
        return _snapshot(data, device)
    except _UNREADABLE as error:
        raise DataError(
            f"{path} is a pickle, but no memory snapshot of a form that this version of elbowroom "
            f"knows ({type(error).__name__}: {error}). It reads those of torch 2.1 to 2.14; {_HINT}"
        ) from None


class _Hostile(Exception):
    """Raised if the pickle names something to import."""


class _Plain(pickle.Unpickler):
    """Unpickler that makes builtins alone."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> NoReturn:
        raise _Hostile(f"{module}.{name}"[:_MAX_SHOWN])

    def persistent_load(self, pid: Any) -> NoReturn:
        raise _Hostile("a persistent id")


def _snapshot(data: Any, device: int | None) -> Snapshot:
    if not isinstance(data, dict) or not isinstance(data.get("segments"), list):
        raise ValueError("it has no list of segments")
    segments, traces = data["segments"], data.get("device_traces", [])
    if device is None:
        held: Counter[int] = Counter({i: 0 for i, _ in enumerate(traces)})
        for segment in segments:
            held[_int(segment.get("device", 0))] += _int(segment["total_size"])
        for i, trace in enumerate(traces):
            held[i] += len(trace)
        device = max(held, key=lambda one: held[one], default=0)
    trace = traces[device] if 0 <= device < len(traces) else []
    stacks = _Stacks()
    last = _blocks(segments, device, stacks)
    if not trace and not last:
        raise ValueError(f"it says nothing of GPU {device}")
    unknown = Counter(_text(event["action"]) for event in trace) if trace else Counter()
    unknown = Counter({name: n for name, n in unknown.items() if name not in _KNOWN})
    events = [event for event in trace if event["action"] in ("alloc", *_FREES)]
    times = [event.get("time_us") for event in events]
    is_timed = bool(times) and all(isinstance(one, int) for one in times)
    starts = [(one - times[0]) / 1e6 for one in times] if is_timed else range(len(events))
    blocks = _replay(events, last, stacks)
    moments = len(events) + 1
    spans = [(block.born, block.freed, block.nbytes) for block in blocks]
    return Snapshot(
        device=device,
        level=tuple(summed(spans, moments).tolist()),
        starts_s=(0.0, *np.maximum.accumulate([float(one) for one in starts] or [0.0]).tolist())[
            :moments
        ],
        blocks=tuple(blocks),
        is_timed=is_timed,
        unknown=unknown,
    )


class _Stack(NamedTuple):
    """Facts that are read from a list of frames.

    alike         equal for equal files, names and lines; whatever else is in frames may be endless
    is_backward   autograd's engine runs: its threads have no frame of Python
    where         the innermost line of Python outside of torch and of Python itself, and its
                  function
    """

    alike: int | None = None
    is_backward: bool = True
    is_optimizer: bool = False
    where: tuple[str, str] = "", ""


class _Stacks:
    """Stacks by the list that they are read from, each once: many events may share one."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, _Stack]] = {}  # by the list's id, which lives as long

    def of(self, frames: Any) -> _Stack:
        if not frames:
            return _Stack()
        known = self._found.get(id(frames))
        if known is None:
            known = self._found[id(frames)] = frames, _stack(frames)
        return known[1]


def _stack(frames: list[Any]) -> _Stack:
    read = tuple(
        (_text(frame["filename"]).replace("\\", "/"), _text(frame["name"]), _int(frame["line"]))
        for frame in frames
    )
    own = ((path, name, line) for path, name, line in read if _is_of_the_user(path))
    path, name, line = next(own, ("", "", 0))
    return _Stack(
        hash(read),
        any(word in name for _, name, _ in read for word in _ENGINE),
        any("torch/optim" in path for path, _, _ in read),
        (f"{path.rsplit('/', 1)[-1]}:{line}", name) if path else ("", ""),
    )


def _is_of_the_user(path: str) -> bool:
    is_packaged = "/site-packages/" in path or "/dist-packages/" in path
    is_own = path.endswith(".py") and "/torch/" not in path and not path.startswith("<")
    return is_own and (is_packaged or "/lib/python" not in path)


def _blocks(segments: list[Any], device: int, stacks: _Stacks) -> dict[int, tuple[int, _Stack]]:
    """The blocks that are allocated at the end, by address: bytes and stack."""
    found = {}
    if len({id(segment["blocks"]) for segment in segments}) < len(segments):
        raise ValueError("two segments share their blocks")  # n of them with n each, of 2 n bytes
    for segment in segments:
        if _int(segment.get("device", 0)) != device:
            continue
        address = _int(segment.get("address") or 0)
        for block in segment["blocks"]:
            nbytes = _int(block["size"])
            at = _int(block.get("address", address))
            address = at + nbytes
            if _text(block["state"]).startswith("active"):
                found[at] = nbytes, stacks.of(block.get("frames") or _history(block))
    return found


def _history(block: dict[str, Any]) -> Any:
    """The frames of a block as older versions wrote them."""
    history = block.get("history") or [{}]
    return history[0].get("frames")


def _replay(events: list[Any], last: dict[int, tuple[int, _Stack]], stacks: _Stacks) -> list[Block]:
    """All blocks: those that the trace allocates, and those that were there before."""
    end = len(events)
    has_frames = any(event.get("frames") for event in events)
    born: dict[int, tuple[int, int, _Stack]] = {}
    found: list[Block] = []
    in_backward = False  # when the last block was allocated
    for at, event in enumerate(events, start=1):
        address, nbytes = _int(event["addr"]), _int(event["size"])
        stack = stacks.of(event.get("frames"))
        is_backward = has_frames and stack.is_backward
        if event["action"] == "alloc":
            if address in born:  # it was freed by an event that was lost
                start, lost, made = born.pop(address)
                found.append(_block(lost, start, at - 1, made, has_frames, ended=False))
            born[address] = at, nbytes, stack
            in_backward = is_backward
        elif address in born:
            start, nbytes, made = born.pop(address)
            # Where stacks of frees were not recorded, the allocator repeats that of the allocation.
            ended = in_backward if stack.alike == made.alike else is_backward
            found.append(_block(nbytes, start, at - 1, made, has_frames, ended=ended))
        else:
            found.append(Block(nbytes, 0, at - 1, BEFORE))
    for address, (nbytes, stack) in last.items():
        if address in born:
            start, nbytes, made = born.pop(address)
            stack = stack if made.alike is None else made
            found.append(_block(nbytes, start, end, stack, has_frames, ended=False))
        else:
            found.append(Block(nbytes, 0, end, BEFORE, *stack.where))
    for start, nbytes, made in born.values():  # allocated, and waiting for another stream
        found.append(_block(nbytes, start, end, made, has_frames, ended=False))
    return sorted(found, key=lambda block: block.born)


def _block(
    nbytes: int, born: int, freed: int, stack: _Stack, has_frames: bool, *, ended: bool
) -> Block:
    """Makes a `Block`. ended: whether it was freed in backward."""
    kind = ELSE
    if stack.is_optimizer:
        kind = OPTIMIZER
    elif has_frames and stack.is_backward:
        kind = BACKWARD
    elif ended:
        kind = SAVED
    return Block(nbytes, born, freed, kind, *stack.where)


def _int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        shown = value if isinstance(value, int) else type(value).__name__
        raise ValueError(f"{shown} should be a whole number")
    return value


def _text(value: Any) -> str:
    """A string; nothing else is shown, since lists of lists of ... may show as terabytes."""
    if not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} should be a string")
    return value


_MAX_INT_NBYTES = 9  # of an unsigned integer of 64 bits, with its sign
_END = (b".", b"")  # STOP, and a file without one
_IMPORTS = (b"c", b"i", b"\x93", b"P", b"Q")  # by name, or by what a program makes of a number


def _counted(longest: int) -> bytes:
    """A pattern of one byte that gives a length, and as many bytes."""
    return b"|".join(b"\\x%02x.{%d}" % (length, length) for length in range(longest + 1))


@cache
def _run() -> re.Pattern[bytes]:
    """Returns a pattern of a run of harmless opcodes."""
    number = rb"(?:K.|M..|J.{4}|[N\x88\x89]|G.{8}|\x8a(?:%b))" % _counted(_MAX_INT_NBYTES)
    opcodes = (
        rb"[\x94}\](aeus)]",  # MEMOIZE, a dict, a list, MARK, APPEND(S), SETITEM(S), ()
        rb"h.|j.{4}",  # BINGET, LONG_BINGET
        rb"\x8c(?:%b)" % _counted(255),  # SHORT_BINUNICODE
        rb"%b(?:\x85|%b(?:\x86|%b\x87)?)?" % (number, number, number),
        rb"\x95.{3}\x00{5}",  # FRAME; pickle.dump begins another one after 64 KiB
        rb"\x80[\x02-\x05]",  # PROTO
    )
    return re.compile(b"(?s)(?:%b)*+" % b"|".join(opcodes))


def scan(data: bytes | mmap) -> None:
    """Raises UnpicklingError for what could take much more memory or time than the file's size.

    Python's unpickler believes what a file says of itself. Nine bytes that put a number at place
    2**27 of its memo have it reserve 2 GiB; a string or a frame may claim any length; and tuples
    inside of tuples, as the key of a dict, are hashed for ever, or until the stack ends. So here is
    a reader of no more than what `pickle.dump` writes of dicts, lists, strings and numbers, by
    protocols 2 to 5:

        lengths     end inside of the file
        the memo    is filled in order
        tuples      have one to three numbers, so a key is a string or as short as one
        integers    have at most 9 bytes

    Whatever names something to import ends the scan, for the unpickler refuses it there.

    One regular expression takes as many opcodes as it can in C, some millions a second. Only
    strings of 256 bytes or more, and places of the memo in protocols 2 and 3, are examined one by
    one.

    What is cut off may pass, since the unpickler notices it without harm.
    """
    at, puts = 0, 0
    while True:
        run = _run().match(data, at)
        assert run is not None  # it may be empty
        at = run.end()
        opcode = data[at : at + 1]
        if opcode in _END or opcode in _IMPORTS:
            return
        if opcode == b"X":  # BINUNICODE
            at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        elif opcode in (b"q", b"r"):  # BINPUT, LONG_BINPUT
            end = at + (2 if opcode == b"q" else 5)
            if int.from_bytes(data[at + 1 : end], "little") > puts:
                raise UnpicklingError(f"byte {at} leaves places of the memo out")
            at, puts = end, puts + 1
        else:
            raise UnpicklingError(f"byte {at}, {opcode!r}, is cut off, or none of a snapshot")
        if at > len(data):
            raise UnpicklingError(f"what ends at byte {at} is cut off")
