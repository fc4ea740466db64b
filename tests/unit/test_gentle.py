"""Attention gets codes of at least 16 levels, GELU and SiLU of 8; mild codes stay as they are."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import elbowroom as er
from elbowroom.plan import Encode, Lean, Lossy, Need, Site
from elbowroom.plan.gentle import gentle, if_curved

ABSOLUTE = er.codec("comet", bound=0.1, relative=False)


def site(consumer):
    return Site("m", consumer, "", (4, 8, 64, 32), torch.float32, 4 * 8 * 64 * 32 * 4, Need.LOSSY)


CURVED = [
    (er.codec("dither", levels=2), er.codec("dither", levels=8)),
    (er.codec("dither", levels=12), er.codec("dither", levels=12)),
    (er.codec("group", bits=2), er.codec("group", bits=3)),
    (er.codec("division", bits=2, block=4), er.codec("division", bits=3, block=4)),
    (er.codec("comet", bound=0.1), er.codec("comet", bound=0.07)),
    (ABSOLUTE, ABSOLUTE),
    (er.codec("cast"), er.codec("cast")),
]


@pytest.mark.parametrize(
    ("lean", "mild"),
    [
        (er.codec("dither", levels=2), er.codec("dither", levels=16)),
        (er.codec("dither", levels=64), er.codec("dither", levels=64)),
        (er.codec("group", bits=1), er.codec("group", bits=5)),
        (er.codec("division", bits=2, block=4), er.codec("division", bits=5, block=4)),
        (er.codec("comet", bound=0.1), er.codec("comet", bound=0.02)),
        (ABSOLUTE, ABSOLUTE),
        (er.codec("cast"), er.codec("cast")),
    ],
)
def test_attention_is_treated_gently_and_a_linear_op_is_not(lean, mild):
    assert gentle(lean, site("scaled_dot_product_attention")) == mild
    assert gentle(lean, site("linear")) == lean
    assert Lossy(lean)(site("scaled_dot_product_attention")) == Encode(mild)


@pytest.mark.parametrize(("lean", "mild"), CURVED)
@pytest.mark.parametrize("op", ["gelu", "silu"])
def test_gelu_and_silu_are_treated_gently(op, lean, mild):
    assert Lossy(lean)(site(op)) == Encode(mild)


@pytest.mark.parametrize(("lean", "mild"), CURVED)
@pytest.mark.parametrize("norm", ["batch_norm", "group_norm", "instance_norm", "layer_norm"])
def test_a_norm_is_if_one_of_them_reads_what_it_makes(norm, lean, mild):
    unknown = site(norm)
    assert if_curved(lean, unknown) == (None if mild == lean else mild)
    assert Lossy(lean)(unknown) == Encode(lean, curved=if_curved(lean, unknown))
    assert Lossy(lean)(replace(unknown, curved=True)) == Encode(mild)
    assert Lossy(lean)(replace(unknown, curved=False)) == Encode(lean)
    assert Lossy(lean, rebuild=False)(unknown) == Encode(lean)  # each has a code of its own


def test_under_lean_a_curved_norm_waits_for_no_mask():
    action = Lean()(replace(site("batch_norm"), curved=True))
    assert action == Encode(er.codec("dither", levels=8))
    assert Lean()(site("batch_norm")).curved == er.codec("dither", levels=8)
    assert Lean(plain=16)(site("batch_norm")).curved is None


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
