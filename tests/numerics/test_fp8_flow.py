"""er.nn.fp8 as a whole: numbers against a float64 reference of the flow, bytes, hostile inputs."""

import copy
import importlib
import io
import math
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.demo.llama import LlamaBlock, _rotated, rope
from elbowroom.errors import ModuleError
from elbowroom.nn import _flow
from elbowroom.nn._probe import is_elementwise, is_linear, norm_facts, suits
from elbowroom.nn._scaled import E4M3, E5M2, product, quantize

D, HEADS = 64, 2


def relative(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def saved_units(net, x):
    """Distinct storages that autograd saves, but for parameters' own and the angles of RoPE."""
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    held = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own and t.shape != rope_shape:
            held[t.untyped_storage().data_ptr()] = t
        return t

    rope_shape = (x.shape[1], x.shape[2] // HEADS)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = net(x * 1.0)
    return sum(t.untyped_storage().nbytes() for t in held.values()) / (2 * x.numel()), y


# --- the reference: plain torch in float64, rounding passed straight through ---


def straight(x, rounded):
    return x + (rounded.double() - x).detach()


def by_group(x, size):
    """E4M3, a scale for each run of `size` elements in memory: largest / 448, up to bf16."""
    flat = x.detach().float().reshape(-1)
    groups = F.pad(flat, (0, -len(flat) % size)).view(-1, size)
    scale = groups.abs().amax(1, keepdim=True) / 448
    up = scale.bfloat16()
    up = torch.where(up.float() < scale, torch.nextafter(up, torch.tensor(math.inf).bfloat16()), up)
    inverse = torch.where(up > 0, 1 / up.float(), 0.0)
    values = (groups * inverse).clamp(-448, 448).to(E4M3).double() * up.double()
    return straight(x, values.view(-1)[: len(flat)].view(x.shape))


def by_tensor(x, to):
    largest = torch.finfo(to).max
    scale = x.detach().float().abs().max().clamp(min=1e-30) / largest
    return (x.detach().float() / scale).clamp(-largest, largest).to(to).double() * scale.double()


class ReferenceLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x8, w8 = by_tensor(x, E4M3), by_tensor(weight, E4M3)
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.t()

    @staticmethod
    def backward(ctx, g):
        x8, w8 = ctx.saved_tensors
        g8 = by_tensor(g, E5M2)
        return g8 @ w8, g8.flatten(0, -2).t() @ x8.flatten(0, -2)


def reference_block(net, x):
    """LlamaBlock.forward as er.nn.fp8 has it."""

    def linear(layer, h):
        return ReferenceLinear.apply(h, layer.weight)

    def norm(layer, h):
        h = by_group(h, 64)
        return h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * layer.weight

    B, T, _ = x.shape
    h = norm(net.norm1, x)
    q, k, v = (
        linear(layer, h).view(B, T, HEADS, -1).transpose(1, 2) for layer in (net.q, net.k, net.v)
    )
    cos, sin = rope(T, D // HEADS, h)
    q, k = (part * cos + _rotated(part) * sin for part in (q, k))
    v = by_group(v.transpose(1, 2), 32).transpose(1, 2)  # as it lies in memory
    y = F.scaled_dot_product_attention(by_group(q, 32), by_group(k, 32), v, is_causal=True)
    x = x + linear(net.o, y.transpose(1, 2).reshape(B, T, D))
    h = norm(net.norm2, x)
    gate, up = (by_group(linear(layer, h), GATED) for layer in (net.gate, net.up))
    return x + linear(net.down, F.silu(gate) * up)


INNER = 8 * D // 3
GATED = next((size for size in (128, 64, 32) if INNER % size == 0), 128)


def block(dtype=torch.float32, **settings):
    torch.manual_seed(0)
    net = LlamaBlock(D, HEADS).to(dtype)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    plain = copy.deepcopy(net)
    report = er.nn.fp8(net, **settings)
    return plain, net, report


def gradients(net, x, run=None):
    h = x.clone().requires_grad_()
    y = (run or net)(h * 1.0)
    return [y, *torch.autograd.grad(y.square().mean(), [h, *net.parameters()])]


def test_a_block_computes_what_the_reference_says():
    plain, net, _ = block()
    x = torch.randn(2, 24, D)
    ours = gradients(net, x)
    wide = copy.deepcopy(plain).double()
    true = gradients(wide, x.double(), lambda h: reference_block(wide, h))
    exact = gradients(plain, x)
    # Codes at a border fall either way in float32 and float64: 2^-4 of few elements.
    for found, expected, other in zip(ours, true, exact, strict=True):
        assert relative(found, expected) < 5e-3
        assert relative(found, other) > 2e-2  # the control: FP8 is far from float32


def test_what_is_made_again_has_the_bits_of_forward(monkeypatch):
    _, net, _ = block()
    x = torch.randn(2, 24, D)
    made = gradients(net, x)
    monkeypatch.setattr(
        importlib.import_module("elbowroom.nn.fp8"), "source_of", lambda x: None
    )  # x8 is saved itself
    assert all(map(torch.equal, made, gradients(net, x)))


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
def test_a_block_saves_seven_units_at_most(fused):
    torch.manual_seed(0)
    plain = LlamaBlock(256, HEADS, fused=fused).bfloat16()
    x = torch.randn(2, 128, 256).bfloat16().requires_grad_()
    before, _ = saved_units(plain, x)
    er.nn.fp8(plain)
    after, y = saved_units(plain, x)
    assert before > 22
    assert 6.17 < after < 6.5  # q8, k8, v8, y, x8 of two norms, gate8, up8: and scales
    y.float().square().mean().backward()
    for policy in ("keep", "exact", "coat"):
        with er.saving(policy, min_nbytes=0) as saved:
            y = plain(x * 1.0)
        rows = [r for r in saved.ledger.rows if "owner" not in r.why and r.consumer != "mul"]
        assert sum(r.after_nbytes for r in rows) / (2 * x.numel()) < 7
        y.float().square().mean().backward()
    er.nn.revert(plain)
    er.nn.fp8(plain, attention=False)
    assert 7.6 < saved_units(plain, x)[0] < 8.5


@pytest.mark.parametrize("policy", ["keep", "exact"])
def test_saving_changes_no_bit_of_the_flow(policy):
    _, net, _ = block(torch.bfloat16)
    x = torch.randn(2, 24, D).bfloat16()
    plain = gradients(net, x)
    with er.saving(policy, min_nbytes=0):
        assert all(map(torch.equal, plain, gradients(net, x)))


# --- what is recognized ---


class RootMean(nn.Module):
    """As transformers has it, Gemma's with `offset`."""

    def __init__(self, n, eps=1e-5, offset=0.0):
        super().__init__()
        self.scale, self.epsilon, self.offset = nn.Parameter(torch.rand(n)), eps, offset

    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * (self.scale.float() + self.offset)).type_as(hidden_states)


class Clipped(RootMean):
    def forward(self, x):
        return super().forward(x).clamp(-0.5, 0.5)


class Noisy(RootMean):
    def forward(self, x):
        return super().forward(x) + torch.rand(())


class Columns(nn.Module):
    def __init__(self, n, m, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, m) / n**0.5)
        self.bias = nn.Parameter(torch.randn(m)) if bias else None

    def forward(self, x):
        y = x.reshape(-1, x.shape[-1]) @ self.weight
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], self.weight.shape[1])


class Tanh(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3)))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return F.silu(x) * self.calls


class Function(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-5, 1e-3])
def test_norms_are_found_by_what_they_compute(eps):
    found = norm_facts(RootMean(48, eps))
    assert (found.centered, found.offset, found.eps, found.bias) == (False, 0.0, eps, None)
    assert norm_facts(RootMean(48, eps, 1.0)).offset == 1.0
    found = norm_facts(nn.LayerNorm(48, eps))
    assert (found.centered, found.eps, found.weight, found.bias) == (True, eps, "weight", "bias")
    assert norm_facts(nn.LayerNorm(48, eps, bias=False)).bias is None
    assert norm_facts(nn.RMSNorm(48, eps)).eps == eps


def test_an_eps_that_the_module_does_not_tell_is_measured():
    found = norm_facts(nn.RMSNorm(48))  # eps=None: float32's
    assert found.eps == pytest.approx(torch.finfo(torch.float32).eps, rel=0.05)


@pytest.mark.parametrize(
    "module",
    [
        *(Clipped(48), Noisy(48), nn.BatchNorm1d(48), nn.PReLU(48), nn.LayerNorm((4, 8))),
        *(nn.LayerNorm(8, elementwise_affine=False), nn.Embedding(8, 48), nn.Linear(1, 48)),
    ],
    ids=lambda m: type(m).__name__,
)
def test_what_is_no_norm_is_left(module):
    state = copy.deepcopy(module.state_dict())
    assert norm_facts(module) is None
    assert all(torch.equal(state[key], value) for key, value in module.state_dict().items())


@pytest.mark.parametrize(
    "module", [nn.GELU(), nn.SiLU(), nn.Mish(), nn.ReLU(), nn.Tanh(), Tanh(), nn.Hardswish()]
)
def test_activations_are_found_by_what_they_compute(module):
    assert is_elementwise(module)


@pytest.mark.parametrize(
    "module",
    [
        *(nn.Softmax(-1), nn.Dropout(0.5), nn.Identity(), nn.Flatten(), nn.SiLU(inplace=True)),
        *(nn.GLU(), Counting(), nn.AvgPool1d(3), nn.RReLU(), Function(torch.exp), nn.PReLU()),
        *(Function(lambda x: x / x.abs().max()), Function(lambda x: torch.sin(30 * x))),
        *(Function(torch.log), Function(lambda x: 1 / 0), Function(lambda x: x.flip(-1))),
    ],
    ids=lambda m: type(m).__name__,
)
def test_what_is_no_activation_is_left(module):
    random = torch.get_rng_state()
    assert not is_elementwise(module)
    assert torch.equal(torch.get_rng_state(), random)
    assert getattr(module, "calls", 0) == 0  # a copy was tried


def test_linear_layers_are_found_by_what_they_compute():
    assert is_linear(Columns(24, 40)) == "transposed"
    assert is_linear(Columns(24, 24, bias=False)) == "transposed"
    assert is_linear(nn.Linear(24, 24)) == "linear"
    assert is_linear(nn.Embedding(24, 24)) is None
    assert is_linear(nn.Bilinear(4, 4, 4)) is None
    assert is_linear(nn.Conv1d(4, 4, 1)) is None
    assert suits(F.silu)
    assert not suits(torch.exp)


def test_the_report_names_what_was_replaced_and_what_was_left():
    net = nn.Sequential(
        *(nn.LayerNorm(32), Columns(32, 32), Tanh(), Clipped(32), nn.Linear(32, 32)),
    )
    classes = [type(m) for m in net]
    report = er.nn.fp8(net)
    assert [swap.now for swap in report.swaps] == [
        *("er.nn.Fp8Norm", "er.nn.Fp8Columns", "er.nn.Fp8Activation", "er.nn.Fp8Linear"),
    ]
    assert report.left == () or all(kind != "LayerNorm" for _, kind in report.left)
    assert isinstance(net[1], Columns)
    assert type(net[1]).__name__ == "Columns"
    assert "1 x Columns -> er.nn.Fp8Columns: 1" in str(report)
    assert len(er.nn.fp8(net)) == 0  # again: nothing is left to do
    assert len(er.nn.revert(net)) == 4
    assert [type(m) for m in net] == classes
    named = er.nn.fp8(nn.ModuleDict({"a": nn.LayerNorm((4, 8)), "b": Noisy(8)}))
    assert ("a", "LayerNorm") in named.left


def test_settings_that_are_not_possible_are_refused():
    with pytest.raises(ModuleError, match=r"scaling='block' is not possible; scaling is one of"):
        er.nn.fp8(nn.Linear(4, 4), scaling="block")
    with pytest.raises(ModuleError, match="keep='head'"):
        er.nn.fp8(nn.Linear(4, 4), keep=["head"])
    with pytest.raises(ModuleError, match=r"expected a torch\.nn\.Module; got str"):
        er.nn.fp8("model")


# --- every way to run ---


def stack(width=48):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.LayerNorm(width), nn.Linear(width, 40), nn.GELU(), nn.Linear(40, width)),
        *(RootMean(width), Columns(width, width), Tanh(), nn.Linear(width, 7)),
    )


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(48,), (1, 48), (5, 7, 48), (2, 3, 1, 48)], ids=str)
def test_any_shape_and_dtype(shape, dtype, scaling):
    plain = stack().to(dtype)
    ours = copy.deepcopy(plain)
    assert len(er.nn.fp8(ours, scaling=scaling)) == 8
    x = torch.randn(shape).to(dtype)
    a, b = gradients(plain, x), gradients(ours, x)
    for found, true in zip(b, a, strict=True):
        assert found.dtype == true.dtype
        assert found.shape == true.shape
        assert relative(found, true) < 0.5
    assert relative(b[0], a[0]) < 0.15


@pytest.mark.parametrize(
    "x",
    [
        *(torch.randn(48, 6).t(), torch.randn(6, 96)[:, ::2], torch.randn(1, 48).expand(6, 48)),
        torch.randn(4, 3, 48).transpose(0, 1),
    ],
    ids=lambda x: str(tuple(x.stride())),
)
def test_any_geometry(x):
    ours = stack()
    er.nn.fp8(ours)
    dense = gradients(ours, x.contiguous())
    for found, true in zip(gradients(ours, x), dense, strict=True):
        # A transposed input has other runs of 128 in memory, and so other scales.
        assert relative(found, true) < 0.3
    assert ours(torch.randn(0, 48)).shape == (0, 7)


def test_float64_and_integers_go_torchs_way_but_for_products():
    net = nn.Sequential(nn.LayerNorm(16), nn.GELU()).double()
    x = torch.randn(4, 16).double()
    plain = net(x)
    er.nn.fp8(net)
    assert torch.equal(net(x), plain)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(bad):
    _, net, _ = block()
    x = torch.randn(2, 24, D)
    x[0, 3, 5] = bad
    y, dx, *_ = gradients(net, x)
    assert not y[0, 3].isfinite().any()
    assert not dx.isfinite().all()


def test_without_gradients_and_in_evaluation_the_bits_are_those_of_training():
    _, net, _ = block(torch.bfloat16)
    x = torch.randn(2, 24, D).bfloat16()
    trained = net((x * 1.0).requires_grad_())
    for alone in (torch.no_grad, torch.inference_mode):
        with alone():
            assert torch.equal(net.eval()(x), trained)


def test_under_autocast():
    plain, net, _ = block()
    x = torch.randn(2, 24, D)
    with torch.autocast("cpu", torch.bfloat16):
        y, found = plain(x), net(x)
        assert y.dtype == found.dtype
        grads = torch.autograd.grad(found.float().square().mean(), list(net.parameters()))
        true = torch.autograd.grad(y.float().square().mean(), list(plain.parameters()))
    assert relative(found, y) < 0.2
    for a, b in zip(grads, true, strict=True):
        assert a.dtype == torch.float32
        assert relative(a, b) < 0.4


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint_gradients_are_the_same(reentrant):
    _, net, _ = block(torch.bfloat16)
    x = torch.randn(2, 24, D).bfloat16()
    y, dx, *plain = gradients(net, x)
    h = x.clone().requires_grad_()
    again = checkpoint(net, h * 1.0, use_reentrant=reentrant)
    assert torch.equal(again, y)
    again.square().mean().backward()
    found = [h.grad, *(p.grad for p in net.parameters())]
    assert all(map(torch.equal, found, [dx, *plain]))


@pytest.mark.parametrize("first", [0, 1, 2, 3, 5, 6, 7])
def test_a_checkpointed_region_may_begin_behind_any_layer(first):
    """There a layer is given its input alone, and not what that could be made from."""
    net = stack()
    er.nn.fp8(net)
    x = torch.randn(5, 48)
    plain = gradients(net, x)

    def run(h):
        h = checkpoint(net[first : first + 2], net[:first](h), use_reentrant=False)
        return net[first + 2 :](h)

    assert all(map(torch.equal, plain, gradients(net, x, run)))


def test_a_product_is_the_same_when_its_factor_is_made_in_a_region():
    """As `er.fit` may run an activation again, and nothing else."""
    _, net, _ = block(torch.bfloat16)
    x = torch.randn(2, 24, D).bfloat16()
    plain, act = gradients(net, x), net.act
    net.act = Function(lambda h: checkpoint(act, h, use_reentrant=False))
    assert all(map(torch.equal, plain, gradients(net, x)))


def test_backward_twice_gives_the_same_and_a_second_derivative_is_refused():
    _, net, _ = block()
    x = torch.randn(2, 24, D, requires_grad=True)
    loss = net(x).square().mean()
    first = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(net.parameters()))
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, x)
    with pytest.raises(ModuleError, match="cannot be differentiated twice"):
        torch.autograd.grad(net(x).sum(), x, create_graph=True)
    for module in (nn.SiLU(), RootMean(D)):
        one = nn.Sequential(module)
        er.nn.fp8(one)
        with pytest.raises(ModuleError, match="cannot be differentiated twice"):
            torch.autograd.grad(one(x).sum(), x, create_graph=True)


def test_copies_and_pickles_compute_the_same_and_can_be_reverted():
    plain, net, _ = block(torch.bfloat16)
    x = torch.randn(2, 24, D).bfloat16()
    y = net(x)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(x), y)
        assert twin.q.weight.data_ptr() != net.q.weight.data_ptr()
        er.nn.revert(twin)
        assert {type(m) for m in twin.modules()} == {type(m) for m in plain.modules()}
        assert torch.equal(twin(x), plain(x))
    er.nn.revert(net)
    assert torch.equal(net(x), plain(x))
    assert list(net.state_dict()) == list(plain.state_dict())


def test_shared_inputs_are_encoded_once_and_changed_ones_anew():
    net = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))
    er.nn.fp8(net)
    x = torch.randn(4, 32, requires_grad=True) * 1.0
    h = net[0](x)
    before = net[1](h)
    with torch.no_grad():
        h.mul_(-2)
    after = net[1](h)
    assert relative(after - net[1].bias, -2 * (before - net[1].bias)) < 1e-5
    (dw,) = torch.autograd.grad(after.sum(), net[1].weight)
    # The gradient is that of what was read: not of what the norm once gave.
    assert relative(dw[0], h.sum(0)) < 0.1


def test_an_input_that_no_graph_has_made_may_change_unseen():
    """As a frozen backbone's features, changed through NumPy before a head reads them."""
    net = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))
    er.nn.fp8(net)
    with torch.no_grad():
        features = net[0](torch.randn(4, 32))
    features.numpy()[:] *= 3
    (dw,) = torch.autograd.grad(net[1](features).sum(), net[1].weight)
    assert relative(dw[0], features.sum(0)) < 0.1


def test_graphs_in_flight_do_not_mix():
    _, net, _ = block()
    xs = [torch.randn(2, 24, D) for _ in range(2)]
    alone = [gradients(net, x) for x in xs]
    inputs = [x.clone().requires_grad_() for x in xs]
    losses = [net(h * 1.0).square().mean() for h in inputs]
    for i in (1, 0):
        found = torch.autograd.grad(losses[i], [inputs[i], *net.parameters()])
        assert all(map(torch.equal, found, alone[i][1:]))


def test_a_mask_reaches_attention_and_dropout_leaves_it_to_torch():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x, p=0.0):
            mask = torch.ones(6, 6, dtype=torch.bool).tril()
            q, k = self.q(x)[:, None], self.k(x)[:, None]
            return F.scaled_dot_product_attention(q, k, k, attn_mask=mask, dropout_p=p)

    net = Attend()
    plain = copy.deepcopy(net)
    er.nn.fp8(net)
    x = torch.randn(2, 6, 16)
    (y, *a), (z, *b) = gradients(plain, x), gradients(net, x)
    assert all(relative(found, true) < 0.2 for found, true in zip((z, *b), (y, *a), strict=True))
    assert type(net(x).grad_fn).__name__ == "_AttentionBackward"
    assert type(net(x, 0.5).grad_fn).__name__ != "_AttentionBackward"


def test_scaled_mm_is_called_as_it_wants_to_be(monkeypatch):
    """It runs on a CPU too: the layouts and scales of both scalings, without a GPU."""
    for rows in (False, True):
        a8, a = quantize(torch.randn(32, 48), E4M3, rows=rows)
        b8, b = quantize(torch.randn(64, 48), E4M3, rows=rows)
        args = a8, b8.t(), a, b.t() if rows else b, torch.bfloat16
        emulated = product(*args)
        with monkeypatch.context() as patch:
            patch.setattr("elbowroom.nn._scaled.backend", lambda device: "scaled_mm")
            assert relative(product(*args), emulated) < 4e-3
    net = nn.Sequential(nn.Linear(32, 48), nn.GELU(), Columns(48, 16)).bfloat16()
    x = torch.randn(16, 32).bfloat16()
    for scaling in ("tensor", "row"):
        er.nn.fp8(net, scaling=scaling)
        emulated = gradients(net, x)
        with monkeypatch.context() as patch:
            patch.setattr("elbowroom.nn._scaled.backend", lambda device: "scaled_mm")
            found = gradients(net, x)
        assert all(relative(a, b) < 1e-2 for a, b in zip(found, emulated, strict=True))
        er.nn.revert(net)


def test_rows_bear_channels_of_any_size():
    """What a scale for the tensor rounds to zero, scales of rows keep."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    x = torch.randn(32, 64) * torch.logspace(-8, 0, 32)[:, None]
    errors = {}
    for scaling in ("tensor", "row"):
        ours = copy.deepcopy(layer)
        er.nn.fp8(ours, scaling=scaling)
        errors[scaling] = relative(ours(x)[0], layer(x)[0])
    assert errors["tensor"] > 0.9
    assert errors["row"] < 0.06


# --- frozen weights ---


def adapters(frozen=True, **settings):
    """A frozen base with an adapter beside it, as LoRA has it."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"base": nn.Linear(64, 48), "other": Columns(48, 64)}).bfloat16()
    net.requires_grad_(False)
    net["down"], net["up"] = nn.Linear(64, 8).bfloat16(), nn.Linear(8, 48).bfloat16()
    plain = copy.deepcopy(net)
    report = er.nn.fp8(net, frozen=frozen, **settings)
    return plain, net, report


def run(net, x):
    return net["other"](net["base"](x) + net["up"](net["down"](x)))


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_frozen_weights_are_held_in_a_byte_and_compute_the_same(scaling):
    plain, held, report = adapters(scaling=scaling)
    _, live, _ = adapters(frozen=False, scaling=scaling)
    assert "2 frozen weights are held in FP8" in str(report)
    x = torch.randn(5, 3, 64).bfloat16()

    def result(net):
        h = x.clone().requires_grad_()
        y = run(net, h * 1.0)
        learned = [p for p in net.parameters() if p.requires_grad]
        return [y, *torch.autograd.grad(y.float().square().sum(), [h, *learned])]

    # As rounded at each use, bit for bit: what is held is what would be computed with.
    assert all(map(torch.equal, result(held), result(live)))
    assert all(relative(a, b) < 0.2 for a, b in zip(result(held), result(plain), strict=True))

    def nbytes(net):
        return sum(t.nbytes for t in net.state_dict().values())

    weights = 2 * 64 * 48
    assert nbytes(plain) - nbytes(held) == weights - 4 * (2 if scaling == "tensor" else 48 + 64)
    er.nn.revert(held)
    assert held["base"].weight.dtype == torch.bfloat16
    assert held["base"].weight.shape == (48, 64)
    assert relative(held["other"].weight, plain["other"].weight) < 0.04
    assert list(held.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_state_dicts_of_frozen_weights_make_the_round(tmp_path, scaling):
    plain, held, _ = adapters(scaling=scaling)
    _, live, _ = adapters(frozen=False, scaling=scaling)
    x = torch.randn(5, 64).bfloat16()
    y = run(held, x)
    torch.save(held.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["base.weight"].dtype == E4M3
    assert state["base.weight_scale"].dtype == torch.float32
    for target in (adapters(scaling=scaling)[1], live):
        with torch.no_grad():
            target["base"].bias.zero_()
        target.load_state_dict(state)
        assert relative(run(target, x), y) < 1e-2
    held.load_state_dict(plain.state_dict())  # of a plain checkpoint: rounded as it comes in
    assert torch.equal(run(held, x), y)
    with pytest.raises(RuntimeError, match="weight_scale"):
        plain.load_state_dict(state)


def test_frozen_codes_live_through_moves_copies_and_changes_of_dtype():
    _, held, _ = adapters()
    x = torch.randn(5, 64).bfloat16()
    y = run(held, x)
    codes, scale = held["base"].weight.clone(), held["base"].weight_scale.clone()
    file = io.BytesIO()  # torch's own pickling of float8 storages takes torch.save
    torch.save(held, file)
    file.seek(0)
    for twin in (copy.deepcopy(held), torch.load(file, weights_only=False)):
        assert torch.equal(run(twin, x), y)
    held.float()
    held.half()
    held.bfloat16()
    assert held["base"].weight.dtype == E4M3
    assert torch.equal(held["base"].weight.float(), codes.float())
    assert torch.equal(held["base"].weight_scale, scale)
    assert torch.equal(run(held, x), y)
    held.float()
    er.nn.revert(held)
    assert held["base"].weight.dtype == torch.float32


class Adapted(nn.Module):
    """A layer with a product of two smaller ones beside it, as PEFT's LoRA has it."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(64, 48).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 8, bias=False), nn.Linear(8, 48, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))

    def merge(self, safe=False):
        delta = (self.up.weight @ self.down.weight).detach()
        if safe:
            weight = self.base_layer.weight.data.clone()
            weight += delta.to(weight.dtype)
            self.base_layer.weight.data = weight
        else:
            self.base_layer.weight.data += delta

    def unmerge(self):
        self.base_layer.weight.data -= (self.up.weight @ self.down.weight).detach()


@pytest.mark.parametrize("flow", [True, False])
@pytest.mark.parametrize("safe", [True, False])
def test_adapters_are_merged_into_the_decoded_weight(flow, safe):
    torch.manual_seed(0)
    net = nn.Sequential(Adapted(), nn.Linear(48, 8)).bfloat16()
    er.nn.fp8(net, frozen=True, flow=flow)
    base = net[0].base_layer
    decoded = (base.weight.float() * base.weight_scale).bfloat16()
    before = [name for name, _ in Adapted().named_parameters()]
    twin = copy.deepcopy(net)  # keeps its class
    for one in (net, twin):
        one[0].merge(safe=safe)
        delta = (one[0].up.weight @ one[0].down.weight).detach()
        assert torch.equal(one[0].base_layer.weight, decoded + delta)
        assert one[0].base_layer.weight_scale is None
        assert [name for name, _ in one[0].named_parameters()] == before
        assert bool(one(torch.randn(3, 64).bfloat16()).isfinite().all())
    net[0].unmerge()
    assert relative(net[0].base_layer.weight, decoded) < 0.01
    er.nn.revert(net)
    assert type(net[0]) is Adapted


def test_a_frozen_weight_that_is_to_learn_is_refused():
    _, held, _ = adapters()
    held.requires_grad_(True)
    with pytest.raises(ModuleError, match=r"held in FP8 and cannot learn.*er\.nn\.revert"):
        run(held, torch.randn(5, 64).bfloat16())


def test_weights_that_learn_or_are_shared_are_not_frozen():
    net = nn.ModuleDict({"token": nn.Embedding(32, 16), "head": nn.Linear(16, 32, bias=False)})
    net["head"].weight = net["token"].weight
    net["free"] = nn.Linear(16, 16)
    net["token"].requires_grad_(False)
    er.nn.fp8(net, frozen=True)
    assert net["head"].weight is net["token"].weight
    assert net["free"].weight.dtype == torch.float32
    assert "weight_scale" not in net.state_dict()


# --- with others ---

DISTRIBUTED = """
import sys, torch, torch.distributed as dist, elbowroom as er
from torch.nn.parallel import DistributedDataParallel
from elbowroom.demo.llama import LlamaBlock
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
net = LlamaBlock(64, 2)
x = torch.randn(2, 24, 64)
er.nn.fp8(net)
net(x).square().mean().backward()
alone = [p.grad.clone() for p in net.parameters()]
net.zero_grad()
wrapped = DistributedDataParallel(net)
for half in range(2):
    wrapped(x).square().mean().backward()
assert all(torch.equal(2 * a, p.grad) for a, p in zip(alone, net.parameters()))
dist.destroy_process_group()
print("equal")
"""


def test_under_ddp_gradients_are_the_same():
    done = subprocess.run(
        [sys.executable, "-c", DISTRIBUTED], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "equal", done.stderr


def test_nothing_outlives_its_graph():
    _, net, _ = block()
    x = torch.randn(2, 24, D)
    for _ in range(2):
        net(x).sum().backward()
    assert len(_flow._known) == 0


def test_a_model_in_fp8_is_fitted_and_trained():
    _, net, _ = block()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    er.fit(net, budget="1 GiB", optimizer=optimizer)
    losses = []
    x = torch.randn(2, 24, D)
    for _ in range(12):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    er.release(net)
    assert losses[-1] < losses[0]


def test_it_runs_on_the_meta_device():
    with torch.device("meta"):
        net, x = LlamaBlock(D, HEADS), torch.empty(2, 24, D)
    er.nn.fp8(net)
    net(x).sum().backward()
    assert all(p.grad.shape == p.shape for p in net.parameters())
