"""Estimates the seconds of a schedule of kernels, to compare plans of the same graph.

    seconds(kernel) = max(flops / F, bytes / B) + heavy elements * H + coded elements * C
                      + bytes that leave or come back * A

F flops a second and B bytes a second are rough figures of a device: decisions depend only on their
ratio, and on the difference between two plans of one graph. They are constants, not measured, so
that the same program compiles to the same code each time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from elbowroom.compiled.collect import Kind, NodeFacts, elements_of, is_away, known_size, nbytes_of
from elbowroom.compiled.fusion import Kernel


@dataclass(frozen=True)
class Device:
    """Flops and bytes a second.

    heavy_s and coded_s are seconds for each element of exp, erf and the like, and of what is
    encoded or decoded; away_s is seconds for each byte that goes to a file or comes from there
    (from a GPU: to host memory).
    """

    flops: float
    nbytes: float
    heavy_s: float
    coded_s: float
    away_s: float


_CPU = Device(5e10, 1e10, 1e-9, 1e-9, 1e-9)
_GPU = Device(1e14, 1.5e12, 0.0, 1e-12, 5e-11)


def device_of(nodes: Iterable[fx.Node]) -> Device:
    """The figures of the device that the graph runs on."""
    for node in nodes:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(leaf, Tensor) and leaf.device.type not in ("cpu", "meta"):
                return _GPU
    return _CPU


class _Work(NamedTuple):
    """Seconds of a call: of its flops, of codes and moves, and what comes besides either."""

    flops_s: float
    moves_s: float
    besides_s: float


class KernelTimer:
    """Seconds of kernels on a device; the work of a call is counted once.

    works: the work of known calls, which is extended
    """

    def __init__(
        self,
        facts: dict[fx.Node, NodeFacts],
        device: Device,
        works: dict[fx.Node, _Work] | None = None,
    ) -> None:
        self._facts = facts
        self._device = device
        self._works = {} if works is None else works

    @property
    def is_cpu(self) -> bool:
        """True if the graph runs on a CPU."""
        return self._device is _CPU

    def with_facts(self, facts: dict[fx.Node, NodeFacts]) -> "KernelTimer":
        """Returns a clock for the same graph with other nodes besides."""
        return KernelTimer(facts, self._device, self._works)

    def seconds(self, kernels: Iterable[Kernel]) -> float:
        """The time that these kernels take one after another."""
        return sum(self._of_kernel(kernel) for kernel in kernels)

    def of_node(self, node: fx.Node) -> float:
        """The time that a node takes as a kernel of its own."""
        fact = self._facts[node]
        read = {self._facts[n].storage for n in node.all_input_nodes if n in self._facts}
        return self._of_kernel(Kernel(0, [node], read, [node], fact.kind is not Kind.EXTERN))

    def coded(self, node: fx.Node) -> float:
        """The time to encode and to decode a value."""
        return 2 * self._facts[node].elements * self._device.coded_s

    def _of_kernel(self, kernel: Kernel) -> float:
        moved = sum([self._facts[s].nbytes for s in kernel.reads])
        moved += sum([self._facts[s].nbytes for s in kernel.writes])
        seconds = moved / self._device.nbytes
        if kernel.is_fused:
            heavy = sum([self._facts[n].elements for n in kernel.heavy])
            return seconds + heavy * self._device.heavy_s
        works = [self._work_of(node) for node in kernel.nodes]
        seconds += sum([work.moves_s for work in works])
        return max(seconds, sum([w.flops_s for w in works])) + sum([w.besides_s for w in works])

    def _work_of(self, node: fx.Node) -> _Work:
        if node not in self._works:
            device = self._device
            self._works[node] = _Work(
                _flops(node) / device.flops,
                _coded_elements(node) * device.coded_s + away_nbytes(node) * device.away_s,
                _scores(node)[0] * device.heavy_s,
            )
        return self._works[node]


_CODES = tuple(f"elbowroom_graph.{name}.default" for name in ("encode", "decode"))


def _coded_elements(node: fx.Node) -> int:
    """Returns the number of elements that an op of ours encodes or decodes."""
    if str(node.target) not in _CODES:
        return 0
    return max(elements_of(node), *(elements_of(n) for n in node.all_input_nodes), 0)


def away_nbytes(node: fx.Node) -> int:
    """Returns the bytes that an op moves out of the device's memory, or into it."""
    is_fetched = str(node.target) == "elbowroom_graph.fetch.default"
    return nbytes_of(node) if is_fetched or is_away(node) else 0


def _scores(node: fx.Node) -> tuple[int, int]:
    """Returns the number of scores that an attention on a CPU computes, and the width of a head.

    PyTorch's flop counter knows attention on other devices only.
    """
    name = str(getattr(node.target, "overloadpacket", ""))
    if "flash_attention_for_cpu" not in name and name != "elbowroom_graph.attention_backward":
        return 0, 0
    at = int("backward" in name)  # after the gradient of its output
    query, key = (n.meta["val"].shape for n in node.args[at : at + 2])  # type: ignore[union-attr]
    batch, heads, rows, width = (known_size(n) for n in query)
    return batch * heads * rows * known_size(key[2]), width


def _flops(node: fx.Node) -> float:
    from torch.utils.flop_counter import flop_registry

    scores, width = _scores(node)
    if scores:
        products = 2 if "backward" not in str(node.target) else 5
        return 2.0 * products * scores * width
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0.0
    args, kwargs = pytree.tree_map(_sized, (node.args, node.kwargs))
    try:
        return float(formula(*args, **kwargs, out_val=_sized_value(node.meta.get("val"))))
    except Exception:  # the formula does not support these arguments: then only bytes count
        return 0.0


def _sized(given: Any) -> Any:
    return _sized_value(given.meta.get("val")) if isinstance(given, fx.Node) else given


def _sized_value(value: Any) -> Any:
    """The value with numbers in place of symbols, so that no guard on these is added."""
    if isinstance(value, Tensor):
        return torch.empty([known_size(n) for n in value.shape], device="meta")
    if isinstance(value, tuple | list):
        return tuple(_sized_value(one) for one in value)
    return known_size(value) if isinstance(value, torch.SymInt) else value
