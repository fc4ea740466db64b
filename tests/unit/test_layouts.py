"""What a convolution's backward takes for maps in other layouts, beside what it really takes."""

from typing import Any

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.measure import layouts
from elbowroom.measure.layouts import copied_nbytes
from elbowroom.plan.policy import KeepAll

LAYERS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
CASES = {  # channels in and out, side, what the layer is made with
    "square": (32, 32, 32, {}),
    "wider": (16, 64, 32, {}),
    "narrower": (64, 16, 32, {}),
    "half a block": (8, 64, 32, {}),
    "half blocks": (8, 8, 32, {}),
    "parts of blocks": (20, 24, 32, {}),
    "to one channel": (16, 1, 32, {}),
    "from one channel": (1, 16, 32, {}),
    "strided": (32, 32, 32, {"stride": 2}),
    "strided, of parts": (24, 24, 32, {"stride": 2}),
    "patches": (32, 64, 32, {"kernel_size": 4, "stride": 4, "padding": 0}),
    "groups": (32, 32, 32, {"groups": 4}),
    "pixels": (32, 64, 32, {"kernel_size": 1, "padding": 0}),
    "more weights than maps": (256, 256, 2, {}),
    "line": (32, 16, 1024, {"maps": 1}),
    "volume": (16, 8, 8, {"maps": 3}),
    "up": (32, 16, 16, {"kernel_size": 4, "stride": 2, "transposed": True}),
}
WEIGHT = 1 << 14  # bytes: its gradient may be copied, too
WINDOWS = {  # volumes that torch does not give to oneDNN
    "one sample": (8, 8, 16, {"maps": 3, "samples": 1}),
    "one sample, strided": (8, 16, 16, {"maps": 3, "samples": 1, "stride": 2}),
    "one sample, dilated": (8, 8, 12, {"maps": 3, "samples": 1, "dilation": 2, "padding": 2}),
    "one sample, up": (
        *(16, 8, 8),
        {"maps": 3, "samples": 1, "kernel_size": 2, "stride": 2, "padding": 0, "transposed": True},
    ),
    "doubles": (8, 8, 8, {"maps": 3, "samples": 2, "dtype": torch.float64}),
    "dilated doubles": (
        *(8, 8, 12),
        {"maps": 3, "samples": 2, "dilation": 2, "padding": 2, "dtype": torch.float64},
    ),
    "doubles of groups": (8, 8, 8, {"maps": 3, "groups": 2, "dtype": torch.float64}),
}
ONLY_WEIGHTS = ("square", "wider", "half a block", "from one channel", "strided", "volume", "up")
FLAT: dict[str, Any] = {"padding": 0, "samples": 4}
UP: dict[str, Any] = {"kernel_size": 4, "stride": 2, "transposed": True}
FEW_CHANNELS = {  # blocks of 16 do not serve, or few channels are made
    "small groups": (32, 32, 32, {"groups": 8}),
    "a depthwise kernel of 7": (32, 32, 32, {"groups": 32, "kernel_size": 7, "padding": 3}),
    "two channels": (2, 32, 32, {}),
    "an image": (3, 32, 32, {}),
    "fewer than a block": (4, 4, 32, {}),
    "dilated": (32, 32, 16, {"dilation": 2, "padding": 2}),
    "a long row": (16, 16, 32, {"kernel_size": (3, 15), "padding": (1, 7)}),
    "a line and a long row": (32, 32, 256, {"maps": 1, "kernel_size": 15, "padding": 7}),
    "volumes of groups": (16, 16, 8, {"maps": 3, "groups": 4}),
    "depthwise volumes": (32, 32, 8, {"maps": 3, "groups": 32}),
    "strided volumes": (16, 32, 8, {"maps": 3, "stride": 2}),
    "volumes without padding": (16, 24, 12, {"maps": 3, "padding": 0}),
    "pixels of volumes": (32, 64, 12, {"maps": 3, "kernel_size": 1, "padding": 0}),
    "many samples": (20, 40, 32, {"samples": 16, "kernel_size": 1, "padding": 0}),
    "blocks of 8 alone": (12, 8, 32, {}),
    "groups of 8": (24, 24, 32, {"groups": 3}),
    "volumes of 8 channels": (8, 24, 8, {"maps": 3}),
    "dilated, of 4 channels": (4, 16, 32, {"dilation": 2, "padding": 2}),
    "dilated volumes": (16, 32, 8, {"maps": 3, "dilation": 2, "padding": 2}),
    "pixels in groups": (48, 48, 32, {"groups": 4, "samples": 4, "kernel_size": 1, "padding": 0}),
    "volumes of pixels in groups": (32, 32, 8, {"maps": 3, "groups": 4, "kernel_size": 1} | FLAT),
    "up to an image": (64, 3, 16, UP),
    "up to one channel": (16, 1, 16, UP | {"kernel_size": 2, "padding": 0}),
    "up to few channels": (16, 4, 16, UP),
    "up from few channels": (2, 32, 16, UP),
    "up, parts of blocks": (100, 24, 16, UP),
    "up, in groups": (48, 48, 16, UP | {"groups": 6}),
    "volumes up to one channel": (16, 1, 8, UP | {"maps": 3, "kernel_size": 2, "padding": 0}),
    "volumes up to two channels": (8, 2, 8, UP | {"maps": 3}),
    "volumes up to 8 channels": (32, 8, 8, UP | {"maps": 3}),
    "volumes up, whole": (64, 32, 8, UP | {"maps": 3, "kernel_size": 2, "padding": 0}),
    "depthwise volumes up": (32, 32, 8, {"maps": 3, "groups": 32, "transposed": True}),
    "line up": (16, 3, 256, UP | {"maps": 1}),
}
FEW_ONLY_WEIGHTS = {
    "patches of volumes": (3, 96, 16, {"maps": 3, "kernel_size": 4, "stride": 4, "padding": 0}),
    "volumes without padding": (8, 24, 12, {"maps": 3, "padding": 0}),
}
CHANNELS_LAST = {
    "square": (64, 64, 16, {}),
    "parts of blocks": (20, 12, 16, {}),
    "strided": (32, 64, 16, {"stride": 2}),
    "patches": (32, 64, 16, {"kernel_size": 4, "stride": 4, "padding": 0}),
    "more weights than maps": (256, 256, 2, {}),
    "a small depthwise kernel": (64, 64, 16, {"groups": 64}),
    "a depthwise kernel of 7": (64, 64, 16, {"groups": 64, "kernel_size": 7, "padding": 3}),
    "a kernel larger than maps": (320, 320, 4, {"groups": 320, "kernel_size": 7, "padding": 3}),
    "groups of two": (64, 64, 8, {"groups": 32}),
    "groups of twelve": (48, 48, 8, {"groups": 4}),
    "one channel in and two out": (32, 64, 8, {"groups": 32}),
    "dilated": (32, 32, 16, {"dilation": 2, "padding": 2}),
    "a long row": (16, 16, 32, {"kernel_size": (3, 15), "padding": (1, 7)}),
    "up, dilated": (32, 16, 16, {"dilation": 2, "padding": 0, "transposed": True}),
}
FEW = 1 << 10  # bytes: scratch space of kernels
CAPABILITY = torch.backends.cpu.get_cpu_capability()
known = pytest.mark.skipif(
    not CAPABILITY.startswith(tuple(layouts._LAYOUTS)), reason="oneDNN was not measured"
)


def layer_of(case: tuple[int, int, int, dict[str, Any]]) -> tuple[nn.Module, torch.Tensor]:
    """Returns the layer of a case, and its input."""
    channels, made, side, settings = case
    settings = {"kernel_size": 3, "padding": 1} | settings
    maps, is_transposed = settings.pop("maps", 2), settings.pop("transposed", False)
    samples = settings.pop("samples", 8)
    layer = (TRANSPOSED if is_transposed else LAYERS)[maps](channels, made, **settings)
    return layer, torch.randn(samples, channels, *[side] * maps, dtype=layer.weight.dtype)


def taken(
    case: tuple[int, int, int, dict[str, Any]],
    *,
    input_needs: bool = True,
    channels_last: bool = False,
    weight_lies: bool = False,
) -> tuple[int, int]:
    """Returns the bytes beside gradients that a backward takes, and those that are counted."""
    layer, x = layer_of(case)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    if weight_lies:
        layer.to(memory_format=torch.channels_last)
    x.requires_grad_(input_needs)
    x = x * 1 if channels_last else x
    with er.saving() if channels_last else er.saving(KeepAll()):  # shows how the input is held
        y = layer(x)
    counted = copied_nbytes(y.grad_fn)
    results = [layer.weight, x] if input_needs else [layer.weight]
    grad = torch.ones_like(y)
    took = er.peak(lambda: torch.autograd.grad(y, results, grad, retain_graph=True))
    return took - sum(one.nbytes for one in results), counted


@known
@pytest.mark.parametrize("case", CASES)
def test_what_is_copied_for_both_gradients_is_counted(case):
    took, counted = taken(CASES[case], input_needs=True)
    assert 0.97 * took <= counted <= 1.1 * took + WEIGHT


@known
@pytest.mark.parametrize("case", ONLY_WEIGHTS)
def test_what_is_copied_for_the_gradient_of_the_weight_alone_is_counted(case):
    took, counted = taken(CASES[case], input_needs=False)
    assert 0.97 * took <= counted <= 1.1 * took + WEIGHT


@pytest.mark.parametrize("input_needs", [True, False])
@pytest.mark.parametrize("case", WINDOWS)
def test_windows_that_are_written_out_are_counted(case, input_needs):
    took, counted = taken(WINDOWS[case], input_needs=input_needs)
    assert 0.97 * took <= counted <= 1.1 * took + WEIGHT


@pytest.mark.parametrize("case", CASES | WINDOWS)
def test_inputs_that_nothing_shows_are_known_by_what_was_made_of_them(case):
    layer, x = layer_of((CASES | WINDOWS)[case])
    y = layer(x)
    channels, *sides = layouts._input_shape(y.grad_fn)[1:]
    assert channels == x.shape[1]
    stride = max(layer.stride)
    assert all(0 <= real - side < stride for real, side in zip(x.shape[2:], sides, strict=True))
    with er.saving(KeepAll()):
        seen = layer(x)
    assert 0.8 * copied_nbytes(seen.grad_fn) <= copied_nbytes(y.grad_fn)
    assert copied_nbytes(y.grad_fn) <= copied_nbytes(seen.grad_fn)


@known
@pytest.mark.parametrize("case", FEW_CHANNELS)
def test_what_is_copied_of_few_channels_is_counted(case):
    took, counted = taken(FEW_CHANNELS[case])
    assert 0.97 * took <= counted <= 1.1 * took + WEIGHT


@known
@pytest.mark.parametrize("case", FEW_ONLY_WEIGHTS)
def test_what_is_copied_of_few_channels_for_the_gradient_of_the_weight_alone_is_counted(case):
    took, counted = taken(FEW_ONLY_WEIGHTS[case], input_needs=False)
    assert 0.97 * took - FEW <= counted <= 1.03 * took + FEW


@known
@pytest.mark.parametrize("weight_lies", [False, True])
@pytest.mark.parametrize("case", CHANNELS_LAST)
def test_what_is_copied_where_channels_come_last_is_counted(case, weight_lies):
    took, counted = taken(CHANNELS_LAST[case], channels_last=True, weight_lies=weight_lies)
    assert 0.97 * took - FEW <= counted <= 1.03 * took + FEW


def test_the_largest_is_counted_with_an_unknown_instruction_set(monkeypatch):
    """Of a depthwise kernel of 5: groups filled up to 16 x 16 channels, or to 8 x 8."""
    x = torch.randn(2, 64, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    layer = nn.Conv2d(64, 64, 5, groups=64)
    with er.saving():
        y = layer(x * 1)
    counted = []
    for capability in ("AVX2", "AVX512", "DEFAULT"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        counted.append(copied_nbytes(y.grad_fn) // layer.weight.nbytes)
    assert counted == [8 * 8 + 1, 16 * 16 + 1, 16 * 16 + 1]


@pytest.mark.parametrize("input_needs", [False, True])
def test_a_gradient_of_a_gradient_takes_maps_of_the_sizes_that_it_gives(input_needs):
    """Its first result, the gradient of the input, may be undefined, and has no shape then."""
    layer = nn.Conv2d(1, 8, 3, padding=1)
    x = torch.randn(2, 1, 14, 14, requires_grad=input_needs)
    y = layer(x).relu().square().sum()
    (given,) = torch.autograd.grad(y, layer.weight, create_graph=True)
    fn: Any = given.grad_fn
    assert fn.name().startswith("ConvolutionBackwardBackward")
    of_input = x.numel() if input_needs else 0
    assert copied_nbytes(fn) == 4 * (2 * 8 * 14 * 14 + layer.weight.numel() + of_input)
