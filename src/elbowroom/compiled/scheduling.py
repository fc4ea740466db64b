"""Keeps Inductor's schedule of a planned graph to the order in which the plan was judged.

Three things in Inductor make another peak of it than that of the order of the graph:

    horizontal fusion   loops that only read the same memory become one kernel, up to 64 nodes
                        apart. If the later one needs a library call that comes after the earlier
                        one, the earlier has to wait, or all that the later needs runs early: three
                        gradients of norms in one kernel held the tensors of two blocks of a Llama
    reordering          other orders are tried, and judged by an estimate without writing in place
                        and without reuse of memory
    reuse               freed memory waits for the next tensor of its size, across moments that
                        another estimate assumes to be low

While a planned graph is compiled, the first is disabled in such cases, and the others entirely.
Fusion of loops that depend on each other is unchanged, so in float32 no bit changes. In 16-bit
floats bits could change: there `fuses_alike` leaves all fusion to Inductor.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


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
        @staticmethod
        def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, score: int) -> bool:
            return not _waits(scheduler, node1, node2) and base.can_fuse_horizontal(
                scheduler, node1, node2, score
            )

    return InOrder


def _waits(scheduler: Any, one: Any, two: Any) -> bool:
    """Returns whether the later of two nodes needs a library call that follows the earlier one."""
    first, second = sorted((one, two), key=lambda node: node.min_order)
    needed = map(scheduler.name_to_fused_node.get, second.ancestors)
    between = (n for n in needed if n is not None and n.is_extern())
    return any(n.min_order > first.max_order for n in between)
