"""The kernel of attention's gradients beside its specification, on odd and hostile inputs."""

import pytest
import torch
from torch import Tensor

from elbowroom.kernels import attention, numba, reference
from elbowroom.kernels.numba import register_tile
from elbowroom.kernels.numba.attention_backward import scratch_size

SHAPES = [  # B, H, G, T, S, E, F
    *((3, 4, 4, 128, 128, 16, 16), (2, 3, 3, 150, 70, 8, 24), (1, 2, 2, 70, 150, 8, 8)),
    *((2, 1, 1, 2, 5, 3, 2), (3, 6, 2, 128, 130, 16, 16), (1, 1, 1, 1, 1, 1, 1)),
    *((2, 2, 1, 33, 17, 17, 33), (1, 2, 2, 5, 300, 64, 64)),
]
LEAST = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """What is read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def drawn(shape, lies: str) -> Tensor:
    """[B, heads, tokens, width], by heads, by tokens, or with its width first."""
    B, H, T, D = shape
    if lies == "heads":
        return torch.randn(shape)
    if lies == "tokens":
        return torch.randn(B, T, H, D).transpose(1, 2)
    return torch.randn(B, H, D, T).transpose(2, 3)


def masked(kind: str, B: int, H: int, T: int, S: int) -> Tensor | None:
    if kind in ("none", "causal"):
        return None
    if kind == "rows":  # one value for all keys of a query
        return torch.rand(T, 1) < 0.7
    if kind == "keys":
        return torch.rand(B, 1, 1, S) < 0.5
    if kind == "bool":
        return torch.rand(B, 1, T, S) < 0.3
    lower = torch.ones(T, S, dtype=torch.bool).tril(3)
    lower[T // 2] = False  # nothing is left of it
    if kind == "float":
        return torch.randn(H, T, S).masked_fill_(~lower, -torch.inf)
    return torch.zeros(T, S).masked_fill_(~lower, LEAST)


def both(q, k, v, grad, mask, is_causal, factor):
    """The gradients by the kernel, and by the specification."""
    found = []
    for by in (numba, reference):
        into = [torch.empty_like(x) for x in (q, k, v)]
        by.attention_backward(q, k, v, grad, mask, is_causal, factor, *into)
        found.append(into)
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("lies", ["heads", "tokens", "width first"])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float", "finite", "rows", "keys"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_equal_the_reference(shape, kind, lies, threads) -> None:
    torch.manual_seed(len(kind))
    B, H, G, T, S, E, F = shape
    sizes = (B, H, T, E), (B, G, S, E), (B, G, S, F), (B, H, T, F)
    q, k, v, grad = (drawn(one, lies) for one in sizes)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got, expected = both(q, k, v, grad, masked(kind, B, H, T, S), kind == "causal", 0.4)
    finally:
        torch.set_num_threads(before)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5)
        assert x.stride() == y.stride()


@pytest.mark.parametrize("std", [0.5, 2.0, 6.0, 30.0])
def test_logits_may_be_as_sharp_as_they_are(std: float) -> None:
    torch.manual_seed(1)
    q, k, v, grad = (torch.randn(2, 2, 64, 32) * s for s in (std, std, 1, 1))
    for x, y in zip(*both(q, k, v, grad, None, True, 32**-0.5), strict=True):
        rounding = 1e-4 if std < 10 else 1e-3  # a logit of 900 is rounded to 6e-5
        assert (x - y).norm() <= rounding * y.norm() + 1e-6


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", range(4))
def test_what_is_not_finite_stays_so_where_the_reference_has_it(which: int, value: float) -> None:
    torch.manual_seed(2)
    given = [torch.randn(1, 2, 40, 16) for _ in range(4)]
    given[which][0, 1, 17, 5] = value
    for x, y in zip(*both(*given, None, False, 0.25), strict=True):
        assert torch.equal(x.isfinite(), y.isfinite())
        torch.testing.assert_close(x[y.isfinite()], y[y.isfinite()], rtol=1e-4, atol=2e-5)


def test_no_bit_depends_on_how_many_threads_there_are() -> None:
    torch.manual_seed(3)
    given = [torch.randn(3, 4, 100, 24) for _ in range(4)]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            into = [torch.empty_like(x) for x in given[:3]]
            numba.attention_backward(*given, None, False, 0.2, *into)
            found.append(torch.cat([x.flatten() for x in into]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize(("S", "E", "F"), [(1, 1, 1), (128, 64, 64), (130, 17, 40)])
def test_the_workspace_is_what_is_said(S: int, E: int, F: int) -> None:
    items = min(2 * 3, torch.get_num_threads())
    said = attention.workspace_nbytes((2, 3, S, E), (2, 3, S, F))
    assert said == 4 * items * scratch_size(S, E, F)


@pytest.mark.parametrize("add", [0, 1])
@pytest.mark.parametrize("K", [1, 2, 33])
def test_a_tile_is_a_product(K: int, add: int) -> None:
    a, b, c = torch.randn(8, K), torch.randn(K, 48), torch.randn(8, 48)
    expected = a.double() @ b.double() + add * c
    at = [x.data_ptr() for x in (c, a, b)]
    register_tile.multiply(at[0], 48, at[1], K, 1, at[2], 16, 48, 8, 48, K, add)
    torch.testing.assert_close(c.double(), expected, rtol=1e-5, atol=1e-5)
    turned = a.t().contiguous()
    register_tile.multiply(at[0], 48, turned.data_ptr(), 1, 8, at[2], 16, 48, 8, 48, K, 0)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
