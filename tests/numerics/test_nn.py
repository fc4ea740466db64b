"""er.nn against torch's own modules: outputs, gradients, what is saved, and hostile inputs."""

import contextlib
import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elbowroom as er
from elbowroom.errors import ModuleError
from elbowroom.nn.fp8 import E4M3, E5M2, product, quantize

EXACT = {
    "LayerNorm": (lambda m: m.LayerNorm(48), (3, 5, 48)),
    "LayerNorm, two dims": (lambda m: m.LayerNorm((4, 6)), (3, 4, 6)),
    "LayerNorm, no bias": (lambda m: m.LayerNorm(48, bias=False), (7, 48)),
    "LayerNorm, plain": (lambda m: m.LayerNorm(48, elementwise_affine=False), (7, 48)),
    "RMSNorm": (lambda m: m.RMSNorm(48), (3, 5, 48)),
    "RMSNorm, two dims": (lambda m: m.RMSNorm((4, 6), eps=1e-3), (3, 4, 6)),
    "RMSNorm, one row": (lambda m: m.RMSNorm(48), (48,)),
    "RMSNorm, empty": (lambda m: m.RMSNorm(48), (0, 48)),
}


def twins(make, dtype=torch.float32, spread=0.2):
    torch.manual_seed(0)
    plain, ours = make(nn), make(er.nn)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    plain, ours = plain.to(dtype), ours.to(dtype)
    ours.load_state_dict(plain.state_dict())
    assert list(ours.state_dict()) == list(plain.state_dict())
    return plain, ours


def both(plain, ours, x, g=None):
    """(output, gradients) of each for the same input and upstream gradient."""
    results = []
    for module in (plain, ours):
        h = x.clone().requires_grad_()
        y = module(h)
        g = torch.randn_like(y) if g is None else g
        grads = torch.autograd.grad(y, [h, *module.parameters()], g)
        results.append((y, grads))
    return results


def relative(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def saved_nbytes(module, x):
    """Bytes that plain autograd holds of what is not a parameter, x's cost left out."""
    found = {}

    def pack(t):
        owners = {p.untyped_storage().data_ptr() for p in module.parameters()}
        if t.untyped_storage().data_ptr() not in owners:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(x.clone().requires_grad_() * 1)
    return sum(found.values()), y


# --- norms ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_norms_equal_torch(name, dtype):
    make, shape = EXACT[name]
    (y, plain), (z, ours) = both(*twins(make, dtype), torch.randn(shape, dtype=dtype) * 3 + 1)
    if "RMS" not in name:
        assert torch.equal(y, z)
    assert relative(z, y) < {torch.float32: 1e-6, torch.float64: 1e-14}.get(dtype, 0.004)
    for a, b in zip(ours, plain, strict=True):
        assert a.dtype == b.dtype
        assert relative(a, b) < {torch.float32: 3e-6, torch.float64: 1e-12}.get(dtype, 0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_without_an_eps_small_inputs_are_normalized_as_torch_does(dtype):
    x = (torch.randn(16, 48) * 1e-3).to(dtype)
    (y, plain), (z, ours) = both(*twins(lambda m: m.RMSNorm(48), dtype), x)
    for a, b in ((z, y), *zip(ours, plain, strict=True)):
        assert relative(a, b) < 0.02


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_norms_save_their_output_once_with_the_next_layer(name):
    for home, tensors in ((nn, 2), (er.nn, 1)):
        net = nn.Sequential(getattr(home, name)(256), nn.Linear(256, 4))
        nbytes, _ = saved_nbytes(net, torch.randn(128, 256))
        full = 128 * 256 * 4
        assert nbytes >= tensors * full
        assert home is nn or nbytes < 1.02 * full


@pytest.mark.parametrize("bad", ["weight 0", "weight tiny", "bias large", "weight nan"])
def test_a_norm_whose_output_says_too_little_saves_its_input(bad):
    plain, ours = twins(lambda m: m.LayerNorm(48))
    x, good = torch.randn(64, 48), saved_nbytes(ours, torch.randn(64, 48))[1]
    assert type(good.grad_fn).__name__ == "_NormBackward"
    for module in (plain, ours):
        with torch.no_grad():
            if bad == "bias large":
                module.bias[3] = 100.0
            else:
                module.weight.data[3] = {"weight 0": 0.0, "weight tiny": 1e-9}.get(bad, math.nan)
    (y, a), (z, b) = both(plain, ours, x)
    assert torch.equal(y, z) or bad == "weight nan"
    assert z.grad_fn.name() == "NativeLayerNormBackward0"
    assert all(torch.equal(p, q) or bad == "weight nan" for p, q in zip(a, b, strict=True))


def test_a_norms_output_changed_in_place_is_told():
    norm = er.nn.RMSNorm(48)
    y = norm(torch.randn(4, 48, requires_grad=True))
    y.mul_(2)
    with pytest.raises(ModuleError, match=r"RMSNorm has saved .* modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("hooks", [False, True])
def test_it_is_told_by_name_and_with_a_cure_that_works(hooks):
    net = nn.Sequential(nn.Linear(48, 48), nn.Sequential(nn.LayerNorm(48), nn.ReLU(inplace=True)))
    er.convert(net)
    twin = copy.deepcopy(net)
    with er.saving() if hooks else contextlib.nullcontext():
        loss = net(torch.randn(4, 48)).sum()
    with pytest.raises(ModuleError, match=r"LayerNorm '1.0' .*keep=\['1.0'\]"):
        loss.backward()
    er.nn.revert(net)
    er.convert(net, keep=["1.0"])
    twin[1][1].inplace = False
    for cured in (net, twin):
        cured(torch.randn(4, 48)).sum().backward()
    norm = er.nn.LayerNorm(48)
    y = norm(torch.randn(4, 48, requires_grad=True)).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


# --- activations ---


ACTIVATIONS = {
    "GELU": lambda m: m.GELU(),
    "GELU, tanh": lambda m: m.GELU(approximate="tanh"),
    "SiLU": lambda m: m.SiLU(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_unbiased_with_the_stated_error(name):
    plain, ours = twins(ACTIVATIONS[name])
    x, one = torch.randn(8, 256), torch.ones(8, 256)
    n, total, square = 100, 0, 0.0
    for _ in range(n):
        (y, (d,)), (z, (found,)) = both(plain, ours, x, one)
        assert torch.equal(y, z)
        total = total + found
        square += float((found - d).square().mean()) / n
        assert (found - d).abs().max() <= 0.22
    assert square**0.5 <= 0.122
    # Hoeffding over 2048 means, each draw within 0.43: a false alarm in 1e-6 of all runs.
    limit = 0.43 * math.sqrt(math.log(2 * x.numel() / 1e-6) / (2 * n))
    assert (total / n - d).abs().max() <= limit
    coarse = torch.where(d > 0.5, 1.0, 0.0)  # the control: rounding is biased by more
    assert (coarse - d).abs().max() > limit


def test_activations_hold_two_bits_and_what_is_not_finite_exactly():
    x = torch.randn(64, 1024)
    nbytes, _ = saved_nbytes(er.nn.GELU(), x)
    assert nbytes * 8 / x.numel() < 2.2
    x[0, 0], x[1, 1] = math.inf, math.nan
    (_, (a,)), (_, (b,)) = both(nn.SiLU(), er.nn.SiLU(), x)
    torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize(
    "x",
    [
        *(torch.randn(()), torch.randn(0, 3), torch.randn(6, 8).t(), torch.randn(6, 8)[:, ::2]),
        *(
            torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
            torch.ones(3, 700),
        ),
    ],
    ids=lambda x: str(tuple(x.stride())),
)
@pytest.mark.parametrize("make", [er.nn.GELU, er.nn.SiLU, lambda: er.nn.Dropout(0.3)])
def test_any_geometry(make, x):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        h = x.to(dtype).requires_grad_()
        y = make()(h)
        (grad,) = torch.autograd.grad(y.sum(), h)
        assert y.shape == h.shape == grad.shape
        assert y.dtype == grad.dtype == dtype
        if isinstance(make(), er.nn.Dropout):
            assert torch.equal((y != 0) | (h == 0), (grad != 0) | (h == 0))
        else:
            (true,) = torch.autograd.grad((F.gelu if make is er.nn.GELU else F.silu)(h).sum(), h)
            assert x.numel() == 0 or (grad - true).abs().max() <= 0.23


# --- dropout ---


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_has_torchs_distribution_and_no_mask(p):
    torch.manual_seed(0)
    x = torch.ones(1000, 1000)
    nbytes, y = saved_nbytes(er.nn.Dropout(p), x)
    assert nbytes == 0
    values = y.unique()
    assert values.tolist() == pytest.approx([0, 1 / (1 - p)])
    kept, deviation = (y != 0).float(), math.sqrt(p * (1 - p))
    assert abs(float(kept.mean()) - (1 - p)) < 5 * deviation / 1000
    for dim in (0, 1):  # no row, and no column, is favoured
        assert (kept.mean(dim) - (1 - p)).abs().max() < 6 * deviation / math.sqrt(1000)
    again = (er.nn.Dropout(p)(x) != 0).float()
    both_kept = float((kept * again).mean())
    assert abs(both_kept - (1 - p) ** 2) < 0.005


def test_dropout_follows_torchs_seed_and_its_gradient_the_same_elements():
    x = torch.randn(100, 33, requires_grad=True)
    torch.manual_seed(5)
    one, other = er.nn.Dropout(0.4)(x), er.nn.Dropout(0.4)(x)
    torch.manual_seed(5)
    again = er.nn.Dropout(0.4)(x)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    (g,) = torch.autograd.grad(one, x, x.detach(), retain_graph=True)
    assert torch.equal(g, one)
    assert torch.equal(er.nn.Dropout(0.4).eval()(x), x)
    assert not er.nn.Dropout(1.0)(x).any()


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        *(torch.ones(6, 8).t(), torch.ones(6, 8)[:, ::2], torch.ones(1, 8).expand(6, 8)),
    ],
    ids=lambda x: str(tuple(x.stride())),
)
def test_dropout_keeps_the_memory_format_and_its_gradient_the_elements(x):
    x.requires_grad_()
    y = er.nn.Dropout(0.5)(x)
    assert y.stride() == nn.Dropout(0.5)(x).stride()
    for g in (torch.ones_like(x), torch.ones(x.shape), torch.ones(()).expand(x.shape)):
        (grad,) = torch.autograd.grad(y, x, g, retain_graph=True)
        assert torch.equal(grad, y)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(x).requires_grad_(), create_graph=True)
    assert torch.equal(grad, y)


# --- the head and its loss ---

CASES = [
    {},
    {"chunk": 7},
    {"chunk": 1, "reduction": "sum"},
    {"reduction": "none", "chunk": 16},
    {"label_smoothing": 0.1, "chunk": 7},
    {"label_smoothing": 1.0, "ignore_index": 3},
    {"ignore_index": -1, "chunk": 9},
]


def head_case(dtype=torch.float32, ignore_index=-100, bias=True):
    torch.manual_seed(0)
    x, weight = torch.randn(4, 9, 24), torch.randn(37, 24) / 4
    target = torch.randint(0, 37, (4, 9))
    target[0, :5] = ignore_index
    leaves = [t.to(dtype).requires_grad_() for t in (x, weight, torch.randn(37))]
    return leaves[: 2 + bias], target


def plain_loss(x, weight, bias, target, **settings):
    settings.pop("chunk", None)
    logits = F.linear(x, weight, bias).flatten(0, -2)
    loss = F.cross_entropy(logits, target.flatten(), **settings)
    return loss.view(target.shape) if settings.get("reduction") == "none" else loss


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_the_chunked_loss_equals_torchs(settings, bias):
    leaves, target = head_case(torch.float64, settings.get("ignore_index", -100), bias)
    x, weight, b = (*leaves, None)[:3]
    ours = er.nn.linear_cross_entropy(x, weight, target, b, **settings)
    plain = plain_loss(x, weight, b, target, **settings)
    torch.testing.assert_close(ours, plain)
    g = torch.randn_like(plain)
    for a, c in zip(
        torch.autograd.grad(ours, leaves, g), torch.autograd.grad(plain, leaves, g), strict=True
    ):
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_is_as_near_to_the_truth_as_torch(dtype):
    leaves, target = head_case(dtype)
    x, weight, b = leaves
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    true = torch.autograd.grad(plain_loss(*wide, target), wide)
    ours = torch.autograd.grad(er.nn.linear_cross_entropy(x, weight, target, b, chunk=5), leaves)
    plain = torch.autograd.grad(plain_loss(x, weight, b, target), leaves)
    for a, c, t in zip(ours, plain, true, strict=True):
        assert a.dtype == dtype
        assert relative(a, t) <= 1.5 * relative(c, t) + 2e-7


def test_all_ignored_and_empty_batches_are_as_torch_has_them():
    leaves, target = head_case()
    for labels, part in ((torch.full_like(target, -100), slice(None)), (target[:0], slice(0))):
        x, weight, b = leaves
        ours = er.nn.linear_cross_entropy(x[part], weight, labels, b)
        plain = plain_loss(x[part], weight, b, labels)
        assert ours.isnan()
        assert plain.isnan()
        for a, c in zip(
            torch.autograd.grad(ours, leaves), torch.autograd.grad(plain, leaves), strict=True
        ):
            assert torch.equal(a.nan_to_num(7), c.nan_to_num(7))


def test_under_autocast_and_where_some_gradients_are_not_wanted():
    (x, weight, b), target = head_case()
    with torch.autocast("cpu", torch.bfloat16):
        ours = er.nn.linear_cross_entropy(x, weight, target, b, chunk=8)
        plain = plain_loss(x, weight, b, target)
    torch.testing.assert_close(ours, plain, rtol=0.01, atol=0.01)
    (dx,) = torch.autograd.grad(ours, x)
    assert dx.dtype == torch.float32
    frozen = er.nn.linear_cross_entropy(x, weight.detach(), target)
    (only,) = torch.autograd.grad(frozen, x)
    assert relative(only, torch.autograd.grad(plain_loss(x, weight, None, target), x)[0]) < 1e-5
    with torch.no_grad():
        assert not er.nn.linear_cross_entropy(x, weight, target).requires_grad


def test_logits_are_never_held():
    torch.manual_seed(0)
    head = er.nn.LinearCrossEntropy(32, 2000, bias=False, chunk=16)
    assert list(head.state_dict()) == list(nn.Linear(32, 2000, bias=False).state_dict())
    x, target = torch.randn(512, 32, requires_grad=True), torch.randint(0, 2000, (512,))
    logits = 512 * 2000 * 4

    def step():
        head(x, target).backward()

    step()
    assert er.peak(step) < logits / 3
    assert head(x).shape == (512, 2000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.zeros(3, dtype=torch.long)}, r"target \(3,\)"),
        ({"weight": torch.randn(37, 23)}, r"weight \(37, 23\)"),
        ({"bias": torch.randn(36)}, r"bias \(36,\)"),
        ({"target": torch.randn(4, 9)}, "float32 and float32"),
        ({"weight": torch.randn(37, 24, dtype=torch.bfloat16)}, "float32 and bfloat16. Cast one"),
        ({"weight": torch.randn(37, 24, device="meta")}, r"got cpu and meta.*\.to\(x\.device\)"),
        ({"chunk": 0}, "chunk=0 is not possible"),
        ({"reduction": "max"}, "reduction='max'"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0"),
    ],
)
def test_heads_refuse_what_does_not_fit(change, message):
    (x, weight, b), target = head_case()
    args = {"x": x, "weight": weight, "target": target, "bias": b, **change}
    with pytest.raises(ModuleError, match=message):
        er.nn.linear_cross_entropy(**args)


def test_under_torch_func_the_error_says_so_and_names_the_plain_loss():
    (x, weight, _), target = head_case()
    with pytest.raises(ModuleError, match=r"torch\.func\.grad always.*F\.cross_entropy\(F\.linear"):
        torch.func.grad(lambda w: er.nn.linear_cross_entropy(x, w, target))(weight)


def test_weights_of_classes_are_applied_as_the_docstring_says():
    (x, weight, b), target = head_case(torch.float64)
    w = torch.rand(37, dtype=torch.float64)
    target = target.clamp(min=0)
    losses = er.nn.linear_cross_entropy(x, weight, target, b, reduction="none")
    plain = F.cross_entropy(F.linear(x, weight, b).flatten(0, 1), target.flatten(), weight=w)
    torch.testing.assert_close((losses * w[target]).sum() / w[target].sum(), plain)


# --- FP8 ---


def test_fp8_products_are_those_of_the_codes():
    torch.manual_seed(0)
    a, b = torch.randn(32, 48), torch.randn(48, 16) * 100
    (a8, a_scale), (b8, b_scale) = quantize(a, E5M2), quantize(b, E4M3)
    assert float((a8.float() * a_scale - a).abs().max() / a.abs().max()) <= 2**-3
    assert float((b8.float() * b_scale - b).abs().max() / b.abs().max()) <= 2**-4
    expected = (a8.double() * a_scale.double()) @ (b8.double() * b_scale.double())
    assert relative(product(a8, b8, a_scale, b_scale, torch.float32), expected) < 1e-6
    assert not quantize(torch.zeros(4), E4M3)[0].float().any()
    assert quantize(torch.tensor([1.0, math.nan]), E4M3)[0].float().isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_linears_are_close_and_save_one_byte_an_element_once(dtype):
    torch.manual_seed(0)
    plain = nn.ModuleList(nn.Linear(128, 64) for _ in range(3)).to(dtype)
    ours = copy.deepcopy(plain)
    report = er.nn.fp8(ours)
    assert "3 x nn.Linear -> er.nn.Fp8Linear" in str(report)
    assert "emulated" in str(report) or torch.cuda.is_available()
    x = torch.randn(256, 128, dtype=dtype)

    class Three(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return sum(layer(x) for layer in self.layers)

    (y, a), (z, b) = both(Three(plain), Three(ours), x)
    assert 0 < relative(z, y) < 0.06
    for found, true in zip(b, a, strict=True):
        assert 0 <= relative(found, true) < 0.08
    nbytes, _ = saved_nbytes(Three(ours), x)
    assert nbytes <= x.numel() + 3 * 512  # one code of x, and scales
    assert saved_nbytes(Three(plain), x)[0] == x.numel() * x.element_size()


def test_fp8_does_not_take_a_changed_input_for_the_old_one():
    layer = nn.Linear(32, 32)
    er.nn.fp8(layer)
    x = torch.randn(16, 32)
    before = layer(x)
    x.mul_(-1)
    assert relative(layer(x) - layer.bias, -(before - layer.bias)) < 1e-5
    for change in (lambda: x.data.neg_(), lambda: np.negative(x.numpy(), out=x.numpy())):
        before = layer(x)
        change()  # no version counts this
        assert relative(layer(x) - layer.bias, -(before - layer.bias)) < 1e-5
    h = torch.ones(16, 32, requires_grad=True) * x
    before = layer(h)
    with torch.no_grad():
        h.neg_()
    assert relative(layer(h) - layer.bias, -(before - layer.bias)) < 1e-5
    for alone in (torch.inference_mode, torch.no_grad):
        with alone():
            assert torch.equal(layer(x * 1), layer(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer(torch.randn(0, 32)).shape == (0, 32)
    assert layer(torch.randn(32)).shape == (32,)


# --- all of them ---


@pytest.mark.parametrize(
    "make",
    [
        *(er.nn.GELU, er.nn.SiLU, lambda: er.nn.LayerNorm(32), lambda: er.nn.RMSNorm(32)),
        lambda: er.nn.Fp8Linear(32, 32),
    ],
)
def test_a_second_derivative_is_refused(make):
    x = torch.randn(8, 32, requires_grad=True)
    with pytest.raises(ModuleError, match="cannot be differentiated twice"):
        torch.autograd.grad(make()(x).sum(), x, create_graph=True)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.2)),
        *(nn.Linear(64, 64), nn.RMSNorm(64), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)),
    )


def test_convert_and_revert_keep_weights_keys_objects_and_optimizers():
    net = network()
    before = {name: (module, type(module)) for name, module in net.named_modules()}
    state = {key: value.clone() for key, value in net.state_dict().items()}
    x = torch.randn(32, 64)
    plain = net.eval()(x)
    report = er.convert(net, norms=True, activations=True, dropout=True)
    assert len(report) == 5
    assert "1 x nn.LayerNorm -> er.nn.LayerNorm: 1" in str(report)
    er.nn.fp8(net, keep=["0", "9"])
    assert [type(net[i]) for i in (0, 2, 9)] == [nn.Linear, er.nn.Fp8Linear, nn.Linear]
    assert all(net.get_submodule(name) is module for name, (module, _) in before.items())
    assert list(net.state_dict()) == list(state)
    copy.deepcopy(net).load_state_dict(state)
    net.train()(x).sum().backward()
    er.nn.revert(net)
    assert {name: type(module) for name, module in net.named_modules()} == {
        name: kind for name, (_, kind) in before.items()
    }
    assert torch.equal(net.eval()(x), plain)
    assert str(er.nn.revert(net)) == "nothing was replaced"


def test_convert_leaves_subclasses_alone_and_says_so():
    class Mine(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) * 2

    net = nn.Sequential(Mine(8), nn.LayerNorm(8))
    report = er.convert(net)
    assert type(net[0]) is Mine
    assert "left alone, 1 x Mine: 0" in str(report)
    with pytest.raises(ModuleError, match=r"keep='head' is not a list of names"):
        er.convert(net, keep="head")
    with pytest.raises(ModuleError, match="keep='head'"):
        er.convert(net, keep=["head"])
    with pytest.raises(ModuleError, match="got list"):
        er.convert([net])


def test_converted_models_and_heads_run_on_the_meta_device():
    with torch.device("meta"):
        net, x = network().train(), torch.empty(8, 64)
        weight, target = torch.empty(10, 64, requires_grad=True), torch.empty(8, dtype=torch.long)
    er.convert(net, activations=True)
    er.nn.fp8(net)
    random = torch.get_rng_state()
    er.nn.linear_cross_entropy(net(x)[:, :64], weight, target).backward()
    assert all(p.grad.shape == p.shape for p in (*net.parameters(), weight))
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_what_is_exported_is_torchs_own(training):
    net, x = network().train(training), torch.randn(4, 64)
    plain = torch.export.export(net, (x,))
    er.convert(net, activations=True)
    random = torch.get_rng_state()
    exported = torch.export.export(net, (x,))
    assert torch.equal(torch.get_rng_state(), random)
    ops = [[node.target for node in made.graph.nodes] for made in (exported, plain)]
    assert ops[0] == ops[1]
    if not training:
        er.nn.fp8(net)
        assert torch.equal(torch.export.export(net, (x,)).module()(x), net(x))


def test_what_works_in_place_is_left_to_torch_and_named():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.drop = nn.SiLU(inplace=True), nn.Dropout(0.5, inplace=True)

        def forward(self, x):
            h = x * 1
            self.act(h)
            self.drop(h)
            return h

    def result(net):
        torch.manual_seed(0)
        x = torch.linspace(-3, 3, 99).requires_grad_()
        y = net(x)
        return y, *torch.autograd.grad(y.sum(), x)

    net = Block()
    plain = result(net)
    report = er.convert(net, activations=True)
    assert str(report).splitlines() == [
        "nothing was replaced",
        "left alone, 1 x SiLU(inplace=True): act",
        "left alone, 1 x Dropout(inplace=True): drop",
    ]
    assert all(map(torch.equal, result(net), plain))
    net.act.inplace = net.drop.inplace = False
    assert len(er.convert(net, activations=True)) == 2
    net.act.inplace = net.drop.inplace = True  # a user may
    assert all(map(torch.equal, result(net), plain))
    assert len(er.nn.revert(net)) == 2


def test_convert_names_what_is_called_like_a_norm_or_an_activation():
    class LlamaRMSNorm(nn.Module):
        pass

    class GELUActivation(nn.Module):
        pass

    class NormedBlock(nn.Module):  # a norm inside it is seen itself
        def __init__(self):
            super().__init__()
            self.norm, self.act = LlamaRMSNorm(), GELUActivation()

    net = nn.Sequential(*(NormedBlock() for _ in range(6)), nn.BatchNorm1d(4), LlamaRMSNorm())
    report = er.convert(net, activations=True, keep=["0"])
    assert str(report).splitlines() == [
        "nothing was replaced",
        "left alone, 6 x LlamaRMSNorm: 1.norm, 2.norm, 3.norm, 3 more",
        "left alone, 5 x GELUActivation: 1.act, 2.act, 3.act, 2 more",
    ]
    assert {kind for _, kind in er.convert(net).left} == {"LlamaRMSNorm"}
    assert not er.nn.revert(net).left
    assert str(er.convert(LlamaRMSNorm())).endswith("1 x LlamaRMSNorm: the model itself")


@pytest.mark.parametrize("policy", ["exact", "coat", "dither"])
def test_converted_models_work_under_saving_and_fit(policy):
    net = network().train()
    er.convert(net, activations=True)
    x = torch.randn(256, 64)

    def gradient(context):
        torch.manual_seed(3)
        with context as saved:
            loss = net(x).square().mean()
        return torch.autograd.grad(loss, list(net.parameters())), saved.ledger

    plain, _ = gradient(er.saving("keep", min_nbytes=0))
    found, ledger = gradient(er.saving(policy, min_nbytes=0, seed=0))
    assert not [r for r in ledger.rows if "uint8" in r.dtype and r.action not in ("keep",)]
    if policy == "exact":
        assert all(map(torch.equal, found, plain))
    assert all(relative(a, b) < 0.3 for a, b in zip(found, plain, strict=True))


def test_a_converted_model_is_fitted():
    net = network().train()
    er.convert(net, activations=True)
    er.nn.fp8(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    er.fit(net, budget="1 GiB", optimizer=optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(64, 64)).square().mean().backward()
        optimizer.step()
    er.release(net)
    assert all(p.grad.isfinite().all() for p in net.parameters())
