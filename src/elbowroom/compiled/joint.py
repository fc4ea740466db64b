"""A joint graph, and the step that results from a choice of saved values.

    saved values  -->  forward graph: its outputs and the saved values
                       backward graph: gradients, from the saved values and the tangents;
                       everything else that backward reads is recomputed

The nodes of both graphs are nodes of the joint graph, and both keep its order, but for one thing:
AOTAutograd moves recomputed nodes to just before their first reader (`reordering_to_mimic_
autograd_engine`). This is done here in the same way, so that a choice can be judged without
creating the two graphs.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, TypeVar

import torch
from torch import fx
from torch._functorch import partitioners
from torch.utils import _pytree as pytree

from elbowroom.compiled.collect import NodeFacts, facts_of, known_size, tensors_of
from elbowroom.compiled.cost import KernelTimer, device_of
from elbowroom.compiled.liveness import LevelCurve, curve_of
from elbowroom.compiled.simulated import Outcome, names_of, outcomes, print_of

_PARTS = "gradients", "results and their gradients", "saved tensors", "computed at the peak"
Found = TypeVar("Found")
_CONVOLUTION = torch.ops.aten.convolution.default


@dataclass(frozen=True)
class Step:
    """Forward and backward of one choice of saved values.

    peak_nbytes   bytes of both at the worst moment; parameters and other inputs are not counted
    saved_nbytes  bytes that are held between forward and backward
    forward_nbytes  bytes of forward at its worst moment
    seconds       an estimate, to compare two choices
    """

    saved: tuple[fx.Node, ...]
    again: tuple[fx.Node, ...]  # nodes that backward recomputes
    peak_nbytes: int
    saved_nbytes: int
    forward_nbytes: int
    seconds: float
    simulate: Callable[[], tuple[LevelCurve, LevelCurve]] = field(repr=False, compare=False)

    @cached_property
    def curves(self) -> tuple[LevelCurve, LevelCurve]:
        """The levels of forward and of backward."""
        return self.simulate()


@dataclass(frozen=True)
class Analysis:
    """Facts of the nodes of a graph, each computed once.

    place   of each node in the graph's order
    random  the nodes whose second run would draw other numbers
    redrawn those that the user's checkpoints run again, with the generator's state of forward
    is_coded  whether codes have been put into the graph
    known   what was found of the graph besides, by any key
    """

    facts: dict[fx.Node, NodeFacts]
    place: dict[fx.Node, int]
    clock: KernelTimer
    random: frozenset[fx.Node]
    redrawn: frozenset[fx.Node] = frozenset()
    is_coded: bool = False
    known: dict[Hashable, Any] = field(default_factory=dict)


class Joint:
    """A joint graph with everything that is needed to judge choices of saved values.

    analysis  of its nodes as they are now
    fakes     fake values of codes that were tried: their sources and results
    """

    def __init__(
        self,
        graph: fx.Graph,
        required: Collection[fx.Node],
        inputs: Sequence[fx.Node],
        n_forward_outputs: int,
        standing_nbytes: int = 0,
    ) -> None:
        """Takes a graph apart.

        required  the nodes that forward's outputs need
        standing_nbytes  bytes beside the graph's own that stand until forward has ended
        """
        self.graph = graph
        self._standing_nbytes = standing_nbytes
        self.inputs = list(inputs)
        self.required = set(required)
        self._n_forward_outputs = n_forward_outputs
        self.fakes: dict[Any, tuple[Any, Any]] = {}
        self.analysis: Analysis
        self.refresh()

    @property
    def facts(self) -> dict[fx.Node, NodeFacts]:
        """The facts of each node."""
        return self.analysis.facts

    @property
    def place(self) -> dict[fx.Node, int]:
        """The place of each node in the graph's order."""
        return self.analysis.place

    @property
    def clock(self) -> KernelTimer:
        """The model of the seconds that kernels of this graph take."""
        return self.analysis.clock

    def once(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """Returns what `find` finds in the graph as it is, which is looked for only once."""
        known = self.analysis.known
        if key not in known:
            known[key] = find()
        return known[key]  # type: ignore[no-any-return]

    def refresh(self, *, is_coded: bool = False) -> None:
        """Analyzes the graph again after it has been rewritten.

        is_coded: only codes were inserted, so that the facts of other nodes are still valid
        """
        place = {node: at for at, node in enumerate(self.graph.nodes)}
        if is_coded:
            before = self.analysis
            facts = facts_of(self.graph, before.facts)
            random = before.random.union(filter(is_random, facts.keys() - before.facts.keys()))
            clock = before.clock.with_facts(facts)
            self.analysis = Analysis(facts, place, clock, random, before.redrawn, True)
            return
        facts = facts_of(self.graph)
        clock = KernelTimer(facts, device_of(facts))
        random = frozenset(filter(is_random, facts))
        redrawn = frozenset(n for n in facts if _draws(n) and partitioners.must_recompute(n))
        self.analysis = Analysis(facts, place, clock, random, redrawn)
        n = self._n_forward_outputs
        results = pytree.arg_tree_leaves(*next(iter(self.graph.find_nodes(op="output"))).args)
        self.forward_outputs = [one for one in results[:n] if isinstance(one, fx.Node)]
        self.backward_outputs = [one for one in results[n:] if isinstance(one, fx.Node)]
        taken = set(self.inputs)
        self.tangents = [n for n in self.graph.find_nodes(op="placeholder") if n not in taken]
        self.is_channels_last = _is_laid_out_anew(self.graph)
        copied = _copied(self.inputs) if self.is_channels_last else set()
        self.outside = {n for n in self.inputs if n not in copied}
        self.changed = _changed(self.graph, self.inputs)
        # What such plans save of maps between convolutions may be copied for each call that reads
        # it, as these lie in another order than the graph's. That is not simulated.
        between = any(
            n.args[0] not in taken
            for n in self.graph.find_nodes(op="call_function", target=_CONVOLUTION)
        )
        self._is_cpu = clock.is_cpu and not (self.is_channels_last and between)

    def step(
        self, saved: Iterable[fx.Node], *, is_plain: bool = False, below_nbytes: float = inf
    ) -> Step | None:
        """Judge a choice; None where backward cannot be computed from it.

        is_plain: as plain torch.compile would run it; below_nbytes: None, too, if its peak is not
        below that, which backward alone may show
        """
        chosen, known = set(saved), outcomes()
        if known is None or self.analysis.is_coded:
            return self._simulated(chosen, is_plain=is_plain, below_nbytes=below_nbytes)
        key = self._print(), frozenset(names_of(chosen)), is_plain, below_nbytes
        if key in known:
            return self._recalled(known[key], chosen, is_plain=is_plain)
        step = self._simulated(chosen, is_plain=is_plain, below_nbytes=below_nbytes)
        known[key] = None if step is None else _outcome(step)
        return step

    def _print(self) -> int:
        given = names_of(self.inputs), self._n_forward_outputs, self._standing_nbytes, self._is_cpu
        return self.once("print", lambda: print_of(self.facts, *given))

    def _recalled(
        self, outcome: Outcome | None, chosen: set[fx.Node], *, is_plain: bool
    ) -> Step | None:
        """Returns the step of a choice that was simulated before, in a graph of the same nodes."""
        if outcome is None:
            return None
        named = self.once("names", lambda: {n.name: n for n in self.place})

        def simulate() -> tuple[LevelCurve, LevelCurve]:
            step = self._simulated(chosen, is_plain=is_plain)
            assert step is not None
            return step.curves

        return Step(
            saved=tuple(named[name] for name in outcome.saved),
            again=tuple(named[name] for name in outcome.again),
            peak_nbytes=outcome.peak_nbytes,
            saved_nbytes=outcome.saved_nbytes,
            forward_nbytes=outcome.forward_nbytes,
            seconds=outcome.seconds,
            simulate=simulate,
        )

    def _simulated(
        self, chosen: set[fx.Node], *, is_plain: bool, below_nbytes: float = inf
    ) -> Step | None:
        after = self._needed(self.backward_outputs, chosen | set(self.tangents))
        if after is None:
            return None
        before = self._needed([*self.forward_outputs, *chosen], set(self.inputs))
        if before is None or any(n in before and n in after for n in self.analysis.random):
            return None
        used = [n for n in chosen if any(u in after for u in n.users) or n in self.backward_outputs]
        outputs = [n for n in self.forward_outputs if n not in self.outside]
        backward = curve_of(
            self._as_autograd(after),
            self.facts,
            given=[*used, *outputs, *self.tangents],
            outside=[n for n in used if n in self.outside],
            # Autograd's engine holds the tangents until backward returns.
            outputs=[*self.backward_outputs, *outputs, *self.tangents],
            waits=is_plain,
            is_cpu=self._is_cpu,
        )
        if backward.peak_nbytes >= below_nbytes:
            return None
        forward = curve_of(
            self._in_order(before),
            self.facts,
            given=self.inputs,
            outside=self.outside,
            outputs=[*self.forward_outputs, *used],
            waits=is_plain,
            is_cpu=self._is_cpu,
        )
        states = sum(_state_nbytes(n) for n in self.analysis.redrawn if n in before and n in after)
        return Step(
            saved=tuple(sorted(used, key=self.place.__getitem__)),
            again=tuple(n for n in self._in_order(after) if n in before),
            peak_nbytes=states
            + max(forward.peak_nbytes + self._standing_nbytes, backward.peak_nbytes),
            saved_nbytes=self._held_nbytes(used) + states,
            forward_nbytes=forward.peak_nbytes + states,
            seconds=self.clock.seconds(forward.kernels) + self.clock.seconds(backward.kernels),
            simulate=lambda: (forward, backward),
        )

    def parts(self, saved: Iterable[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
        """Returns the nodes that forward and backward compute if `saved` is what they save."""
        chosen = set(saved)
        after = self._needed(self.backward_outputs, chosen | set(self.tangents))
        before = self._needed([*self.forward_outputs, *chosen], set(self.inputs))
        assert after is not None
        assert before is not None
        return before, after

    def parts_at_peak(self, step: Step) -> dict[str, int]:
        """Returns what stands at the worst moment of a step in this graph, by kind, in bytes."""
        facts, in_forward = self.facts, step.forward_nbytes + self._standing_nbytes
        curve = step.curves[0 if in_forward >= step.peak_nbytes else 1]
        results = {facts[n].storage for n in (*self.forward_outputs, *self.tangents)}
        gradients = {facts[n].storage for n in self.backward_outputs}
        saved = {facts[n].storage for n in step.saved}
        parts = dict.fromkeys(_PARTS, 0)
        for storage in curve.counted_at_peak(facts):
            kinds = storage in gradients, storage in results, storage in saved, True
            parts[_PARTS[kinds.index(True)]] += facts[storage].nbytes
        if curve is step.curves[0]:
            parts["results of the step before"] = self._standing_nbytes
        # Memory of library calls, states of generators, and freed memory that waits in plain graphs
        parts["workspaces"] = max(step.peak_nbytes - sum(parts.values()), 0)
        return parts

    def saves_changed(self, saved: Iterable[fx.Node]) -> bool:
        """Returns whether forward changes one of these after it was saved.

        The caller's tensor has the new value then when backward reads it.
        """
        return any(self.facts[n].storage in self.changed for n in saved)

    def gradients(self) -> set[fx.Node]:
        """All nodes that depend on a tangent."""
        found = set(self.tangents)
        for node in self.graph.nodes:
            if any(n in found for n in node.all_input_nodes):
                found.add(node)
        return found

    def order_of(self, node: fx.Node) -> list[int]:
        """The dimensions of a value as they will lie in memory, outermost first."""
        value = node.meta["val"]
        if self.is_channels_last and value.dim() == 4:
            return [0, 2, 3, 1]
        return sorted(range(value.dim()), key=lambda d: (-known_size(value.stride(d)), d))

    def _held_nbytes(self, saved: Iterable[fx.Node]) -> int:
        storages = {self.facts[n].storage for n in saved} - self.outside
        return sum(self.facts[s].nbytes for s in storages)

    def _needed(self, wanted: Iterable[fx.Node], known: set[fx.Node]) -> set[fx.Node] | None:
        """Returns the nodes to compute for the wanted ones; None if that needs an unknown input."""
        facts, found = self.facts, set[fx.Node]()
        pending = [n for n in wanted if n not in known]
        while pending:
            node = pending.pop()
            if node in found:
                continue
            if node.op == "placeholder":
                return None
            found.add(node)
            for read in facts[node].inputs:
                if read not in found and read not in known:
                    pending.append(read)
        return found

    def _in_order(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.place.__getitem__)

    def _as_autograd(self, nodes: set[fx.Node]) -> list[fx.Node]:
        """The order of backward: recomputed nodes come just before their first reader."""
        ordered = self._in_order(nodes)
        first = min(
            (self.place[u] for t in self.tangents for u in t.users if u in nodes), default=None
        )
        if first is None:
            return ordered
        done: dict[fx.Node, None] = {}
        for node in ordered:
            if self.place[node] < first or node in done:
                continue
            wanted, pending = {node}, [node]
            while pending:
                for read in self.facts[pending.pop()].inputs:
                    if read in nodes and read not in done and read not in wanted:
                        wanted.add(read)
                        pending.append(read)
            done.update(dict.fromkeys(self._in_order(wanted)))
        done.update(dict.fromkeys(ordered))
        return list(done)


def _outcome(step: Step) -> Outcome:
    return Outcome(
        names_of(step.saved),
        names_of(step.again),
        step.peak_nbytes,
        step.saved_nbytes,
        step.forward_nbytes,
        step.seconds,
    )


def is_random(node: fx.Node) -> bool:
    """Returns whether a second run of the op draws other numbers, and no checkpoint prevents it.

    The checkpoint is one of the user's. PyTorch's own min-cut forbids a second run for some random
    ops only, once it may recompute much.
    """
    if not _draws(node) or partitioners.must_recompute(node):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return True
    at = names.index("dropout_p")  # attention draws nothing where this is 0
    given = node.args[at] if len(node.args) > at else node.kwargs.get("dropout_p", 0.0)
    return bool(given != 0)


def _draws(node: fx.Node) -> bool:
    """Returns whether an op may read a generator of random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _state_nbytes(node: fx.Node) -> int:
    """Returns the bytes of a generator's state, which the partitioner saves for each such op."""
    is_cpu = all(x.device.type == "cpu" for x in tensors_of(node))
    return torch.get_rng_state().nbytes if is_cpu else 16


def _changed(graph: fx.Graph, inputs: Sequence[fx.Node]) -> set[fx.Node]:
    """The inputs whose memory forward gives another value, in the graph or right after it."""
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    output = next(iter(graph.find_nodes(op="output")))
    after = [getattr(one, "mutated_input", None) for one in output.meta.get("desc", ())]
    targets = {node.args[0] for node in copies}
    return {n for n in inputs if n in targets or n.meta.get("desc", n) in after}


def _copied(inputs: Sequence[fx.Node]) -> set[fx.Node]:
    """Inputs that Inductor copies, since convolutions read them in another order of memory."""
    return {
        n
        for n in inputs
        if any(user.target is _CONVOLUTION for user in n.users)
        and not _is_channels_last(n.meta.get("val"))
    }


def _is_laid_out_anew(graph: fx.Graph) -> bool:
    """Returns whether Inductor will put the tensors of convolutions into channels_last."""
    if graph.owning_module is None or not graph.find_nodes(op="call_function", target=_CONVOLUTION):
        return False
    from torch._inductor.graph import GraphLowering

    try:
        return bool(GraphLowering.decide_layout_opt(graph.owning_module, is_inference=False))
    except Exception:  # a private function, which may differ in another version
        return False


def _is_channels_last(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dim() not in (4, 5):
        return True
    layout = torch.channels_last if value.dim() == 4 else torch.channels_last_3d
    return bool(value.is_contiguous(memory_format=layout))
