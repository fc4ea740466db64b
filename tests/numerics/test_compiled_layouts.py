"""Sums in compiled graphs whose order may differ from plain torch.compile's."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.graph import GraphLowering
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from elbowroom.compiled import Regions, Settings
from elbowroom.compiled.decision import Decision
from elbowroom.compiled.layouts import laid_out_as_plain
from elbowroom.compiled.partition import Partitioner, listening
from elbowroom.fitting.summary import summary_of_regions
from uncompiled import nothing_compiled as nothing_compiled
from uncompiled import without_codegen

pytestmark = pytest.mark.usefixtures("one_thread", "nothing_compiled")


@pytest.mark.parametrize(("norm", "channels"), [("group", 12), ("group", 16), ("batch", 12)])
def test_sums_over_groups_of_channels_that_fill_no_vector_are_said(norm, channels, caplog) -> None:
    """Of one net their bits differed from plain torch.compile's, with exact=True and in silence."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for at in range(4):
        made = nn.GroupNorm(4, channels) if norm == "group" else nn.BatchNorm2d(channels)
        layers += [nn.Conv2d(channels if at else 3, channels, 3, padding=1), made, nn.SiLU()]
    net, x = nn.Sequential(*layers), torch.randn(16, 3, 24, 24)

    def decide(room: int | None) -> Decision:
        torch._dynamo.reset()
        found: list[Decision] = []
        with listening(found.append):
            backend = without_codegen(Partitioner(room))
            torch.compile(net, backend=backend)(x).square().mean().backward()
        return found[0]

    plain = decide(None)
    assert not plain.is_uncertain
    tight = decide(int(0.9 * plain.plain_nbytes))
    assert not tight.is_plain
    is_said = norm == "group" and channels % 16 != 0
    assert tight.is_uncertain == is_said
    for exact in (True, None):
        caplog.clear()
        Regions(Settings(100, exact=exact)).decided(tight)
        warned = [one for one in caplog.records if one.levelname == "WARNING"]
        assert len(warned) == (exact is True and is_said)
        assert all(
            "exact=True. Take a multiple of 16 channels" in one.getMessage() for one in warned
        )


class Mixing(nn.Module):
    """Layers around a Fourier transform along this dimension, which is the innermost in memory."""

    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.dim = dim
        layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
        self.before, self.after = nn.Sequential(*layers[:2]), nn.ModuleList(layers[2:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        if self.dim is not None:
            x = torch.fft.irfft(torch.fft.rfft(x, dim=self.dim), dim=self.dim, n=x.shape[self.dim])
        for layer in self.after:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("dim", [0, 1, None])
def test_sums_over_what_a_fourier_transform_has_laid_out_are_said(dim) -> None:
    """The gradient of a last bias had other bits than plain's, with exact=True and in silence."""
    torch.manual_seed(0)
    net, x = Mixing(dim), torch.randn(512, 64)

    def decide(room: int | None) -> Decision:
        torch._dynamo.reset()
        found: list[Decision] = []
        with listening(found.append):
            compiled = torch.compile(net, backend=without_codegen(Partitioner(room)))
            compiled(x).sum().backward()
        return found[0]

    plain = decide(None)
    assert not plain.is_uncertain
    tight = decide(int(0.8 * plain.plain_nbytes))
    assert not tight.is_plain
    assert tight.is_uncertain == (dim == 0)
    state: Any = SimpleNamespace(device=x.device)
    options: Any = SimpleNamespace(budget_nbytes=1)
    said = str(summary_of_regions("Mixing", state, options, 0, [tight], 1))
    assert ("may differ from plain torch.compile by a rounding" in said) == (dim == 0)
    assert ("no bit of a gradient changed" in said) == (dim != 0)


class Block(nn.Module):
    """A residual sum over a convolution and a GroupNorm, behind a checkpoint if that is asked."""

    def __init__(self, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.conv, self.norm = nn.Conv2d(12, 12, 3, padding=1), nn.GroupNorm(4, 12)

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(F.gelu(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again = self.is_checkpointed
        return x + (checkpoint(self.branch, x, use_reentrant=False) if again else self.branch(x))


def backward_of(net: nn.Module, room: int | None) -> tuple[fx.Graph, Decision]:
    """Returns the backward graph that is planned for a net in this room, and the decision."""
    torch._dynamo.reset()
    found: list[Decision] = []
    graphs: list[fx.Graph] = []

    def partition(*args: Any, **kwargs: Any) -> Any:
        forward, backward = Partitioner(room)(*args, **kwargs)
        graphs.append(backward.graph)
        return forward, backward

    with listening(found.append):
        step = torch.compile(lambda x: net(x).square().mean(), backend=without_codegen(partition))
        step(torch.randn(8, 3, 24, 24)).backward()
    return graphs[0], found[0]


def dependent_on_tangents(graph: fx.Graph) -> set[str]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.name.startswith("tangents") or found.intersection(node.all_input_nodes):
            found.add(node)
    return {node.name for node in found}


def preferred(graph: fx.Graph, *, is_planned: bool) -> set[str]:
    """Returns what Inductor prefers to have in channels_last, if that graph is lowered."""
    lowering: Any = SimpleNamespace(module=SimpleNamespace(graph=graph), is_backward=True)
    with laid_out_as_plain() if is_planned else nullcontext():
        return {node.name for node in GraphLowering.find_nodes_prefer_channels_last(lowering)}


@pytest.mark.parametrize("checkpoints", [0, 1])
def test_gradients_are_in_channels_last_only_where_plain_backward_has_them(checkpoints) -> None:
    """With the convolutions that run again in a plan, Inductor preferred that of all gradients."""
    torch.manual_seed(0)
    blocks = [Block(is_checkpointed=at < checkpoints) for at in range(5)]
    net = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), *blocks)
    graph, _ = backward_of(net, None)
    with pytest.raises(BackendCompilerFailed) as refused:
        backward_of(net, 1000)
    tight, _ = backward_of(net, refused.value.inner_exception.least_nbytes)
    gradients = dependent_on_tangents(tight) & {node.name for node in graph.nodes}
    by_plain = preferred(graph, is_planned=False) & gradients
    assert bool(by_plain) == bool(checkpoints)
    assert preferred(tight, is_planned=False) & gradients > by_plain
    found = preferred(tight, is_planned=True)
    assert found & gradients == by_plain
    assert {n.name for n in tight.nodes if n.target is torch.ops.aten.convolution.default} <= found
