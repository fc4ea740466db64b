"""Encoded states: v is 0 only if it is 0, rounding is unbiased, v decays, weights move."""

import math

import pytest
import torch

from elbowroom.kernels import ops, reference, states
from elbowroom.kernels.reference import moments
from elbowroom.kernels.reference.noise import uniform
from elbowroom.optim import SGD, AdamW, Lion

SECOND = {"coat": "expanded8", "int8": "log8", "int4": "log4"}


def hard_groups() -> torch.Tensor:
    """[10, 128] >= 0: all zero, constant, one element, wide, tiny, subnormal, huge, mixed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(10, 128, generator=generator)
    x[0], x[1] = 0, 0.3
    x[2] = 0
    x[2, 5] = 1e-12
    x[3] = torch.logspace(-37, 37, 128)
    x[4] *= 1e-30
    x[5] = 1e-42
    x[6] *= 1e37
    x[7, ::2] = 0
    x[8] = 2.0**-20
    x[9] = torch.linspace(0.1, 1.0, 128)
    return x


def held(kind: str, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """x [G, 128] as a second moment, encoded and decoded."""
    n, row = x.numel(), 128
    first = torch.zeros(n), torch.zeros(0, dtype=torch.int16)
    codes = torch.zeros(states.code_shape(kind, n, row), dtype=torch.uint8)
    bounds = torch.zeros(states.bound_shape(kind, n, row), dtype=torch.int16)
    kinds = ("fp32", kind, row)
    flat = x.reshape(-1)
    ops.moments_quantize(torch.zeros(n), flat, *first, codes, bounds, *kinds, seed)
    return ops.moments_dequantize(*first, codes, bounds, *kinds, n)[1].view_as(x)


@pytest.mark.parametrize("kind", SECOND.values())
def test_v_is_zero_only_where_it_is_zero_and_extremes_stay(kind):
    x = hard_groups()
    back = held(kind, x)
    assert torch.equal(back == 0, x == 0)
    assert back.isfinite().all()
    assert back[1].allclose(x[1], rtol=0.005)  # constant: bounds are rounded to 1/256 octave
    top = x.amax(1)
    assert ((back.amax(1) - top).abs() <= 0.4 * top + 2.0**-126).all()


def test_codes_of_e4m3_are_where_the_format_has_them():
    codes = torch.arange(1, 127, dtype=torch.int32)
    octaves = codes.to(torch.uint8).view(torch.float8_e4m3fn).double().log2() + 9
    assert (moments.octaves(codes) - octaves).abs().max() < 5e-5
    assert torch.equal(moments.e4m3_place(octaves.float())[0].round().int(), codes)

    z = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * states.OCTAVES
    nearest = torch.exp2(z.double() - 9).float().to(torch.float8_e4m3fn).view(torch.uint8).int()
    found = moments.e4m3_place(z)[0].round().int()
    differ = found != nearest
    assert differ.float().mean() < 1e-4  # right at the middle of two
    assert (found - nearest).abs().max() <= 1


def test_plain_e4m3_does_zero_a_wide_v():
    x = hard_groups()[3]
    out = torch.empty_like(x)
    ops.fp8_dequantize(*ops.fp8_quantize(x, 128, "e4m3"), 128, "e4m3", out)
    assert (out == 0).any()


@pytest.mark.parametrize(("kind", "steps"), [("log8", 254), ("log4", 14)])
def test_stochastic_rounding_of_v_is_unbiased(kind, steps):
    """Every draw falls in a cell: Hoeffding's limit at a false alarm of 1e-6 for all elements."""
    x, n = hard_groups()[[3, 9]], 600
    mean = sum(held(kind, x, seed).double() for seed in range(n)) / n
    span = 1.5 * torch.log2(x.amax(1) / x.amin(1)) + 8 / 128
    cell = x * (torch.exp2(span / steps) - 1)[:, None]
    limit = cell * math.sqrt(math.log(2 * x.numel() / 1e-6) / (2 * n)) + 1e-6 * x
    bias = (mean - x).abs()
    assert (bias <= limit).all()
    nearest = x * torch.exp2(0.25 * span / steps)[:, None]  # what a quarter of a cell would do
    assert ((nearest - x).abs()[1] > limit[1]).all()


def test_relative_first_moments_err_less_where_v_varies():
    generator = torch.Generator().manual_seed(0)
    root = torch.exp(torch.randn(64, 128, generator=generator) * 1.5)
    m, v = torch.randn(64, 128, generator=generator) * root, root**2
    codes, _, stored = reference.moments.log_store(v, torch.full_like(v, 0.5), 254)
    errors = []
    before, u = torch.zeros(64, 128, dtype=torch.int8), torch.full_like(v, 0.5)
    for unit in (stored, None):
        made = reference.moments.softsign_store(m, unit, before, u)
        back = reference.moments.softsign_load(*made, unit)
        errors.append(((back - m) / root).square().mean() / (m / root).square().mean())
    assert errors[0] < 5e-5
    assert errors[1] > 10 * errors[0]
    assert (codes > 0).all()


def test_stochastic_rounding_of_m_is_unbiased_and_to_nearest_would_not_be():
    """Every draw falls in a cell: Hoeffding's limit at a false alarm of 1e-6 for all elements."""
    generator, n = torch.Generator().manual_seed(0), 600
    m = torch.randn(4, 128, generator=generator)
    m[1] *= 1e-20
    m[2, ::3] = 0
    m[3] = 0
    kinds, held = ("softsign4", "none", 128), []
    for seed in range(n):
        codes, bounds = torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.int16)
        nothing = torch.zeros(0, dtype=torch.uint8), torch.zeros(0, dtype=torch.int16)
        parts = (codes, bounds, *nothing)
        ops.moments_quantize(m.view(-1), torch.zeros(512), *parts, *kinds, seed << 32)
        held.append(ops.moments_dequantize(*parts, *kinds, 512)[0].view_as(m))
    assert all(torch.equal(back[m == 0], m[m == 0]) for back in held)
    bias = (sum(back.double() for back in held) / n - m).abs()
    widest = 0.3 * 1.01 * m.abs().amax(1, keepdim=True)  # the outermost cell, of a bound rounded up
    limit = widest * math.sqrt(math.log(2 * m.numel() / 1e-6) / (2 * n))
    assert (bias <= limit).all()
    assert (bias.mean(1) <= limit.view(-1) / 6).all()  # to nearest it would be 0.03 of the maximum
    assert (held[0] != held[1])[0].any()


@pytest.mark.parametrize(
    ("cls", "state", "keeps", "settings"),
    [
        (AdamW, "int8", 0.9, {"betas": (0.9, 0.999)}),
        (AdamW, "int4x2", 0.9, {"betas": (0.9, 0.999)}),
        (SGD, "int8", 0.9, {}),
        (SGD, "int8", 0.99, {"momentum": 0.99}),
        (SGD, "int8", 0.999, {"momentum": 0.999}),
        (SGD, "int4x2", 0.99, {"momentum": 0.99}),
        (AdamW, "coat", 0.9, {"betas": (0.9, 0.999)}),
        (SGD, "coat", 0.99, {"momentum": 0.99}),
        (Lion, "int8", 0.99, {}),
    ],
)
def test_m_whose_gradients_have_ended_fades(cls, state, keeps, settings):
    """As `keeps`^t, though the rest of its group goes on: else its weight would move for ever."""
    p = torch.nn.Parameter(torch.zeros(64, 256))
    optimizer = cls([p], lr=0.0, state=state, **settings)
    gone, tenth = torch.arange(256) % 2 == 0, round(math.log(0.1) / math.log(keeps))
    kept = []
    for t in range(40 + 2 * tenth):
        p.grad = torch.full_like(p, 0.01)
        p.grad[:, gone] *= 0.7 if t < 40 else 0
        optimizer.step()
        if t in (39, 39 + tenth, 39 + 2 * tenth):
            m = optimizer.portable_state_dict()["state"][0][optimizer.moments[0]]
            kept.append(m[:, gone].sum().item())
    wide = 0.1 if state == "int8" else 0.2
    assert kept[1] / kept[0] == pytest.approx(keeps**tenth, rel=wide)
    assert kept[2] / kept[0] == pytest.approx(keeps ** (2 * tenth), rel=3 * wide)


@pytest.mark.parametrize(
    ("state", "within"), [("coat", 0.03), ("int8", 0.01), ("int4", 0.03), ("int4x2", 0.03)]
)
def test_v_does_not_stall_at_beta2_of_0_999(state, within):
    """Constant gradients, then none on half of every group: their v decays as 0.999^t."""
    p = torch.nn.Parameter(torch.zeros(64, 256))
    optimizer = AdamW([p], lr=0.0, state=state, betas=(0.9, 0.999))
    gone = torch.arange(256) % 2 == 0
    for t in range(400):
        p.grad = torch.full_like(p, 0.01)
        if t >= 100:
            p.grad[:, gone] = 0
        optimizer.step()
        if t == 99:
            before = optimizer.portable_state_dict()["state"][0]["exp_avg_sq"][:, gone].sum()
    v = optimizer.portable_state_dict()["state"][0]["exp_avg_sq"]
    assert abs(v[:, gone].sum() / (before * 0.999**300) - 1) <= within
    assert (v > 0).all()


@pytest.mark.parametrize("octaves", [4, 12, 20, 30])
def test_stochastic_rounding_of_slow_e4m3_is_unbiased(octaves):
    """Over and over: what one rounding is off by, a thousand add up."""
    generator, rows = torch.Generator().manual_seed(0), 400
    x = torch.exp2(torch.rand(128, generator=generator) * octaves).sort().values
    parts = torch.zeros(rows * 128), torch.zeros(0, dtype=torch.int16)
    codes = torch.zeros(rows, 128, dtype=torch.uint8), torch.zeros(rows, 2, dtype=torch.int16)
    rest = "fp32", "expanded8", 128
    values = x.repeat(rows)
    for seed in range(100):
        values = values.view(rows, 128)
        values[:, 127] = x[127]  # a bound is rounded up, and stays
        ops.moments_quantize(parts[0], values.view(-1), *parts, *codes, *rest, seed)
        _, values = ops.moments_dequantize(*parts, *codes, *rest, rows * 128)
    drift = values.view(rows, 128).double().mean(0) / x - 1
    assert drift[8:].abs().mean() <= 0.1
    assert drift[8:].mean().abs() <= 0.03


def test_m_that_fades_does_not_take_the_codes_of_the_others():
    p = torch.nn.Parameter(torch.zeros(64, 128))
    optimizers = [SGD([torch.nn.Parameter(p.clone())], lr=0.0, state=s) for s in ("coat", "fp32")]
    generator, gone = torch.Generator().manual_seed(0), torch.arange(128) % 2 == 0
    for t in range(1200):
        grad = torch.randn(64, 128, generator=generator)
        grad[:, gone] *= t < 10
        for one in optimizers:
            one.param_groups[0]["params"][0].grad = grad
            one.step()
    got, exact = (o.portable_state_dict()["state"][0]["momentum_buffer"] for o in optimizers)
    error = (got - exact)[:, ~gone].square().mean() / exact[:, ~gone].square().mean()
    assert 0 < error <= 0.03


def test_small_updates_move_bf16_weights_unless_they_are_rounded_to_nearest():
    moved = {}
    for weights in ("residual", "sr", "nearest"):
        p = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = AdamW([p], lr=1e-5, weight_decay=0.0, weights=weights, state="fp32")
        for _ in range(300):
            p.grad = torch.ones_like(p)
            optimizer.step()
        residual = optimizer.state[p].get("residual")
        moved[weights] = 1 - reference.weights.weights_load(p.detach(), residual).mean().item()
    assert moved["nearest"] == 0
    assert moved["residual"] == pytest.approx(3e-3, rel=0.01)
    assert moved["sr"] == pytest.approx(3e-3, rel=0.1)


@pytest.mark.parametrize("update", [6e-8, 2e-7, 1e-6])
def test_updates_of_an_ulp_of_float32_move_weights_with_a_residual(update):
    w = torch.linspace(0.5, 2, 1 << 16)
    param, residual = w.to(torch.bfloat16), torch.zeros(1 << 16, dtype=torch.int8)
    load, store = reference.weights.weights_load, reference.weights.weights_store
    exact, steps = load(param, residual), 100
    before = exact.double().mean()
    for seed in range(steps):
        exact -= update
        u = uniform(seed, 0, 512, w.device, 128).view(-1)
        store(load(param, residual) - update, param, residual, "residual", u)
    moved = (before - load(param, residual).double().mean()) / (before - exact.double().mean())
    assert moved == pytest.approx(1, rel=0.1)


def test_residual_weights_are_read_back_to_a_127th_of_half_a_step():
    w = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * torch.logspace(
        -30, 30, 5000
    )
    u = uniform(3, 0, 40, w.device, 128).view(-1)[:5000]
    param, residual = w.to(torch.bfloat16), torch.zeros(5000, dtype=torch.int8)
    reference.weights.weights_store(w, param, residual, "residual", u)
    back = reference.weights.weights_load(param, residual)
    assert abs(((back - w) / w).mean()) < 4e-7  # unbiased: a cell is up to 3e-5
    assert ((back - w).abs() <= w.abs() * 2.0**-8 / 127 * 1.01).all()
    once, again = param.clone(), residual.clone()
    reference.weights.weights_store(back, once, again, "residual", u)
    assert torch.equal(reference.weights.weights_load(once, again), back)


def test_noise_of_groups_is_that_of_tiles_in_another_size():
    u = uniform(5, 0, 4, torch.device("cpu"), 128)
    assert u.shape == (4, 128)
    assert u.unique().numel() > 500
