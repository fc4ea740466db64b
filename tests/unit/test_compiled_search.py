"""What makes planning a compiled graph fast gives what the slow way gives, on random graphs."""

import random

import networkx
import pytest
import torch
from torch import fx, nn

from elbowroom.codecs import Dither
from elbowroom.compiled import decide, fusion
from elbowroom.compiled.collect import facts_of
from elbowroom.compiled.cut import minimum_cut
from elbowroom.compiled.decide import without
from elbowroom.compiled.fusion import Kernel
from elbowroom.compiled.joint import Joint
from elbowroom.compiled.liveness import curve_of
from elbowroom.compiled.partition import Partitioner
from elbowroom.compiled.rewrite import CodedValue, Rewriting
from elbowroom.compiled.scheduling import SHARED
from uncompiled import nothing_compiled as nothing_compiled
from uncompiled import without_codegen

INFINITY = float("inf")


def network(seed: int, *, bounded: bool) -> networkx.DiGraph:
    """Nodes as the partitioner has them: x_in to x_out with a size, all else without a bound."""
    draw = random.Random(seed)
    graph = networkx.DiGraph()
    graph.add_nodes_from(["source", "sink"])
    n = draw.randint(2, 24)
    for i in range(n):
        size = draw.choice([0, 1, 2, 3, 7, 7, 40])
        graph.add_edge(f"{i}_in", f"{i}_out", capacity=size if bounded else INFINITY)
        for j in range(i + 1, n):
            if draw.random() < 3 / n:
                graph.add_edge(f"{i}_out", f"{j}_in", capacity=INFINITY)
        if draw.random() < 0.3:
            graph.add_edge("source", f"{i}_in", capacity=INFINITY)
        if draw.random() < 0.3:
            graph.add_edge(f"{i}_out", "sink", capacity=draw.choice([INFINITY, 5]))
    return graph


@pytest.mark.parametrize("seed", range(60))
def test_a_minimum_cut_is_the_one_of_networkx(seed: int) -> None:
    graph = network(seed, bounded=True)
    value, (before, behind) = minimum_cut(graph, "source", "sink")
    expected, parts = networkx.minimum_cut(graph, "source", "sink")
    assert value == expected
    assert (before, behind) == parts


def test_a_cut_that_has_no_bound_is_refused_as_networkx_refuses_it() -> None:
    graph = networkx.DiGraph()
    graph.add_edge("source", "0_in", capacity=INFINITY)
    graph.add_edge("0_in", "sink", capacity=INFINITY)
    for cut in (networkx.minimum_cut, minimum_cut):
        with pytest.raises(networkx.NetworkXUnbounded):
            cut(graph, "source", "sink")
    graph.remove_node("sink")
    with pytest.raises(networkx.NetworkXError, match="sink"):
        minimum_cut(graph, "source", "sink")


def program(seed: int):
    """A random function of four tensors, of products, loops, reductions and views."""
    draw = random.Random(seed)
    plan = [(draw.randrange(9), draw.randrange(99), draw.randrange(99)) for _ in range(40)]
    results = [draw.randrange(44) for _ in range(4)]

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = list(given)
        for kind, i, j in plan:
            a, b = made[-1 - i % min(len(made), 9)], made[j % len(made)]
            made.append(
                [
                    lambda a, b: torch.mm(a, b),
                    lambda a, b: torch.relu(a),
                    lambda a, b: a + b,
                    lambda a, b: a * b,
                    lambda a, b: torch.exp(a),
                    lambda a, b: a - a.mean(1, keepdim=True),
                    lambda a, b: a * b.sum(0),
                    lambda a, b: a.t(),
                    lambda a, b: torch.mm(a.view(16, 64).t().reshape(32, 32), b),
                ][kind](a.contiguous() if kind == 8 else a, b)
            )
        return tuple(made[at] for at in results)

    return run


def traced(seed: int) -> fx.GraphModule:
    given = [torch.randn(32, 32) for _ in range(4)]
    gm = fx.experimental.proxy_tensor.make_fx(program(seed), tracing_mode="fake")(*given)
    gm.graph.eliminate_dead_code()
    return gm


def fused_slowly(kernels: list[Kernel], facts) -> list[Kernel]:
    """What `_fused` says, with what reaches what looked up anew for each pair."""
    made_by = {s: at for at, kernel in enumerate(kernels) for s in kernel.writes}
    reads = [{made_by[s] for s in k.reads if s in made_by} for k in kernels]
    home, latest = list(range(len(kernels))), list(range(len(kernels)))

    def ancestors(at: int) -> set[int]:
        """Homes of the kernels that run before one of those in this home."""
        found: set[int] = set()
        pending = [at]
        while pending:
            here = pending.pop()
            for member in (m for m in range(len(kernels)) if home[m] == here):
                for source in {home[s] for s in reads[member]} - found - {here}:
                    found.add(source)
                    pending.append(source)
        return found

    pairs = []
    for one in range(len(kernels)):
        for two in range(one + 1, min(len(kernels), one + fusion._FAR + 1)):
            a, b = kernels[one], kernels[two]
            if not (a.is_fused and b.is_fused and a.writes and b.writes):
                continue
            shared = sum(facts[s].nbytes for s in {*a.reads, *a.writes} & {*b.reads, *b.writes})
            loops = [{fusion.loop_of(facts[n]) for n in k.nodes} for k in (a, b)]
            given = [s for s in a.writes if s in b.reads] + [s for s in b.writes if s in a.reads]
            cut = any(facts[s].blocks for s in given)
            if shared >= fusion._MIN_SHARED and loops[0] & loops[1] and not cut:
                pairs.append((-shared, one, two))
    for negative, first, second in sorted(pairs):
        one, two = home[first], home[second]
        if one == two:
            continue
        above = {at: ancestors(at) for at in set(home)}
        if any(one in above[at] and at in above[two] for at in above):
            continue
        if any(two in above[at] and at in above[one] for at in above):
            continue
        early, late = sorted((one, two))
        follows = one in above[two] or two in above[one]
        calls = [at for at in range(latest[early] + 1, late) if not kernels[at].is_fused]
        written = sum(facts[s].nbytes for at in (one, two) for s in kernels[at].writes)
        waits = any(at in above[late] for at in calls)
        if not follows and (waits or (calls and -negative < SHARED * written)):
            continue
        fusion._merge(kernels, one, two)
        latest[one] = max(latest[one], latest[two])
        home = [one if at == two else at for at in home]
    return [kernel for at, kernel in enumerate(kernels) if home[at] == at]


@pytest.mark.parametrize("seed", range(40))
def test_loops_are_fused_as_the_slow_form_fuses_them(seed: int, monkeypatch) -> None:
    graph = traced(seed).graph
    inputs = graph.find_nodes(op="placeholder")
    work = [n for n in graph.nodes if n.op == "call_function"]
    outputs = list(graph.find_nodes(op="output")[0].all_input_nodes)

    def simulated():
        curve = curve_of(work, facts_of(graph), given=inputs, outside=[], outputs=outputs)
        return curve.levels, [(k.nodes, k.reads, k.writes, k.order) for k in curve.kernels]

    fast = simulated()
    monkeypatch.setattr(fusion, "_fused", fused_slowly)
    assert fast == simulated()


@pytest.mark.parametrize("rows", [1, 64])
def test_loops_cross_a_call_where_they_share_half_of_what_they_write(rows: int) -> None:
    """Else what is recomputed for one block ran with another block, and stood between them."""

    def beside(x, y, z, w):
        return y * x, torch.mm(w, w), z * x

    given = [torch.randn(n, 64) for n in (rows, 64, 64, 64)]
    gm = fx.experimental.proxy_tensor.make_fx(beside, tracing_mode="fake")(*given)
    inputs = gm.graph.find_nodes(op="placeholder")
    work = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    work = sorted(
        [*work, *gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)]
    )
    outputs = list(gm.graph.find_nodes(op="output")[0].all_input_nodes)
    curve = curve_of(work, facts_of(gm.graph), given=inputs, outside=inputs, outputs=outputs)
    assert sum(kernel.is_fused for kernel in curve.kernels) == (2 if rows == 1 else 1)


def test_a_code_that_is_tried_and_undone_leaves_what_was_known() -> None:
    """And what is known meanwhile is what looking at all of the graph anew says."""
    tried = 0
    for seed in range(12):
        gm = traced(seed)
        inputs = gm.graph.find_nodes(op="placeholder")
        results = list(gm.graph.find_nodes(op="output")[0].args[0])
        required, pending = set(), results[:1]
        while pending:
            required.add(node := pending.pop())
            pending += node.all_input_nodes
        joint = Joint(gm.graph, required, inputs, 1)
        saved = {n for n in joint.place if n in required and n.op == "call_function"}
        saved = {n for n in saved if n.meta["val"].dim() == 2 and n not in results}
        plain = joint.step({*saved, *inputs})
        if plain is None or not saved:
            continue
        coded = [
            CodedValue(n, Dither(levels=16))
            for n in sorted(saved, key=joint.place.__getitem__)[::2]
        ]
        before, names = joint.analysis, [n.name for n in gm.graph.nodes]
        levels = []
        for is_tentative in (True, True, False):
            rewriting = Rewriting(joint, {*saved, *inputs}, coded, is_tentative=is_tentative)
            assert joint.facts == facts_of(gm.graph)
            step = joint.step(rewriting.saved)
            assert step is not None
            levels.append((*(one.levels for one in step.curves), step.seconds))
            tried += 1
            rewriting.undo()
            assert joint.analysis is before
            assert joint.facts == facts_of(gm.graph)
            assert [n.name for n in gm.graph.nodes] == names
        assert levels[0] == levels[1] == levels[2]
    assert tried > 6


def test_sources_of_a_value_that_runs_again_are_looked_for_once() -> None:
    """Residual sums give 2^60 ways from the last value to the first."""

    def run(x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x
        for _ in range(60):
            y = y + torch.sin(y)
        return y, gradient * y * y

    given = [torch.ones(4, 4), torch.ones(4, 4)]
    gm = fx.experimental.proxy_tensor.make_fx(run, tracing_mode="fake")(*given)
    source, _ = gm.graph.find_nodes(op="placeholder")
    last, _ = gm.graph.find_nodes(op="output")[0].args[0]
    required = {node for node in gm.graph.nodes if node.op == "call_function" and node <= last}
    joint = Joint(gm.graph, required, [source], 1)
    assert without(joint, {last}, {last}) == {source}


class Residual(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.last, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (y.view(8, 64, 4, 8).transpose(1, 2) for y in self.qkv(self.norm(x)).split(32, 2))
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.last(x))))


def test_the_lowest_plan_of_many_blocks_is_not_searched_block_by_block(monkeypatch) -> None:
    looked: list[int] = []
    real = decide._changes_at_peak

    def look(joint: Joint, step: decide.Step):
        looked.append(step.peak_nbytes)
        return real(joint, step)

    monkeypatch.setattr(decide, "_changes_at_peak", look)
    rounds = {}
    for depth in (2, 6):
        looked.clear()
        net, x = nn.Sequential(*(Residual() for _ in range(depth))), torch.randn(8, 64, 32)
        partition = without_codegen(Partitioner(1000, exact=True))
        with pytest.raises(Exception, match="this compiled region needs at least"):
            torch.compile(net, backend=partition)(x).sum().backward()
        rounds[depth] = len(looked)
        torch._dynamo.reset()
    assert 0 < rounds[6] <= rounds[2] + 2
