"""Another library's op that is called like one of torch's is not taken for it."""

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er


@torch.library.custom_op("elbowroom_tests::relu", mutates_args=())
def squared_relu(x: Tensor) -> Tensor:
    return x.clamp(min=0) ** 2


@torch.library.custom_op("elbowroom_tests::max_pool2d", mutates_args=())
def squared(x: Tensor) -> Tensor:
    return x**2


def keep_input(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


squared_relu.register_autograd(
    lambda ctx, g: g * 2 * ctx.saved_tensors[0].clamp(min=0), setup_context=keep_input
)
squared.register_autograd(lambda ctx, g: g * 2 * ctx.saved_tensors[0], setup_context=keep_input)


@pytest.mark.parametrize("policy", ["exact", "dither"])
@pytest.mark.parametrize("name", ["relu", "max_pool2d"])
def test_a_foreign_op_of_a_known_name_keeps_its_tensor(name, policy):
    torch.manual_seed(0)
    op = getattr(torch.ops.elbowroom_tests, name)
    weight, x = nn.Parameter(torch.randn(16, 16)), torch.randn(8, 16)
    plain = torch.autograd.grad(op(x @ weight).sum(), weight)[0]
    with er.saving(policy, min_nbytes=0) as saved:
        loss = op(x @ weight).sum()
    assert torch.equal(plain, torch.autograd.grad(loss, weight)[0])
    why = f"'elbowroom_tests::{name}': no derivative formula of it is known"
    assert why in {row.why for row in saved.ledger.rows}
