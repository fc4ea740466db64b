"""Inputs of norms are normalized before they are encoded: no channel drowns another."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elbowroom as er
from elbowroom.codecs import Facts
from elbowroom.plan import Encode, Keep, Need
from elbowroom.runtime.normal import Statistics
from programs import looking


def network(layout, spread, offset=0.0):
    torch.manual_seed(0)
    if layout == "1d":
        model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
        x = torch.randn(128, 32)
    else:
        conv = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
        model = nn.Sequential(conv, nn.Flatten(), nn.Linear(64 * 100, 4))
        x = torch.randn(8, 3, 12, 12)
        if layout == "channels_last":
            model, x = (
                model.to(memory_format=torch.channels_last),
                x.contiguous(memory_format=torch.channels_last),
            )
    first = model[0] if layout == "1d" else model[0][0]
    with torch.no_grad():
        first.weight[:8] *= spread
        first.bias += offset * torch.randn(64)
    return model, x


def error(model, x, **settings):
    """The relative error of the gradient of the first eight channels, which are the small ones."""
    first = model[0] if isinstance(model[0], nn.Linear) else model[0][0]

    def gradient(context=None):
        model.zero_grad()
        if context is None:
            loss = F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long))
        else:
            with context:
                loss = F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long))
        loss.backward()
        return first.weight.grad[:8].clone()

    exact = gradient()
    saved = er.saving("dither", min_nbytes=0, seed=1, **settings)
    lossy = gradient(saved)
    return float((lossy - exact).square().sum() / exact.square().sum()), saved.ledger


@pytest.mark.parametrize("layout", ["1d", "nchw", "channels_last"])
@pytest.mark.parametrize("spread", [0.1, 0.01, 0.001])
def test_small_channels_are_not_drowned(layout, spread):
    even, _ = error(*network(layout, 1.0), bits=4)
    uneven, _ = error(*network(layout, spread), bits=4)
    assert uneven < 2 * even


@pytest.mark.parametrize("layout", ["1d", "nchw", "channels_last"])
def test_channels_with_far_means_are_not_drowned(layout):
    even, _ = error(*network(layout, 1.0), bits=4)
    far, ledger = error(*network(layout, 1.0, offset=100.0), bits=4)
    assert far < 2 * even
    assert ("batch_norm", "dither") in {(row.consumer, row.action) for row in ledger.rows}


NORMS = {
    "batch_norm": lambda: nn.BatchNorm2d(16),
    "batch_norm, eval": lambda: nn.BatchNorm2d(16).eval(),
    "instance_norm": lambda: nn.InstanceNorm2d(16, affine=True),
    "layer_norm": lambda: nn.LayerNorm((16, 10, 10)),
    "group_norm": lambda: nn.GroupNorm(4, 16),
}


def held(norm, x, codec="dither", **fields):
    """What backward is given for the norm's input, its ledger, and the exact input."""
    y = x * 1.0  # the norm's input has a graph, and nobody else holds it
    exact = y.detach().clone()
    with er.saving(codec, min_nbytes=0, seed=1, **fields) as saved:
        z = norm(y)
    del y
    return saved_input(z), saved.ledger, exact


def saved_input(z):
    node = z.grad_fn
    while not hasattr(node, "_saved_input") and not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]  # instance norm reshapes around its batch norm
    saved = node._saved_input if hasattr(node, "_saved_input") else node.saved_tensors[0]
    return saved.view(z.shape)


def scattered():
    """Samples and channels of very different scale and mean."""
    torch.manual_seed(0)
    spread = 10 ** torch.linspace(-3, 3, 16).view(1, 16, 1, 1)
    return (torch.randn(4, 16, 10, 10) * spread + 5 * spread).requires_grad_()


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("codec", ["dither", "group"])
def test_the_error_follows_the_scale_that_the_norm_divides_by(name, codec):
    norm, x = NORMS[name](), scattered()
    if "eval" in name:
        norm.running_mean.copy_(x.detach().mean(dim=(0, 2, 3)))
        norm.running_var.copy_(x.detach().var(dim=(0, 2, 3)))
    decoded, ledger, exact = held(norm, x, codec, bits=4)
    assert ("batch_norm" if "batch" in name else name, codec) in {
        (row.consumer, row.action) for row in ledger.rows
    }
    dims = {"instance_norm": (2, 3), "layer_norm": (1, 2, 3), "group_norm": (2, 3)}
    shape = (4, 4, 4, 100) if name == "group_norm" else exact.shape
    of = dims.get(name, (0, 2, 3))
    error, spread = (decoded - exact).view(shape), exact.view(shape).std(dim=of, keepdim=True)
    normalized = (error / spread).square().mean(dim=of)
    assert normalized.max() < 0.5  # groups span several samples and channels of 5 sigma and more
    assert normalized.mean() < 0.1


def test_zeros_that_matter_stay_zeros():
    norm, x = nn.BatchNorm2d(16), scattered()
    with er.saving("dither", min_nbytes=0, seed=1, bits=4) as saved:
        y = F.relu(x - 5 * x.detach().std())
        exact = y.detach().clone()
        z = norm(y)
    del y
    decoded = saved_input(z)
    assert {"dither"} == {row.action for row in saved.ledger.rows if row.before_nbytes > 20_000}
    assert torch.equal(decoded != 0, exact != 0)
    spread = exact.amax(dim=(0, 2, 3), keepdim=True).clamp_min(1e-30)
    assert ((decoded - exact) / spread).square().mean() < 0.01


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_cannot_be_normalized_is_held_as_it_is(bad):
    x = scattered()
    with torch.no_grad():
        x[0, 0, 0, 0] = bad
    decoded, ledger, exact = held(nn.BatchNorm2d(16), x)
    assert ("batch_norm", "raw") in {(row.consumer, row.action) for row in ledger.rows}
    assert torch.equal(decoded.nan_to_num(7), exact.nan_to_num(7))


def test_tightening_later_normalizes_too():
    norm, x = nn.BatchNorm2d(16), scattered()
    saving = looking("keep", min_nbytes=0)
    with saving:
        y = x * 1.0
        exact = y.detach().clone()
        z = norm(y)
        del y
        saving.tighten(er.saving("dither", bits=4).policy)
    decoded = saved_input(z)
    assert not torch.equal(decoded, exact)
    spread = exact.std(dim=(0, 2, 3), keepdim=True)
    assert ((decoded - exact) / spread).square().mean(dim=(0, 2, 3)).max() < 0.1


def test_a_bound_in_units_of_x_is_kept_in_units_of_x():
    x, codec, facts = scattered(), er.codec("comet"), Facts(error_bound=0.01)
    decoded, ledger, exact = held(nn.BatchNorm2d(16), x, lambda site: bounded(site, codec, facts))
    assert ("batch_norm", "comet") in {(row.consumer, row.action) for row in ledger.rows}
    assert (decoded.double() - exact.double()).abs().max() <= 0.01


def bounded(site, codec, facts):
    return Encode(codec, facts) if site.need is Need.LOSSY else Keep("exact")


def rows_of(norm: str) -> tuple[nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """A norm, an input whose elements it normalizes apart differ 100-fold, and how it is called."""
    torch.manual_seed(0)
    each = torch.logspace(-2, 0, 96)
    if norm == "layer_norm of transposed":  # (batch, channels, time), time by time
        return nn.LayerNorm(64), torch.randn(16, 64, 96) * each, lambda x: x.transpose(1, 2)
    if norm == "layer_norm of swapped":  # (time, batch, channels), row by row
        x = torch.randn(96, 4, 24) * each.view(96, 1, 1)
        return nn.LayerNorm(24), x, lambda x: x.transpose(0, 1)
    if norm == "layer_norm of permuted":  # (N, C, H, W), place by place
        x = torch.randn(4, 40, 8, 12) * each.view(8, 12)
        return nn.LayerNorm(40), x, lambda x: x.permute(0, 2, 3, 1)
    x = torch.randn(4, 96, 7, 9) * each.view(96, 1, 1)
    x = x.to(memory_format=torch.channels_last)
    if norm == "instance_norm in channels_last":
        return nn.InstanceNorm2d(96, affine=True), x, lambda x: x
    return nn.GroupNorm(24, 96), x, lambda x: x


@pytest.mark.parametrize(
    "norm",
    [
        *("layer_norm of transposed", "layer_norm of swapped", "layer_norm of permuted"),
        *("instance_norm in channels_last", "group_norm in channels_last"),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "codec"),
    [(torch.float32, "dither"), (torch.bfloat16, "dither"), (torch.float32, "group")],
)
def test_small_rows_are_not_drowned_in_any_layout(norm, dtype, codec):
    layer, x, seen = rows_of(norm)
    layer, x = layer.to(dtype), x.to(dtype)
    grad = torch.randn(seen(x).shape, dtype=dtype)

    def gradient(context):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        with context:
            out = layer(seen(leaf * 1))
        out.backward(grad)
        return leaf.grad.double()

    exact = gradient(nullcontext())
    saved = er.saving(codec, bits=4, min_nbytes=0, seed=1)
    lossy = gradient(saved)
    assert saved.ledger.after_nbytes < 0.4 * saved.ledger.before_nbytes
    # Each of the elements that differ in scale has a gradient as large as it is small.
    assert (lossy - exact).square().sum() < 0.01 * exact.square().sum()


def test_a_layout_without_order_is_kept():
    """Its statistics alternate three times with what they are the same for."""
    x = torch.randn(4, 6, 5, 8, 3, requires_grad=True)
    with er.saving("dither", bits=2, min_nbytes=0) as saved:
        F.layer_norm((x * 1).permute(0, 2, 4, 1, 3), (6, 8))
    assert "the input of a norm, in no order that is known" in str(saved.ledger)


@pytest.mark.parametrize("kind", ["layer", "two dimensions", "no weight", "batch", "batch, ReLU"])
def test_the_output_of_a_norm_is_decoded_from_its_normalized_input(kind, monkeypatch, one_thread):
    """By the norm's own weight and bias, in one pass: the code is not turned into its input."""
    torch.manual_seed(0)
    norm: nn.Module = {
        "layer": nn.LayerNorm(32),
        "two dimensions": nn.LayerNorm((4, 8)),
        "no weight": nn.LayerNorm(32, elementwise_affine=False),
    }.get(kind, nn.BatchNorm1d(32))
    with torch.no_grad():
        for p in norm.parameters():
            p.copy_(torch.randn(p.shape) + 1)
    # A bias before a batch norm has a gradient of zero.
    parts: list[nn.Module] = [nn.Linear(32, 32, bias=False), norm, nn.Linear(32, 4)]
    if kind == "two dimensions":
        parts[1:2] = [nn.Unflatten(1, (4, 8)), norm, nn.Flatten()]
    if kind == "batch, ReLU":
        parts.insert(2, nn.ReLU())
    model, x = nn.Sequential(*parts), torch.randn(64, 32)
    model(x).square().mean().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    undone = []
    undo = Statistics.undo
    monkeypatch.setattr(Statistics, "undo", lambda *a, **b: undone.append(1) or undo(*a, **b))
    for _ in range(3):  # examined, then replayed
        model.zero_grad()
        with er.saving("dither", levels=256, min_nbytes=0) as saved:
            loss = model(x).square().mean()
        assert "rebuild" in saved.ledger.totals("action")
        loss.backward()
        for p, right in zip(model.parameters(), plain, strict=True):
            assert (p.grad - right).norm() <= 0.02 * right.norm() + 1e-6
    assert not undone


@pytest.mark.parametrize("offset", [0.0, 30.0, 300.0])
def test_a_batch_norm_behind_a_layer_whose_input_has_an_offset(offset):
    """The layer multiplies the sum of its gradient over the batch by it: torch's sum is 0."""

    def gradients(context):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
        x = torch.randn(128, 64) + offset
        with context:
            loss = net(x).square().sum()
        loss.backward()
        return net[0].weight.grad

    exact = gradients(nullcontext())
    coded = gradients(er.saving("dither", levels=16, seed=2, min_nbytes=1024))
    assert (coded - exact).square().sum() / exact.square().sum() < 0.05
