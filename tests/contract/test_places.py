"""Max-pooling's indices as places in their windows: every geometry, and every lie."""

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.codecs import Facts, codec
from elbowroom.kernels import numba, reference
from elbowroom.kernels.windows import Window

POOLS = {
    "2 x 2": (nn.MaxPool2d(2), 2),
    "3 x 3, stride 2, padding 1": (nn.MaxPool2d(3, 2, 1), 4),
    "one row": (nn.MaxPool2d((1, 2)), 1),
    "one column": (nn.MaxPool2d((3, 1), (2, 1)), 2),
    "dilated": (nn.MaxPool2d(3, 1, 1, dilation=2), 4),
    "beyond the edge": (nn.MaxPool2d(3, 2, 1, ceil_mode=True), 4),
    "4 x 5": (nn.MaxPool2d((4, 5), 1), 8),
    "1-D": (nn.MaxPool1d(3, 2, 1), 2),
}


def input_of(name, last=False):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 23) if name == "1-D" else torch.randn(3, 5, 17, 23)
    return x.to(memory_format=torch.channels_last) if last else x


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", POOLS)
def test_gradients_are_bit_equal_and_indices_take_a_few_bits(name, last):
    pool, bits = POOLS[name]
    if last and name == "1-D":
        pytest.skip("1-D has one layout")
    x = input_of(name, last)
    grads = []
    for context in (er.saving("keep"), er.saving(min_nbytes=0)):
        leaf = x.clone().requires_grad_()
        with context as saved:
            out = pool(leaf * 1.0)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)
    held = saved.ledger.totals("action")["narrow"]
    assert held == (8 * out.numel(), -(-out.numel() * bits // 8))


@pytest.mark.parametrize("kind", [nn.AdaptiveMaxPool2d(4), nn.MaxPool3d(2), nn.MaxPool2d(2)])
def test_other_poolings_are_narrowed_as_before(kind):
    shape = (2, 3, 8, 8, 8) if isinstance(kind, nn.MaxPool3d) else (3, 9, 9)
    leaf = torch.randn(shape, requires_grad=True)
    with er.saving(min_nbytes=0) as saved:
        out = kind(leaf * 1.0)
    out.sum().backward()
    before, after = saved.ledger.totals("action")["narrow"]
    assert after < before


def test_an_index_outside_of_its_window_is_held_raw():
    window = Window(8, 2, 2, 2, 2, 0, 0, 1, 1)
    true = torch.nn.functional.max_pool2d(torch.randn(2, 3, 8, 8), 2, return_indices=True)[1]
    for wrong in (0, 63, 2**40, -1):
        x = true.clone()
        x[1, 2, 1, 1] = wrong
        encoded = codec("narrow").encode(x, facts=Facts(largest=63, window=window))
        assert encoded.raw
        assert torch.equal(encoded.decode(), x)
    encoded = codec("narrow").encode(true, facts=Facts(largest=63, window=window))
    assert encoded.nbytes == true.numel() // 4
    assert encoded.nbytes == codec("narrow").encoded_nbytes(true.shape, true.dtype, encoded.facts)
    assert torch.equal(encoded.decode(), true)


MAPS = [(70, 31, 29, 1), (9, 31, 29, 7), (1, 1, 29, 1), (3000, 1, 25, 1)]


@pytest.mark.parametrize("maps", MAPS)
@pytest.mark.parametrize("kernel", [(1, 2), (2, 2), (3, 3), (4, 5)])
def test_numba_equals_the_reference(maps, kernel):
    w = Window(60, *kernel, 2, 2, 1, 1, 1, 1)
    row = torch.arange(maps[1])[:, None, None] * 2 - 1
    column = torch.arange(maps[2])[:, None] * 2 - 1
    y, x = (torch.randint(n, maps) for n in kernel)
    index = ((row + y) * 60 + column + x).flatten()
    for lies in (0, 3):
        index[: 5 * lies : 5] = torch.tensor([10**12, -(10**12), 7])[:lies]
        one, other = (m.places_pack(index, w, maps) for m in (reference, numba))
        assert torch.equal(one[0][lies * 5 :], other[0][lies * 5 :])
        assert (int(one[1]) > 0, int(other[1]) > 0) == (lies > 0, lies > 0)
        outs = torch.zeros(2, index.numel(), dtype=torch.int64)
        reference.places_unpack(one[0], w, maps, outs[0])
        numba.places_unpack(one[0], w, maps, outs[1])
        assert torch.equal(*outs)
        assert torch.equal(outs[0], index) or lies
