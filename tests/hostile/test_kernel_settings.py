"""Settings of torch by which kernels differ, that hold in forward or in backward alone."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import elbowroom as er
from elbowroom.runtime.arguments import Arguments
from elbowroom.runtime.kernel_settings import settings_of_ops
from elbowroom.runtime.recompute import recomputed

Settings = Callable[[], AbstractContextManager[Any]]

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def precision(name: str) -> Iterator[None]:
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextmanager
def without_mkldnn() -> Iterator[None]:
    """As `torch.backends.mkldnn.flags(enabled=False)`, which warns of its other flags."""
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


SETTINGS: dict[str, Settings] = {
    "no oneDNN": without_mkldnn,
    "bfloat16 in products": lambda: precision("medium"),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
}


class Mixes(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y: Tensor = torch.tanh(self.down(F.gelu(self.up(x)))) * torch.sigmoid(self.out(x))
        return y


def once(net: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = recomputed(net, net, (x,), {}, Arguments((x,), {}))
    return y


def by_hand(net: nn.Module, x: Tensor) -> Tensor:
    with er.saving(min_nbytes=0):
        y: Tensor = net(x)
        return y * 1


def plainly(net: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = net(x)
    return y * 1


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("around", ["forward", "backward"])
@pytest.mark.parametrize("run", [by_hand, once])
def test_what_runs_again_runs_as_in_forward(
    name: str, around: str, run: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    forward = SETTINGS[name] if around == "forward" else nullcontext
    backward = SETTINGS[name] if around == "backward" else nullcontext
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")  # from "none", which `precision` does not restore
    net = Mixes()

    def gradients(run: Callable[[nn.Module, Tensor], Tensor], x: Tensor) -> list[Tensor]:
        with forward():
            loss = run(net, x).square().mean()
        with backward():
            return list(torch.autograd.grad(loss, [x, *net.parameters()]))

    for step in range(4):  # the first is examined; then a script is replayed
        x = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(step), requires_grad=True)
        before = settings_of_ops()
        found = gradients(run, x)
        assert settings_of_ops() == before
        assert all(map(torch.equal, found, gradients(plainly, x))), step
