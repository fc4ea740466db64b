"""How loops over rows end that fill no whole number of vectors, as plain torch.compile has it.

On a CPU, Inductor's loops take a row vector by vector. What is left at its end is taken as a part
of a vector, or one by one, if that is half a vector at most, and many ops of the loop are masks or
read memory far apart. exp(x) of one element may differ from that of a vector in its last bit, and
sums add up in another order. So how a row ends depends on all that its loop does, and a plan that
saves other values may end rows in another way:

    softmax of 257 classes, logsumexp saved           16 vectors, and one element by std::exp
    the same, logsumexp computed in the loop          16 vectors, and a part of one

Where a plan must change no bit, plain's code is written first, but not compiled. `Tails` notes by
the names of nodes how it ends rows, and has the plan's loops do the same.

Plain backward may compute again what forward has computed, with another end: sines and cosines of
12 positions by std::cos in forward, and in vectors in backward, beside loops over other rows. Its
gradients then have other bits than with what forward has given. So gradients have their own copies
of what ends differently (`apart`, `twice.plain_loops`), and each has the end of its own.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import fx

from elbowroom.compiled.collect import (
    is_reduction,
    known_size,
    ops_named,
    packet_of,
    tensors_of,
)

if TYPE_CHECKING:  # it imports Inductor
    from elbowroom.compiled.joint import Joint

_INEXACT = ops_named(
    "exp exp2 expm1 log log2 log10 log1p logit erf erfc erfinv tanh sigmoid silu gelu softplus pow "
    "sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh lgamma digamma"
)
_Tiling = tuple[list[int], list[int], Any]  # width, dimensions, and counts of ops
_Select = Callable[[], _Tiling]
_log = logging.getLogger("elbowroom")
_lock = threading.RLock()
_END = "elbowroom_end"  # in a node's meta: of backward, and the name in plain's graphs


def may_end_in_few(joint: Joint) -> bool:
    """Returns whether a graph has rows whose rest may be taken one by one, where that is seen."""
    if not joint.clock.is_cpu:
        return False
    return any(
        _leaves_few(x)
        for node in joint.facts
        if _may_differ(node)
        for one in (node, *node.all_input_nodes)
        for x in tensors_of(one)
    )


def _may_differ(node: fx.Node) -> bool:
    """Returns whether an op may give another value by itself than in a vector."""
    return packet_of(node) in _INEXACT or is_reduction(node)


def _leaves_few(x: torch.Tensor) -> bool:
    """Returns whether at most half a vector is left of a row, or of all elements."""
    if not x.is_floating_point():
        return False
    from torch._inductor import cpu_vec_isa

    isa: Any = cpu_vec_isa.pick_vec_isa()
    # Other dtypes are taken in as many elements at a time as float32.
    dtype = x.dtype if x.dtype in (torch.bfloat16, torch.float16) else torch.float32
    width = isa.nelements(dtype=dtype) if isa else 1
    inner = [*x.shape[-1:], *(x.shape[1:2] if x.dim() == 4 else ()), x.numel()]
    return any(0 < known_size(size) % width <= width // 2 for size in inner)


class Tails:
    """How plain code ends the rows of loops, by names of the nodes that they compute.

    A loop is "scalar" (without vectors), or its rest is taken as "part" of a vector or as a "few".
    """

    def __init__(self) -> None:
        self.ends: dict[tuple[bool, str], str] = {}  # of backward, and the name

    @property
    def apart(self) -> tuple[str, ...]:
        """The names of what plain's backward computes again, and ends in another way."""
        return tuple(
            name
            for (is_backward, name), end in self.ends.items()
            if is_backward and self.ends.get((False, name), end) != end
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Notes how rows end in what is written inside this context."""

        def note(names: list[tuple[bool, str]], tiling: _Tiling, _: _Select) -> _Tiling:
            self.ends.update(dict.fromkeys(names, _end_of(tiling)))
            return tiling

        with _selecting(note):
            yield

    @contextmanager
    def following(self) -> Iterator[None]:
        """Has rows end in the same way in what is written inside this context."""
        if not self.ends:
            yield
            return

        def follow(names: list[tuple[bool, str]], tiling: _Tiling, vectors: _Select) -> _Tiling:
            # What plain computes in forward alone, backward has as it was there.
            known = (
                self.ends.get((is_backward, name), self.ends.get((not is_backward, name)))
                for is_backward, name in names
            )
            found = {one for one in known if one is not None}
            if len(found) > 1:
                _log.debug("rows of %s end in two ways in plain torch.compile", names)
            return _ended(tiling, found.pop(), vectors) if len(found) == 1 else tiling

        with _selecting(follow):
            yield


@contextmanager
def _selecting(
    act: Callable[[list[tuple[bool, str]], _Tiling, _Select], _Tiling],
) -> Iterator[None]:
    """Passes what decides about the rest of rows through `act`, with the nodes that it is for.

    `act` is given what takes the loop in vectors, too, wherever that can be.
    """
    from torch._inductor import config
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import V

    select = getattr(getattr(cpp, "TilingSelect", None), "select_tiling", None)
    if select is None or not hasattr(cpp, "KernelOpStats"):
        yield  # a version whose loops end in one way
        return

    def run(self: Any, functions: Sequence[Any], *args: Any, **kwargs: Any) -> _Tiling:
        tiling: _Tiling = select(self, functions, *args, **kwargs)
        is_backward = bool(V.graph.is_backward)
        names = [name for one in functions for name in _computed(one, is_backward=is_backward)]

        def in_vectors() -> _Tiling:
            with config.patch({"cpp.enable_tiling_heuristics": False}):
                return select(self, functions, *args, **kwargs)  # type: ignore[no-any-return]

        return act(names, tiling, in_vectors) if names else tiling

    with _lock, mock.patch.object(cpp.TilingSelect, "select_tiling", run):
        yield


def ends_as_gradients(copied: fx.Node, node: fx.Node) -> None:
    """Notes that a copy of a node, which gradients read, ends as that does in plain backward."""
    copied.meta[_END] = (True, _name_of(node))


def ends_as_forward(node: fx.Node) -> None:
    """Notes that a node of which gradients have copies ends as in plain's forward."""
    node.meta[_END] = (False, _name_of(node))


def _name_of(node: fx.Node) -> str:
    """Returns the name of a node, or of what it is a copy of, in plain's graphs."""
    _, name = node.meta.get(_END, (True, node.name))
    return str(name)


def _computed(function: Any, *, is_backward: bool) -> list[tuple[bool, str]]:
    """Returns the names of what a loop computes that may differ, of what it comes from."""
    given = getattr(function, "original_fn", function).args[0]
    body, made = getattr(given, "_body", None), getattr(given, "node", None)
    if body is None or made is None:
        return []
    ops = set(body.op_counts)
    return sorted(
        node.meta.get(_END, (is_backward, node.name))
        for node in made.get_origins()
        if (packet_of(node) in _INEXACT and node.target._opname in ops)
        or (is_reduction(node) and "reduction" in ops)
    )


def _end_of(tiling: _Tiling) -> str:
    _, indices, stats = tiling
    if not indices:
        return "scalar"
    count = sum(stats.op_counter.values())
    masks = stats.mask_op_count + sum(stats.non_contig_indexing_op_counter.values())
    return "few" if count > 0 and masks / count > stats.OVERHEAD_RATIO_THRESHOLD else "part"


def _ended(tiling: _Tiling, end: str, vectors: _Select) -> _Tiling:
    """Returns the tiling with another end, where it can have that."""
    factors, indices, stats = tiling
    if end == _end_of(tiling):
        return tiling
    if end == "scalar":
        return [], [], stats
    if not indices:
        factors, indices, _ = vectors()
    changed = copy.copy(stats)
    changed.non_contig_indexing_op_counter = {}
    changed.mask_op_count = sum(stats.op_counter.values()) + 1 if end == "few" else 0
    return factors, indices, changed
