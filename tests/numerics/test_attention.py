"""Attention under lossy codes: its gradient is near whatever the logits are, or nothing is coded.

gErr2 = sum |g~ - g|^2 / sum |g|^2, of each of q, k and v.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import elbowroom as er
from elbowroom.codecs import Dither
from elbowroom.kernels import attention as one_pass
from elbowroom.plan.precision_floor import levels_for
from elbowroom.runtime import direct
from elbowroom.runtime.direct.attention import attention, spread
from elbowroom.runtime.direct.attention.dropout import LeanMask

pytestmark = pytest.mark.usefixtures("one_thread")
BAR = 0.05
STDS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0)
SHAPE = (2, 4, 128, 32)


def drawn(std: float, shape: Any = SHAPE, keys: Any = None, dtype: Any = None) -> list[Tensor]:
    g = torch.Generator().manual_seed(int(10 * std))
    q, k, v = (torch.randn(s, generator=g) for s in (shape, keys or shape, keys or shape))
    return [x.to(dtype or torch.float32) for x in (q * std, k * std, v)]


def gradients(tensors: list[Tensor], context: Any, **how: Any) -> tuple[list[Tensor], Any]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    torch.manual_seed(4)
    with context as saved:
        out = F.scaled_dot_product_attention(*(x * 1 for x in leaves), **how)
    g = torch.Generator().manual_seed(9)
    grad = torch.randn(out.shape, generator=g).to(out.dtype)
    return [x.double() for x in torch.autograd.grad(out, leaves, grad)], saved


def errors(tensors: list[Tensor], *codec: Any, fields: Any = None, **how: Any) -> list[float]:
    true, _ = gradients(tensors, nullcontext(), **how)
    coded = er.saving(*(codec or ("dither",)), min_nbytes=0, seed=0, **(fields or {"bits": 2}))
    got, _ = gradients(tensors, coded, **how)
    return [
        float((a - b).square().sum() / b.square().sum()) for a, b in zip(got, true, strict=True)
    ]


def additive(*shape: int) -> Tensor:
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return mask.masked_fill_(mask > 1, float("-inf"))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "wide heads": ({"shape": (2, 4, 128, 64)}, {}),
    "wide heads, causal": ({"shape": (2, 4, 128, 64)}, {"is_causal": True}),
    "long": ({"shape": (1, 2, 512, 32)}, {"is_causal": True}),
    "other keys": ({"shape": (2, 4, 64, 32), "keys": (2, 4, 200, 32)}, {}),
    "grouped": ({"keys": (2, 2, 128, 32)}, {"enable_gqa": True}),
    "dropout": ({}, {"dropout_p": 0.1, "is_causal": True}),
    "additive mask": ({}, {"attn_mask": additive(128, 128)}),
    "boolean mask": ({}, {"attn_mask": additive(2, 1, 128, 128).isfinite()}),
    "three dimensions": ({"shape": (8, 128, 32)}, {}),
    "scale": ({}, {"scale": 0.3}),
    "bf16": ({"dtype": torch.bfloat16}, {}),
    "fp16": ({"dtype": torch.float16}, {"is_causal": True}),
    "double": ({"dtype": torch.float64}, {}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("std", STDS)
def test_the_gradient_is_near_at_every_sharpness(std: float, case: str) -> None:
    tensors, how = CASES[case]
    assert max(errors(drawn(std, **tensors), **how)) <= BAR


HIDES = {"none": 0.0, "inf": float("-inf"), "least": torch.finfo(torch.float32).min, "far": -100.0}
BIASES = {
    "each": (2, 4, 128, 128),
    "heads": (1, 4, 128, 128),
    "all": (128, 128),
    "samples": (2, 1, 128, 128),
    "odd": (2, 4, 97, 61),
}


def biased(
    bias_std: float, *, of: str, hides: str, whole_rows: bool, std: float, **how: Any
) -> tuple[list[float], Any]:
    """The errors of q, k, v and a bias that wants a gradient, and the ledger."""
    shape, g = BIASES[of], torch.Generator().manual_seed(3)
    q, k, v = drawn(std, (2, 4, shape[-2], 32), (2, 4, shape[-1], 32))
    hidden = torch.rand(shape, generator=g) > 0.7
    hidden[..., 0] = False
    if whole_rows:
        hidden[..., 3:5, :] = True
    added = torch.zeros(shape).masked_fill_(hidden, HIDES[hides])
    bias = torch.randn(shape, generator=g) * bias_std
    grad = torch.randn(q.shape, generator=g)

    def found(context: Any) -> tuple[list[Tensor], Any]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
        torch.manual_seed(4)
        with context as saved:
            out = F.scaled_dot_product_attention(
                *(x * 1 for x in leaves[:3]), attn_mask=leaves[3] * 1 + added, **how
            )
        return [x.double() for x in torch.autograd.grad(out, leaves, grad)], saved

    true, _ = found(nullcontext())
    exact, _ = found(er.saving(min_nbytes=0))
    assert all(torch.equal(x, y) for x, y in zip(true, exact, strict=True))
    got, saved = found(er.saving("dither", bits=2, min_nbytes=0, seed=0))
    pairs = zip(got, true, strict=True)
    return [float((a - b).square().sum() / b.square().sum()) for a, b in pairs], saved.ledger


@pytest.mark.sampled(4)
@pytest.mark.parametrize("std", [0.5, 1.0, 2.0, 4.0, 6.0])
@pytest.mark.parametrize("bias_std", [0.5, 1.0, 3.0, 6.0])
def test_the_gradient_is_near_with_a_bias_of_any_size(bias_std: float, std: float) -> None:
    found, ledger = biased(bias_std, of="each", hides="none", whole_rows=False, std=std)
    assert max(found) <= BAR
    assert 3 * ledger.after_nbytes < ledger.before_nbytes  # most of which is the bias


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", [{}, {"dropout_p": 0.1}, {"scale": 0.3}])
@pytest.mark.parametrize("whole_rows", [False, True])
@pytest.mark.parametrize("hides", ["inf", "least", "far"])
@pytest.mark.parametrize("of", BIASES)
def test_a_bias_that_hides_is_coded_where_hidden_elements_have_no_weight(
    of: str, hides: str, whole_rows: bool, how: Any
) -> None:
    found, ledger = biased(1.0, of=of, hides=hides, whole_rows=whole_rows, std=1.0, **how)
    assert max(found) <= BAR
    is_kept = "attention's bias is too wide for any code" in str(ledger)
    assert is_kept == (whole_rows and hides != "far")  # its weights are those of q k^T, or none


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize("frozen", ["k", "v", "kv"])
def test_k_and_v_that_want_no_gradient_are_coded(frozen: str, std: float) -> None:
    """They are those of a frozen layer in front of which nothing trains."""
    q, k, v = drawn(std)
    grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(9))

    def found(context: Any) -> tuple[list[Tensor], Any]:
        leaves = [
            x.clone().requires_grad_(name not in frozen)
            for name, x in zip("qkv", (q, k, v), strict=True)
        ]
        with context as saved:
            out = F.scaled_dot_product_attention(*(x * 1 for x in leaves))
        wanted = [x for x in leaves if x.requires_grad]
        return [x.double() for x in torch.autograd.grad(out, wanted, grad)], saved

    true, _ = found(nullcontext())
    got, saved = found(er.saving("dither", bits=2, min_nbytes=0, seed=0))
    assert saved.ledger.after_nbytes < 0.45 * saved.ledger.before_nbytes  # 256 levels have 0.28
    assert all(
        float((a - b).square().sum() / b.square().sum()) <= BAR
        for a, b in zip(got, true, strict=True)
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bias_that_is_no_number_is_not_coded(value: float) -> None:
    q, k, v = drawn(1.0)
    bias = torch.zeros(128, 128, requires_grad=True)
    with er.saving("dither", bits=2, min_nbytes=0) as saved:
        own = (bias * 1).masked_fill(torch.eye(128, dtype=torch.bool), value)
        F.scaled_dot_product_attention(q * 1, k, v, attn_mask=own)
    assert "attention's bias is too wide for any code" in str(saved.ledger)


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize(
    ("codec", "fields"),
    [
        ("group", {"bits": 2}),
        ("division", {"bits": 2}),
        ("comet", {"bound": 0.1}),
        ("cast", {"to": "fp8_e4m3"}),
        ("lean", {"fold": 1}),
        ("dither", {"levels": 2, "group_size": 256}),
    ],
)
def test_so_it_is_by_every_codec(codec: str, fields: dict[str, Any], std: float) -> None:
    assert max(errors(drawn(std), codec, fields=fields, is_causal=True)) <= BAR


def test_one_sharp_head_among_many_is_seen() -> None:
    """Its logits are averaged with nobody's."""
    q, k, v = drawn(0.5, (2, 8, 128, 64))
    q[:, 3], k[:, 3] = 8 * q[:, 3], 8 * k[:, 3]
    assert max(errors([q, k, v])) <= BAR


@pytest.mark.parametrize("width", [32, 80, 96])
def test_heads_that_share_steps_with_a_larger_one_are_seen(width: int) -> None:
    """In memory a head lies beside the next one, and 80 elements are no whole groups of 64."""
    scales = torch.tensor([8.0, 0.5, 8.0, 0.5])
    q, k, v = drawn(1.0, (2, 128, 4, width))
    q, k = q * scales.view(4, 1), k * scales.flip(0).view(4, 1)

    def of(context: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with context:
            out = F.scaled_dot_product_attention(*((x * 1).transpose(1, 2) for x in leaves))
        g = torch.Generator().manual_seed(9)
        return list(torch.autograd.grad(out, leaves, torch.randn(out.shape, generator=g)))

    coded = of(er.saving("dither", bits=2, seed=1, min_nbytes=0))
    for got, wanted in zip(coded, of(nullcontext()), strict=True):
        assert (got - wanted).square().sum() <= BAR * wanted.square().sum()


def test_channels_that_stand_out_are_seen() -> None:
    """They set the step of the codes: what rows' norms alone would not tell."""
    q, k, v = drawn(1.0, (2, 4, 128, 64))
    k[..., 5] += 30
    assert max(errors([q, k, v])) <= BAR


@pytest.mark.parametrize("shape", [SHAPE, (2, 4, 128, 64)])
@pytest.mark.parametrize("offset", [5, 10, 20, 50])
def test_a_constant_channel_of_v_is_seen(offset: float, shape: tuple[int, ...]) -> None:
    """It widens the range of v's codes; what it adds to a row of logits' gradients cancels."""
    q, k, v = drawn(1.0, shape)
    v[..., 3] += offset
    assert max(errors([q, k, v], is_causal=True)) <= BAR


def test_a_v_that_is_the_same_for_all_tokens_is_not_coded() -> None:
    """Its share in q's gradient is 0, and any error of it would be all that there is."""
    q, k, v = drawn(1.0)
    v[:] = v[:, :, :1].clone()
    _, saved = gradients([q, k, v], er.saving("dither", bits=2, min_nbytes=0, seed=0))
    whys = {row.why for row in saved.ledger.rows}
    assert "attention's v varies too little over its tokens for any code of it" in whys


@pytest.mark.parametrize("tokens", [128, 1024])
@pytest.mark.parametrize("length", [3.0, 6.0, 15.0])
@pytest.mark.parametrize("which", ["q", "k"])
def test_one_row_that_is_much_longer_is_seen(which: str, length: float, tokens: int) -> None:
    """Softmax follows it: of all keys it has all of a query's weight, or none."""
    q, k, v = drawn(1.0, (1, 2, tokens, 32))
    (q if which == "q" else k)[:, :, 5] *= length
    assert max(errors([q, k, v], is_causal=True)) <= BAR


@pytest.mark.parametrize("tokens", [128, 512])
@pytest.mark.parametrize("std", [0.5, 1.0, 3.0, 6.0])
@pytest.mark.parametrize("fields", [{"bits": 2}, {"levels": 8}])
def test_attention_that_is_written_out_is_as_near(
    fields: dict[str, int], std: float, tokens: int
) -> None:
    """A product of two activations has 16 levels, however many tokens there are in all."""
    drawn_here = drawn(std, (2, 4, tokens, 32))

    def of(context: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in drawn_here]
        with context:
            q, k, v = (x * 1 for x in leaves)
            out = torch.softmax(q @ k.mT * 32**-0.5, -1) @ v
        g = torch.Generator().manual_seed(9)
        return list(torch.autograd.grad(out, leaves, torch.randn(out.shape, generator=g)))

    coded = of(er.saving("dither", **fields, seed=1, min_nbytes=0))
    for got, wanted in zip(coded, of(nullcontext()), strict=True):
        assert (got - wanted).square().sum() <= BAR * wanted.square().sum()


@pytest.mark.parametrize(("std", "worst"), [(2.0, 0.1), (3.0, 1.0)])
def test_an_exact_logsumexp_beside_coded_q_and_k_fails(std: float, worst: float) -> None:
    """The negative control: what was done before, by 16 levels."""
    q, k, v = drawn(std)
    aten = torch.ops.aten
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(9))
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    coded = [Dither(levels=16).encode(x, seed).decode() for seed, x in enumerate((q, k, v, out))]
    true = backward(grad, q, k, v, out, lse, 0.0, True)
    got = backward(grad, *coded, lse, 0.0, True)
    error = [float((a - b).square().sum() / b.square().sum()) for a, b in zip(got, true)]  # noqa: B905
    assert max(error[:2]) > worst


@pytest.mark.parametrize("std", [6.0, 8.0, 12.0])
def test_sharper_logits_have_floats_of_half_the_bits(std: float) -> None:
    """A float's step follows each element: the standard deviation of the logits is up to 144."""
    tensors = drawn(std)
    true, _ = gradients(tensors, nullcontext())
    for fields in ({"levels": 16}, {"levels": 256}):
        got, saved = gradients(tensors, er.saving("dither", **fields, min_nbytes=0, seed=0))
        for one, other in zip(got, true, strict=True):
            assert float((one - other).square().sum()) <= BAR * float(other.square().sum())
        actions = [row.action for row in saved.ledger.rows for _ in range(row.count)]
        assert sorted(actions) == ["cast", "cast", "dither"]
    half = tensors[0].nbytes // 2
    assert {r.after_nbytes for r in saved.ledger.rows if r.action == "cast"} == {2 * half}


def test_elements_that_no_such_float_has_are_held_as_they_are() -> None:
    q, k, v = drawn(8.0)
    q, k = q * 1e4, k / 1e4
    true, _ = gradients([q, k, v], nullcontext())
    got, _ = gradients([q, k, v], er.saving("dither", levels=16, min_nbytes=0, seed=0))
    for one, other in zip(got, true, strict=True):
        assert float((one - other).square().sum()) <= BAR * float(other.square().sum())


def test_where_no_code_is_fine_enough_none_is_made_and_the_ledger_says_so() -> None:
    tensors = drawn(40.0)
    true, _ = gradients(tensors, nullcontext())
    got, saved = gradients(tensors, er.saving("dither", bits=2, min_nbytes=0, seed=0))
    # Without the error of v: what is left is the rounding of logits of 1,000.
    assert float((got[2] - true[2]).square().sum()) <= 1e-5 * float(true[2].square().sum())
    whys = {row.why for row in saved.ledger.rows}
    assert "attention's logits are too sharp for any code of q and k" in whys
    actions = [row.action for row in saved.ledger.rows for _ in range(row.count)]
    assert sorted(actions) == ["dither", "keep", "keep"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_is_not_coded(value: float) -> None:
    q, k, v = drawn(1.0)
    q[0, 0, 0, 0] = value
    true, _ = gradients([q, k, v], nullcontext())
    got, _ = gradients([q, k, v], er.saving("dither", bits=2, min_nbytes=0, seed=0))
    assert got[0].isnan().equal(true[0].isnan())


def test_the_variance_of_a_logits_error_is_the_predicted_one() -> None:
    """Of codes of 16 levels; the prediction is an upper one, by less than a half."""
    for shape in (SHAPE, (2, 4, 128, 64), (2, 4, 128, 128)):
        q, k, _ = drawn(1.5, shape)
        q_, k_ = (Dither(levels=16).encode(x, seed).decode() for seed, x in enumerate((q, k)))
        error = (q_ @ k_.mT - q @ k.mT) * shape[-1] ** -0.5
        predicted = spread(q, k) / 15**2
        assert 1.0 < predicted / float(error.square().mean()) < 1.6


def test_levels_follow_the_logits() -> None:
    assert [levels_for(spread(*drawn(std)[:2])) for std in (0.5, 1, 2, 3, 4, 8)] == [
        *(16, 16, 64, 128, 256, None)
    ]
    assert levels_for(float("nan")) is None


def test_layers_of_sharp_logits_have_finer_codes_of_v() -> None:
    """Nearly all of a gradient goes through such logits, and so do v's errors."""
    torch.manual_seed(0)
    q, k, v = maps = [nn.ModuleList(nn.Linear(128, 128) for _ in range(4)) for _ in range(3)]
    params = [p for one in maps for p in one.parameters()]

    def gradient(around: Any) -> Tensor:
        g = torch.Generator().manual_seed(1)
        h, read = torch.randn(2, 2, 128, 128, generator=g).unbind()
        with around:
            for layer in zip(q, k, v, strict=True):
                heads = (one(h).unflatten(-1, (4, 32)) for one in layer)
                parts = (F.rms_norm(x, (32,)).transpose(1, 2) for x in heads)
                h = F.scaled_dot_product_attention(*parts, scale=0.7).transpose(1, 2).flatten(2)
            loss = (h * read).sum()
        return torch.cat([x.flatten() for x in torch.autograd.grad(loss, params)])

    true = gradient(nullcontext())
    contexts = [er.saving("dither", levels=16, min_nbytes=0, seed=seed) for seed in range(3)]
    error2 = sum(float((gradient(one) - true).square().sum()) for one in contexts) / 3
    assert error2 <= BAR * float(true.square().sum())


@pytest.mark.parametrize("first", ["linear", "norm", "of a norm"])
def test_a_code_that_another_op_holds_is_not_read_if_it_is_too_rough(first: str) -> None:
    """x is read by an op that 4 levels do, and as q and k."""
    x, _, read = drawn(3.0)
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def gradient(context: Any) -> Tensor:
        leaf = x.clone().requires_grad_()
        with context:
            h = leaf * 1
            if first == "of a norm":  # which could be rebuilt from the code of the norm's input
                h = F.layer_norm(h, (32,), torch.full((32,), 3.0))
                beside = leaf
            else:
                beside = F.linear(h, weight) if first == "linear" else F.layer_norm(h, (32,))
            out = F.scaled_dot_product_attention(h, h, h)
        return torch.autograd.grad((out * read).sum() + 0 * beside.sum(), leaf)[0]

    true = gradient(nullcontext())
    got = gradient(er.saving("dither", bits=2, min_nbytes=0, seed=0))
    assert float((got - true).square().sum() / true.square().sum()) <= BAR


def test_torchs_own_node_keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ours cannot stand, logsumexp and output fit q, k and v, since all are exact."""
    monkeypatch.setattr(direct, "fits_attention", lambda call: False)
    true, _ = gradients(drawn(4.0), nullcontext())
    got, saved = gradients(drawn(4.0), er.saving("dither", bits=2, min_nbytes=0, seed=0))
    assert all(map(torch.equal, got, true))
    assert any("logsumexp" in row.why for row in saved.ledger.rows)


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"enable_gqa": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropouts_backward_holds_three_matrices_of_weights(how: Any, dtype: torch.dtype) -> None:
    # Four and more before: the mask as floats, and a copy of the gradient that it multiplies.
    batch, heads, tokens, width = 2, 4, 256, 16
    keys = (batch, 2 if "enable_gqa" in how else heads, tokens, width)
    tensors = drawn(1.0, (batch, heads, tokens, width), keys, dtype)
    true, _ = gradients(tensors, nullcontext(), dropout_p=0.1, **how)
    got, _ = gradients(tensors, er.saving(min_nbytes=0), dropout_p=0.1, **how)
    assert all(map(torch.equal, got, true))
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = attention(*leaves, dropout_p=0.1, **how)
    grad = torch.ones_like(out)
    weights = 4 * batch * heads * tokens * tokens  # in float32, whatever the leaves are
    beside = 8 * 4 * grad.numel()
    assert er.peak(lambda: out.backward(grad)) <= 3 * weights + beside


def test_a_mask_of_dropout_that_is_changed_otherwise_is_held() -> None:
    bits, x = torch.zeros(8, dtype=torch.uint8), torch.ones(64)
    lean = LeanMask(bits)
    with lean.drawing():
        x.bernoulli_(0.5).div_(0.5)
    assert not isinstance(lean.pack(x), Tensor)
    assert isinstance(lean.pack(x), Tensor)  # what lies there later is another tensor
    other = LeanMask(bits)
    with other.drawing():
        x.bernoulli_(0.5).mul_(2.0)
    assert isinstance(other.pack(x), Tensor)


class AttentionWithoutSoftmax(nn.Module):
    """Attention over ReLU's results, divided by its weights' sum, in one product with the values.

    As EfficientViT, Sana and DC-AE have it. Where a query has no positive element, the quotient is
    0 / 1e-15, and only the zeros of the query keep its gradient from being infinite.
    """

    def __init__(self, heads, each, scale):
        super().__init__()
        self.each, self.scale = each, scale
        self.into = nn.Linear(heads * each, 3 * heads * each, bias=False)
        self.out = nn.Linear(heads * each, heads * each)

    def forward(self, x):
        rows, length, _ = x.shape
        given = self.into(x).transpose(1, 2).reshape(rows, -1, 3 * self.each, length)
        query, key, value = given.chunk(3, 2)
        query, key = self.scale * F.relu(query), F.relu(key)
        value = F.pad(value, (0, 0, 0, 1), value=1.0)
        both = value @ key.transpose(-1, -2) @ query
        out = both[:, :, :-1] / (both[:, :, -1:] + 1e-15)
        return self.out(out.reshape(rows, -1, length).transpose(1, 2))


@pytest.mark.parametrize("seed", range(5))
def test_a_quotient_of_products_of_which_a_query_has_one_element(seed):
    """Its gradient is 0 then, a difference of two terms that are divided by the query."""
    torch.manual_seed(seed)
    net, x = AttentionWithoutSoftmax(4, 4, 1.0), torch.randn(8, 256, 16)

    def gradient(policy, **fields):
        with er.saving(policy, min_nbytes=0, **fields):
            loss = (net(x) - x).square().mean()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])

    plain = gradient("keep")
    assert (gradient("dither", levels=16) - plain).square().sum() < 0.01 * plain.square().sum()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_zeros_of_relu_survive_the_copies_that_a_product_makes(seed, scale):
    torch.manual_seed(seed)
    net, x = AttentionWithoutSoftmax(4, 4, scale), torch.randn(8, 512, 16)

    def gradients(policy, **fields):
        with er.saving(policy, **fields):
            loss = (net(x) - x).square().mean()
        return torch.autograd.grad(loss, list(net.parameters()))

    for plain, coded in zip(gradients("keep"), gradients("dither", levels=16), strict=True):
        assert (coded - plain).square().sum() < 0.05 * plain.square().sum()


def _mask(kind: str, T: int, S: int) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "rows":  # one value for all keys of a query
        return torch.ones(T, 1, dtype=torch.bool)
    mask = torch.ones(T, S, dtype=torch.bool).tril(S // 2)
    mask[0] = False  # nothing is left of it
    least = -torch.inf if kind == "float" else torch.finfo(torch.float32).min
    return mask if kind == "bool" else torch.zeros(T, S).masked_fill_(~mask, least)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("lies_by_head", [True, False])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "rows", "float", "finite"])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(
    ("B", "H", "G", "T", "S", "E", "F"),
    [
        *((3, 4, 4, 128, 128, 16, 16), (2, 3, 3, 150, 70, 8, 24), (1, 2, 2, 70, 150, 8, 8)),
        *((2, 1, 1, 2, 5, 3, 2), (3, 6, 2, 128, 130, 16, 16)),
    ],
)
def test_gradients_in_one_pass_are_those_of_torch(
    B, H, G, T, S, E, F, scale, mask, lies_by_head
) -> None:
    draw = torch.Generator().manual_seed(3)

    def drawn(heads: int, tokens: int, width: int) -> Tensor:
        lies = (B, heads, tokens, width) if lies_by_head else (B, tokens, heads, width)
        x = torch.randn(lies, generator=draw)
        return x if lies_by_head else x.transpose(1, 2)

    q, k, v, grad = drawn(H, T, E), drawn(G, S, E), drawn(G, S, F), drawn(H, T, F)
    is_causal = mask == "causal"
    masked = None if is_causal else _mask(mask, T, S)
    given = one_pass.AttentionArguments(q, k, v, masked, is_causal, scale)
    assert given.fits
    found = one_pass.gradients(given, grad)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    if masked is not None and masked.dtype is not torch.bool:
        masked = masked.double()
        if mask == "finite":  # in float32 nothing is left of a logit beside it, in float64 there is
            masked = masked.masked_fill(masked < 0, -1e30)
    # Of rows that a finite mask fills, the logsumexp of the fused kernel is off by all of log(S).
    kernel = sdpa_kernel(SDPBackend.MATH) if mask == "finite" else nullcontext()
    with kernel:
        out = nn.functional.scaled_dot_product_attention(
            *wide, masked, is_causal=is_causal, scale=scale, enable_gqa=H != G
        )
    expected = torch.autograd.grad(out, wide, grad.double())
    for x, one, true in zip((q, k, v), found, expected, strict=True):
        torch.testing.assert_close(one.double(), true, rtol=1e-4, atol=2e-5)
        assert one.stride() == x.stride()


@pytest.mark.parametrize("frozen", [0, 2])
def test_gradients_of_codes_run_no_forward_again(frozen):
    """Dropout and half floats have it run again."""
    q, k, v = (torch.randn(2, 4, 64, 16).requires_grad_(i != frozen) for i in range(3))
    with er.saving("dither", levels=64, min_nbytes=0):
        out = F.scaled_dot_product_attention(*(x * 1 for x in (q, k, v)), is_causal=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        out.sum().backward()
    assert [x.grad is None for x in (q, k, v)] == [i == frozen for i in range(3)]
    assert not any("flash" in event.key for event in seen.key_averages())


def written_out(mask: Tensor | None, context: Any) -> tuple[list[Tensor], Any]:
    """Attention as models write it, with an additive mask, and a scale that may be another soon."""
    leaves = [x.clone().requires_grad_() for x in drawn(0.5)]
    with context as saved:
        q, k, v = (x * 1 for x in leaves)
        scores = q @ k.transpose(-1, -2) * torch.tensor(32**-0.5)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        out = weights @ v
    return list(torch.autograd.grad(out.square().sum(), leaves)), saved


@pytest.mark.parametrize("hidden", [None, 0.1, 0.5, 1.0])
def test_weights_that_a_mask_hides_are_not_held(hidden: float | None) -> None:
    """hidden: the share of keys that are hidden; 1: of a causal mask, a half."""
    mask = None
    if hidden is not None:
        mask = torch.zeros(128, 128)
        if hidden == 1.0:
            mask.fill_(torch.finfo(torch.float32).min).triu_(1)
        else:
            mask[:, : int(128 * hidden)] = float("-inf")
    coded = er.saving("dither", levels=16, min_nbytes=0, seed=0)
    for _ in range(3):  # examined, and replayed
        true, _ = written_out(mask, nullcontext())
        got, saved = written_out(mask, coded)
        for one, other in zip(got, true, strict=True):
            assert float((one - other).square().sum()) <= BAR * float(other.square().sum())
    (row,) = (row for row in saved.ledger.rows if row.consumer == "softmax")
    is_sparse = hidden is not None and hidden >= 0.5
    nbytes = 1 / 2 + 1 / 8 if is_sparse else 1  # of an element; and a scale for 128
    assert row.action == "cast"
    assert row.after_nbytes == pytest.approx(row.before_nbytes / 4 * (nbytes + 2 / 128), rel=0.02)
