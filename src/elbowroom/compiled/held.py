"""A policy of `er.saving` as a backend of torch.compile: its graphs hold saved values in codes.

    GraphPolicy(codes, min_nbytes)   the codec that holds values; "": exact codes alone
        .backend(options)            one backend for each set of Inductor's options: Dynamo keeps
                                     what it has compiled by the identity of the backend, so that
                                     a policy is compiled once, and plain graphs stay beside it
        .running(report)             calls `report` with the bytes that each region holds as it runs

The values that plain torch.compile would save are coded. A graph that cannot be rewritten is
compiled unchanged, and the logger "elbowroom" reports it.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.autograd.function import BackwardCFunction

from elbowroom.codecs import BitMask, Codec, Narrow
from elbowroom.codecs.dropped import drop, why_dropped
from elbowroom.codecs.facts import NOTHING
from elbowroom.codecs.quality import broken_form, is_own
from elbowroom.compiled.away import is_away
from elbowroom.compiled.backend import Regions, compile_region
from elbowroom.compiled.options import Settings
from elbowroom.errors import RestoreError

_MAX_VIEWS = 8  # nodes of views behind a region
_log = logging.getLogger("elbowroom")
Report = Callable[[int, int, Any], None]  # plain bytes, held bytes, object whose end frees them


def acts_in_graphs(codec: Codec) -> bool:
    """Returns whether a codec has a form for the values that a graph saves.

    Exact ones need only take what graphs know of masks and indices. One of another package, whose
    form is not what it declares, is dropped, and is none from then on.
    """
    if isinstance(codec, BitMask | Narrow):
        return True
    if is_own(type(codec)):
        return codec.graph_form(NOTHING) is not None
    lie = broken_form(codec)
    if lie:
        drop(type(codec), lie)
    return not why_dropped(type(codec)) and codec.graph_form(NOTHING) is not None


class RegionHolder(Protocol):
    """Holds what regions save, as hooks for saved tensors do.

    Their first runs have hooks of their own, behind which others see nothing.
    """

    def pack(self, x: Tensor) -> Any: ...
    def unpack(self, held: Any) -> Tensor: ...
    def expect(self, nbytes: int) -> None:
        """Is told how much a region will save, before it runs again."""


class _Thread(threading.local):
    """Listener that is notified of the regions that run on this thread.

    holder  holds what a region saves in its first run
    runs    whether one of these regions runs now
    """

    report: Report | None = None
    holder: RegionHolder | None = None
    runs = False


_thread = _Thread()
_lock = threading.Lock()
_backends: dict[tuple[Any, ...], "_Backend"] = {}


@contextmanager
def reporting_to(report: Report) -> Iterator[None]:
    """Calls `report` with what `counted` regions on this thread hold, at each run."""
    before, _thread.report = _thread.report, report
    try:
        yield
    finally:
        _thread.report = before


@contextmanager
def held_by(holder: RegionHolder) -> Iterator[None]:
    """Has `counted` regions on this thread tell the holder what they save."""
    before, _thread.holder = _thread.holder, holder
    try:
        yield
    finally:
        _thread.holder = before


def is_in_region() -> bool:
    """Returns whether a `counted` region runs on this thread."""
    return _thread.runs


@dataclass(frozen=True)
class GraphPolicy:
    """A policy for compiled code.

    codes       the setting of a codec (`setting_name`), for values that tolerate an error; "":
                exact codes alone; None: graphs are those of plain torch.compile
    min_nbytes  values below are left alone
    seed        where the noise of the codes starts; None: one sequence for the whole process
    """

    codes: str | None
    min_nbytes: int = 32768
    seed: int | None = None

    def backend(self, options: Mapping[str, Any]) -> Callable[..., Any] | None:
        """The backend for these options of Inductor, always the same object; None: its own."""
        if self.codes is None:
            return None
        key = self.codes, self.min_nbytes, repr(sorted(options.items()))
        with _lock:
            if key not in _backends:
                settings = Settings(None, False, None, self.codes, self.min_nbytes)
                _backends[key] = _Backend(settings, dict(options))
            return _backends[key]

    @contextmanager
    def running(self, report: Report) -> Iterator[None]:
        """Calls `report` with what regions on this thread hold, and seeds their noise."""
        with reporting_to(report):
            if self.seed is None:
                yield
            else:
                from elbowroom.compiled.ops import draws

                with draws.started_at(self.seed):
                    yield


class _Backend:
    """Compiles regions whose saved values are coded."""

    compiler_name = "elbowroom"

    def __init__(self, settings: Settings, options: dict[str, Any]) -> None:
        self._settings, self._options = settings, options

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        regions = Regions(self._settings)
        try:
            region = compile_region(gm, example_inputs, regions, self._options)
        except Exception as error:  # whatever error rewriting raises, the training continues
            _log.warning("a compiled region is held as it is; coding it failed: %r", error)
            regions = Regions(Settings(None, counts_inputs=False))
            region = compile_region(gm, example_inputs, regions, self._options)
        plain = [one.plain_saved_nbytes for one in regions.decisions]
        return counted(region, plain[0] if plain else None)


def counted(region: Callable[..., Any], plain_nbytes: int | None = None) -> Callable[..., Any]:
    """The region; each run reports what it holds, which is counted in its first run.

    plain_nbytes: what plain torch.compile would hold; None for a region from a cache, of which
    that is not known any more
    """
    held: int | None = None

    def run(*args: Any) -> Any:
        nonlocal held
        report = _thread.report
        if report is None or not torch.is_grad_enabled():
            return region(*args)
        _thread.runs = True
        try:
            if held is None:
                count = _Count(args, _thread.holder)
                with count:
                    out = region(*args)
                held = count.nbytes
            else:
                if _thread.holder is not None:
                    _thread.holder.expect(held)
                out = region(*args)
        finally:
            _thread.runs = False
        node = next(_own_nodes(out), None)
        if node is not None:
            report(held if plain_nbytes is None else plain_nbytes, held, node)
        return out

    return run


def _own_nodes(out: Any) -> Iterator[BackwardCFunction]:
    """Yields the node of a region that has run, as often as it is found by its results.

    A result that is a view of another one is made behind the region, by a node of its own, which
    no weak reference can refer to.
    """
    for x in _leaves(out):
        node = x.grad_fn
        for _ in range(_MAX_VIEWS):
            if isinstance(node, BackwardCFunction):
                yield node
            node = node.next_functions[0][0] if node is not None and node.next_functions else None


class _Count(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes of tensors saved inside, except inputs. holder: holds them; None: it."""

    def __init__(self, given: Sequence[Any], holder: RegionHolder | None) -> None:
        self._seen = {_address(x) for x in given if isinstance(x, Tensor)}
        self.nbytes = 0
        self._hold = _hold if holder is None else holder.pack
        super().__init__(self._pack, _unpack if holder is None else holder.unpack)

    def _pack(self, x: Tensor) -> Any:
        address = _address(x)
        if address not in self._seen:
            self._seen.add(address)
            counts = address is not None and not is_away(x)
            self.nbytes += x.untyped_storage().nbytes() if counts else 0
        return self._hold(x)


def _hold(x: Tensor) -> tuple[Tensor, int]:
    """Holds a tensor, and its version: hooks switch off autograd's check for changes in place."""
    return x.detach(), x._version


def _unpack(held: tuple[Tensor, int]) -> Tensor:
    x, version = held
    if x._version != version:
        raise RestoreError(
            f"a tensor of shape {tuple(x.shape)} that backward of a compiled region needs was "
            f"changed in place after it was saved (version {version}, now {x._version}). Change a "
            "copy of it, as in x = x + 1."
        )
    return x


def _address(x: Tensor) -> int | None:
    try:
        return int(x.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # it has no storage
        return None


def _leaves(out: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]
