"""What a convolution's backward takes for maps in other layouts, beside what it really takes."""

import pytest
import torch
from torch import nn

import elbowroom as er
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
ONLY_WEIGHTS = ("square", "wider", "half a block", "from one channel", "strided", "volume", "up")
pytestmark = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX512"),
    reason="oneDNN's blocks are of another size",
)


def taken(case: str, *, input_needs: bool) -> tuple[int, int]:
    """Returns the bytes beside gradients that a backward takes, and those that are counted."""
    channels, made, side, settings = CASES[case]
    settings = {"kernel_size": 3, "padding": 1} | settings
    maps, is_transposed = settings.pop("maps", 2), settings.pop("transposed", False)
    layer = (TRANSPOSED if is_transposed else LAYERS)[maps](channels, made, **settings)
    x = torch.randn(8, channels, *[side] * maps, requires_grad=input_needs)
    with er.saving(KeepAll()):  # which shows how the input is held
        y = layer(x)
    results = [layer.weight, x] if input_needs else [layer.weight]
    grad = torch.ones_like(y)
    took = er.peak(lambda: torch.autograd.grad(y, results, grad, retain_graph=True))
    return took - sum(one.nbytes for one in results), copied_nbytes(y.grad_fn)


@pytest.mark.parametrize("case", CASES)
def test_what_is_copied_for_both_gradients_is_counted(case):
    took, counted = taken(case, input_needs=True)
    assert 0.97 * took <= counted <= 1.1 * took + WEIGHT


@pytest.mark.parametrize("case", ONLY_WEIGHTS)
def test_what_is_copied_for_the_gradient_of_the_weight_alone_is_counted(case):
    took, counted = taken(case, input_needs=False)
    assert 0.97 * took <= counted <= 1.1 * took + WEIGHT
