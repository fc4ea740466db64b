"""Attention that runs again in backward: torch's own bits in exact contexts, whatever comes."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.plan.precision_floor import ATTENTION
from elbowroom.runtime import opened
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.direct import direct_of


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype)


def attended(context: Any, tensors: list[Tensor], **how: Any) -> list[Tensor]:
    """The output, the gradients, and the next random numbers before and after backward."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]
    torch.manual_seed(3)
    with context:
        given = [x * 1 for x in leaves[:3]]
        out = F.scaled_dot_product_attention(*given, *leaves[3:], **how)
    before = torch.rand(3)
    wanted = [x for x in leaves if x.requires_grad]
    grads = torch.autograd.grad(out, wanted, drawn(*out.shape, seed=7).to(out.dtype))
    return [out.detach(), *grads, before, torch.rand(3)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype is b.dtype
        and a.stride() == b.stride()
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(one, other, strict=True)
    )


def masked_rows(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., 3, :] = float("-inf")
    return x


Q, LARGE = (2, 4, 16, 8), (2, 4, 128, 32)  # of the latter, dropout is held as bits
THREE = [drawn(*Q, seed=i) for i in range(3)]
WIDE = [drawn(*LARGE, seed=i) for i in range(3)]
CROSS = [drawn(2, 4, 5, 8), drawn(2, 4, 9, 8, seed=1), drawn(2, 4, 9, 8, seed=2)]
EXACT: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "dropout": (THREE, {"dropout_p": 0.2}),
    "dropout of many": (WIDE, {"dropout_p": 0.2}),
    "dropout, causal": (WIDE, {"dropout_p": 0.2, "is_causal": True}),
    "other keys": (CROSS, {"dropout_p": 0.3}),
    "other keys, no dropout": (CROSS, {}),
    "grouped": ([drawn(2, 4, 16, 8), *(drawn(2, 2, 16, 8, seed=i) for i in (1, 2))],
                {"dropout_p": 0.2, "enable_gqa": True}),
    "scale": (THREE, {"dropout_p": 0.2, "scale": 0.7}),
    "learned mask": ([*THREE, drawn(16, 16, seed=5)], {}),
    "learned mask, dropout": ([*THREE, drawn(2, 1, 16, 16, seed=5)], {"dropout_p": 0.2}),
    "rows that see nothing": ([*THREE, masked_rows(drawn(16, 16, seed=5))], {"dropout_p": 0.2}),
    "bool mask": ([*THREE, drawn(16, 16, seed=5) > 0], {"dropout_p": 0.2}),
    "bool mask, rows that see nothing": (
        [*THREE, masked_rows(drawn(16, 16, seed=5)) > -1], {"dropout_p": 0.2}),
    "three dimensions": ([x[0] for x in THREE], {}),
    "NaN": ([THREE[0].where(THREE[0] < 2, float("nan")), *THREE[1:]], {"dropout_p": 0.2}),
    "no queries": ([drawn(2, 4, 0, 8), *THREE[1:]], {"dropout_p": 0.2}),
    "no keys": ([THREE[0], drawn(2, 4, 0, 8), drawn(2, 4, 0, 8)], {"dropout_p": 0.2}),
    "all is dropped": (THREE, {"dropout_p": 1.0}),
    "fused": (THREE, {}),
    "sharp": ([8 * x for x in THREE], {"dropout_p": 0.2}),
}  # fmt: skip


@pytest.mark.parametrize("case", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_an_exact_context_gives_the_bits_of_torch(case: str, dtype: torch.dtype) -> None:
    tensors, how = EXACT[case]
    cast = [x.to(dtype) if x.is_floating_point() else x for x in tensors]
    true = attended(nullcontext(), cast, **how)
    assert same(attended(er.saving(min_nbytes=0), cast, **how), true)


@pytest.mark.parametrize("case", EXACT)
def test_a_lossy_context_gives_the_output_of_torch_and_finite_gradients(case: str) -> None:
    tensors, how = EXACT[case]
    true = attended(nullcontext(), tensors, **how)
    got = attended(er.saving("dither", bits=2, min_nbytes=0, seed=0), tensors, **how)
    assert same([true[0], *true[-2:]], [got[0], *got[-2:]])
    for one, other in zip(got, true, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())


def held(case: str, *context: Any, **fields: Any) -> tuple[int, int]:
    tensors, how = EXACT[case]
    saved = er.saving(*context, min_nbytes=0, **fields)
    attended(saved, tensors, **how)
    return saved.ledger.after_nbytes, sum(x.nbytes for x in tensors)


def test_of_dropout_q_k_v_are_held_and_bits() -> None:
    after, qkv = held("dropout of many")
    weights = 2 * 4 * 128 * 128
    assert after == qkv + weights // 8
    assert held("dropout") == (held("dropout")[1],) * 2  # the RNG's state is no tensor of the graph


def test_the_node_is_needed() -> None:
    """The negative control: what torch's own op saves where it drops, beside q, k and v."""
    nbytes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        nbytes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        q, k, v = (x.clone().requires_grad_() for x in WIDE)
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
    assert sum(nbytes.values()) > 3 * held("dropout of many")[0]


@pytest.mark.parametrize("how", [{}, {"dropout_p": 0.2}])
def test_one_tensor_as_q_k_and_v(how: dict[str, Any]) -> None:
    def grad(context: Any) -> Tensor:
        x = THREE[0].clone().requires_grad_()
        torch.manual_seed(1)
        with context:
            h = x * 1
            out = F.scaled_dot_product_attention(h, h, h, **how)
        return torch.autograd.grad(out.square().sum(), x)[0]

    assert grad(er.saving(min_nbytes=0)).equal(grad(nullcontext()))


def test_the_gradient_of_a_gradient() -> None:
    """Of the math path; torch has none of its fused kernel."""

    def second(context: Any) -> list[Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in THREE)
        torch.manual_seed(1)
        with context:
            out = F.scaled_dot_product_attention(q * 1, k * 1, v * 1, dropout_p=0.2)
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), (q, k, v)))

    for one, other in zip(second(er.saving(min_nbytes=0)), second(nullcontext()), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_backward_twice_and_inside_the_context() -> None:
    def grads(context: Any) -> list[Tensor]:
        q = WIDE[0].clone().requires_grad_()
        torch.manual_seed(1)
        with context:
            out = F.scaled_dot_product_attention(q * 1, q * 2, q * 3, dropout_p=0.2)
            loss = out.square().sum()
            first = torch.autograd.grad(loss, q, retain_graph=True)[0]
        return [first, torch.autograd.grad(loss, q)[0]]

    assert same(grads(er.saving(min_nbytes=0)), grads(nullcontext()))


def test_only_some_want_a_gradient() -> None:
    def grads(context: Any) -> Tensor:
        q, k, v = (x.clone() for x in THREE)
        v.requires_grad_()
        torch.manual_seed(1)
        with context:
            out = F.scaled_dot_product_attention(q, k, v * 1, dropout_p=0.2)
        return torch.autograd.grad(out.square().sum(), v)[0]

    assert grads(er.saving(min_nbytes=0)).equal(grads(nullcontext()))
    assert grads(er.saving("dither", bits=2, min_nbytes=0)).isfinite().all()


@pytest.mark.parametrize("how", [{}, {"dropout_p": 0.2}])
def test_autocast(how: dict[str, Any]) -> None:
    def grads(context: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in THREE]
        torch.manual_seed(1)
        with context, torch.autocast("cpu", torch.bfloat16):
            out = F.scaled_dot_product_attention(*(x * 1 for x in leaves), **how)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    assert same(grads(er.saving(min_nbytes=0)), grads(nullcontext()))
    assert all(x.isfinite().all() for x in grads(er.saving("dither", bits=2, min_nbytes=0)))


def test_a_kernel_that_forward_chose_is_that_of_backward() -> None:
    def grads(context: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in THREE]
        with context, sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(*(x * 1 for x in leaves))
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    assert same(grads(er.saving(min_nbytes=0)), grads(nullcontext()))


def test_a_checkpoint_of_the_users_around_it() -> None:
    def grads(context: Any) -> Tensor:
        x = THREE[0].clone().requires_grad_()
        torch.manual_seed(1)
        with context:
            out = checkpoint(
                lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.2),
                x * 1,
                use_reentrant=False,
            )
        return torch.autograd.grad(out.square().sum(), x)[0]

    assert grads(er.saving(min_nbytes=0)).equal(grads(nullcontext()))


def test_wrong_shapes_are_torchs_error() -> None:
    q = THREE[0].clone().requires_grad_()
    for other in (drawn(2, 4, 16, 7), drawn(2, 3, 16, 8)):
        for context in (nullcontext(), er.saving("dither", bits=2, min_nbytes=0)):
            with pytest.raises(RuntimeError), context:
                F.scaled_dot_product_attention(q, other, other)


# --- functions of torch's that are written in Python


MODULES = {
    "weights": lambda: nn.MultiheadAttention(32, 4, 0.1, batch_first=True),
    "encoder": lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True),
    "decoder": lambda: nn.TransformerDecoderLayer(32, 4, 64, 0.1, batch_first=True),
    "no dropout": lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True),
}


def trained(kind: str, context: Any) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    module, start = MODULES[kind](), drawn(4, 24, 32, seed=5).requires_grad_()
    torch.manual_seed(1)
    with context as saved:
        x = start * 1
        y = module(x, x, x)[0] if kind == "weights" else module(*(x, x)[: 1 + (kind == "decoder")])
    (y * drawn(*y.shape, seed=6)).sum().backward()
    return [y.detach(), start.grad, torch.rand(2), *(p.grad for p in module.parameters())], saved


@pytest.mark.parametrize("kind", MODULES)
def test_what_multi_head_attention_calls_is_seen_and_its_bits_are_torchs(kind: str) -> None:
    true, _ = trained(kind, nullcontext())
    got, saved = trained(kind, er.saving(min_nbytes=0))
    assert same(got, true)
    savers = {row.consumer for row in saved.ledger.rows}
    assert "multi_head_attention_forward" not in savers
    assert ("bmm" if kind == "weights" else "scaled_dot_product_attention") in savers


@pytest.mark.parametrize("kind", MODULES)
def test_it_has_codes(kind: str) -> None:
    true, _ = trained(kind, nullcontext())
    got, saved = trained(kind, er.saving("dither", bits=4, min_nbytes=0, seed=0))
    coded = {row.consumer for row in saved.ledger.rows if row.action == "dither"}
    assert coded & {"bmm", "scaled_dot_product_attention"}
    for one, other in zip(got, true, strict=True):
        assert (one - other).square().sum() <= 0.05 * other.square().sum()


def test_unopened_it_is_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(opened, "_FUNCTIONS", {})
    _, saved = trained("encoder", er.saving(min_nbytes=0))
    assert "multi_head_attention_forward" in {row.consumer for row in saved.ledger.rows}


def test_another_mode_sees_the_function_itself() -> None:
    class Names(torch.overrides.TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Names() as names:
        got, _ = trained("encoder", er.saving(min_nbytes=0))
    assert "multi_head_attention_forward" in names.seen
    assert same(got, trained("encoder", nullcontext())[0])


@pytest.mark.parametrize("exact", [True, None])
def test_plans_know_the_node(exact: bool | None) -> None:
    """What was written down is what is saved then: no stranger, and the gradients of plain."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, 0.1) for _ in range(2)))
    x = drawn(64, 8, 64)

    def step(context: Any) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        with context:
            loss = model(x * 1).square().mean()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    profile = er.measure(lambda: step(nullcontext()))
    budget = int((0.99 if exact else 0.92) * profile.peak)
    try:
        plan = er.plan(profile, budget=budget, exact=exact)
    except er.errors.BudgetTooSmall as error:  # by the seconds that this machine took
        plan = er.plan(profile, budget=int(1.01 * error.least_nbytes), exact=exact)
    true, got = step(nullcontext()), step(er.following(plan))
    assert not plan.unknown_sites
    assert same(got, true) if plan.exact else all(g.isfinite().all() for g in got)


def test_it_takes_few_functions_to_ask_whether_attention_has_a_node() -> None:
    """It is asked in each settled step."""
    q, k, v = (torch.randn(2, 4, 16, 16, requires_grad=True) for _ in range(3))
    call = Call(F.scaled_dot_product_attention, (q, k, v), {"dropout_p": 0.1, "is_causal": True})
    assert direct_of(call) is not None
    entered = []
    sys.setprofile(lambda frame, event, arg: entered.append(frame) if event == "call" else None)
    try:
        direct_of(call)
    finally:
        sys.setprofile(None)
    assert len(entered) <= 16


@pytest.mark.parametrize("coded", [False, True])
def test_a_fit_runs_attention_again_only_where_its_plan_has_a_code_for_it(coded: bool) -> None:
    """Neither the code of a linear layer nor that of a ReLU asks for it."""
    net = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
    x = torch.randn(8, 64, 64)

    def step() -> None:
        net(x).square().mean().backward()

    plan = er.plan(er.measure(step), budget="1 GiB", exact=False)
    presets = {ATTENTION: "dither, 256 levels" if coded else "keep", "linear": "dither, 16 levels"}
    sites = {
        name: replace(entry, preset=presets.get(name.consumer, entry.preset))
        for name, entry in plan.sites.items()
    }
    er.fit(net, budget="1 GiB", plan=replace(plan, sites=sites, exact=False))
    nodes = _nodes_of(net(x).grad_fn)
    assert ("_AttentionBackward" in nodes) is coded
    assert any(name.startswith("ScaledDotProduct") for name in nodes) is not coded


def _nodes_of(node: Any) -> set[str]:
    """Returns the names of the nodes of a graph."""
    found, seen = [node], {node}
    for one in found:
        below = {before for before, _ in one.next_functions if before is not None} - seen
        found += below
        seen |= below
    return {one.name() for one in found}


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_the_memory_of_a_backward_whose_heads_share_keys_is_known(heads: int, mask: bool) -> None:
    """Torch has no fused kernel for them: weights in full, and a copy of k and v for each head."""
    torch.manual_seed(0)
    each = [torch.randn(4, n, 192, 32) for n in (6, heads, heads)]
    if heads > 1:  # which broadcast in another way, as some decoders have them
        each[0], each[1:] = (
            each[0].view(4, heads, 3, 192, 32),
            [x.unsqueeze(2) for x in each[1:]],
        )
    given = [x.requires_grad_() for x in each]
    allowed = torch.ones(192, 192, dtype=torch.bool).tril() if mask else None
    with er.saving():
        out = F.scaled_dot_product_attention(*(x * 1.0 for x in given), attn_mask=allowed)
        node = out.grad_fn
    said = getattr(node, "workspace_nbytes", None)
    assert said is not None, node
    grad = torch.ones_like(out)
    taken = er.peak(lambda: out.backward(grad)) - sum(x.nbytes for x in given)
    assert 0.75 * taken < said < 1.35 * taken
