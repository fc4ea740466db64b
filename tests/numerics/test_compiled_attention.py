"""Codes in compiled transformers: q, k and v of attention, and what norms read."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elbowroom.compiled import attention as compiled_attention
from elbowroom.compiled import lossy, ops
from elbowroom.compiled.decide import Search
from elbowroom.compiled.joint import Step
from elbowroom.compiled.partition import Decision, Partitioner, listening
from elbowroom.compiled.readers import Extent, reading_of
from elbowroom.kernels import attention
from uncompiled import without_codegen

pytestmark = pytest.mark.usefixtures("one_thread")
BAR = 0.05
SHAPE = (2, 4, 128, 32)  # samples, heads, tokens, width
CODES = {"codes": "dither, 16 levels", "min_nbytes": 0}


class Attention(nn.Module):
    """Attention whose logits have about this standard deviation.

    q, k and v are parts of one storage, or, if q is scaled, k and v are.
    """

    def __init__(self, std: float, *, mask: str = "causal", apart: bool = True) -> None:
        super().__init__()
        _, self.heads, self.tokens, width = SHAPE
        d = self.heads * width
        self.apart, self.mask = apart, mask
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        with torch.no_grad():
            self.gain = 3 * std  # a linear layer's own weights give a variance of a third
            self.qkv.weight[: 1 if apart else d].mul_(1 if apart else self.gain)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in parts)
        q = q * self.gain if self.apart else q
        hidden = None
        if self.mask == "bool":
            hidden = torch.ones(T, T, dtype=torch.bool).tril(T // 2)
        is_causal = self.mask == "causal"
        y = F.scaled_dot_product_attention(q, k, v, hidden, is_causal=is_causal)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


def gradient(net: nn.Module, x: Tensor, **settings: Any) -> tuple[Tensor, Decision]:
    """Gradients of q, k and v's weights under a partitioner's settings, and its decision."""
    torch._dynamo.reset()
    given = {"room_nbytes": None, "exact": True} | settings
    found: list[Decision] = []
    net.zero_grad()
    with listening(found.append):
        torch.compile(net, backend=without_codegen(Partitioner(**given)))(
            x
        ).square().mean().backward()
    return net.get_parameter("qkv.weight").grad.clone(), found[0]


def errors(got: Tensor, exact: Tensor) -> list[float]:
    """gErr2 of the weights of each of q, k and v."""
    pairs = zip(got.chunk(3), exact.chunk(3), strict=True)
    return [float((a - b).square().sum() / b.square().sum()) for a, b in pairs]


def drawn(std: float, **given: Any) -> tuple[Attention, Tensor]:
    torch.manual_seed(0)
    batch, heads, tokens, width = SHAPE
    return Attention(std, **given), torch.randn(batch, tokens, heads * width)


@pytest.mark.parametrize("std", [0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
def test_q_k_and_v_are_codes_whose_gradient_is_near_whatever_the_logits_are(std: float) -> None:
    net, x = drawn(std)
    exact, plain = gradient(net, x)
    got, coded = gradient(net, x, **CODES)
    assert coded.is_lossy
    assert coded.saved_nbytes < 0.2 * plain.saved_nbytes
    assert max(errors(got, exact)) <= BAR


@pytest.mark.parametrize("runs_again", [False, True])
@pytest.mark.parametrize("mask", ["causal", "bool", "none"])
@pytest.mark.parametrize("apart", [False, True])
def test_so_they_are_where_forward_runs_again(
    mask: str, apart: bool, runs_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, and for half floats."""
    if runs_again:
        monkeypatch.setattr(compiled_attention, "_in_one_pass", lambda *_: [])
    net, x = drawn(3.0, mask=mask, apart=apart)
    exact, plain = gradient(net, x)
    got, coded = gradient(net, x, **CODES)
    assert coded.saved_nbytes < 0.3 * plain.saved_nbytes
    assert 0 < max(errors(got, exact)) <= BAR


def test_exact_codes_change_nothing_about_attention() -> None:
    net, x = drawn(3.0)
    exact, _ = gradient(net, x)
    got, _ = gradient(net, x, codes="", min_nbytes=0)
    assert torch.equal(got, exact)


def test_dropout_keeps_q_k_and_v() -> None:
    """A second run would draw other numbers."""
    net, x = drawn(1.0)
    net.forward = lambda x: (
        x
        + F.scaled_dot_product_attention(  # type: ignore[method-assign]
            *net.qkv(x).view(2, 128, 3, 4, 32).permute(2, 0, 3, 1, 4), dropout_p=0.1
        )
        .transpose(1, 2)
        .reshape(x.shape)
    )
    torch.manual_seed(1)
    exact, _ = gradient(net, x)
    torch.manual_seed(1)
    got, _ = gradient(net, x, **CODES)
    assert max(errors(got, exact)) <= BAR


def test_the_op_has_a_true_fake_and_takes_what_is_counted() -> None:
    for heads_of_k, mask in ((4, None), (2, None), (4, torch.ones(128, 128, dtype=torch.bool))):
        q = torch.randn(2, 128, 4, 32).transpose(1, 2)
        k, v = (torch.randn(2, 128, heads_of_k, 32).transpose(1, 2) for _ in range(2))
        args = torch.randn_like(q), q, k, v, mask, mask is None, None
        torch.library.opcheck(ops.ATTENTION_BACKWARD, args)
        given = attention.AttentionArguments(q, k, v, mask, mask is None, None)
        expected = attention.gradients(given, args[0])
        found = ops.ATTENTION_BACKWARD(*args)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        with torch.profiler.profile(profile_memory=True) as seen:
            found = ops.ATTENTION_BACKWARD(*args)
        events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
        total, most = 0, 0
        for event in sorted(events, key=lambda one: one.start_ns()):
            total += event.nbytes()
            most = max(most, total)
        taken = most - sum(x.nbytes for x in found)
        counted = attention.workspace_nbytes(k.shape, v.shape)
        assert 0.6 * counted <= taken <= 1.1 * counted, (heads_of_k, mask is not None)


class Residual(nn.Module):
    """A residual stream that RMS norms read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.qkv = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.qkv(x)
        for layer in self.layers:
            x = x + layer(x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt())
        return x


def test_with_their_statistics_inputs_of_norms_have_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the inverse of a root is computed again, what it is the root of stays exact."""
    seen = []

    def code(search: Search, step: Step, *_: Any, **__: Any) -> tuple[Step, int, float]:
        gradients = search.joint.gradients()
        stream = {n for n in search.joint.required if n.target is torch.ops.aten.add.Tensor}
        ends = {n for n in stream if n.meta["val"].numel() == x.numel()}
        base = search.judge({*ends, *search.joint.inputs})
        assert base is not None
        for one in (base, lossy._with_statistics(search, base)):
            after = search.joint.parts(one.saved)[1]
            uses = [reading_of(n, after, gradients).use for n in one.saved if n in ends]
            seen.append(uses.count(Extent.EXACT))
        return step, 0, 0.0

    monkeypatch.setattr("elbowroom.compiled.partition.code", code)
    torch.manual_seed(0)
    x = torch.randn(512, 64)
    gradient(Residual(), x, room_nbytes=10**6, exact=False)
    assert seen[0] >= 7
    assert seen[1] == 0
