"""Backward of norms on a code: against the reference, and against torch on the decoded."""

import pytest
import torch
from torch import Tensor

from elbowroom.kernels import numba, reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")
# batch, channels, elements of a map: tiles of 2048 begin and end inside runs, rows and maps
SHAPES = ((2, 1, 3), (3, 5, 1), (7, 700, 1), (5000, 2, 1), (4, 3, 7), (2, 3, 4096), (9, 64, 49))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn(n: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case(shape, dtype: torch.dtype, levels: int = 8, group_size: int = 64) -> tuple:
    batch, channels, inner = shape
    n = batch * channels * inner
    code = reference.dither_quantize(drawn(n, 1), 5, levels, group_size)
    return drawn(n, 2, dtype), *code, 5, levels, group_size, drawn(channels, 3) + 2, inner


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(shape, dtype):
    for levels, group_size in ((2, 32), (3, 256), (8, 64), (256, 128)):
        args = case(shape, dtype, levels, group_size)
        out, expected = torch.empty_like(args[0]), torch.empty_like(args[0])
        sums = numba.dither_batch_norm_backward(*args, out)
        right = reference.dither_batch_norm_backward(*args, expected)
        size = max(1.0, expected.abs().max().item())
        assert (out - expected).abs().max() <= size * (1e-5 if dtype is torch.float32 else 1e-2)
        for got, wanted in zip(sums, right, strict=True):
            assert got.dtype is torch.float32
            error = (got - wanted).abs().max()
            assert error <= 1e-5 * max(1.0, wanted.abs().max().item()) * shape[0] ** 0.5


@pytest.mark.parametrize("inner_is_one", [False, True])
def test_is_torchs_own_on_the_decoded(inner_is_one):
    """NCHW and channels_last."""
    batch, channels, inner = 6, 10, 50
    shape = (batch * inner, channels, 1) if inner_is_one else (batch, channels, inner)
    grad, *code, factor, inner = case(shape, torch.float32)
    xhat = torch.empty_like(grad)
    reference.dither_dequantize(*code, xhat)
    maps = (shape[0], channels, inner)
    zero, one, out = torch.zeros(channels), torch.ones(channels), torch.empty_like(grad)
    expected = torch.ops.aten.native_batch_norm_backward(
        *(grad.view(maps), xhat.view(maps), factor, None, None, zero, one, True, 0.0, [True] * 3)
    )
    got = out.view(maps), *numba.dither_batch_norm_backward(grad, *code, factor, inner, out)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_no_bit_depends_on_how_many_threads_there_are():
    args = case((9, 64, 490), torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = torch.empty_like(args[0])
            found.append((*numba.dither_batch_norm_backward(*args, out), out))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_a_gradient_that_is_not_finite_spoils_its_channel_and_no_other():
    grad, *rest = case((4, 3, 70), torch.float32)
    grad[75] = float("nan")  # channel 1
    out = torch.empty_like(grad)
    sums = numba.dither_batch_norm_backward(grad, *rest, out)
    by_channel = out.view(4, 3, 70)
    assert by_channel[:, 1].isnan().all()
    assert by_channel[:, [0, 2]].isfinite().all()
    for total in sums:
        assert total.isnan().tolist() == [False, True, False]


# --- layer norm ---

ROWS = ((1, 1), (3, 5), (700, 3), (64, 192), (50, 2048), (3, 5000))


def layer_case(rows: int, row: int, dtype: torch.dtype, levels: int = 8) -> tuple:
    code = reference.dither_quantize(drawn(rows * row, 1), 5, levels, 64)
    weight, rstd = drawn(row, 3) + 2, drawn(rows, 4).abs() + 0.1
    return drawn(rows * row, 2, dtype), *code, 5, levels, 64, weight, rstd


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "row"), ROWS)
def test_of_rows_equals_the_reference(rows, row, dtype):
    for levels in (2, 5, 256):
        args = layer_case(rows, row, dtype, levels)
        out, expected = torch.empty_like(args[0]), torch.empty_like(args[0])
        sums = numba.dither_layer_norm_backward(*args, out)
        right = reference.dither_layer_norm_backward(*args, expected)
        size = max(1.0, expected.abs().max().item())
        assert (out - expected).abs().max() <= size * (1e-5 if dtype is torch.float32 else 1e-2)
        for got, wanted in zip(sums, right, strict=True):
            assert (got.dtype, got.shape) == (torch.float32, (row,))
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * rows**0.5)


def test_of_rows_is_torchs_own_on_the_decoded():
    grad, *code, weight, rstd = layer_case(60, 192, torch.float32)
    xhat, out = torch.empty_like(grad), torch.empty_like(grad)
    reference.dither_dequantize(*code, xhat)
    maps, mean = (60, 192), torch.zeros(60, 1)
    x = xhat.view(maps) / rstd[:, None]  # whose normalized form it is
    expected = torch.ops.aten.native_layer_norm_backward(
        *(grad.view(maps), x, [192], mean, rstd[:, None], weight, weight, [True] * 3)
    )
    got = out.view(maps), *numba.dither_layer_norm_backward(grad, *code, weight, rstd, out)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_no_bit_of_rows_depends_on_how_many_threads_there_are():
    args = layer_case(700, 300, torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = torch.empty_like(args[0])
            found.append((*numba.dither_layer_norm_backward(*args, out), out))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))
