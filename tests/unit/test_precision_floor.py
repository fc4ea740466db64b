"""What does not average an error out gets codes of more levels; mild codes stay as they are."""

from dataclasses import replace
from math import prod

import pytest
import torch
from torch.nn import functional as F

import elbowroom as er
from elbowroom.codecs import Sided
from elbowroom.plan import Encode, Lean, Lossy, Need, Site
from elbowroom.plan.precision_floor import at_precision_floor, if_curved, suffices, summed_over
from elbowroom.plan.site import Formula

ABSOLUTE = er.codec("comet", bound=0.1, relative=False)


def site(consumer, formula=Formula.SUMMED, shape=(4, 8, 64, 32), **more):
    nbytes = 4 * prod(shape)
    return Site(
        "m", consumer, "", shape, torch.float32, nbytes, Need.LOSSY, formula=formula, **more
    )


FINE = [
    (er.codec("dither", levels=2), er.codec("dither", levels=16)),
    (er.codec("dither", levels=24), er.codec("dither", levels=24)),
    (er.codec("group", bits=2), er.codec("group", bits=5)),
    (er.codec("division", bits=2, block=4), er.codec("division", bits=5, block=4)),
    (er.codec("comet", bound=0.1), er.codec("comet", bound=0.3 / 15)),
    (ABSOLUTE, ABSOLUTE),
    (er.codec("cast"), er.codec("cast")),
]
SHARED = [
    (er.codec("dither", levels=2), er.codec("dither", levels=32)),
    (er.codec("dither", levels=40), er.codec("dither", levels=40)),
    (er.codec("group", bits=2), er.codec("group", bits=6)),
    (er.codec("division", bits=2, block=4), er.codec("division", bits=6, block=4)),
    (er.codec("comet", bound=0.1), er.codec("comet", bound=0.3 / 31)),
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
    assert at_precision_floor(lean, site("scaled_dot_product_attention")) == mild
    assert at_precision_floor(lean, site("linear")) == lean
    assert Lossy(lean)(site("scaled_dot_product_attention")) == Encode(mild)


@pytest.mark.parametrize(("lean", "mild"), FINE)
@pytest.mark.parametrize("formula", [Formula.PRODUCT, Formula.CURVED])
def test_products_and_curves_are_treated_gently(formula, lean, mild):
    assert Lossy(lean)(site("mul", formula)) == Encode(mild)


@pytest.mark.parametrize(("lean", "mild"), FINE)
@pytest.mark.parametrize("consumer", ["conv2d", "batch_norm", "linear"])
def test_so_are_sums_over_few_elements(consumer, lean, mild):
    few = (4, 16, 3, 3) if consumer != "linear" else (4, 9, 16)
    assert Lossy(lean, rebuild=False)(site(consumer, shape=few)) == Encode(mild)


@pytest.mark.parametrize(("lean", "mild"), FINE)
def test_what_counts_is_the_shape_that_the_reader_sees(lean, mild):
    flattened = replace(site("linear"), summed=16)
    assert at_precision_floor(lean, flattened) == mild
    assert at_precision_floor(lean, replace(flattened, summed=256)) == lean


@pytest.mark.parametrize(("lean", "mild"), SHARED)
def test_products_of_activations_pass_errors_on(lean, mild):
    product = replace(site("matmul", Formula.MATRIX), summed=256)
    if mild.id == "group":  # rows of a matrix may differ in size
        mild = replace(mild, group_size=64)
    assert at_precision_floor(lean, product) == mild


def test_how_many_elements_are_summed():
    assert summed_over((16, 4096), "linear") == 16
    assert summed_over((4, 9, 16), "linear") == 36
    assert summed_over((4, 16, 3, 5), "conv2d") == summed_over((4, 16, 3, 5), "batch_norm") == 60
    assert summed_over((4096,), "linear") == summed_over((), "dot") == 1
    assert summed_over((4, 0), "linear") == 0


@pytest.mark.parametrize("id", ["dither", "group", "division", "comet"])
def test_probabilities_have_relative_codes_and_log_probabilities_fine_ones(id):
    codec = er.codec(id)
    assert at_precision_floor(codec, site("softmax", Formula.PROBABILITY)) == er.codec(
        "cast", to="fp8_e4m3"
    )
    fine = at_precision_floor(codec, site("log_softmax", Formula.LOG_PROBABILITY))
    assert getattr(fine, "levels", 256) == 256
    assert getattr(fine, "bits", 8) in (8, None)
    assert at_precision_floor(er.codec("cast"), site("softmax", Formula.PROBABILITY)) == er.codec(
        "cast"
    )


@pytest.mark.parametrize("id", ["dither", "division"])
def test_probabilities_with_zeros_hold_the_others_alone(id):
    masked = site("softmax", Formula.PROBABILITY, facts=er.Facts(has_zeros=True))
    codec = er.codec("cast", to="fp8_e4m3", sparse=True)
    assert at_precision_floor(er.codec(id), masked) == codec
    assert at_precision_floor(codec, masked) == codec
    assert at_precision_floor(er.codec("sparse_lossless"), masked).id == "sparse_lossless"


def test_a_sided_code_suffices_where_both_of_its_codes_have_the_levels():
    product = site("mul", Formula.PRODUCT)
    assert not suffices(Sided(upper=32, lower=2), product)
    assert suffices(Sided(upper=32, lower=16), product)
    assert suffices(Sided(upper=2, lower=2), site("conv2d"))


@pytest.mark.parametrize(("lean", "mild"), SHARED)
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
    assert action == Encode(er.codec("dither", levels=32))
    assert Lean()(site("batch_norm")).curved == er.codec("dither", levels=32)
    assert Lean(plain=32)(site("batch_norm")).curved is None


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
