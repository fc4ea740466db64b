"""Codecs of other packages whose form for graphs is not what they declare: `er.saving` says so."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.codecs import Codec, GraphForm, dropped
from elbowroom.codecs.base import Expected
from elbowroom.codecs.quality import broken_form, broken_promise
from elbowroom.codecs.registry import _registered, register
from elbowroom.compiled import acts_in_graphs


def _write(out, x):
    out.copy_(x)


def _boom(x, seed):
    raise ValueError("boom")


FORMS = {
    "honest": (GraphForm(lambda x, seed: (x.half(),), lambda b, seed, out: _write(out, b[0])), ""),
    "doubled": (
        GraphForm(lambda x, seed: (x.half(),), lambda b, seed, out: _write(out, b[0] * 2)),
        "its form for graphs has a squared error of 1, and the codec",
    ),
    "too-large": (
        GraphForm(lambda x, seed: (x.clone(),), lambda b, seed, out: _write(out, b[0])),
        "it says that its code is float16 of shape (65536,), and its form for graphs makes float32",
    ),
    "raises": (
        GraphForm(_boom, lambda b, seed, out: None),
        "its form for graphs fails: ValueError: boom",
    ),
    "changes": (
        GraphForm(lambda x, seed: (x.mul_(2).half(),), lambda b, seed, out: _write(out, b[0] / 2)),
        "its form for graphs changes the tensor",
    ),
    "written": (
        GraphForm(
            lambda x, seed: (x.half(),),
            lambda b, seed, out: _write(out, b[0]),
            (lambda x, seed: (x.half(),), lambda b, seed, n, dtype: -b[0].to(dtype)),
        ),
        "its form for graphs has a squared error of 4",
    ),
}


@pytest.fixture
def codec(request):
    name = request.param

    @dataclass(frozen=True)
    class Half(Codec):
        id = f"test-form-{name}"
        lossless, dtypes = False, (torch.float32,)

        def _layout(self, n, dtype, facts):
            return (Expected(torch.float16, (n,)),)

        def _encode(self, flat, seed, facts):
            return (flat.half(),)

        def _decode_into(self, encoded, out):
            out.copy_(encoded.buffers[0])

        def graph_form(self, facts):
            return FORMS[name][0]

    register(Half)
    yield Half(), FORMS[name][1]
    del _registered[Half.id]
    dropped._dropped.pop(Half, None)


@pytest.mark.parametrize("codec", FORMS, indirect=True)
def test_a_form_for_graphs_is_compared_with_its_codec(codec, caplog):
    one, lie = codec
    assert lie in broken_form(one)
    assert bool(lie) is bool(broken_form(one))
    assert lie in broken_promise(one)
    assert acts_in_graphs(one) is not bool(lie)
    assert lie in caplog.text
    assert caplog.text.count("is left out of all plans") == bool(lie)


@pytest.mark.parametrize("codec", ["doubled"], indirect=True)
@pytest.mark.filterwarnings("ignore::UserWarning")  # it runs eagerly instead
def test_gradients_of_a_compiled_module_are_not_those_of_a_form_that_lies(codec):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Sigmoid(), nn.Linear(128, 64), nn.Sigmoid())
    compiled, x = torch.compile(model), torch.randn(512, 64)

    def gradients(context):
        model.zero_grad()
        with context:
            loss = compiled(x).square().mean()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    lossy, plain = gradients(er.saving(codec[0].id)), gradients(er.saving("keep"))
    error = sum((a - b).square().sum() for a, b in zip(lossy, plain, strict=True))
    assert error < 1e-3 * sum(b.square().sum() for b in plain)
