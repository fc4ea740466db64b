"""Attention gets codes of at least 16 levels; nothing else is touched, and mild codes stay."""

import pytest
import torch
from torch.nn import functional as F

import elbowroom as er
from elbowroom.plan import Encode, Lean, Lossy, Need, Site
from elbowroom.plan.gentle import gentle

ABSOLUTE = er.codec("comet", bound=0.1, relative=False)


def site(consumer):
    return Site("m", consumer, "", (4, 8, 64, 32), torch.float32, 4 * 8 * 64 * 32 * 4, Need.LOSSY)


@pytest.mark.parametrize(
    ("lean", "mild"),
    [
        (er.codec("dither", levels=2), er.codec("dither", levels=16)),
        (er.codec("dither", levels=64), er.codec("dither", levels=64)),
        (er.codec("group", bits=1), er.codec("group", bits=4)),
        (er.codec("division", bits=2, block=4), er.codec("division", bits=4, block=4)),
        (er.codec("comet", bound=0.1), er.codec("comet", bound=0.03)),
        (
            er.codec("comet", bound=0.1, relative=False),
            er.codec("comet", bound=0.1, relative=False),
        ),
        (er.codec("cast"), er.codec("cast")),
    ],
)
def test_only_attention_is_treated_gently(lean, mild):
    assert gentle(lean, site("scaled_dot_product_attention")) == mild
    assert gentle(lean, site("linear")) == lean
    assert Lossy(lean)(site("scaled_dot_product_attention")) == Encode(mild)


def test_lean_is_gentle_too():
    action = Lean(plain=2)(site("scaled_dot_product_attention"))
    assert action.codec == er.codec("dither", levels=16)


@pytest.mark.parametrize("name", ["dither", "group", "division"])
def test_attention_has_a_gradient_even_with_one_bit(name):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 64, 32, requires_grad=True) for _ in range(3))

    def grads(*how, **fields):
        with er.saving(*how, min_nbytes=0, seed=0, **fields):
            out = F.scaled_dot_product_attention(q * 1.0, k * 1.0, v * 1.0, is_causal=True)
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    true = grads("keep")
    for one, other in zip(true, grads(name, bits=1), strict=True):
        assert (one - other).square().sum() < one.square().sum()
