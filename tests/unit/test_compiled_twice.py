"""What backward computes a second time: bits stay, and less is in memory at once."""

from functools import partial

import pytest
import torch
from torch import Tensor, fx

from elbowroom.compiled.collect import facts_of
from elbowroom.compiled.joint import Joint
from elbowroom.compiled.liveness import curve_of
from elbowroom.compiled.order import gradients_first
from elbowroom.compiled.sums import fuse
from elbowroom.compiled.tails import _name_of
from elbowroom.compiled.twice import late_operands, own_functions, undo

D = 64


def joint_of(function, given: list[Tensor], grad: Tensor) -> tuple[fx.GraphModule, Joint]:
    """The joint graph of a function of `given` and a gradient, whose first result is forward's."""
    gm = fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*given, grad)
    fuse(gm.graph)
    gm.recompile()
    inputs = gm.graph.find_nodes(op="placeholder")[: len(given)]
    result = gm.graph.find_nodes(op="output")[0].args[0][0]
    required, pending = set(), [result]
    while pending:
        required.add(node := pending.pop())
        pending += node.all_input_nodes
    return gm, Joint(gm.graph, required, inputs, 1)


def gated(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """A gated product and its backward."""
    g, u = torch.mm(x, w), torch.mm(w, x)
    s = torch.sigmoid(g)
    y = g * s * u
    grad_y = torch.mm(grad, w.t())
    grad_w = torch.mm(y.t(), grad)
    grad_u = grad_y * (g * s)
    grad_g = grad_y * u * (s * (1 + g * (1 - s)))
    return torch.mm(y, w), grad_w, torch.mm(grad_u, w), torch.mm(grad_g, w)


def tied(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Exponentials of logits, and a backward that adds a product of their gradient at its end."""
    logits = torch.mm(x, w.t())
    grad_logits = grad.sum(1, keepdim=True) * torch.exp(logits)
    grad_x = torch.mm(grad_logits, w)
    for _ in range(3):
        grad_x = torch.mm(grad_x, torch.mm(w.t(), w)).tanh()
    return torch.exp(logits), torch.mm(grad_logits.t(), x) + grad_x.sum(0), grad_x


def values(*shapes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) / 8 for shape in shapes]


def peak_of(joint: Joint) -> int:
    """The peak where the first two products are saved."""
    products = [n for n in joint.place if n.target is torch.ops.aten.mm.default]
    step = joint.step([*joint.inputs, *products[:2]])
    assert step is not None
    return step.peak_nbytes


def equal(gm: fx.GraphModule, expected: tuple[Tensor, ...], given: list[Tensor]) -> bool:
    gm.graph.lint()
    gm.recompile()
    return all(torch.equal(a, b) for a, b in zip(gm(*given), expected, strict=True))


def test_a_gradient_has_slow_functions_of_its_own() -> None:
    given = values((D, D), (D, D), (D, D))
    gm, joint = joint_of(gated, given[:-1], given[-1])
    gradients_first(joint)
    before = peak_of(joint)
    gm, joint = joint_of(gated, given[:-1], given[-1])
    (copy,) = [n for n in own_functions(joint) if n.target is torch.ops.aten.sigmoid.default]
    gradients_first(joint)
    (own,) = [n for n in joint.required if n.target is torch.ops.aten.sigmoid.default]
    assert own.users.keys() <= joint.required
    assert copy.users.keys().isdisjoint(joint.required)
    assert _name_of(copy) == own.name != copy.name  # by which it ends rows (`tails.py`)
    assert peak_of(joint) <= before - 4 * D * D
    assert equal(gm, gated(*given), given)
    assert own_functions(joint) == []  # nothing is left to do


def test_a_slow_function_that_a_call_reads_stays_the_one_of_forward() -> None:
    """Its result is stored, and the gradient of a tanh or sigmoid needs nothing else."""

    def layer(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x)
        return torch.mm(y, w), torch.mm(grad, w.t()) * (1 - y * y)

    given = values((D, D), (D, D), (D, D))
    _, joint = joint_of(layer, given[:-1], given[-1])
    assert own_functions(joint) == []


def test_what_reads_an_input_that_forward_changes_does_not_run_in_backward() -> None:
    """Backward would read the new value."""

    def layer(x: Tensor, grad: Tensor, *, changes: bool) -> tuple[Tensor, Tensor]:
        s = torch.sigmoid(x)
        y, grad_x = s * x, grad * s
        if changes:
            x.copy_(y)
        return torch.mm(y, y), grad_x

    for changes in (False, True):
        given = values((D, D), (D, D))
        _, joint = joint_of(partial(layer, changes=changes), given[:-1], given[-1])
        assert len(own_functions(joint)) == (not changes)


def test_the_operand_of_a_sum_at_the_end_of_backward_is_computed_there_again() -> None:
    given = values((D, 8), (8 * D, 8), (D, 8 * D))
    gm, joint = joint_of(tied, given[:-1], given[-1])
    added = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.addmm.default)
    expected = gm(*given)
    text, before = str(gm.graph), set(joint.place)
    made = late_operands(joint)
    targets = [n.target for n in made if n.target is not torch.ops.aten.t.default]
    aten = torch.ops.aten
    assert targets == [aten.mm.default, aten.sum.dim_IntList, aten.exp.default, aten.mul.Tensor]
    assert set(made).isdisjoint(before)
    place = list(gm.graph.nodes).index
    calls = [n for n in before if n.target is aten.mm.default]
    first = next(iter(made))
    assert all(place(n) < place(first) < place(added) for n in calls)
    assert equal(gm, expected, given)
    undo(made, joint)
    assert str(gm.graph) == text


def test_an_operand_that_takes_two_calls_stays_the_first_one() -> None:
    def deeper(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        return tied(torch.mm(x, torch.mm(w.t(), w)).cumsum(0).mm(x.t()).mm(x), w, grad)

    given = values((D, 8), (8 * D, 8), (D, 8 * D))

    def untied(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        one, two, three = deeper(x, w, torch.mm(grad, torch.mm(w, w.t())))
        return one, two, three

    _, joint = joint_of(untied, given[:-1], given[-1])
    assert not late_operands(joint)


@pytest.mark.parametrize("rows", [1, D])
def test_loops_cross_a_call_where_they_share_half_of_what_they_write(rows: int) -> None:
    """Else what is recomputed for one block ran with another block, and stood between them."""

    def beside(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return y * x, torch.mm(w, w), z * x

    given = values((rows, D), (D, D), (D, D), (D, D))
    gm = fx.experimental.proxy_tensor.make_fx(beside, tracing_mode="fake")(*given)
    inputs = gm.graph.find_nodes(op="placeholder")
    work = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    work = sorted(
        [*work, *gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)]
    )
    outputs = list(gm.graph.find_nodes(op="output")[0].all_input_nodes)
    curve = curve_of(work, facts_of(gm.graph), given=inputs, outside=inputs, outputs=outputs)
    assert sum(kernel.is_fused for kernel in curve.kernels) == (2 if rows == 1 else 1)
