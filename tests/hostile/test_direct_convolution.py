"""Convolutions whose backward takes a few samples at a time: torch's gradient but for rounding."""

import weakref
from contextlib import nullcontext
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.codecs import PART
from elbowroom.errors import RestoreError
from elbowroom.plan import restored
from elbowroom.plan.restored import samples_at_once, spared, workspace
from elbowroom.plan.site import Reads
from elbowroom.runtime import direct as table
from elbowroom.runtime.replay.saving_context import forget_all

own = import_module("elbowroom.runtime.direct.convolution")  # a function has its name
SETTINGS = {"levels": 16, "min_nbytes": 0, "seed": 5}


@pytest.fixture(autouse=True)
def small_turns(monkeypatch):
    """A turn of 8 KiB: one sample of the cases here, or two."""
    monkeypatch.setattr(restored, "AT_ONCE", 8192)
    monkeypatch.setattr(own, "AT_ONCE", 1 << 20)  # any weight


@pytest.fixture
def turns(monkeypatch) -> list[int]:
    """How many samples each turn took."""
    found: list[int] = []
    get = own._Samples.get

    def noted(taken, first: int, last: int) -> Tensor:
        part = get(taken, first, last)
        found.append(len(part))
        return part

    monkeypatch.setattr(own._Samples, "get", noted)
    return found


def drawn(*shape: int, seed: int = 0, **kind) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(**kind)


def gradients(x: Tensor, net: nn.Module, context, grad: Tensor | None = None) -> list[Tensor]:
    """Of x and of all parameters."""
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    net.zero_grad()
    with context:
        out = net(leaf * 1)
    out.backward(drawn(*out.shape, seed=3, dtype=out.dtype) if grad is None else grad)
    return [leaf.grad, *(p.grad for p in net.parameters())]


def close(found: list[Tensor], expected: list[Tensor], share: float = 1e-5) -> None:
    for got, wanted in zip(found, expected, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            assert (got.dtype, got.shape, got.stride()) == (
                *(wanted.dtype, wanted.shape, wanted.stride()),
            )
            assert (got - wanted).float().norm() <= share * wanted.float().norm()


CASES = {
    "2-D": (nn.Conv2d(8, 6, 3, padding=1), (9, 8, 16, 16)),
    "stride": (nn.Conv2d(8, 6, 3, stride=2, dilation=2, bias=False), (9, 8, 16, 16)),
    "groups": (nn.Conv2d(8, 16, 3, groups=8, padding=(1, 0)), (9, 8, 16, 16)),
    "parts end inside samples": (nn.Conv2d(3, 4, 3), (40, 3, 16, 16)),
    "a last turn that is shorter": (nn.Conv2d(4, 4, 3), (7, 4, 16, 32)),
    "1-D": (nn.Conv1d(8, 6, 3), (9, 8, 256)),
    "3-D": (nn.Conv3d(4, 6, 3), (9, 4, 8, 8, 8)),
    "circular": (nn.Conv2d(8, 6, 3, padding=1, padding_mode="circular"), (9, 8, 14, 14)),
    "channels last": (nn.Conv2d(8, 6, 3), (9, 8, 16, 16)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_in_turns_it_is_what_it_is_at_once(name, dtype, turns, restored, monkeypatch):
    net, shape = CASES[name]
    net, x = net.to(dtype), drawn(*shape, dtype=dtype)
    if name == "channels last":
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    found = gradients(x, net, er.saving("dither", **SETTINGS))
    assert len(turns) > 1
    assert sum(turns) == shape[0]
    assert not restored
    monkeypatch.setattr(table, "_OPS", {})
    forget_all()
    expected = gradients(x, net, er.saving("dither", **SETTINGS))
    assert restored
    close(found, expected, 1e-5 if dtype is torch.float32 else 0.02)


@pytest.mark.parametrize(
    ("net", "shape", "taken"),
    [
        (nn.Conv2d(8, 32, 3, padding=1), (9, 8, 16, 16), [2, 2, 2, 2, 1]),
        (nn.Conv2d(8, 32, 1, bias=False), (9, 8, 16, 16), [2, 2, 2, 2, 1]),
        (nn.Conv2d(8, 64, 2, stride=2, padding=(1, 0), dilation=(2, 1)), (9, 8, 16, 16), [4, 4, 1]),
        (nn.Conv2d(8, 8, 3, padding=1), (9, 8, 16, 16), []),  # a smaller one: at once
        (nn.Conv1d(8, 32, 3, padding=1), (9, 8, 256), [2, 2, 2, 2, 1]),
        (nn.Conv3d(4, 16, 1), (9, 4, 8, 8, 8), [2, 2, 2, 2, 1]),
    ],
)
def test_turns_go_by_a_result_that_is_larger(net, shape, taken, turns, monkeypatch):
    monkeypatch.setattr(restored, "AT_ONCE", 1 << 16)
    x = drawn(*shape)
    found = gradients(x, net, er.saving("dither", **SETTINGS))
    assert turns == taken
    monkeypatch.setattr(table, "_OPS", {})
    forget_all()
    close(found, gradients(x, net, er.saving("dither", **SETTINGS)))


@pytest.mark.parametrize(("samples", "taken"), [(3, []), (4, [2, 2]), (7, [2, 2, 3])])
def test_no_turn_of_3d_maps_goes_through_the_kernel_that_writes_windows_out(samples, taken, turns):
    """One sample alone would: its backward took 61 MiB where that of the two took 10."""
    net, x = nn.Conv3d(16, 8, 3, padding=1), drawn(samples, 16, 8, 8, 8)
    found = gradients(x, net, er.saving("dither", **SETTINGS))
    assert turns == taken
    close(found, gradients(x, net, er.saving("keep")), 0.1)


@pytest.mark.parametrize("wrong", [{"stride": ()}, {"padding": (1, 1, 1)}, {"stride": 0}])
def test_sizes_that_torch_refuses_are_refused_by_torch(wrong):
    x, weight = drawn(9, 8, 16, 16).requires_grad_(), drawn(32, 8, 3, 3).requires_grad_()
    with pytest.raises(RuntimeError):
        F.conv2d(x * 1, weight, **wrong)
    with pytest.raises(RuntimeError), er.saving("dither", **SETTINGS):
        F.conv2d(x * 1, weight, **wrong)


def test_a_plan_counts_what_these_turns_spare(monkeypatch, tmp_path):
    monkeypatch.setattr(restored, "AT_ONCE", 1 << 16)
    net = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32))
    x = drawn(9, 8, 16, 16)
    profile = er.measure(lambda: net(x).square().sum().backward(), min_nbytes=1024)
    (storage,) = (one for one in profile.storages if one.saves[0].site.samples)
    assert storage.saves[0].site.samples == 2
    assert storage.saves[0].site.reads is Reads.SAMPLES
    profile.save(tmp_path / "profile.json")
    assert er.Profile.load(tmp_path / "profile.json").storages == profile.storages
    ((moment, nbytes),) = spared(profile, storage).items()
    expected = 7 / 9 * workspace(profile, storage, moment) - 2 / 9 * storage.nbytes
    assert nbytes == round(expected)


@pytest.mark.parametrize("name", CASES)
def test_in_exact_mode_no_bit_changes(name, turns):
    net, shape = CASES[name]
    net, x = net.float(), drawn(*shape)
    expected = gradients(x, net, nullcontext())
    assert all(map(torch.equal, gradients(x, net, er.saving(min_nbytes=0)), expected))
    assert not turns


def block(*, zeros: bool = True, norm: bool = True, last: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
    ]
    chosen = [layer for layer, used in zip(layers, (True, norm, zeros, True), strict=True) if used]
    net = nn.Sequential(*chosen)
    return net.to(memory_format=torch.channels_last) if last else net


@pytest.mark.parametrize(
    "kind",
    [{}, {"zeros": False}, {"norm": False}, {"last": True}],
    ids=["relu of a norm", "a norm", "relu", "channels last"],
)
@pytest.mark.parametrize("policy", ["dither", "group", "lean"])
def test_what_is_made_again_from_a_code_is_made_in_parts(
    policy, kind, turns, restored, monkeypatch
):
    """Of `dither` and `sided`; from another code it is restored as a whole."""
    net, x = block(**kind), drawn(9, 8, 16, 16)
    if "last" in kind:
        x = x.to(memory_format=torch.channels_last)
    settings = {"dither": {"levels": 16}, "group": {"bits": 4}, "lean": {}}[policy]
    context = er.saving(policy, **settings, min_nbytes=0, seed=5)
    found = gradients(x, net, context)
    assert sum(turns) == 18
    assert policy == "group" or (9, 8, 16, 16) not in restored
    monkeypatch.setattr(table, "_OPS", {F.relu: table._RELU} if "last" in kind else {})
    again = er.saving(policy, **settings, min_nbytes=0, seed=5)
    close(found, gradients(x, net, again), 1e-4)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("act", [nn.ReLU, nn.Identity])
@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True), nn.BatchNorm2d(8)], ids=str
)
def test_samples_of_any_scale_whose_norm_is_made_again_from_what_is_held(norm, act, last, turns):
    """The caller holds its input, so that it is exact; each sample has statistics of its own."""
    conv = nn.Conv2d(8, 6, 3)
    net = nn.Sequential(norm, act(), conv)
    x = drawn(9, 8, 16, 16) * torch.logspace(-1, 1, 9).view(9, 1, 1, 1)
    if last:
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    grads, leaf = [], x.requires_grad_()
    for context in (nullcontext(), er.saving("dither", levels=256, min_nbytes=0)):
        net.zero_grad()
        with context:
            held = leaf * 1
            out = net(held)
        out.backward(drawn(*out.shape, seed=3))
        grads.append([p.grad.clone() for p in net.parameters()])
        del held
    assert turns
    close(grads[1], grads[0], 0.02)


@pytest.mark.parametrize("stride", [np.int64(2), torch.tensor(2), (2, np.int64(2)), [2]])
def test_any_number_that_torch_takes(stride):
    x, weight = drawn(9, 8, 16, 16).requires_grad_(), drawn(6, 8, 3, 3).requires_grad_()
    expected = F.conv2d(x * 1, weight, stride=stride)
    with er.saving("dither", levels=256, min_nbytes=0):
        out = F.conv2d(x * 1, weight, stride=stride)
    assert out.equal(expected)
    out.sum().backward()


def test_one_input_of_two_convolutions(turns):
    torch.manual_seed(0)
    first, second = nn.Conv2d(8, 4, 3), nn.Conv2d(8, 4, 1, stride=2)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.first(x).flatten(1), self.second(x).flatten(1)], 1)

    x = drawn(9, 8, 16, 16)
    found = gradients(x, Both(), er.saving("dither", levels=256, min_nbytes=0))
    assert sum(turns) == 18
    close(found, gradients(x, Both(), nullcontext()), 0.02)


@pytest.mark.parametrize("frozen", ["weight", "bias", "both", "input"])
def test_what_wants_no_gradient_gets_none(frozen):
    net, x = nn.Conv2d(8, 6, 3), drawn(9, 8, 16, 16)
    for name, p in net.named_parameters():
        p.requires_grad_(frozen not in (name, "both"))

    def found(context) -> list[Tensor | None]:
        leaf = x.clone().requires_grad_(frozen != "input")
        net.zero_grad()
        with context:
            out = net(leaf * 1)
        out.sum().backward()
        return [leaf.grad, *(p.grad for p in net.parameters())]

    close(found(er.saving("dither", levels=256, min_nbytes=0)), found(nullcontext()), 0.02)


def test_second_derivatives_are_torchs_on_the_restored():
    x, net = drawn(9, 8, 16, 16), nn.Conv2d(8, 6, 3)

    def second(context) -> Tensor:
        leaf = x.clone().requires_grad_()
        with context:
            out = net(leaf * 1).pow(2).sum()
        (first,) = torch.autograd.grad(out, leaf, create_graph=True)
        (found,) = torch.autograd.grad(first.pow(2).sum(), leaf)
        return found

    close([second(er.saving(min_nbytes=0))], [second(nullcontext())], 0.0)
    close([second(er.saving("dither", levels=256, min_nbytes=0))], [second(nullcontext())], 0.02)


def test_batched_gradients_take_it_as_a_whole(turns):
    x, net = drawn(9, 8, 16, 16).requires_grad_(), nn.Conv2d(8, 6, 3)
    with er.saving("dither", levels=256, min_nbytes=0):
        out = net(x * 1)
    grads = drawn(3, *out.shape, seed=2)
    (batched,) = torch.autograd.grad(out, x, grads, is_grads_batched=True, retain_graph=True)
    assert not turns
    singles = [torch.autograd.grad(out, x, grad, retain_graph=True)[0] for grad in grads]
    torch.testing.assert_close(batched, torch.stack(singles), rtol=1e-4, atol=1e-4)


def test_autocast_is_torchs_own(turns):
    x, net = drawn(9, 8, 16, 16), nn.Conv2d(8, 6, 3)

    def found(context) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        net.zero_grad()
        with context, torch.autocast("cpu", torch.bfloat16):
            out = net(leaf * 1)
        out.float().sum().backward()
        return [leaf.grad, *(p.grad for p in net.parameters())]

    close(found(er.saving(min_nbytes=0)), found(nullcontext()), 0.0)
    close(found(er.saving("dither", levels=256, min_nbytes=0)), found(nullcontext()), 0.02)
    assert not turns


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_input_that_is_not_finite_is_held_as_it_is(bad):
    x, net = drawn(9, 8, 16, 16), nn.Conv2d(8, 6, 3)
    x[3, 2, 0, 0] = bad
    expected = gradients(x, net, nullcontext())
    for got, wanted in zip(
        gradients(x, net, er.saving("dither", **SETTINGS)), expected, strict=True
    ):
        assert got.isnan().equal(wanted.isnan())


def test_a_gradient_that_is_not_finite_stays_with_its_sample(turns):
    x, net = drawn(9, 8, 16, 16), nn.Conv2d(8, 6, 3)
    grad = drawn(9, 6, 14, 14, seed=3)
    grad[4, 0, 0, 0] = float("nan")
    found = gradients(x, net, er.saving("dither", **SETTINGS), grad)
    assert turns
    assert found[0][4].isnan().any()
    assert found[0][[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()
    assert found[1][0].isnan().any()


def test_a_changed_weight_is_an_error():
    x, net = drawn(9, 8, 16, 16).requires_grad_(), nn.Conv2d(8, 6, 3)
    with er.saving("dither", **SETTINGS):
        out = net(x * 1)
    with torch.no_grad():
        net.weight.mul_(2)
    with pytest.raises(RestoreError, match="modified by an inplace operation"):
        out.sum().backward()


def test_errors_are_torchs(turns):
    """Also of what could take turns."""
    x = drawn(9, 8, 16, 16).requires_grad_()
    with er.saving("dither", **SETTINGS):
        with pytest.raises(RuntimeError, match="to have 7 channels, but got 8 channels"):
            F.conv2d(x * 1, drawn(6, 7, 3, 3).requires_grad_())
        with pytest.raises(RuntimeError, match="negative padding is not supported"):
            F.conv2d(x * 1, drawn(6, 8, 3, 3).requires_grad_(), padding=-1)


@pytest.mark.parametrize("how", ["same", [1, 1], 1])
def test_any_way_to_say_padding(how):
    x, weight = drawn(9, 8, 16, 16), drawn(6, 8, 3, 3).requires_grad_()

    def found(context) -> list[Tensor]:
        leaf, weight.grad = x.clone().requires_grad_(), None
        with context:
            out = F.conv2d(input=leaf * 1, weight=weight, padding=how)
        out.sum().backward()
        return [leaf.grad, weight.grad]

    close(found(er.saving("dither", levels=256, min_nbytes=0)), found(nullcontext()), 0.02)


def test_samples_have_gone_before_their_gradient_is_made(monkeypatch):
    found: list[weakref.ref[Tensor]] = []
    of_x: list[bool] = []
    get, backward = own._Samples.get, own._backward

    def noted(taken, first: int, last: int) -> Tensor:
        part = get(taken, first, last)
        found.append(weakref.ref(part))
        return part

    def checked(ctx, grad, x, weight, wanted):
        if wanted[0]:
            of_x.append(all(one() is None for one in found))
        return backward(ctx, grad, x, weight, wanted)

    monkeypatch.setattr(own._Samples, "get", noted)
    monkeypatch.setattr(own, "_backward", checked)
    net, x = nn.Conv2d(4, 8, 3), drawn(6, 4, 16, 16)
    gradients(x, net, er.saving("dither", **SETTINGS))
    assert len(found) == len(of_x) > 1
    assert all(of_x)


@pytest.mark.parametrize("samples", [0, 1, 2, 3, 8, 100])
@pytest.mark.parametrize("each", [0, 1, 7, 2048, 3 * 1024, 5000])
def test_turns_are_whole_parts_of_a_code(samples, each):
    n = samples_at_once((samples, each), 4)
    assert n == samples or (n * each % PART == 0 and 2 * n <= samples)
    assert samples == 0 or n > 0
