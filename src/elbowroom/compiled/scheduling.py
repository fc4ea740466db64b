"""Keeps Inductor's schedule of a planned graph to the order in which the plan was judged.

Three things in Inductor make another peak of it than that of the order of the graph:

    horizontal fusion   loops that only read the same memory become one kernel, up to 64 nodes
                        apart. If the later one needs a library call that comes after the earlier
                        one, the earlier has to wait, or all that the later needs runs early: three
                        gradients of norms in one kernel held the tensors of two blocks of a Llama.
                        If it needs none, it runs early: keys that were recomputed with those of
                        another block, for their sines and cosines, stood through two MLPs
    reordering          other orders are tried, and judged by an estimate without writing in place
                        and without reuse of memory
    reuse               freed memory waits for the next tensor of its size, across moments that
                        another estimate assumes to be low

While a planned graph is compiled, the first is disabled in such cases, unless in the second the
loops share at least half of the bytes that they write; the others are disabled entirely.
Fusion of loops that depend on each other is unchanged, so in float32 no bit changes. In 16-bit
floats bits could change: there `fuses_alike` leaves all fusion to Inductor.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

SHARED = 1 / 2  # of what two loops write: they may be fused across a library call if they share it


@contextmanager
def in_order(*, fuses_alike: bool = False) -> Iterator[None]:
    """Makes Inductor keep kernels in the graph's order, and free memory at its last use."""
    from torch._inductor import config
    from torch._inductor.virtualized import V

    base: Any = type(V.choices)
    handler = V.choices if fuses_alike else _choices_after(base)()
    given: dict[str, Any] = {"reorder_for_peak_memory": False, "allow_buffer_reuse": False}
    if not fuses_alike:
        # Inductor's cache keys a graph by its settings, not by the object that chooses. So one
        # setting encodes this: loops are fused for 11 shared bytes or more, instead of 10.
        given["score_fusion_memory_threshold"] = config.score_fusion_memory_threshold + 1
    with config.patch(given), V.set_choices_handler(handler):
        yield


@cache
def _choices_after(base: Any) -> Any:
    """Inductor's heuristics, or the user's own, with one more case in which loops are not fused."""

    class InOrder(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._calls: dict[int, Any] = {}  # library calls of the graph, by their order
            self._of: Any = None

        def can_fuse_horizontal(self, scheduler: Any, node1: Any, node2: Any, score: int) -> bool:
            if self._of is not scheduler:
                self._of = scheduler
                self._calls = {n.min_order: n for n in scheduler.nodes if n.is_extern()}
            first, second = sorted((node1, node2), key=lambda node: node.min_order)
            orders = range(first.max_order + 1, second.min_order)
            calls = [self._calls[at] for at in orders if at in self._calls]
            if calls and not _may_cross(calls, first, second, score):
                return False
            return bool(base.can_fuse_horizontal(scheduler, node1, node2, score))

    return InOrder


def _may_cross(calls: list[Any], first: Any, second: Any, shared_nbytes: int) -> bool:
    """Returns whether two nodes may run as one though library calls run between them."""
    if any(second.ancestors & call.get_operation_names() for call in calls):
        return False
    sizes = first.scheduler.dep_size_hint
    written = sum(sizes(dep) for node in (first, second) for dep in node.read_writes.writes)
    return bool(shared_nbytes >= SHARED * written)
