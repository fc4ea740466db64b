"""A part of a tensor, decoded by itself: the very bits of that part of the whole."""

from typing import Any

import pytest
import torch
from torch import Tensor

from elbowroom.kernels import numba, ops, reference
from elbowroom.kernels.layout import TILE

pytestmark = pytest.mark.usefixtures("poisoned_memory")
N = 5 * TILE + 77
PARTS = ((0, 2), (2, 1), (3, 2), (4, 2), (0, 6))  # first tile, tiles: the last is a short one
OPS = ("group", "dither", "nonzero", "sided")
CHANNELS = torch.linspace(0.5, 2, 7), torch.linspace(-1, 1, 7), 300


def code_of(op: str, levels: int) -> list[Any]:
    """What its `_dequantize` takes before `out`."""
    x = torch.randn(N, generator=torch.Generator().manual_seed(0))
    x[x.abs() < 0.4] = 0
    if op == "sided":
        settings = [9, levels, 2, 64, 4]
        bits = reference.pack_bits((x > 0.1).float())
        return [bits, *reference.sided_quantize(x, bits, *settings), *settings]
    settings = [9, levels, 64]
    stored = getattr(reference, f"{op}_quantize")(x, *settings)
    return [*stored, *settings[1:]] if op == "group" else [*stored, *settings]  # it needs no seed


@pytest.mark.parametrize("levels", [3, 8, 256])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("module", [numba, reference])
def test_a_part_is_that_part_of_the_whole(module, op, levels):
    code, mask = code_of(op, levels), reference.pack_bits((torch.rand(N) < 0.5).float())
    decode = getattr(module, f"{op}_dequantize")
    for further in (
        (None, None, 1, None),
        (*CHANNELS, None),
        (None, None, 1, mask),
        (*CHANNELS, mask),
    ):
        whole = torch.empty(N)
        decode(*code, whole, *further)
        for first, tiles in PARTS:
            expected = whole[first * TILE : (first + tiles) * TILE]
            out = torch.empty_like(expected)
            decode(*code, out, *further, first)
            assert torch.equal(out, expected)


@pytest.mark.parametrize("op", OPS)
def test_on_a_gpu_too(op):
    """In Triton's interpreter, where there is none."""
    pytest.importorskip("triton")
    from elbowroom.kernels import triton

    cuda = torch.cuda.is_available()
    device, module = ("cuda", ops) if cuda else ("cpu", triton)
    mask = reference.pack_bits((torch.rand(N) < 0.5).float())
    arguments = code_of(op, 8)
    further = [*CHANNELS, mask]
    whole = torch.empty(N)
    getattr(reference, f"{op}_dequantize")(*arguments, whole, *further)
    out = torch.empty(N - 3 * TILE, device=device)
    there = [
        [a.to(device) if isinstance(a, Tensor) else a for a in x] for x in (arguments, further)
    ]
    getattr(module, f"{op}_dequantize")(*there[0], out, *there[1], 3)
    assert torch.equal(out.cpu(), whole[3 * TILE :])


@pytest.mark.parametrize("op", ["nonzero", "sided"])
@pytest.mark.parametrize("module", [numba, reference])
def test_a_payload_that_is_too_short_is_refused_in_parts_too(module, op):
    bits, payload, *rest = code_of(op, 4)
    decode, out = getattr(module, f"{op}_dequantize"), torch.empty(2 * TILE)
    decode(bits, payload, *rest, out, first=1)
    short = payload[: payload.numel() // 3]  # less than two tiles of five
    with pytest.raises(ValueError, match="bytes of payload"):
        decode(bits, short, *rest, out, first=1)
