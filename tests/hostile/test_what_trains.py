"""Forwards that change what trains: which weights want a gradient, the gradients, hooks of nodes.

`er.fit` runs a first forward again to plan it, and blocks again in backward. Each such change is
made once, as in plain training, or the block that makes it is not run again.
"""

from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.autograd.function import _HookMixin

import elbowroom as er
from elbowroom.errors import BudgetTooSmall, PlanError, RestoreError
from elbowroom.measure import peak
from elbowroom.plan import Exact
from elbowroom.runtime.arguments import Arguments
from elbowroom.runtime.context import Context
from elbowroom.runtime.node_hooks import NodeHooks
from elbowroom.runtime.repeats import why_not_again
from elbowroom.runtime.saving import Saving

STEPS, ROWS, WIDTH = 4, 256, 32
pytestmark = pytest.mark.usefixtures("nothing_stays_attached")


class Block(nn.Module):
    def __init__(self, acts=None):
        super().__init__()
        sizes = (WIDTH, 4 * WIDTH, 4 * WIDTH, WIDTH)
        self.layers = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))
        self.acts = acts
        self.is_known = False

    def forward(self, x):
        x = x if self.acts is None else self.acts(self, x)
        out = x
        for layer in self.layers:
            out = torch.tanh(layer(out))
        return x + out


class Net(nn.Module):
    def __init__(self, acts=None, whole=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block(acts) for _ in range(5))
        self.whole = whole
        self.is_known = False

    def forward(self, x):
        x = x if self.whole is None else self.whole(self, x)
        for block in self.blocks:
            x = block(x)
        return x


def weight_of(module):
    return next(module.parameters())


def by_turns(module, x):
    weight = weight_of(module)
    weight.requires_grad_(not weight.requires_grad)
    return x


def all_by_turns(module, x):
    for p in module.parameters():
        p.requires_grad = not p.requires_grad
    return x


def by_data(module, x):
    weight_of(module).requires_grad_(float(x.detach().sum()) > 0)
    return x


def with_gradients(change):
    def changes(module, x):
        for p in module.parameters():
            if p.grad is not None:
                change(p)
        return x

    return changes


def halves(p):
    p.grad.mul_(0.5)


def halves_through_data(p):
    p.grad.data.mul_(0.5)


def replaces(p):
    p.grad = p.grad * 0.5


def drops(p):
    p.grad = None


def clips(module, x):
    nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    return x


def reads_and_drops(module, x):
    gradient = weight_of(module).grad
    scale = 1.0 if gradient is None else 1.0 + float(gradient.norm())
    module.zero_grad()
    return x * scale


def hooks_the_node_of_its_weight(module, x):
    if not module.is_known:
        module.is_known = True
        weight = weight_of(module)
        module.node = weight.view_as(weight).grad_fn.next_functions[0][0]
        module.node.register_prehook(lambda gradients: (0.5 * gradients[0],))
    return x


def hooks_its_weights_gradient(module, x):
    if not module.is_known:
        module.is_known = True
        weight_of(module).register_post_accumulate_grad_hook(halves)
    return x


ACTS = {
    "by turns": by_turns,
    "all by turns": all_by_turns,
    "by data": by_data,
    "halves gradients": with_gradients(halves),
    "halves gradients through data": with_gradients(halves_through_data),
    "replaces gradients": with_gradients(replaces),
    "drops gradients": with_gradients(drops),
    "clips gradients": clips,
    "reads and drops gradients": reads_and_drops,
    "hooks the node of its weight": hooks_the_node_of_its_weight,
    "hooks its weight's gradient": hooks_its_weights_gradient,
}


def trained(make, budget=None, before=lambda x: x):
    """Of each step the loss, gradients, weights that want one, and the gradient of the input.

    Two batches are added up in each step.
    """
    torch.manual_seed(0)
    model, found = make(), []
    if budget is not None:
        er.fit(model, budget=budget, exact=True, min_nbytes=4096)
    for seed in range(STEPS):
        model.zero_grad()
        for part in range(2):
            torch.manual_seed(2 * seed + part)
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            loss = model(before(x)).square().mean()
            loss.backward()
        wants = torch.tensor([p.requires_grad for p in model.parameters()])
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([loss.detach(), wants, x.grad, *gradients])
    if budget is not None:
        er.release(model)
    return found


def plain_nbytes():
    model, x = Net(), torch.randn(ROWS, WIDTH)
    held = sum(p.nbytes for p in model.parameters())
    return held + peak(lambda: model(x).square().mean().backward())


def assert_same(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        assert len(one) == len(other)
        for x, y in zip(one, other, strict=True):
            assert torch.equal(x, y)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("share", [0.85, 0.7])
@pytest.mark.parametrize("where", ["acts", "whole"])
@pytest.mark.parametrize("name", ACTS)
def test_what_trains_is_changed_once(name, where, share):
    def make():
        return Net(**{where: ACTS[name]})

    expected = trained(make)
    with suppress(BudgetTooSmall):
        assert_same(trained(make, int(share * plain_nbytes())), expected)


def prehook(_, x):
    x.grad_fn.register_prehook(lambda gradients: (0.5 * gradients[0],))
    return x


def posthook(_, x):
    x.grad_fn.register_hook(lambda inputs, outputs: (0.5 * inputs[0], *inputs[1:]))
    return x


@pytest.mark.parametrize("share", [0.95, 0.85])
@pytest.mark.parametrize("hook", [prehook, posthook])
def test_a_hook_of_a_node_before_the_model_is_registered_once(hook, share):
    def make():
        return Net(whole=hook)

    def before(x):
        return 1.5 * x

    expected = trained(make, before=before)
    assert_same(trained(make, int(share * plain_nbytes()), before), expected)


def test_a_block_that_changes_gradients_is_not_run_again_and_says_why():
    block, x = Block(with_gradients(halves)), torch.randn(ROWS, WIDTH)
    block(x).sum().backward()
    before = [p.grad.clone() for p in block.parameters()]
    why = why_not_again(block, block.forward, Arguments((x,), {}))
    assert why == "it changes the gradient of its parameter 'layers.0.weight'"
    assert_same([[p.grad for p in block.parameters()]], [before])


def test_a_block_that_begins_to_change_gradients_is_an_error_in_backward():
    model, x = Net(with_gradients(halves)), torch.randn(ROWS, WIDTH)
    with Saving(Exact(), min_nbytes=0, context=Context(), recompute={"blocks.1"}):
        loss = model(x).square().mean()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(RestoreError, match="changes the gradients of its parameters"):
        loss.backward()


def test_a_gradient_that_numpy_changes_is_an_error_that_says_so():
    def changes(module, x):
        for p in module.parameters():
            if p.grad is not None:
                p.grad.numpy()[...] *= 0.5
        return x

    with pytest.raises(PlanError, match=r"the gradient of 'blocks\.0\.layers\.0\.weight'"):
        trained(lambda: Net(whole=changes), int(0.7 * plain_nbytes()))


def test_only_hooks_that_are_registered_inside_are_removed():
    x = torch.ones(2, requires_grad=True)
    y = 1 * x
    registers = _HookMixin._register_hook
    kept = y.grad_fn.register_prehook(lambda gradients: (2 * gradients[0],))
    with NodeHooks() as outer:
        with NodeHooks() as hooks:
            y.grad_fn.register_prehook(lambda gradients: (3 * gradients[0],))
        assert hooks.any
        y.grad_fn.register_prehook(lambda gradients: (5 * gradients[0],))
    assert _HookMixin._register_hook is registers
    hooks.remove()
    assert torch.autograd.grad(y.sum(), x, retain_graph=True)[0].tolist() == [10, 10]
    outer.remove()
    assert torch.autograd.grad(y.sum(), x, retain_graph=True)[0].tolist() == [2, 2]
    kept.remove()
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [1, 1]
