"""Bytes that the code which Inductor has written for a graph takes, before any of it is compiled.

The simulation predicts what Inductor will fuse (`fusion.py`) and when it will free (`liveness.py`).
Where it is wrong, the code says so: its lines take memory, hand it over and free it, one after
another.

    backward starts with        what is held (`HeldAtBackward`), and the gradients of the outputs
    buf1 = empty(...)           + bytes
    buf2 = buf1  # reuse        handed over
    del buf1                    - bytes

Memory that a library call takes while it runs is in no line, and is added as far as it is known
(`collect.workspace_of`). The lines are private to torch: where a version has others, nothing is
known, and the plan stays.

AOTAutograd has backward compiled when it is called for the first time. Its plan cannot be changed
then, so here it is compiled with forward (`Early`).
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch

from elbowroom.compiled.collect import workspace_of
from elbowroom.compiled.decision import HeldAtBackward, Loaded, store

_log = logging.getLogger("elbowroom")
_lock = threading.RLock()
# Channels that oneDNN's copies of maps are filled up to (measured; `measure/layouts.py`).
_BLOCK = 8 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 16
# By op, how many of its first operands are maps.
_MAPS: dict[Any, int] = {
    torch.ops.aten.convolution.default: 1,
    torch.ops.aten.convolution_backward.default: 2,
}
SURE = 0.8  # of a prediction for plain code: so much it takes at least, and 1 / SURE at most


@contextmanager
def watching(listener: Callable[[Sequence[Any], Any], None]) -> Iterator[None]:
    """Calls listener(lines, graph) for each graph that Inductor writes inside this context.

    What the listener raises ends the compilation.
    """
    from torch._inductor.codegen import wrapper
    from torch._inductor.virtualized import V

    plan = getattr(wrapper.PythonWrapperCodegen, "run_wrapper_ir_passes", None)
    if plan is None:
        yield
        return

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = plan(self, *args, **kwargs)
        listener(self.lines, V.graph)
        return result

    with _lock, mock.patch.object(wrapper.PythonWrapperCodegen, "run_wrapper_ir_passes", run):
        yield


class Early:
    """Has the backward graph of a region compiled with its forward graph.

    The result waits for the first call of backward. A call that retains the graph may not write
    over saved tensors, so for that one it is compiled anew.
    """

    def __init__(self) -> None:
        self._is_now = False
        self._compiled: tuple[Any, Any] | None = None  # with the tensors that it may write over

    @contextmanager
    def wanted(self, check: "Check") -> Iterator[None]:
        """Compiles backward early inside this context, where `check` has something to compare."""
        from torch._functorch._aot_autograd import graph_compile

        name = "_aot_stage2b_bw_compile"
        lazily = getattr(graph_compile, name, None)
        if lazily is None:
            yield
            return

        def compile_now(*args: Any) -> Any:
            *given, n_symbols, config, compiler = args
            if not check.is_needed() or _is_compiled_autograd():
                return lazily(*args)
            self._is_now = True
            try:
                forced = replace(config, force_non_lazy_backward_lowering=True)
                info, compiled = lazily(*given, n_symbols, forced, compiler)
            except Exception as error:
                if check.over_nbytes:
                    raise
                _log.debug("backward of a compiled region waits for its first call: %r", error)
                return lazily(*args)
            finally:
                self._is_now = False
            stays = n_symbols > 0 or config.force_non_lazy_backward_lowering
            return info, compiled if stays else None

        with _lock, mock.patch.object(graph_compile, name, compile_now):
            yield

    def compile(self, run: Callable[[], Any]) -> Any:
        """Returns what `run` compiles for backward, or what it has compiled early."""
        from torch._inductor import config
        from torch._inductor.utils import get_donated_idxs

        if self._is_now:
            compiled = run()
            self._compiled = get_donated_idxs(), compiled
            return compiled
        known, self._compiled = self._compiled, None
        if known is None:
            return run()
        if known[0] == get_donated_idxs():
            return known[1]
        # The key of Inductor's cache leaves out what a graph may write over.
        with config.patch(fx_graph_cache=False):
            return run()


def _is_compiled_autograd() -> bool:
    """Returns whether compiled autograd compiles backward, from the graph and not from its code."""
    from torch._dynamo import compiled_autograd, config

    return bool(config.compiled_autograd or compiled_autograd.in_compiled_autograd_region)


class Check:
    """Compares what is written for a region with its room.

    made         decisions of the region
    peak_nbytes  the highest of its graphs
    over_nbytes  what that is above the room, once it has raised
    wants_tails  whether its rows must end as in plain torch.compile's code
    """

    wants_tails = False

    def __init__(
        self,
        room_nbytes: int | None,
        counts_inputs: bool,
        *,
        raises: bool,
        standing_nbytes: int = 0,
        waits: bool = False,
    ) -> None:
        """standing_nbytes: bytes beside the region's own that stand until forward has ended.

        waits: it raises only once the peaks of both graphs are known
        """
        self._room_nbytes, self._counts_inputs = room_nbytes, counts_inputs
        self._standing_nbytes = standing_nbytes
        self.raises, self._waits = raises, waits
        self.made: list[Any] = []
        self.peak_nbytes = self.over_nbytes = 0
        self._seen: set[bool] = set()  # forward, backward

    @property
    def is_complete(self) -> bool:
        """True if the code of both graphs was looked at."""
        return len(self._seen) == 2

    def known_nbytes(self, planned_nbytes: int) -> int:
        """Returns the bytes that both graphs take, as far as that is known.

        Where the code of one graph is not known, it is the plan's figure if that is higher.
        """
        return self.peak_nbytes if self.is_complete else max(planned_nbytes, self.peak_nbytes)

    def is_needed(self) -> bool:
        """Returns whether the region has a plan, or may not fit as plain torch.compile has it."""
        decision = self.made[-1] if self.made else None
        if decision is None or self._room_nbytes is None:
            return False
        return not decision.is_plain or self._over(decision.peak_nbytes / SURE) > 0

    def __call__(self, lines: Sequence[Any], graph: Any) -> None:
        if not self.made:
            return
        held = self.made[-1].held if graph.is_backward else None
        peak = peak_of(lines, graph, held) if self.is_needed() else None
        if peak is not None and not graph.is_backward:
            peak += self._standing_nbytes
        store(self.made[-1], peak, is_backward=graph.is_backward)
        if peak is not None:
            self._judge(peak, is_backward=bool(graph.is_backward))

    def found(self, peak_nbytes: int, *, is_backward: bool) -> None:
        """Takes the peak of the code of one graph, which may have come from the cache; 0: none.

        Inductor caches forward as soon as that is compiled, whatever is then found of backward.
        """
        if peak_nbytes and is_backward not in self._seen and self.is_needed():
            self._judge(peak_nbytes, is_backward=is_backward)

    def _judge(self, peak: int, *, is_backward: bool) -> None:
        self.peak_nbytes = max(self.peak_nbytes, peak)
        self._seen.add(is_backward)
        over = int(self._over(self.peak_nbytes if self._waits else peak))
        if over > 0 and self.raises and (self.is_complete or not self._waits):
            self.over_nbytes = over
            raise RuntimeError(f"the code of a compiled region takes {over} bytes too many")

    def load(self, loaded: Loaded) -> None:
        """Takes the figures of graphs that came from the cache."""
        if loaded.decision is None:
            return
        if not self.made:  # nothing was decided now
            self.made.append(loaded.decision)
        self.peak_nbytes = max(self.peak_nbytes, loaded.peak_nbytes)
        if loaded.is_complete:
            self._seen = {False, True}

    def above_nbytes(self) -> int:
        """Returns by how much the code, where it was looked at, is above the room."""
        if not self.made or self._room_nbytes is None:
            return 0
        return max(int(self._over(self.peak_nbytes)), 0)

    @property
    def planned_nbytes(self) -> int:
        """The bytes that the last plan predicts, of what the room is for."""
        return int(self._counted(self.made[-1].peak_nbytes))

    def _counted(self, peak_nbytes: float) -> float:
        return peak_nbytes + (self.made[-1].inputs_nbytes if self._counts_inputs else 0)

    def _over(self, peak_nbytes: float) -> float:
        return self._counted(peak_nbytes) - (self._room_nbytes or 0)


def peak_of(lines: Sequence[Any], graph: Any, held: HeldAtBackward | None) -> int | None:
    """Returns the most bytes that stand while these lines run; None where that is not known.

    held: what stands when they begin; None for a forward graph
    """
    try:
        return _Walk(graph, held).run(lines)
    except Exception as error:  # lines that are not known
        _log.debug("the bytes of compiled code cannot be read: %r", error)
        return None


class _Map(NamedTuple):
    """A map that a convolution reads, and its order in memory."""

    nbytes: int
    filled_nbytes: int  # of oneDNN's copy
    is_channels_last: bool
    is_contiguous: bool
    is_on_cpu: bool

    @classmethod
    def of(cls, buffer: Any, graph: Any) -> "_Map":
        """Reads off a buffer of Inductor's."""
        size, stride = (
            [known_hint(graph, n) for n in given]
            for given in (buffer.get_size(), buffer.get_stride())
        )
        found = torch.empty_strided(size, stride, dtype=buffer.get_dtype(), device="meta")
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        return cls(
            found.nbytes,
            found.nbytes // max(size[1], 1) * -(-size[1] // _BLOCK) * _BLOCK,
            len(size) not in formats or found.is_contiguous(memory_format=formats[len(size)]),
            found.is_contiguous(),
            buffer.get_device().type == "cpu",
        )


def _copied_nbytes(maps: Sequence[_Map]) -> int:
    """Returns the bytes of the copies that a convolution on a CPU makes of what it reads.

    oneDNN takes maps in channels_last as they are. Others are copied into the graph's order, if
    they are in none of the two, and from there into oneDNN's. The figures were read off the
    allocator. maps: the gradient, if it is a backward, and the input
    """
    if not all(one.is_on_cpu for one in maps):
        return 0
    if maps and maps[-1].is_channels_last:
        return sum(one.nbytes for one in maps if not one.is_channels_last)
    return sum(one.filled_nbytes + (0 if one.is_contiguous else one.nbytes) for one in maps)


class _Walk:
    """Bytes that stand, line by line."""

    def __init__(self, graph: Any, held: HeldAtBackward | None) -> None:
        self._graph = graph
        self._alive: dict[str, tuple[str, int]] = {}  # name -> name of its memory, bytes
        self._users: dict[str, int] = {}  # of each memory
        held = held or HeldAtBackward()
        self.level = self.highest = held.fixed_nbytes
        self._parts: dict[str, list[Any]] = {}
        for name in graph.graph_inputs:
            if name in held.saved:
                self._take(name, *held.saved[name])

    def run(self, lines: Sequence[Any]) -> int:
        self._parts = self._parts_of(lines)
        for line in lines:
            act = getattr(self, f"_{type(line).__name__}", None)
            if act is not None:
                act(line)
        return self.highest

    def _take(self, name: str, memory: str, nbytes: int) -> None:
        self._alive[name] = memory, nbytes
        users = self._users[memory] = self._users.get(memory, 0) + 1
        if users == 1:
            self.level += nbytes
            self.highest = max(self.highest, self.level)

    def _give(self, name: str) -> None:
        memory, nbytes = self._alive.pop(name, ("", 0))
        self._users[memory] = self._users.get(memory, 0) - 1
        if not self._users[memory]:
            self.level -= nbytes

    def _make(self, buffer: Any) -> None:
        name = buffer.get_name()
        if name not in self._alive:
            size = known_hint(self._graph, self._graph.get_allocation_storage_size(buffer))
            self._take(name, name, size * buffer.get_dtype().itemsize)

    def _AllocateLine(self, line: Any) -> None:  # noqa: N802
        self._make(line.node)

    def _ReuseLine(self, line: Any) -> None:  # noqa: N802
        memory, nbytes = self._alive.get(line.node.get_name(), ("", 0))
        if not memory:  # an input of the caller's
            return
        self._take(line.reused_as.get_name(), memory, nbytes)
        if line.delete_old:
            self._give(line.node.get_name())

    def _FreeIfNotReusedLine(self, line: Any) -> None:  # noqa: N802
        if not line.is_reused:
            self._give(line.node.get_name())

    def _FreeLine(self, line: Any) -> None:  # noqa: N802
        self._give(line.node.get_name())

    def _ExternKernelAllocLine(self, line: Any) -> None:  # noqa: N802
        is_whole = type(line.node.layout).__name__ in ("FixedLayout", "FlexibleLayout")
        if is_whole and not _moves_away(line.node):  # torch 2.14: no MultiOutputLine
            self._make(line.node)
        # The call makes all that later lines take from its result. Before these, its inputs end.
        for buffer in self._parts.get(line.node.get_name(), ()):
            self._make(buffer)
        op = getattr(line.node, "op_overload", None)
        work = [workspace_of(node) for node in line.node.get_origins() if node.target is op]
        maps = [_Map.of(one, self._graph) for one in line.node.inputs[: _MAPS.get(op, 0)]]
        taken = max(work, default=0) + _copied_nbytes(maps)
        self.highest = max(self.highest, self.level + taken)

    def _parts_of(self, lines: Sequence[Any]) -> dict[str, list[Any]]:
        """Returns the buffers that hold parts of what a library call returns, by its name."""
        found: dict[str, list[Any]] = {}
        for line in lines:
            if type(line).__name__ != "MultiOutputLine":
                continue
            buffer = self._graph.get_buffer(line.result_name)
            call = self._graph.get_buffer(line.arg_name)
            if not _moves_away(call) and not buffer.get_inputs_that_alias_output():
                found.setdefault(line.arg_name, []).append(buffer)
        return found


def _moves_away(call: Any) -> bool:
    """Returns whether the result of a library call lies outside of the device's memory."""
    return str(getattr(call, "op_overload", "")) == "elbowroom_graph.offload.default"


def known_hint(graph: Any, size: Any) -> int:
    """A number of elements as an int; symbols count as what they are in the compiled call."""
    if isinstance(size, int):
        return size
    sizevars = graph.sizevars
    hint = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint
    return int(hint(size, fallback=0))
