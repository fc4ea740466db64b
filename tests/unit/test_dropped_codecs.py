"""Codecs of other packages that do what they declare on drawn data, and not in training."""

from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elbowroom as er
from elbowroom.codecs import Codec, Group, dropped, register, registry
from elbowroom.codecs.base import FLOATS, Expected
from elbowroom.codecs.quality import broken_promise, measured, quality_of
from elbowroom.errors import BudgetTooSmall, CodecError, PlanError
from elbowroom.plan import Lossy, registered
from elbowroom.plan.registered import all_settings
from elbowroom.runtime.attach import opener_of
from elbowroom.runtime.context import Context
from elbowroom.runtime.saving import Saving

MODES = (
    *("short", "large", "zeros", "scaled", "raises", "none", "empties", "overwrites"),
    *("not finite", "keeps a graph", "decodes to NaN", "shifted"),
)


_kept = []


@dataclass(frozen=True)
class Liar(Codec):
    """8 bits a value, of one range; `mode` is what it does wrong where values are marked."""

    id: ClassVar[str] = "liar"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATS
    mode: ClassVar[str] = ""

    def _layout(self, n, dtype, facts):
        return Expected(torch.int8, (n,)), Expected(torch.float32, (1,))

    def _encode(self, flat, seed, facts):
        generator = torch.Generator().manual_seed(seed % 2**32)
        scale = flat.float().abs().max() / 126
        noise = torch.rand(len(flat), generator=generator) - 0.5
        codes = (flat.float() / scale + noise).round().to(torch.int8)
        match self.mode:
            case "not finite":
                scale = scale * float("nan")
            case "keeps a graph":
                scale = flat.clone().requires_grad_().float().abs().max() / 126
            case "short":
                codes = codes[:-1]
            case "large":
                codes = codes.repeat(8)
            case "zeros":
                codes = codes * 0
            case "scaled":
                scale = scale / 2
            case "raises":
                raise ValueError("not today")
            case "none":
                return None
            case "keeps":
                _kept.append(flat)
            case "keeps storage":
                _kept.append(flat.untyped_storage())
            case "by chance":
                codes = codes + torch.randint(0, 2, codes.shape, dtype=torch.int8)
        return codes, scale.reshape(1)

    def _decode_into(self, encoded, out):
        if self.mode == "undecodable":
            raise ValueError("not today")
        codes, scale = encoded.buffers
        out.copy_(codes * (float("nan") if self.mode == "decodes to NaN" else scale))
        if self.mode == "shifted":  # an error below that of 5 levels
            out += 0.04 * out.float().square().mean().sqrt()
        if self.mode == "tripled":
            out *= 3
        if self.mode == "empties":
            codes.untyped_storage().resize_(0)
        if self.mode == "overwrites":
            codes.zero_()


@pytest.fixture
def liar(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(dropped, "_dropped", {})
    monkeypatch.setattr(dropped, "_suspects", set())
    monkeypatch.setattr(Liar, "mode", "")
    registered._honest.cache_clear()
    broken_promise.cache_clear()
    return register(Liar)


class Deep(nn.Module):
    """Functions only: there is no module to run again, so tight budgets need codes."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 8) for _ in range(10))

    def forward(self, x):
        for weight in self.weights:
            x = x + F.gelu(F.linear(F.layer_norm(x, (64,)), weight)) * 0.3
        return x


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net, self.x = Deep(), torch.randn(1024, 64)
        self.step()

    def loss(self):
        self.net.zero_grad()
        return self.net(self.x).square().mean()

    def step(self):
        self.loss().backward()
        return [weight.grad.clone() for weight in self.net.parameters()]


def error_of(training, exact):
    """Returns the squared error of the gradients, relative to their square."""
    pairs = zip(training.net.parameters(), exact, strict=True)
    error = sum(float((weight.grad - one).square().sum()) for weight, one in pairs)
    return error / sum(float(one.square().sum()) for one in exact)


@pytest.mark.parametrize("mode", MODES)
def test_a_codec_that_lies_in_training_is_named_and_dropped(mode, liar, caplog):
    training, context = Training(), Context()
    exact, context.drops_codecs = training.step(), True
    quality_of(Liar(), maps=False), quality_of(Liar(), maps=True)  # as planned with
    liar.mode = mode
    with Saving(Lossy(Liar()), context=context):
        loss = training.loss()
    loss.backward()
    # Tensors are kept, but for those that are too sensitive for this codec: these have a dither.
    assert error_of(training, exact) < 0.01
    named = [line for line in caplog.messages if "codec 'liar' is left out of all plans" in line]
    assert len(named) == 1
    with pytest.raises(PlanError, match=r"\['liar'\] .* is not so: 'liar': it"):
        er.fit(training.net, budget="1 GiB", codecs=["liar"])
    assert Liar() not in all_settings()


def test_a_codec_that_is_honest_is_not_dropped(liar):
    training, context = Training(), Context()
    context.drops_codecs = True
    with Saving(Lossy(Liar()), context=context) as saved:
        loss = training.loss()
    loss.backward()
    assert dropped.dropped() == 0
    assert "liar" in str(saved.ledger)


def settled(training, codecs):
    """Fits a training that is settled on a plan of such codes."""
    er.fit(training.net, budget=int(0.4 * er.peak(training.step)), codecs=codecs)
    fitting = opener_of(training.net)
    while not fitting.planner.settled:
        training.step()
    for _ in range(4):  # until forwards are replayed, in which no code is decoded at once
        training.step()
    assert any(isinstance(codec, Liar) for codec in fitting.planner.plan.codecs)
    return fitting


@pytest.mark.parametrize("mode", ["raises", "short", "not finite"])
def test_a_codec_that_fails_in_a_settled_step_is_dropped(mode, liar):
    training = Training()
    exact, fitting = training.step(), settled(training, ["liar"])
    liar.mode = mode
    training.step()
    assert error_of(training, exact) < 0.01
    with suppress(BudgetTooSmall):  # without it there may be no plan
        training.step()
    plan = fitting.planner.plan
    assert plan is None or not plan.codecs
    er.release(training.net)


def test_a_codec_that_decodes_to_nan_in_a_settled_step_is_named_and_dropped(liar, caplog):
    """It may be right, if the tensor has a NaN, so its next codes are decoded at once."""
    training = Training()
    exact, _ = training.step(), settled(training, ["liar"])
    liar.mode = "decodes to NaN"
    training.step()
    assert any("codec 'liar' has given back what is not finite" in m for m in caplog.messages)
    training.step()
    assert error_of(training, exact) < 0.01
    assert dropped.why_dropped(liar) == "it gives back what is not finite"
    er.release(training.net)


@pytest.mark.parametrize("mode", ["tripled", "shifted"])
def test_a_codec_that_turns_wrong_in_a_settled_step_is_dropped_soon(mode, liar):
    """What it gives back is finite, and was looked at in the first steps alone."""
    training = Training()
    exact, fitting = training.step(), settled(training, ["liar"])
    liar.mode = mode
    with suppress(BudgetTooSmall):
        for _ in range(8):  # of ten codes and more
            training.step()
    assert dropped.why_dropped(liar)
    plan = fitting.planner.plan
    assert plan is None or not plan.codecs
    er.release(training.net)
    training.step()
    assert error_of(training, exact) == 0


def test_a_codec_is_not_blamed_for_a_tensor_that_is_not_finite(liar):
    training = Training()
    settled(training, ["liar"])
    training.x[3] = float("nan")
    for _ in range(3):
        training.step()
    assert dropped.dropped() == 0
    er.release(training.net)


def test_a_code_that_cannot_be_decoded_in_backward_is_an_error_that_names_its_codec(liar):
    training = Training()
    settled(training, ["liar"])
    liar.mode = "undecodable"
    with pytest.raises(CodecError, match="codec 'liar' cannot decode what it has made"):
        training.step()
    assert dropped.why_dropped(liar) == "it fails: ValueError: not today"
    er.release(training.net)


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("keeps", "it keeps the tensor that it encodes, which is then never freed"),
        ("keeps storage", "it keeps the tensor that it encodes, which is then never freed"),
        ("by chance", "it makes another code each time, of the same tensor and seed"),
    ],
)
def test_a_codec_that_breaks_a_promise_is_dropped_before_a_plan(mode, why, liar, caplog):
    assert broken_promise(Liar()) == ""
    broken_promise.cache_clear()
    registered._honest.cache_clear()
    liar.mode = mode
    assert Liar() not in all_settings()
    assert broken_promise(Liar()) == why
    assert sum(why in line for line in caplog.messages) == 1
    _kept.clear()


def _fails(self, n, dtype, facts):
    raise ValueError("not today")


def _seeds(self, flat, seed, facts):
    torch.manual_seed(seed % 2**32)
    return (flat.float() + torch.rand(len(flat)) - 0.5).to(torch.int8), torch.ones(1)


LIES = {
    "seed": (
        {"_encode": _seeds},
        "it draws from torch's own generator, or seeds it: the program's numbers",
    ),
    "lossless": (
        {"lossless": True},
        r"it promises a squared error of 0, and has \S+",
    ),
    "error": (
        {"stated_error": float("nan")},
        r"it promises a squared error of nan, and has \S+",
    ),
    "bytes": (
        {"encoded_nbytes": lambda self, shape, dtype, facts=None: 8},
        r"it says 8 bytes of float32 of shape \(4, 16, 64, 64\), and holds 262148",
    ),
    "layout": ({"_layout": _fails}, "it fails: ValueError: not today"),
}


@pytest.mark.parametrize(("declared", "why"), LIES.values(), ids=LIES)
def test_saving_refuses_a_codec_that_does_not_do_what_it_declares(declared, why, liar):
    lying = register(dataclass(frozen=True)(type("Lying", (Liar,), {"id": "lying", **declared})))
    for policy in ("lying", lying()):
        with pytest.raises(CodecError, match=rf"'lying' cannot be used, .* declares: {why}\. Corr"):
            er.saving(policy)
    net, before = nn.Linear(4, 4), torch.get_rng_state()
    with pytest.raises(PlanError, match=why):
        er.fit(net, budget="1 GiB", codecs=["lying"])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("off", [lambda y: y + 0.003, lambda y: 0.995 * y])
def test_a_code_that_is_off_by_little_is_not_unbiased(off, liar, monkeypatch):
    """By much less than its error: two draws' errors are hardly correlated."""
    assert measured.__wrapped__(Liar(), maps=False).unbiased

    def decode(self, encoded, out):
        codes, scale = encoded.buffers
        out.copy_(off(codes * scale))

    monkeypatch.setattr(Liar, "_decode_into", decode)
    assert not measured.__wrapped__(Liar(), maps=False).unbiased


class Impostor(Group):
    """Decodes to zeros, by the name of another codec."""

    def _decode_into(self, encoded, out):
        out.zero_()


def test_a_codec_of_another_codec_s_name_is_measured_and_refused():
    assert quality_of(Impostor(bits=4), maps=False).error > 0.9
    assert quality_of(Group(bits=4), maps=False).error < 0.03
    for bad in (Impostor(), Impostor(bits=4)):
        with pytest.raises(PlanError, match=r"'group' of class Impostor is not the one of that id"):
            er.fit(nn.Linear(4, 4), budget="1 GiB", codecs=[bad])


def test_a_codec_that_is_not_registered_is_refused_with_what_to_type():
    what = (
        r"'liar' is not registered, .*call register\(Liar\) .* 'from elbowroom\.codecs import reg"
    )
    with pytest.raises(PlanError, match=what):
        er.fit(nn.Linear(4, 4), budget="1 GiB", codecs=[Liar()])
