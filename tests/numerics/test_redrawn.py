"""Codes whose error is most of a gradient are found in backward, and taken back in later steps."""

import gc
import logging
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.plan.site import HalfSuffices, LevelsSuffice, strictness
from elbowroom.runtime import redrawn
from elbowroom.runtime.context import PROCESS, Context
from elbowroom.runtime.redrawn import _energies, _share, reason

FUNCTIONS = {
    "gaussian": lambda z: torch.exp(-100 * z * z),
    "cauchy": lambda z: 1 / (1 + 300 * z * z),
    "addcmul": lambda z: torch.exp(torch.addcmul(torch.zeros(1), z, z, value=-100)),
    "exponential in an exponential": lambda z: torch.exp(-torch.exp(3 * z)),
    "hyperbolic": lambda z: torch.exp(1 - torch.cosh(4 * z)),
    "huber": lambda z: torch.exp(-50 * F.huber_loss(z, torch.zeros_like(z), reduction="none")),
    "bin": lambda z: torch.sigmoid(60 * z + 3) - torch.sigmoid(60 * z - 3),
    "erf": lambda z: torch.erf(20 * z),
    "transposed": lambda z: torch.erf(20 * z.t()).t(),
    "part": lambda z: torch.cat([torch.erf(20 * z[:, 8:]), z[:, :8]], 1),
    "broadcast": lambda z: (torch.erf(20 * z[:, None]) * torch.ones(1, 2, 1)).sum(1),
    "ricker": lambda z: (1 - (20 * z) ** 2) * torch.exp(-((20 * z) ** 2) / 2),
    # What the op that reads the code gives is right; what the next ops let through of it is not.
    "bump": lambda z: z * torch.clamp(1 - (100 * z).abs(), min=0),
    "bump by relu": lambda z: z * F.relu(1 - (30 * z).square()),
    "derivative of a gaussian": lambda z: z * torch.exp(-((10 * z) ** 2)),
    "steep gate": lambda z: z * torch.sigmoid(50 * z),
    "steep tanh": lambda z: z * torch.tanh(50 * z),
}


class Net(nn.Module):
    def __init__(self, f) -> None:
        super().__init__()
        self.first, self.last, self.f = nn.Linear(32, 64), nn.Linear(64, 10), f

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.f(self.first(x)))


def error_of(net: nn.Module, *, levels: int = 16, codec: str = "dither", **fields) -> float:
    x, labels = torch.randn(512, 32), torch.randint(0, 10, (512,))
    F.cross_entropy(net(x), labels).backward()
    exact = [p.grad for p in net.parameters()]
    net.zero_grad()
    fields = fields or {"levels": levels}
    with er.saving(codec, **fields):
        loss = F.cross_entropy(net(x), labels)
    loss.backward()
    pairs = [(p.grad, g) for p, g in zip(net.parameters(), exact, strict=True)]
    net.zero_grad()
    size = sum(g.square().sum() for _, g in pairs)
    return float(sum((a - g).square().sum() for a, g in pairs) / size)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_mostly_error_is_kept_from_the_second_step_on(name, caplog) -> None:
    torch.manual_seed(0)
    net = Net(FUNCTIONS[name])
    first = error_of(net)
    assert first < 0.05 or any("has a code" in one.message for one in caplog.records)
    assert max(error_of(net) for _ in range(3)) < 0.05


SMOOTH = {
    "hard swish": lambda z: z * F.relu6(z + 3) / 6,
    "swish": lambda z: z * torch.sigmoid(z),
    "hardtanh": lambda z: z * F.hardtanh(z),
    "square of a relu": lambda z: z.relu().square() * 0.5 + 1,
    "mish": lambda z: z * F.softplus(z).tanh(),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_what_later_ops_let_through_as_a_whole_keeps_its_code(name, caplog) -> None:
    torch.manual_seed(0)
    net = Net(SMOOTH[name])
    assert max(error_of(net) for _ in range(3)) < 0.05
    assert not caplog.records


def test_a_module_is_told_of_once_in_a_step(caplog) -> None:
    """It has several codes that are too coarse: all of them are finer in the next step."""
    torch.manual_seed(0)
    net = Net(lambda z: torch.erf(20 * z) + torch.exp(-torch.exp(3 * z)))
    assert error_of(net) > 0.05
    assert len([one for one in caplog.records if "has a code" in one.message]) == 1
    assert max(error_of(net) for _ in range(2)) < 0.05


def test_a_factor_that_is_too_coarse_has_a_finer_code_then(caplog) -> None:
    torch.manual_seed(0)

    def narrow(z: Tensor) -> Tensor:
        return z * (3 * z).sin() * torch.erf(1 - (20 * z).abs().clamp(max=1))

    net, x = Net(narrow), torch.randn(512, 32)
    first = error_of(net)
    assert first > 0.001
    assert "'mul'" in caplog.text
    assert error_of(net) < 0.03 * first
    with er.saving("dither", levels=16) as saved:
        net(x)
    assert {row.action for row in saved.ledger.rows if row.consumer == "mul"} == {
        "dither",
        "rebuild",
    }
    codes = [row for row in saved.ledger.rows if row.action == "dither"]
    assert all(row.before_nbytes > 3 * row.after_nbytes for row in codes)


def test_as_many_levels_are_asked_for_as_would_make_its_error_small() -> None:
    """Its variance is that of a step's square; where 256 are too few, it is a float of 16 bits."""
    for levels, share, wanted in ((16, 0.06, 64), (16, 1.0, 256), (64, 0.051, 256), (32, 0.2, 256)):
        found = reason(levels, share)
        assert isinstance(found, LevelsSuffice)
        assert found.levels == wanted
    for levels, share in ((256, 0.06), (16, 2.0), (16, float("inf"))):
        assert isinstance(reason(levels, share), HalfSuffices)
    copied = pickle.loads(pickle.dumps(reason(16, 0.06)))
    assert (copied, copied.levels) == (reason(16, 0.06), 64)


def test_a_limit_is_replaced_by_a_stricter_one_alone() -> None:
    kinds = LevelsSuffice("why", 64), LevelsSuffice("why", 256), HalfSuffices("why"), "exact"
    assert [*map(strictness, kinds)] == sorted(map(strictness, kinds))
    context, key = Context(), ("net", "mul", (8, 8), torch.float32)
    assert [context.learn_limit(None, key, one) for one in kinds] == [True] * 4
    assert not any(context.learn_limit(None, key, one) for one in kinds)


def test_an_exponential_in_an_exponential_is_kept_at_once() -> None:
    torch.manual_seed(0)
    assert error_of(Net(FUNCTIONS["exponential in an exponential"])) == 0


class Coarse(dict):
    """Says of all that a product of matrices saves that its code was too coarse for a factor."""

    def get(self, key, default=None):
        return HalfSuffices("its error is large") if "bmm" in str(key) else default


def test_a_factor_in_a_product_of_matrices_has_half_of_its_bits_then(monkeypatch) -> None:
    monkeypatch.setattr(PROCESS, "kept", Coarse())
    one, other = (torch.randn(8, 64, 64, requires_grad=True) for _ in range(2))
    with er.saving("dither", levels=16, min_nbytes=0) as saved:
        loss = torch.bmm(2 * one, 2 * other).square().sum()  # they wait for a softmax
    assert {row.action for row in saved.ledger.rows if row.consumer == "bmm"} == {"cast"}
    del loss


def test_codes_by_stochastic_rounding_are_drawn_again_too(caplog) -> None:
    torch.manual_seed(0)
    net = Net(FUNCTIONS["erf"])
    assert error_of(net, codec="group", bits=4) > 0.05
    assert "'erf'" in caplog.text
    assert error_of(net, codec="group", bits=4) < 0.05


def test_contexts_with_a_seed_for_each_step_remember_it() -> None:
    torch.manual_seed(0)
    net = Net(FUNCTIONS["erf"])
    errors = [error_of(net, levels=16, seed=step) for step in range(3)]
    assert errors[0] > 0.05
    assert max(errors[1:]) < 0.05


def test_ordinary_gates_keep_their_codes(caplog) -> None:
    torch.manual_seed(0)
    net = Net(lambda z: torch.tanh(z) * torch.sigmoid(z.flip(1)))
    with caplog.at_level(logging.WARNING):
        assert max(error_of(net) for _ in range(2)) < 0.05
    assert not caplog.records


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_gradient_that_tells_nothing_takes_no_code_back(value: float, caplog) -> None:
    net = Net(torch.erf)
    with er.saving("dither", levels=16):
        out = net(torch.randn(512, 32))
    out.backward(torch.full_like(out, value))
    assert not caplog.records


@pytest.mark.parametrize("spoiled", [float("nan"), float("inf")])
def test_what_only_other_noise_makes_infinite_is_all_error(spoiled: float) -> None:
    x, y = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, spoiled])
    assert _share(_energies([x], [y])) == float("inf")
    assert _share(_energies([y], [x])) == _share(_energies([torch.zeros(4)], [y])) == 0


@pytest.mark.parametrize("shares", [[0.2, 0.01], [0.2], [0.01]])
def test_one_sample_with_more_error_than_others_takes_no_code_back(
    shares: list[float], caplog, monkeypatch
) -> None:
    """The largest elements of a heavy-tailed product may be in the first sample alone."""
    left = list(shares)

    def measured(own, other) -> Tensor:
        share = left.pop(0) if len(left) > 1 else left[0]
        return torch.tensor([[share, 1.0] for _ in own])

    monkeypatch.setattr(redrawn, "_energies", measured)
    net = Net(torch.erf)
    with er.saving("dither", levels=16):
        out = net(torch.randn(512, 32))
    out.sum().backward()
    assert bool(caplog.records) is (shares == [0.2])


def test_noise_that_goes_on_is_compared_with_that_of_the_same_elements(monkeypatch, caplog) -> None:
    """Few elements are followed: what they have more than all, they have behind a gate, too."""
    energies = redrawn._energies

    def thinned(x: Tensor) -> Tensor:
        return x.reshape(-1)[:1].clone()

    def of_few(own, other) -> Tensor:
        found = energies(own, other)
        if all(x is None or x.numel() == 1 for x in own):
            found[:, 0] *= 20
        return found

    monkeypatch.setattr(redrawn, "_thinned", thinned)
    monkeypatch.setattr(redrawn, "_energies", of_few)
    net = Net(lambda z: torch.tanh(z) * torch.sigmoid(z.flip(1)))
    with er.saving("dither", levels=16):
        out = net(torch.randn(512, 32))
    out.sum().backward()
    assert not caplog.records


def test_graphs_are_freed_and_may_run_twice_or_never() -> None:
    net, x = Net(torch.erf), torch.randn(512, 32)
    for runs in range(3):
        with er.saving("dither", levels=16):
            out = checkpoint(net, x, use_reentrant=False) + net(x)
        node = weakref.ref(out)
        for n in range(runs):
            out.sum().backward(retain_graph=n < runs - 1)
        del out
        assert node() is None or gc.collect() >= 0
        assert node() is None


def test_second_derivatives_are_unchanged() -> None:
    net, x = Net(torch.erf).double().float(), torch.randn(512, 32, requires_grad=True)
    with er.saving("dither", levels=256):
        out = net(x).square().sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    grad.square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_a_fit_finds_them_and_plans_without_them(caplog) -> None:
    """The first step has codes of a Ricker wavelet, and later ones coarse codes of others."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), Net(FUNCTIONS["ricker"]))
    batches = [(torch.randn(1024, 32), torch.randint(0, 10, (1024,))) for _ in range(4)]
    exact = [gradient(net, *batch) for batch in batches]
    plain = er.peak(lambda: gradient(net, *batches[0]))
    er.fit(net, budget=int(0.6 * plain))
    errors = []
    for batch, g in zip(batches, exact, strict=True):
        errors.append(float((gradient(net, *batch) - g).square().sum() / g.square().sum()))
        assert "has a code" in caplog.text
    assert errors[0] > 0.2
    assert max(errors[1:]) < 0.1


def gradient(net: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    net.zero_grad(set_to_none=True)
    F.cross_entropy(net(x), labels).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])
