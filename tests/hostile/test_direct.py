"""Ops whose backward works on what is held: torch's own gradient, whatever comes their way."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.errors import RestoreError
from elbowroom.runtime import direct as table
from elbowroom.runtime.replay.saving_context import forget_all
from elbowroom.runtime.slot import View

LEVELS = {"levels": 16, "min_nbytes": 0, "seed": 5}


@pytest.fixture
def by_restoring(monkeypatch):
    """Nothing is direct any more."""

    def switch() -> None:
        monkeypatch.setattr(table, "_OPS", {})
        forget_all()

    return switch


def drawn(*shape: int, seed: int = 0, **kind) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(**kind)


# --- relu ---

RELUS = {
    "functional": F.relu,
    "in place": lambda x: F.relu(x, inplace=True),
    "torch": torch.relu,
    "torch in place": torch.relu_,
    "method": lambda x: x.relu(),
    "method in place": lambda x: x.relu_(),
    "module": nn.ReLU(),
    "module in place": nn.ReLU(inplace=True),
    "keyword": lambda x: F.relu(input=x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("way", RELUS)
def test_relu_gives_the_bits_of_torch_and_restores_nothing(way, dtype, restored):
    x = drawn(3, 4, 10, 10, dtype=dtype)
    x[0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), 0.0, -0.0])
    grad = drawn(3, 4, 10, 10, seed=1, dtype=dtype)
    grad[0, 0, 0], grad[0, 0, 1, :3] = -0.0, torch.tensor([float("nan"), float("inf"), -1.0])

    def gradient(context) -> Tensor:
        leaf = x.clone().requires_grad_()
        with context:
            out = RELUS[way](leaf * 1)
        out.backward(grad)
        assert leaf.grad is not None
        return leaf.grad

    expected = gradient(nullcontext())
    got = gradient(er.saving(min_nbytes=0))
    assert not restored
    assert got.isnan().equal(expected.isnan())
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    assert got.nan_to_num().view(words).equal(expected.nan_to_num().view(words))  # signs of zeros


def test_relu_in_channels_last(restored):
    x = drawn(3, 8, 10, 10).to(memory_format=torch.channels_last)
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with er.saving(min_nbytes=0):
        out = F.relu(leaf * 1)
    out.backward(torch.ones_like(out))
    assert not restored
    assert leaf.grad.equal((x > 0).float())
    assert leaf.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", ["expanded", "transposed", "sliced"])
def test_relu_under_a_gradient_of_another_layout(shape, restored):
    leaf = drawn(6, 6).requires_grad_()
    grad = {
        "expanded": torch.ones(1).expand(6, 6),
        "transposed": drawn(6, 6, seed=2).T,
        "sliced": drawn(6, 12, seed=2)[:, ::2],
    }[shape]
    with er.saving(min_nbytes=0):
        out = F.relu(leaf * 1)
    out.backward(grad)
    assert leaf.grad.equal(torch.where(leaf > 0, grad, 0.0))
    assert restored  # it was done the other way


def test_relu_that_changes_a_part_of_a_tensor():
    leaf = drawn(6, 6).requires_grad_()

    def gradient(context) -> Tensor:
        leaf.grad = None
        with context:
            whole = leaf * 1
            F.relu(whole[:, 2:4], inplace=True)
            loss = (whole * whole).sum()
        loss.backward()
        return leaf.grad.clone()

    assert gradient(er.saving(min_nbytes=0)).equal(gradient(nullcontext()))


def test_relu_of_a_leaf_in_place_is_torchs_error():
    leaf = drawn(6, 6).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable"), er.saving(min_nbytes=0):
        torch.relu_(leaf)


def test_a_changed_output_of_relu_does_not_change_its_gradient():
    """torch refuses it; the bits stand for what was saved."""
    leaf = drawn(6, 6).requires_grad_()
    with er.saving(min_nbytes=0):
        out = F.relu(leaf * 1)
        out.mul_(-1)
    out.sum().backward()
    assert leaf.grad.equal(-(leaf > 0).float())


# --- batch norm ---


def normed(x: Tensor, norm: nn.Module, context, grad: Tensor | None = None) -> list[Tensor]:
    """The gradients of x, weight, bias."""
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    norm.zero_grad()
    with context:
        out = norm(leaf * 1)
    out.backward(drawn(*x.shape, seed=3, dtype=x.dtype).to(out) if grad is None else grad)
    return [leaf.grad, *(p.grad for p in norm.parameters())]


SHAPES = {
    "1-D": ((40, 6), nn.BatchNorm1d),
    "1-D maps": ((5, 6, 30), nn.BatchNorm1d),
    "2-D": ((5, 6, 11, 13), nn.BatchNorm2d),
    "2-D channels last": ((5, 6, 11, 13), nn.BatchNorm2d),
    "3-D": ((3, 6, 5, 6, 7), nn.BatchNorm3d),
}


@pytest.fixture
def centred(monkeypatch):
    """What is restored of a batch norm's input has the mean of the input in each channel."""

    def switch(x: Tensor) -> None:
        restore, over = View.restore, (0, *range(2, x.dim()))

        def centring(view: View) -> Tensor:
            found = restore(view)
            if found.shape != x.shape:
                return found
            means = (one.double().mean(over, keepdim=True) for one in (found, x))
            return (found - next(means) + next(means)).to(found.dtype)

        monkeypatch.setattr(View, "restore", centring)

    return switch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_batch_norm_on_the_code_is_batch_norm_on_the_restored(
    name, dtype, restored, by_restoring, centred
):
    shape, kind = SHAPES[name]
    norm = kind(6)  # weights in float32, whatever the input is
    nn.init.uniform_(norm.weight, 0.5, 2)
    x = (drawn(*shape) * 3 + 1).to(dtype)
    if "last" in name:
        x = x.to(memory_format=torch.channels_last)
    grad = torch.empty_like(x).copy_(drawn(*shape, seed=3))
    found = normed(x, norm, er.saving("dither", **LEVELS), grad)
    assert tuple(shape) not in restored
    running = norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.clone()
    by_restoring()
    centred(x)
    norm.reset_running_stats()
    expected = normed(x, norm, er.saving("dither", **LEVELS), grad)
    assert tuple(shape) in restored
    assert all(map(torch.equal, running, norm.buffers()))
    for got, wanted in zip(found, expected, strict=True):
        assert (got.dtype, got.stride()) == (wanted.dtype, wanted.stride())
        torch.testing.assert_close(got, wanted, **tolerance(dtype))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(6), nn.LayerNorm(13)], ids=["batch", "layer"])
@pytest.mark.parametrize(
    ("codec", "fields"),
    [
        ("group", {"bits": 4}),
        ("cast", {"to": "bf16"}),
        ("comet", {"bound": 0.1}),
        ("lean", {}),
        ("division", {"bits": 4}),
        ("fdsr", {}),
    ],
)
def test_any_code_of_a_norms_input_serves(
    codec, fields, norm, layout, restored, by_restoring, centred
):
    """What `fdsr` transforms is not normalized; rows of a layer norm must lie one after another."""
    x = (drawn(5, 6, 11, 13) * 3 + 1).to(memory_format=layout)
    nn.init.uniform_(norm.weight, 0.5, 2)
    grad = torch.empty_like(x).copy_(drawn(*x.shape, seed=3))

    def context():
        return er.saving(codec, **fields, min_nbytes=0, seed=5)

    normed(x, norm, context(), grad)  # while a kernel is compiled, its arguments stay alive
    del restored[:]
    found = normed(x, norm, context(), grad)
    rows = isinstance(norm, nn.BatchNorm2d) or layout is torch.contiguous_format
    assert (tuple(x.shape) in restored) == (codec == "fdsr" or not rows)
    by_restoring()
    if isinstance(norm, nn.BatchNorm2d):
        centred(x)
    for got, wanted in zip(found, normed(x, norm, context(), grad), strict=True):
        assert got.stride() == wanted.stride()
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.03}


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(6, affine=False),
        nn.BatchNorm2d(6, track_running_stats=False),
        nn.BatchNorm2d(6, momentum=None),
        nn.BatchNorm2d(6, eps=0.1, momentum=0.5),
        nn.SyncBatchNorm(6).eval(),
        nn.BatchNorm2d(6).double(),
        nn.BatchNorm2d(6).eval(),
    ],
    ids=["no weights", "no statistics", "cumulative", "other numbers", "sync", "double", "eval"],
)
def test_batch_norm_of_any_kind_is_torchs_in_exact_mode(norm):
    x = drawn(5, 6, 7, 7).to(next(norm.buffers(), torch.zeros(0)).dtype)
    state = [b.clone() for b in norm.buffers()]
    expected = normed(x, norm, nullcontext())
    after = [b.clone() for b in norm.buffers()]
    for buffer, before in zip(norm.buffers(), state, strict=True):
        buffer.copy_(before)
    found = normed(x, norm, er.saving(min_nbytes=0))
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, norm.buffers(), after))
    if not x.dtype.is_floating_point or x.dtype is torch.float64:
        return
    lossy = normed(x, norm, er.saving("dither", levels=256, min_nbytes=0, seed=5))
    for got, wanted in zip(lossy, expected, strict=True):
        assert (got - wanted).norm() < 0.05 * wanted.norm()


def test_one_input_of_two_norms():
    """The code is normalized by the first one's statistics; eps sets the second one's apart."""
    x, norms = drawn(8, 6, 9, 9), [nn.BatchNorm2d(6), nn.BatchNorm2d(6, eps=3.0)]

    def gradients(context) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        for norm in norms:
            norm.zero_grad()
        with context:
            h = leaf * 1
            loss = sum((norm(h) * drawn(*x.shape, seed=i)).sum() for i, norm in enumerate(norms))
        loss.backward()
        return [leaf.grad, *(p.grad for norm in norms for p in norm.parameters())]

    for got, wanted in zip(
        gradients(er.saving("dither", levels=256, min_nbytes=0)),
        gradients(nullcontext()),
        strict=True,
    ):
        assert (got - wanted).norm() < 0.02 * wanted.norm()


def test_an_input_that_is_not_finite():
    x, norm = drawn(5, 6, 7, 7), nn.BatchNorm2d(6)
    x[0, 2, 0, 0] = float("inf")
    expected = normed(x, norm, nullcontext())
    for got, wanted in zip(normed(x, norm, er.saving("dither", **LEVELS)), expected, strict=True):
        assert got.isnan().equal(wanted.isnan())


def test_an_input_that_somebody_holds_is_used_as_it_is(restored):
    x, norm = drawn(5, 6, 7, 7).requires_grad_(), nn.BatchNorm2d(6)
    expected = normed(x.detach(), norm, nullcontext())
    norm.zero_grad()
    with er.saving("dither", **LEVELS):
        held = x * 1
        out = norm(held)
    out.backward(drawn(5, 6, 7, 7, seed=3))
    assert x.grad.equal(expected[0])


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_frozen_parameters(frozen):
    norm = nn.BatchNorm2d(6)
    for name, p in norm.named_parameters():
        p.requires_grad_(frozen not in (name, "both"))
    found = normed(drawn(5, 6, 7, 7), norm, er.saving("dither", levels=256, min_nbytes=0))
    expected = normed(drawn(5, 6, 7, 7), norm, nullcontext())
    for got, wanted in zip(found, expected, strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or (got - wanted).norm() < 0.02 * wanted.norm()


def test_a_changed_weight_is_an_error():
    norm, x = nn.BatchNorm2d(6), drawn(5, 6, 7, 7).requires_grad_()
    with er.saving("dither", **LEVELS):
        out = norm(x * 1)
    with torch.no_grad():
        norm.weight.mul_(2)
    with pytest.raises(RestoreError, match="modified by an inplace operation"):
        out.sum().backward()


def test_one_value_for_a_channel_is_torchs_error():
    with pytest.raises(ValueError, match="more than 1 value"), er.saving(min_nbytes=0):
        nn.BatchNorm1d(4)(drawn(1, 4).requires_grad_())


# --- layer norm ---

LAYERS = {
    "plain": nn.LayerNorm(24),
    "two dimensions": nn.LayerNorm((6, 24)),
    "no weights": nn.LayerNorm(24, elementwise_affine=False),
    "no bias": nn.LayerNorm(24, bias=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_norm_on_the_code_is_layer_norm_on_the_restored(name, dtype, restored, by_restoring):
    norm, x = LAYERS[name].to(dtype), (drawn(50, 6, 24) * 3 + 1).to(dtype)
    for p in norm.parameters():
        nn.init.uniform_(p, 0.5, 2)
    exact = normed(x, norm, nullcontext())
    assert all(map(torch.equal, normed(x, norm, er.saving(min_nbytes=0)), exact))
    del restored[:]
    found = normed(x, norm, er.saving("dither", **LEVELS))
    assert (50, 6, 24) not in restored
    by_restoring()
    expected = normed(x, norm, er.saving("dither", **LEVELS))
    assert (50, 6, 24) in restored
    for got, wanted in zip(found, expected, strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        # In bfloat16 torch's own weight gradient is 1.6 % off that of float32.
        allowed = 1e-5 if dtype is torch.float32 else 0.05
        assert (got - wanted).float().norm() < allowed * wanted.float().norm()


def test_layer_norm_whose_weights_are_plain_tensors():
    """As many rows as columns: no weight may be taken for a statistic."""
    x, weight, bias = drawn(24, 24), drawn(24, seed=1), drawn(24, seed=2)

    def gradient(context) -> Tensor:
        leaf = x.clone().requires_grad_()
        with context:
            out = F.layer_norm(leaf * 1, (24,), weight, bias)
        out.backward(drawn(24, 24, seed=3))
        return leaf.grad

    lossy = gradient(er.saving("dither", levels=256, min_nbytes=0))
    torch.testing.assert_close(lossy, gradient(nullcontext()), rtol=0.1, atol=0.05)


# --- dropout, gelu, silu ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_draws_and_differentiates_as_torchs(inplace, p, dtype, restored):
    x, grad = drawn(40, 50, dtype=dtype), drawn(40, 50, seed=1, dtype=dtype)
    grad[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])

    def both(context) -> tuple[Tensor, Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        torch.manual_seed(3)
        with context:
            out = F.dropout(leaf * 1, p, inplace=inplace)
        out.backward(grad)
        return out.detach(), leaf.grad, torch.rand(1)

    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    expected, found = both(nullcontext()), both(er.saving(min_nbytes=0))
    for got, wanted in zip(found, expected, strict=True):
        assert got.isnan().equal(wanted.isnan())
        bits = words[got.element_size()]
        assert got.nan_to_num().view(bits).equal(wanted.nan_to_num().view(bits))
    if p in (0.1, 0.5) and not inplace and dtype is not torch.float64:
        assert not restored


def test_dropout_in_eval_mode_and_of_nothing():
    x = drawn(4, 5).requires_grad_()
    with er.saving(min_nbytes=0):
        assert nn.Dropout().eval()(x) is x
        empty = F.dropout(torch.zeros(0, 3).requires_grad_() * 1)
        with pytest.raises(ValueError, match="between 0 and 1"):
            F.dropout(x * 1, 1.5)
    empty.sum().backward()


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu module": nn.GELU(),
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x, inplace=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_give_the_bits_of_torch_on_the_restored(name, dtype, restored, by_restoring):
    x, grad = drawn(40, 50, dtype=dtype), drawn(40, 50, seed=1, dtype=dtype)

    def gradient(context) -> Tensor:
        leaf = x.clone().requires_grad_()
        with context:
            h = leaf * 1
            out = ACTIVATIONS[name](h)
            del h
        out.backward(grad)
        return leaf.grad

    exact = gradient(nullcontext())
    assert gradient(er.saving(min_nbytes=0)).equal(exact)
    del restored[:]
    found = gradient(er.saving("dither", **LEVELS))
    assert bool(restored) == (name == "silu in place")
    by_restoring()
    assert found.equal(gradient(er.saving("dither", **LEVELS)))


# --- all together ---


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
    )


def nodes_of(out: Tensor) -> set[str]:
    """The names of all nodes of a graph."""
    seen, waiting = set(), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {node.name() for node in seen}


def gradients(model: nn.Module, context, x: Tensor, **backward) -> list[Tensor]:
    model.zero_grad()
    with context:
        loss = model(x).square().mean()
    loss.backward(**backward)
    return [p.grad.clone() for p in model.parameters()]


def test_twice_through_one_graph():
    model, x = net(), drawn(4, 3, 12, 12)
    with er.saving("dither", **LEVELS):
        loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for p, first in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def transformer() -> nn.Module:
    torch.manual_seed(0)
    mlp = nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 12), nn.SiLU()
    return nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), *mlp)


@pytest.mark.parametrize("kind", [net, transformer])
def test_second_derivatives_are_those_of_torch(kind):
    x = drawn(4, 3, 12, 12)

    def penalty(context) -> list[Tensor]:
        model = kind()
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        with context:
            loss = model(leaf).pow(3).mean()
        (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
        slope.square().sum().backward()
        return [p.grad for p in model.parameters()]

    for got, wanted in zip(penalty(er.saving(min_nbytes=0)), penalty(nullcontext()), strict=True):
        torch.testing.assert_close(got, wanted)


def test_inside_a_checkpoint_torchs_own_ops_run():
    """Checkpointing counts what is saved, and runs forward again outside the context."""
    model, x = net(), drawn(4, 3, 12, 12)

    class Checkpointed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(model, x, use_reentrant=False)

    expected = gradients(model, nullcontext(), x)
    again = Checkpointed()
    model.zero_grad()
    with er.saving(min_nbytes=0):
        loss = again(x).square().mean()
    loss.backward()
    assert all(p.grad.equal(wanted) for p, wanted in zip(model.parameters(), expected, strict=True))


def test_under_hooks_of_somebody_else():
    model, x, seen = net(), drawn(4, 3, 12, 12), []
    with (
        er.saving(min_nbytes=0),
        torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t),
    ):
        loss = model(x).square().mean()
    loss.backward()
    assert seen
    expected = gradients(net(), nullcontext(), x)
    assert all(p.grad.equal(wanted) for p, wanted in zip(model.parameters(), expected, strict=True))


@pytest.mark.filterwarnings("ignore")  # of a tracer that torch has given up
def test_forward_mode_and_vmap_and_tracing():
    x = drawn(5, 6, 7, 7)
    with er.saving(min_nbytes=0), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.clone().requires_grad_(), torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(F.relu(dual * 1)).tangent
    assert tangent.equal((x > 0).float())
    with er.saving(min_nbytes=0):
        assert torch.vmap(F.relu)(x.requires_grad_() * 1).equal(x.relu())
        traced = torch.jit.trace(F.relu, x.detach().requires_grad_() * 1, check_trace=False)
    assert traced(-x).equal((-x).relu())


def test_memory_is_flat_and_what_is_held_dies_with_the_graph():
    import gc
    import weakref

    model, x = net(), drawn(4, 3, 12, 12)
    with er.saving("dither", **LEVELS) as saved:
        out = model(x)
    node = weakref.ref(out.grad_fn)
    assert saved.ledger.held_nbytes > 0
    del out
    gc.collect()
    assert node() is None
    assert saved.ledger.held_nbytes == 0


def test_a_fitted_model_uses_them_and_stays_exact():
    model, x = net(), drawn(16, 3, 40, 40)
    expected = gradients(model, nullcontext(), x)
    plain = er.peak(lambda: gradients(model, nullcontext(), x))
    fitted = er.fit(net(), budget=int(0.95 * plain), exact=True)
    for _ in range(6):
        found = gradients(fitted, nullcontext(), x)
        assert all(map(torch.equal, found, expected))
    assert "_ReLUBackward" in nodes_of(fitted(x))
    er.release(fitted)


# --- what torch refuses, and what others may see ---


@pytest.mark.parametrize("which", ["running_mean", "weight", "bias"])
def test_batch_norm_of_the_wrong_width_is_torchs_error(which):
    """The kernel beneath torch.batch_norm would write beside the buffer."""
    given = dict.fromkeys(("running_mean", "running_var", "weight", "bias")) | {
        which: torch.ones(3)
    }
    if which == "running_mean":
        given["running_var"] = torch.ones(3)
    with pytest.raises(RuntimeError, match="should contain 6 elements"), er.saving(min_nbytes=0):
        F.batch_norm(drawn(4, 6).requires_grad_() * 1, training=True, **given)
    with pytest.raises(ValueError, match="eps"), er.saving(min_nbytes=0):
        F.batch_norm(drawn(4, 6).requires_grad_() * 1, None, None, training=True, eps=0.0)


class Doubled(Tensor):
    """A weight that counts twice in a layer norm."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not F.layer_norm:
            return super().__torch_function__(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*map(doubled, args), **{k: doubled(v) for k, v in (kwargs or {}).items()})


def doubled(value):
    return value.as_subclass(Tensor) * 2 if isinstance(value, Doubled) else value


def test_a_weight_of_a_subclass_keeps_its_own_way():
    x, weight = drawn(6, 8).requires_grad_(), drawn(8, seed=1)
    with er.saving(min_nbytes=0):
        out = F.layer_norm(x * 1, (8,), weight.as_subclass(Doubled))
    torch.testing.assert_close(out.as_subclass(Tensor), F.layer_norm(x, (8,), 2 * weight))


def test_a_function_mode_of_somebody_else_sees_the_call():
    class Tripled(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return args[0] * 3 if func is F.dropout else func(*args, **(kwargs or {}))

    x = drawn(6, 8).requires_grad_()
    with Tripled(), er.saving(min_nbytes=0):
        out = F.dropout(x * 1)
    assert out.equal(3 * x)
    with torch.device("cpu"), er.saving(min_nbytes=0):  # a mode of torch's that changes nothing
        assert type(F.relu(x * 1).grad_fn).__name__ == "_ReLUBackward"


OPS = {
    "relu": F.relu,
    "dropout": lambda x: F.dropout(x, 0.3),
    "gelu": F.gelu,
    "silu": F.silu,
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
}
EVERY_OP = pytest.mark.parametrize("op", OPS)


@EVERY_OP
def test_a_gradient_that_does_not_exist_stays_so(op):
    """Zeros in its place would let weight decay and momentum go on."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    x = drawn(6, 8).requires_grad_()
    with er.saving("dither", **LEVELS):
        loss = Stop.apply(OPS[op](x * 1)).sum()
    loss.backward()
    assert x.grad is None


@EVERY_OP
@pytest.mark.parametrize("policy", [None, "dither"])
def test_batched_gradients(op, policy):
    x, grads = drawn(6, 8).requires_grad_(), drawn(3, 6, 8, seed=1)
    fields = LEVELS if policy else {"min_nbytes": 0}
    torch.manual_seed(2)
    with er.saving(policy, **fields):
        out = OPS[op](x * 1)
    (found,) = torch.autograd.grad(out, x, grads, is_grads_batched=True, retain_graph=True)
    for got, grad in zip(found, grads, strict=True):
        (wanted,) = torch.autograd.grad(out, x, grad, retain_graph=True)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@EVERY_OP
def test_inside_a_map_over_something_else(op):
    h, scales = drawn(6, 8).requires_grad_() * 1, torch.arange(3.0)
    with er.saving(min_nbytes=0):
        mapped = torch.vmap(lambda scale: OPS[op](h) * scale, randomness="same")(scales)
    assert mapped.shape == (3, 6, 8)


def test_the_default_dtype_is_nobodys_business():
    torch.set_default_dtype(torch.float64)
    try:
        x = drawn(16, 8, dtype=torch.float32).requires_grad_()
        with er.saving("dither", levels=256, min_nbytes=0):
            loss = F.layer_norm(x * 1, (8,)).pow(3).sum()
        loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert x.grad.dtype is torch.float32


def test_a_few_long_rows_take_no_more_than_restoring_them():
    x, norm = drawn(4, 1 << 18).requires_grad_(), nn.LayerNorm(1 << 18)

    def peak(context) -> int:
        with context:
            loss = norm(x * 1).sum()
        found = er.peak(loss.backward)
        x.grad = norm.weight.grad = norm.bias.grad = None
        return found

    assert peak(er.saving("dither", levels=4)) <= peak(nullcontext()) + x.nbytes


def test_dropout_by_a_tensor_of_chances_is_torchs():
    x = drawn(6, 80).requires_grad_()

    def kept(context) -> Tensor:
        torch.manual_seed(4)
        with context:
            return F.dropout(x * 1, p=torch.tensor(0.3)) != 0

    assert kept(er.saving(min_nbytes=0)).equal(kept(nullcontext()))


def test_the_node_of_a_batch_norm_has_the_inputs_of_torchs():
    with er.saving(min_nbytes=0):
        out = nn.BatchNorm1d(8)(drawn(6, 8).requires_grad_() * 1)
    assert len(out.grad_fn.next_functions) == 3


def test_a_changed_bias_is_torchs_error():
    norm, x = nn.LayerNorm(8), drawn(6, 8).requires_grad_()
    with er.saving("dither", **LEVELS):
        out = norm(x * 1)
    with torch.no_grad():
        norm.bias.mul_(2)
    with pytest.raises(RestoreError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_norm_is_torchs_own_where_no_code_is_lossy():
    x = torch.randn(8, 16, requires_grad=True)
    with er.saving(min_nbytes=0):
        exact = F.layer_norm(x * 2, (16,))
    with er.saving("dither", levels=16, min_nbytes=0):
        coded = F.layer_norm(x * 2, (16,))
    assert exact.grad_fn.name() == "NativeLayerNormBackward0"
    assert coded.grad_fn.name() == "_LayerNormBackward"
