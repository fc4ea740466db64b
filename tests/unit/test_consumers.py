"""Which op saves, what its backward needs of each tensor, and what is known of the values."""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elbowroom as er
from elbowroom.codecs import Facts
from elbowroom.plan import Exact, Need, Rebuildable
from elbowroom.plan.site import Formula


def sites_of(forward, *shape, dtype=torch.float32, rebuild=False):
    """{consumer: sites} of what `forward(h)` saves, and h."""
    torch.manual_seed(0)
    seen = {}

    def policy(site):
        seen.setdefault(site.consumer, []).append(site)
        return Exact(rebuild=False)(site)

    x = torch.randn(*(shape or (6, 6)), requires_grad=True)
    with er.saving(policy, min_nbytes=0):
        forward((x * torch.randn(x.shape)).to(dtype))
    return seen


def needs_of(forward, *shape, **kwargs):
    found = sites_of(forward, *shape, **kwargs)
    return {consumer: [site.need for site in sites] for consumer, sites in found.items()}


W = nn.Parameter(torch.randn(6, 6))
KERNEL = nn.Parameter(torch.randn(4, 4, 3, 3))
TOLERANT = {
    "linear": lambda h: F.linear(h, W),
    "conv2d": lambda h: F.conv2d(h.view(1, 4, 3, 3), KERNEL),
    "conv_transpose2d": lambda h: F.conv_transpose2d(h.view(1, 4, 3, 3), KERNEL),
    "__matmul__": lambda h: h @ W,
    "matmul": lambda h: torch.matmul(W, h),
    "mm": lambda h: h.mm(W),
    "bmm": lambda h: torch.bmm(h[None], W[None]),
    "addmm": lambda h: torch.addmm(W, h, W),
    "baddbmm": lambda h: torch.baddbmm(W[None], h[None], W[None]),
    "batch_norm": lambda h: F.batch_norm(h, None, None, training=True),
    "layer_norm": lambda h: F.layer_norm(h, (6,)),
    "group_norm": lambda h: F.group_norm(h, 2),
    "instance_norm": lambda h: F.instance_norm(h.view(1, 6, 6)),
    "gelu": F.gelu,
    "silu": F.silu,
}


@pytest.mark.parametrize("name", TOLERANT)
def test_known_consumers_tolerate_errors_in_their_data(name):
    shape = (36,) if "conv" in name else (6, 6)
    needs = needs_of(TOLERANT[name], *shape)
    assert needs.keys() & {name, name.strip("_")}
    assert Need.LOSSY in needs.get(name, needs.get(name.strip("_")))
    assert not any(Need.MASK in asked for asked in needs.values())


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "forward",
    [
        lambda h: F.linear(h.view(2, 3, 6), W),
        lambda h: F.linear(h, W, W[0]),
        lambda h: h.view(2, 3, 6) @ W,
        lambda h: h.view(1, 6, 6) @ W,
        lambda h: h.view(3, 2, 6).transpose(0, 1) @ h.view(3, 2, 6).transpose(0, 1).mT,
        lambda h: F.linear(h.t(), W),
    ],
)
def test_data_are_known_through_casts_and_reshapes(forward, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        needs = needs_of(forward)
    found = [
        need
        for name, each in needs.items()
        if name in ("linear", "__matmul__", "matmul")
        for need in each
    ]
    assert found
    assert set(found) == {Need.LOSSY}


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (lambda h: F.relu(h), "relu"),
        (lambda h: h.relu(), "relu"),
        (lambda h: h.relu_(), "relu_"),
        (lambda h: torch.relu(h), "relu"),
        (lambda h: F.relu(h, inplace=True), "relu"),
        (lambda h: nn.ReLU()(h), "relu"),
        (lambda h: F.leaky_relu(h), "leaky_relu"),
        (lambda h: F.leaky_relu(h, inplace=True), "leaky_relu"),
        (lambda h: F.relu6(h), "relu6"),
        (lambda h: F.relu6(h, inplace=True), "relu6"),
        (lambda h: nn.ReLU6()(h), "hardtanh"),
        (lambda h: F.hardtanh(h, max_val=6, min_val=0, inplace=True), "hardtanh"),
    ],
)
def test_masks(forward, name):
    assert needs_of(forward)[name] == [Need.MASK]


@pytest.mark.parametrize("limits", [(-1.0, 1.0), (0.0, 1.0), (-6.0, 6.0)])
def test_of_hardtanh_only_relu6_is_a_mask(limits):
    assert needs_of(lambda h: F.hardtanh(h, *limits))["hardtanh"] == [Need.EXACT]


@pytest.mark.parametrize(
    "forward",
    [
        lambda h: h.log(),
        lambda h: h / W,
        lambda h: h.atan2(W),
        lambda h: h.sqrt(),
        lambda h: h.abs(),
        lambda h: h.clamp(-1, 1),
        lambda h: h.cumprod(-1),
        lambda h: torch.maximum(h, W),
    ],
)
def test_unknown_consumers_need_every_bit(forward):
    needs = needs_of(forward)
    needs.pop("mul", None)  # our own first step
    assert needs
    assert {need for asked in needs.values() for need in asked} == {Need.EXACT}


@pytest.mark.parametrize(
    ("forward", "formula"),
    [
        (lambda h: h.softmax(-1), Formula.PROBABILITY),
        (lambda h: h.log_softmax(-1), Formula.LOG_PROBABILITY),
        (lambda h: h.tanh(), Formula.CURVED),
        (lambda h: F.elu(h), Formula.CURVED),
        (lambda h: h**3, Formula.CURVED),
        (lambda h: h.exp(), Formula.PROBABILITY),
        (lambda h: F.mse_loss(h, W.detach()), Formula.DIFFERENCE),
        (lambda h: torch.einsum("ij,jk->ik", h, W), Formula.SUMMED),
        (lambda h: torch.matmul(h, W), Formula.SUMMED),
        (lambda h: torch.matmul(h, h.T), Formula.MATRIX),
        (lambda h: torch.bmm(h[None], W[None]), Formula.SUMMED),
        (lambda h: torch.bmm(h.view(2, 3, 6), W.expand(2, 6, 6)), Formula.MATRIX),
        (lambda h: F.avg_pool1d(h[None], 2), Formula.SHAPE),
    ],
)
def test_nodes_tell_by_their_formulas(forward, formula):
    sites = [site for name, each in sites_of(forward).items() if name != "mul" for site in each]
    assert formula in {site.formula for site in sites}
    tolerant = [site.formula.tolerates_errors for site in sites]
    assert tolerant == [site.need is Need.LOSSY for site in sites]


@pytest.mark.parametrize("exponent", [W, W[0], torch.tensor(2.0), nn.Parameter(torch.tensor(3.0))])
@pytest.mark.parametrize("power", [torch.pow, lambda h, y: h**y, lambda h, y: h.pow(exponent=y)])
def test_a_power_with_a_tensor_for_exponent_needs_every_bit(power, exponent):
    def gradient(context):
        x = torch.linspace(0.1, 2.0, 36).view(6, 6).requires_grad_()
        with context:
            y = power(x, exponent.detach().requires_grad_())
        y.sum().backward()
        return x.grad

    assert torch.equal(
        gradient(er.saving("coat", min_nbytes=0)), gradient(contextlib.nullcontext())
    )


def test_a_custom_function_needs_every_bit():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad * ctx.saved_tensors[0]

    sites = sites_of(lambda h: Square.apply(h))
    assert [(s.need, s.why) for s in sites[""]] == [
        (Need.EXACT, "saved by an autograd.Function, or by an op that Python did not call")
    ]


def test_weights_and_statistics_need_every_bit():
    sites = sites_of(lambda h: F.layer_norm(h, (6,)))["layer_norm"]
    assert [site.need for site in sites] == [Need.LOSSY, Need.EXACT, Need.EXACT]
    assert {site.why for site in sites[1:]} == {"a weight or statistic of 'layer_norm'"}


def test_a_weight_made_of_data_needs_every_bit():
    """A hypernetwork: the weight comes from the node that gives the input, too."""
    needs = needs_of(lambda h: F.linear(*[part * 1 for part in h.unbind(0)]), 2, 6, 6)["linear"]
    assert sorted(need.value for need in needs) == ["exact", "lossy"]


def test_integers_are_never_lossy():
    needs = needs_of(lambda h: F.embedding(torch.tensor([1, 2]), h))
    assert set(needs.pop("embedding", [Need.EXACT])) == {Need.EXACT}


# --- Facts


@pytest.mark.parametrize(
    ("forward", "largest"),
    [
        (lambda h: F.max_pool2d(h.view(1, 1, 8, 8), 2), 63),
        (lambda h: F.max_pool1d(h.view(1, 4, 16), 2), 15),
        (lambda h: F.max_pool3d(h.view(1, 1, 4, 4, 4), 2), 63),
        (lambda h: F.adaptive_max_pool2d(h.view(1, 1, 8, 8), 2), 63),
        (lambda h: F.max_pool2d(h.view(1, 8, 8), 2, return_indices=True), 63),
        (lambda h: F.max_pool2d(h.view(1, 1, 8, 8), 3, padding=1), 63),
    ],
)
def test_pooling_knows_the_range_of_its_indices(forward, largest):
    sites = [s for each in sites_of(forward, 64).values() for s in each if s.dtype is torch.int64]
    assert sites
    for site in sites:
        assert (site.facts.smallest, site.facts.largest) in ((0, largest), (0, 15))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1 / 3])
def test_dropout_knows_the_bits_of_its_factor(p, dtype):
    saved = []
    x = torch.randn(4000, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t) or t.detach(), lambda t: t
    ):
        F.dropout(x * 1, p)
    (site,) = sites_of(lambda h: F.dropout(h, p), dtype=dtype)["dropout"]
    values = set(saved[0].double().unique().tolist())
    assert values <= {0.0, float(torch.tensor(site.facts.value, dtype=dtype).double())}


def test_what_comes_from_relu_has_zeros():
    for forward in (F.relu, lambda h: F.dropout(F.relu(h), 0.5), lambda h: h.relu_()):
        (site,) = sites_of(lambda h, f=forward: F.linear(f(h), W))["linear"]
        assert replace(site.facts, sequence=None) == Facts(has_zeros=True)
        assert site.producer in ("relu", "relu_", "dropout")
    for forward in (F.gelu, lambda h: F.relu(h) - 1, lambda h: F.relu(h).sub_(1)):
        sites = sites_of(lambda h, f=forward: F.linear(f(h), W))["linear"]
        assert not sites[0].facts.has_zeros


def test_zeros_of_a_part_are_not_zeros_of_the_whole():
    def forward(h):
        F.relu(h[:3], inplace=True)
        return F.linear(h, W)

    assert not sites_of(forward)["linear"][0].facts.has_zeros


# --- What can be rebuilt


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda h: F.gelu(h), Rebuildable.EXACT),
        (lambda h: F.silu(h), Rebuildable.EXACT),
        (lambda h: F.layer_norm(h, (6,)), Rebuildable.EXACT),
        (lambda h: F.batch_norm(h, None, None, training=True), Rebuildable.EXACT),
        (lambda h: F.relu(F.layer_norm(h, (6,))), Rebuildable.EXACT),
        (lambda h: F.dropout(F.gelu(h), 0.5), Rebuildable.EXACT),
        (lambda h: F.gelu(h).view(36).view(6, 6), Rebuildable.EXACT),
        (lambda h: F.gelu(h.t()), Rebuildable.EXACT),
        (lambda h: F.gelu(h) + 1, Rebuildable.EXACT),
        (lambda h: 2 * F.gelu(h) + h, Rebuildable.EXACT),
        (lambda h: F.gelu(h).cumsum(-1), Rebuildable.NO),
        (lambda h: F.gelu(h).mul_(2), Rebuildable.NO),
        (lambda h: F.relu(h), Rebuildable.NO),  # nobody holds what it came from
        (lambda h: F.dropout(F.gelu(h), 0.0), Rebuildable.EXACT),
        (lambda h: F.dropout(F.gelu(h), 0.5, training=False), Rebuildable.EXACT),
        (lambda h: F.gelu(h)[:5].repeat(2, 1)[:6], Rebuildable.NO),
        (lambda h: F.gelu(h).cumsum(-1)[:5].repeat(2, 1)[:6], Rebuildable.NO),
    ],
)
def test_what_can_be_rebuilt(forward, expected):
    sites = [
        s for s in sites_of(lambda h: F.linear(forward(h), W))["linear"] if s.need is Need.LOSSY
    ]
    assert sites[0].rebuildable is expected


def test_modules_are_named():
    net = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.GELU(), nn.Linear(6, 6)), nn.Softmax(-1))
    sites = [s for each in sites_of(net).values() for s in each]
    assert {site.module for site in sites} >= {"0", "1.0", "1.1", "2"}
