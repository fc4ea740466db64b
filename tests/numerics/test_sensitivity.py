"""Closed forms against sums written out: the expected square of a weight gradient's error."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elbowroom.measure.sensitivity import form_of
from elbowroom.runtime.consumers import Call


def call(module, x):
    if isinstance(module, nn.Linear):
        return Call(F.linear, (x, module.weight), {})
    name = {"Conv": "conv", "ConvTranspose": "conv_transpose"}[type(module).__name__[:-2]]
    func = getattr(F, name + type(module).__name__[-2].lower() + "d")
    kwargs = {
        "stride": module.stride,
        "padding": module.padding,
        "dilation": module.dilation,
        "groups": module.groups,
    }
    if "transpose" in name:
        kwargs["output_padding"] = module.output_padding
    return Call(func, (x, module.weight), kwargs)


CASES = {
    "linear": (nn.Linear(7, 5), (6, 7)),
    "linear of tokens": (nn.Linear(7, 5), (2, 3, 7)),
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "conv2d": (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 7, 5)),
    "one picture": (nn.Conv2d(4, 6, 3), (4, 7, 5)),
    "stride": (nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 8, 9)),
    "same": (nn.Conv2d(4, 6, (3, 5), padding="same"), (2, 4, 7, 5)),
    "dilation": (nn.Conv2d(4, 6, 3, dilation=2), (2, 4, 8, 9)),
    "groups": (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 8, 9)),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4), (2, 4, 8, 9)),
    "conv3d": (nn.Conv3d(2, 3, 2), (2, 2, 4, 5, 3)),
    "transposed": (nn.ConvTranspose2d(4, 6, 2, stride=2), (2, 4, 3, 5)),
    "transposed, odd": (
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        (2, 4, 3, 5),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_variance_is_the_weight_gradient_of_squares(name):
    # dW is a sum of products dY x; with an independent error each product's variance is dY^2 e^2,
    # so the sum over dW's entries of the weight gradient for (e^2, dY^2) is the exact answer.
    module, shape = CASES[name]
    error = torch.randn(shape) * torch.rand(shape)
    grad = torch.randn_like(module(error))
    form = form_of(call(module, torch.randn(shape)))
    predicted = form.variance(form.fold(error), grad)
    out = module(error.square())
    (squares,) = torch.autograd.grad(out, module.weight, grad.square())
    torch.testing.assert_close(predicted, squares.sum(), rtol=1e-4, atol=0)


def test_no_closed_form_beside_a_weight_that_is_not_trained():
    frozen = nn.Linear(3, 3).requires_grad_(False)
    assert form_of(Call(F.linear, (torch.randn(2, 3), frozen.weight), {})) is None
    assert form_of(Call(torch.matmul, (torch.randn(2, 3), torch.randn(3, 3)), {})) is None
    assert form_of(Call(F.gelu, (torch.randn(2, 3),), {})) is None
