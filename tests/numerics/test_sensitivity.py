"""Closed forms against sums written out: the expected square of a weight gradient's error."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elbowroom.measure.sensitivity import energy, form_of
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


SAMPLED = {
    "tokens": (nn.Linear(32, 16), (64, 64, 32)),
    "rows": (nn.Linear(32, 16), (4096, 32)),
    "conv2d": (nn.Conv2d(24, 8, 3, padding=1), (64, 24, 16, 16)),
    "1x1": (nn.Conv2d(64, 8, 1), (64, 64, 16, 16)),
    "one picture": (nn.Conv2d(24, 8, 3), (24, 80, 80)),
    "stride, groups": (nn.Conv2d(24, 8, 3, stride=2, groups=2), (32, 24, 33, 33)),
    "conv1d": (nn.Conv1d(24, 8, 5), (16, 24, 512)),
    "transposed": (nn.ConvTranspose2d(24, 8, 2, stride=2), (32, 24, 16, 16)),
}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", SAMPLED)
def test_some_places_tell_of_all(name, layout):
    """Each sequence's first token is 4 times as large, and some samples have nearly all of it."""
    module, shape = SAMPLED[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    if len(shape) > 2 and "picture" not in name:
        x *= 10 ** torch.linspace(-0.7, 0.7, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    if name == "tokens":
        x[:, 0] *= 4
    if layout == "channels_last" and len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    grad = torch.randn_like(module(x)) * (module(x) * 0 + 1)
    if len(shape) > 2 and "picture" not in name:
        grad = grad * 10 ** torch.linspace(-0.7, 0.7, shape[0]).reshape(-1, *[1] * (grad.dim() - 1))
    exact, some = form_of(call(module, x)), form_of(call(module, x), most=512)
    of_all = exact.variance(exact.fold(x), grad)
    folded = some.fold(x)
    assert folded.numel() <= 1024
    assert 0.6 < some.variance(folded, grad) / of_all < 1.7
    # What is made of parts of it is folded in their place.
    doubled = some.variance(some.fold(x, lambda part: 2 * part), grad)
    assert 0.5 < doubled / some.variance(folded, grad) / 4 < 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("most", [0, 16])
def test_other_dtypes(dtype, most):
    """A convolution of doubles ended the step that was watched."""
    module = nn.Conv2d(4, 6, 3, padding=1)
    x = torch.randn(3, 4, 7, 5)
    grad = torch.randn_like(module(x))
    form = form_of(call(module, x), most=most)
    expected = form.variance(form.fold(x), grad)
    found = form.variance(form.fold(x.to(dtype)), grad.to(dtype))
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("shape", [(4, 128, 32), (64, 1, 32), (8, 32), (32,), (2, 3, 4, 32)])
@pytest.mark.parametrize("most", [0, 512])
def test_what_is_made_of_parts_has_the_shape_of_tokens(shape, most):
    """Tokens in a row, beside a gradient of several dimensions, ended a training."""
    module, x = nn.Linear(32, 16), torch.randn(shape)
    grad = torch.randn_like(module(x))
    form = form_of(call(module, x), most=most)
    whole, parts = form.fold(x), form.fold(x, lambda part: part)
    torch.testing.assert_close(form.variance(parts, grad), form.variance(whole, grad))


def test_energies_along_a_dimension():
    x = torch.randn(3, 5, 7, 11)
    for odd in (x, x[:, :, ::2], x.to(memory_format=torch.channels_last), x[:0], x.half()):
        for dim in (1, 2, 3, -1):
            torch.testing.assert_close(
                energy(odd, dim), odd.float().square().sum(dim), rtol=1e-4, atol=1e-5
            )
    large = torch.randn(1, 40, 5000)
    torch.testing.assert_close(energy(large, 1), large.square().sum(1))


def test_no_closed_form_beside_a_weight_that_is_not_trained():
    frozen = nn.Linear(3, 3).requires_grad_(False)
    assert form_of(Call(F.linear, (torch.randn(2, 3), frozen.weight), {})) is None
    assert form_of(Call(torch.matmul, (torch.randn(2, 3), torch.randn(3, 3)), {})) is None
    assert form_of(Call(F.gelu, (torch.randn(2, 3),), {})) is None
