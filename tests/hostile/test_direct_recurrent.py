"""LSTM, GRU and RNN that run forward again in backward: torch's bits, or its gradient but for sums.

What is saved is kept exactly here, unless a test says otherwise.
"""

from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.errors import RestoreError
from elbowroom.plan import Keep

own = import_module("elbowroom.runtime.direct.recurrent")
LENGTH, BATCH, WIDTH, HIDDEN = 40, 3, 5, 8


class KeepsAll:
    """Not an exact policy, so nodes may round; but it codes nothing."""

    exact, again = False, True

    def __call__(self, site):
        return Keep("")


@pytest.fixture
def whole(monkeypatch):
    """A layer is one stretch, so that all bits are torch's."""
    monkeypatch.setattr(own, "_MIN", 10 * LENGTH)


@pytest.fixture
def runs(monkeypatch):
    """How often a layer ran."""
    found: list[int] = []
    run = own._Layer.run

    def noted(layer, *args):
        found.append(1)
        return run(layer, *args)

    monkeypatch.setattr(own._Layer, "run", noted)
    return found


def drawn(*shape: int, seed: int = 0, **kind) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(**kind)


def kept():
    return er.saving(KeepsAll(), min_nbytes=0, seed=1)


def everything(net: nn.RNNBase, x: Tensor, context, hx=None, lengths=None) -> list[Tensor]:
    """Outputs, gradients of input, states and parameters, and the random numbers after it."""
    net.zero_grad()
    torch.manual_seed(5)
    leaf = x.clone().requires_grad_()
    states = None if hx is None else tuple(h.clone().requires_grad_() for h in hx)
    given = states if states is None or isinstance(net, nn.LSTM) else states[0]
    with context:
        inputs = leaf * 1
        if lengths is not None:
            inputs = pack_padded_sequence(inputs, lengths, net.batch_first, enforce_sorted=False)
        out, last = net(inputs, given)
        data = out.data if isinstance(out, PackedSequence) else out
        last = last if isinstance(last, tuple) else (last,)
        loss = (data * drawn(*data.shape, seed=2).to(data)).sum()
        loss = loss + sum((h * drawn(*h.shape, seed=3).to(h)).sum() for h in last)
    after = torch.get_rng_state()
    loss.backward()
    found = [data.detach(), *(h.detach() for h in last), leaf.grad, after]
    found += [] if states is None else [h.grad for h in states if h.grad is not None]
    return [*found, *(p.grad.clone() for p in net.parameters())]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype is wanted.dtype
        assert got.stride() == wanted.stride()
        assert torch.equal(got, wanted)


CASES = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "both ways": {"num_layers": 2, "bidirectional": True},
    "dropout": {"num_layers": 3, "dropout": 0.4},
    "dropout, both ways": {"num_layers": 2, "dropout": 0.4, "bidirectional": True},
    "batch first": {"num_layers": 2, "batch_first": True},
    "no bias": {"num_layers": 2, "bias": False},
    "double": {"num_layers": 2, "dtype": torch.float64},
    "bf16": {"num_layers": 2, "dtype": torch.bfloat16},
}
KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **how: nn.RNN(*sizes, nonlinearity="relu", **how),
}


def made(kind: str, **how) -> nn.RNNBase:
    torch.manual_seed(0)
    return KINDS[kind](WIDTH, HIDDEN, **how)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_gradients_and_random_numbers_are_torchs_own(kind, case, whole, runs):
    net = made(kind, **CASES[case])
    shape = (BATCH, LENGTH) if net.batch_first else (LENGTH, BATCH)
    x = drawn(*shape, WIDTH, dtype=CASES[case].get("dtype", torch.float32))
    expected = everything(net, x, nullcontext())
    assert not runs
    assert_same(everything(net, x, kept()), expected)
    assert len(runs) == 2 * net.num_layers


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projected_states(whole):
    net = made("lstm", num_layers=2, proj_size=3)
    x = drawn(LENGTH, BATCH, WIDTH)
    assert_same(everything(net, x, kept()), everything(net, x, nullcontext()))


@pytest.mark.parametrize("kind", KINDS)
def test_states_that_are_given_and_no_batch(kind, whole):
    net = made(kind, num_layers=2)
    hx = [drawn(2, BATCH, HIDDEN, seed=7), drawn(2, BATCH, HIDDEN, seed=8)]
    x = drawn(LENGTH, BATCH, WIDTH)
    assert_same(everything(net, x, kept(), hx), everything(net, x, nullcontext(), hx))
    x = drawn(LENGTH, WIDTH)
    assert_same(everything(net, x, kept()), everything(net, x, nullcontext()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("both", [False, True])
def test_packed_sequences(kind, both, whole, runs):
    net = made(kind, num_layers=2, bidirectional=both, dropout=0.3)
    x, lengths = drawn(LENGTH, BATCH, WIDTH), torch.tensor([LENGTH, 7, 23])
    expected = everything(net, x, nullcontext(), lengths=lengths)
    assert_same(everything(net, x, kept(), lengths=lengths), expected)
    assert runs


@pytest.mark.parametrize("kind", KINDS)
def test_stretches_of_time_give_the_gradient_but_for_rounding(kind, runs):
    net = made(kind, num_layers=2, dropout=0.3, dtype=torch.float64)
    x = drawn(LENGTH + 3, BATCH, WIDTH, dtype=torch.float64)
    hx = [drawn(2, BATCH, HIDDEN, seed=seed, dtype=torch.float64) for seed in (7, 8)]
    expected = everything(net, x, nullcontext(), hx)
    found = everything(net, x, kept(), hx)
    assert len(runs) == 2 * 2 * 5  # 43 moments, at least 8 in a stretch
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_wanted(kind):
    """Input that wants no gradient, frozen weights, and a loss of the last state alone."""
    net = made(kind, num_layers=2)
    net.weight_hh_l1.requires_grad_(False)
    x = drawn(LENGTH, BATCH, WIDTH)

    def gradients(context) -> list[Tensor | None]:
        net.zero_grad()
        with context:
            last = net(x)[1]
            loss = (last[0] if isinstance(last, tuple) else last).square().sum()
        loss.backward()
        return [p.grad for p in net.parameters()]

    expected = [None if grad is None else grad.clone() for grad in gradients(nullcontext())]
    for got, wanted in zip(gradients(kept()), expected, strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("kind", ["gru", "tanh"])  # of an LSTM torch knows no second derivative
def test_a_gradient_of_the_gradient(kind):
    net = made(kind, num_layers=2, dtype=torch.float64)
    x = drawn(LENGTH, BATCH, WIDTH, dtype=torch.float64)

    def second(context) -> Tensor:
        leaf = x.clone().requires_grad_()
        with context:
            loss = net(leaf)[0].square().sum()
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        (found,) = torch.autograd.grad(grad.square().sum(), leaf)
        return found

    torch.testing.assert_close(second(kept()), second(nullcontext()))


def test_backward_twice_inside_the_context_and_under_another_checkpoint():
    net, x = made("lstm", num_layers=2), drawn(LENGTH, BATCH, WIDTH)
    with kept():
        loss = net(x)[0].square().sum()
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in net.parameters()]
        loss.backward()
    for p, one in zip(net.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * one)
    net.zero_grad()
    with kept():
        loss = checkpoint(net, x, use_reentrant=False)[0].square().sum()
    loss.backward()
    for p, one in zip(net.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, one)


def test_a_weight_that_is_changed_before_backward_is_an_error():
    net, x = made("gru"), drawn(LENGTH, BATCH, WIDTH)
    with kept():
        loss = net(x)[0].square().sum()
    with torch.no_grad():
        net.weight_hh_l0.mul_(2)
    with pytest.raises(RestoreError, match="inplace operation"):
        loss.backward()


def test_exact_contexts_and_those_without_gradient_leave_it_to_torch(runs):
    net, x = made("lstm"), drawn(LENGTH, BATCH, WIDTH)
    expected = everything(net, x, nullcontext())
    assert_same(everything(net, x, er.saving(min_nbytes=0)), expected)
    with er.saving("dither", bits=2, min_nbytes=0), torch.no_grad():
        net(x)
    assert not runs


def test_an_empty_batch():
    net, x = made("gru"), torch.zeros(LENGTH, 0, WIDTH)
    with er.saving("dither", bits=2, min_nbytes=0):
        loss = net(x)[0].sum()
    loss.backward()
    assert not net.weight_hh_l0.grad.any()


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_what_is_saved_shrinks_and_the_error_is_small(kind):
    torch.manual_seed(0)
    net = KINDS[kind](32, 64, 2)
    x = drawn(64, 16, 32)

    def gradients(context) -> list[Tensor]:
        net.zero_grad()
        with context:
            out = net(x)[0]
            loss = (out * drawn(*out.shape, seed=4)).sum()
        loss.backward()
        return [p.grad.clone() for p in net.parameters()]

    expected = gradients(nullcontext())
    saved = er.saving("dither", bits=2, seed=3, min_nbytes=0)
    found = gradients(saved)
    off = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    assert off <= 0.01 * sum(float(b.square().sum()) for b in expected)
    assert any(row.consumer == kind and row.action == "dither" for row in saved.ledger.rows)
    plain = er.saving("keep", min_nbytes=0)
    gradients(plain)
    inputs = x.nbytes + 64 * 16 * 64 * 4  # and the output, which the loss reads
    assert saved.ledger.after_nbytes - inputs < (plain.ledger.after_nbytes - inputs) / 6


@pytest.mark.parametrize("watched", [{"watch": True}, {"noise": 0.1}])
def test_under_a_watch(watched):
    net, x = made("lstm", num_layers=2), drawn(LENGTH, BATCH, WIDTH)
    for seed in range(3):
        with er.saving("dither", bits=2, seed=seed, min_nbytes=0, **watched) as saved:
            loss = net(x)[0].square().sum()
        loss.backward()
        saved.error_report()


def test_the_many_small_tensors_of_an_exact_context_are_counted_and_checked():
    net, x = made("gru", num_layers=2), drawn(LENGTH, BATCH, WIDTH)
    expected = everything(net, x, nullcontext())
    saved, kept_all = er.saving(), er.saving("keep")
    assert_same(everything(net, x, saved), expected)
    assert_same(everything(net, x, kept_all), expected)
    by_gru, by_all = (
        sum(row.before_nbytes for row in context.ledger.rows if row.consumer == "gru")
        for context in (saved, kept_all)
    )
    assert by_gru == by_all > 0
    assert not saved.ledger.held_nbytes  # backward has let go of all
    with er.saving():
        loss = net(x)[0].square().sum()
    with torch.no_grad():
        net.weight_hh_l0.mul_(2)
    with pytest.raises(RestoreError, match="inplace operation"):
        loss.backward()


@pytest.mark.parametrize("wants_x", [True, False])
@pytest.mark.parametrize("stretches", [1, 6])
@pytest.mark.parametrize(("width", "both"), [(64, False), (512, False), (64, True)])
def test_the_memory_of_a_backward_that_runs_an_lstm_again_is_known(width, both, stretches, wants_x):
    """Beside gradients: what is as wide as a wide input, a copy of weights, and joined parts."""
    net = nn.LSTM(width, 128, bidirectional=both)
    x = drawn(48, 16, width).requires_grad_(wants_x)
    zeros = torch.zeros(1 + both, 16, 128)
    run = own.recurrent(torch.lstm, stretches)
    for _ in range(2):
        net.zero_grad()
        x.grad = None
        out = run(x, (zeros, zeros), net._flat_weights, True, 1, 0.0, True, both, False)[0]
        grad, said = torch.ones_like(out), out.grad_fn.workspace_nbytes
        taken = er.peak(lambda out=out, grad=grad: out.backward(grad))
    taken -= sum(p.nbytes for p in net.parameters()) + wants_x * x.nbytes
    assert 0.8 * taken < said < 1.35 * taken
