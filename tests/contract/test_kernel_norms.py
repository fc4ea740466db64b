"""Backward of norms in place of their normalized input: against the reference and torch."""

import pytest
import torch
from torch import Tensor

from elbowroom.kernels import numba, ops, reference
from elbowroom.runtime import normal
from elbowroom.runtime.direct.attention import levels

# batch, channels, elements of a map: tiles of 2048 begin and end inside runs, rows and maps
SHAPES = ((2, 1, 3), (3, 5, 1), (7, 700, 1), (5000, 2, 1), (4, 3, 7), (2, 3, 4096), (9, 64, 49))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn(n: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case(shape, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, int, Tensor]:
    """grad, factor, inner, xhat."""
    batch, channels, inner = shape
    n = batch * channels * inner
    return drawn(n, 2, dtype), drawn(channels, 3) + 2, inner, drawn(n, 1, dtype)


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Gradients of the input, by the largest of them."""
    size = max(1.0, expected.abs().max().item())
    allowed = 1e-5 if got.dtype is torch.float32 else 1e-2
    assert (got - expected).abs().max() <= size * allowed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(shape, dtype):
    *args, xhat = case(shape, dtype)
    got, expected = xhat.clone(), xhat.clone()
    sums = numba.batch_norm_backward(*args, got)
    right = reference.batch_norm_backward(*args, expected)
    assert_near(got, expected)
    for total, wanted in zip(sums, right, strict=True):
        assert total.dtype is torch.float32
        error = (total - wanted).abs().max()
        assert error <= 1e-5 * max(1.0, wanted.abs().max().item()) * shape[0] ** 0.5


@pytest.mark.parametrize("inner_is_one", [False, True])
def test_is_torchs_own(inner_is_one):
    """NCHW and channels_last."""
    batch, channels, inner = 6, 10, 50
    shape = (batch * inner, channels, 1) if inner_is_one else (batch, channels, inner)
    grad, factor, inner, xhat = case(shape)
    xhat = xhat.view(shape)
    xhat = (xhat - xhat.mean((0, 2), keepdim=True)).flatten()  # as a norm has it
    zero, one = torch.zeros(channels), torch.ones(channels)
    expected = torch.ops.aten.native_batch_norm_backward(
        *(grad.view(shape), xhat.clone().view(shape), factor, None, None, zero, one, True, 0.0),
        [True] * 3,
    )
    sums = numba.batch_norm_backward(grad, factor, inner, xhat)
    for a, b in zip((xhat.view(shape), *sums), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(64, 128, 1), (9, 8, 490)])
def test_the_gradient_sums_to_nothing_over_a_channel_whatever_the_mean(shape):
    """The layer below multiplies the sum by the mean of its input, which may be large."""
    grad, factor, inner, xhat = case(shape)
    offset = xhat + 0.3
    numba.batch_norm_backward(grad, factor, inner, xhat)
    numba.batch_norm_backward(grad, factor, inner, offset)
    assert_near(offset, xhat)
    assert offset.view(shape).double().mean((0, 2)).abs().max() < 1e-6


def test_no_bit_depends_on_how_many_threads_there_are():
    *args, xhat = case((9, 64, 490))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            x = xhat.clone()
            found.append((*numba.batch_norm_backward(*args, x), x))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_a_gradient_that_is_not_finite_spoils_its_channel_and_no_other():
    grad, factor, inner, xhat = case((4, 3, 70))
    grad[75] = float("nan")  # channel 1
    sums = numba.batch_norm_backward(grad, factor, inner, xhat)
    by_channel = xhat.view(4, 3, 70)
    assert by_channel[:, 1].isnan().all()
    assert by_channel[:, [0, 2]].isfinite().all()
    for total in sums:
        assert total.isnan().tolist() == [False, True, False]


# --- layer norm ---

ROWS = ((1, 1), (3, 5), (700, 3), (64, 192), (50, 2048), (3, 5000))


def layer_case(rows: int, row: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """grad, weight, rstd, xhat."""
    grad, xhat = drawn(rows * row, 2, dtype), drawn(rows * row, 1, dtype)
    return grad, drawn(row, 3) + 2, drawn(rows, 4).abs() + 0.1, xhat


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "row"), ROWS)
def test_of_rows_equals_the_reference(rows, row, dtype):
    *args, xhat = layer_case(rows, row, dtype)
    got, expected = xhat.clone(), xhat.clone()
    sums = numba.layer_norm_backward(*args, got)
    right = reference.layer_norm_backward(*args, expected)
    assert_near(got, expected)
    for total, wanted in zip(sums, right, strict=True):
        assert (total.dtype, total.shape) == (torch.float32, (row,))
        torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-4 * rows**0.5)


def test_of_rows_is_torchs_own():
    grad, weight, rstd, xhat = layer_case(60, 192)
    maps, mean = (60, 192), torch.zeros(60, 1)
    x = xhat.view(maps) / rstd[:, None]  # whose normalized form it is
    expected = torch.ops.aten.native_layer_norm_backward(
        *(grad.view(maps), x, [192], mean, rstd[:, None], weight, weight, [True] * 3)
    )
    sums = numba.layer_norm_backward(grad, weight, rstd, xhat)
    for a, b in zip((xhat.view(maps), *sums), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_no_bit_of_rows_depends_on_how_many_threads_there_are():
    *args, xhat = layer_case(700, 300)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            x = xhat.clone()
            found.append((*numba.layer_norm_backward(*args, x), x))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


# --- facts of rows ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "row"), [*ROWS, (1, 4097), (4096, 1), (3000, 24)])
def test_statistics_of_rows_equal_the_reference(rows, row, dtype):
    x = (3 * drawn(rows * row, 5) + 40).to(dtype)
    got, expected = numba.row_statistics(x, row), reference.row_statistics(x, row)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=1e-9)
    assert torch.equal(got[2:], expected[2:])


@pytest.mark.parametrize(
    "values",
    [
        pytest.param((1.0, float("nan"), -2.0), id="nan"),
        pytest.param((-float("nan"), 0.0, 0.0), id="minus nan among zeros"),
        pytest.param((float("nan"), float("inf"), -float("inf")), id="nan and both infinities"),
        pytest.param((-0.0, 0.0, 0.0), id="zeros"),
        pytest.param((-3.0, -2.0, -7.0), id="negative"),
        pytest.param((1e4 + 1, 1e4, 1e4 - 1), id="a mean far above the spread"),
    ],
)
def test_statistics_of_hostile_rows(values):
    x = torch.zeros(5, 3)
    x[2] = torch.tensor(values)
    got, expected = numba.row_statistics(x.view(-1), 3), reference.row_statistics(x.view(-1), 3)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0.0, equal_nan=True)
    assert got[:, [0, 1, 3, 4]].eq(0).all()


@pytest.mark.parametrize("value", [float("inf"), -float("inf")])
def test_the_extremes_of_a_row_are_infinite_where_it_is(value):
    x = torch.ones(4)
    x[2] = value
    *_, least, most = numba.row_statistics(x, 4).flatten()
    assert (float(least), float(most)) == (min(1.0, value), max(1.0, value))


@pytest.mark.parametrize("keep_zeros", [False, True])
@pytest.mark.parametrize(("rows", "row"), [*ROWS, (1, 4097), (4096, 1), (300, 24)])
def test_scales_of_rows_are_those_of_their_statistics(monkeypatch, rows, row, keep_zeros):
    x = (3 * drawn(rows * row, 5) + 40 * drawn(rows, 6).repeat_interleave(row)).view(rows, row)
    x[0] = 0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    by_address = normal._by_address(x, keep_zeros=keep_zeros)
    monkeypatch.setattr(normal, "_by_address", lambda *_, **__: None)
    for got, expected in zip(by_address, normal.of_rows(x, keep_zeros=keep_zeros), strict=True):
        assert got.dtype is expected.dtype
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_scales_of_rows_beyond_all_numbers_are_left_to_torch(value):
    x = torch.randn(5, 8)
    x[3, 2:4] = value
    assert normal._by_address(x, keep_zeros=False) is None


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("B", "T", "H", "D"), [(3, 70, 4, 16), (1, 5, 2, 64), (2, 1, 1, 3), (2, 130, 3, 80)]
)
def test_spreads_of_heads_equal_the_reference(B, T, H, D, dtype, shares):
    whole = (3 * drawn(B * T * H * (D + 5), 5) + 1).to(dtype).view(B, T, H, D + 5)
    x = whole[..., 2 : 2 + D].transpose(1, 2)  # a part of what one linear layer gives
    x[0, 0] *= 4
    sizes, strides = x.shape[:3], x.stride()[:3]
    n = D + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    given = x.as_strided((n,), (1,)), D, sizes, strides, shares
    got, expected = numba.head_spread(*given), reference.head_spread(*given)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), 1e30])
def test_the_spread_of_a_head_with_a_row_beyond_all_numbers_is_none(value):
    x = torch.zeros(2, 3, 4)  # 2 heads, 3 tokens
    x[1, 2, 1] = value
    given = x.view(-1), 4, (1, 2, 3), (24, 12, 4), False
    for by in (numba, reference):
        found = by.head_spread(*given)
        assert found[:, 0, 0].eq(0).all()
        assert found[:, 0, 1].isnan().all()


@pytest.mark.parametrize("name", ["batch_norm_backward", "layer_norm_backward"])
def test_norms_without_the_dispatcher_are_those_of_ops(name, one_thread):
    grad, xhat, factor = drawn(24 * 40, 1), drawn(24 * 40, 2), drawn(24, 3).abs()
    of_rows = drawn(40, 4).abs()
    given = (factor, 10) if name.startswith("batch") else (factor, of_rows)
    kernels = ops.by_address(grad)
    assert kernels is not None
    found = [
        (*run(grad, *given, x), x)
        for run, x in ((getattr(ops, name), xhat.clone()), (getattr(kernels, name), xhat.clone()))
    ]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("H", "G", "T", "S", "D"), [(4, 4, 16, 16, 16), (6, 2, 9, 30, 64), (1, 1, 1, 2, 3)]
)
@pytest.mark.parametrize("odd", [None, "nan", "zeros", "constant"])
def test_spreads_by_address_are_those_of_ops(H, G, T, S, D, odd, monkeypatch, one_thread):
    q, k, v = (
        drawn(2 * n * h * D, i).view(2, n, h, D) for i, h, n in ((1, H, T), (2, G, S), (3, G, S))
    )
    v = v * 0.1 + 5
    if odd == "nan":
        q[1, 0, 0, 1] = v[1, 0, 0, 1] = float("nan")
    if odd in ("zeros", "constant"):
        for x in (q, k, v):
            x[0] = 0.0 if odd == "zeros" else 7.0
    given = [x.transpose(1, 2) for x in (q, k, v)]

    def looks() -> Tensor:
        return torch.tensor([levels.spread(*given[:2]), levels.spread_of_values(given[2])])

    assert levels._by_address(*given) is not None
    found = looks()
    monkeypatch.setattr(levels, "_by_address", lambda *_: None)
    torch.testing.assert_close(found, looks(), rtol=1e-4, atol=0.0, equal_nan=True)


def test_no_statistic_depends_on_how_many_threads_there_are():
    x, before, found = drawn(3000 * 24, 6), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            of_heads = numba.head_spread(x, 24, (10, 3, 100), (7200, 2400, 24), True)
            found.append(torch.cat((numba.row_statistics(x, 24).view(-1), of_heads.view(-1))))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
