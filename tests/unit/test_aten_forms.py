"""The ops of compiled graphs, written out in aten ops: the bits of the kernels' reference."""

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from elbowroom.compiled import aten, ops
from elbowroom.compiled.rewrite import GROUP_SIZE
from elbowroom.kernels import reference


def values(dtype: torch.dtype, layout=torch.contiguous_format) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(4, 16, 8, 12) * torch.logspace(-3, 3, 4)[:, None, None, None]
    x[1] = x[1].relu()
    x[2, :3] = 0.5
    return x.to(dtype).contiguous(memory_format=layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("levels", [4, 16, 256])
def test_codes_are_those_of_the_reference(levels: int, dtype: torch.dtype) -> None:
    x, order = values(dtype), [0, 2, 3, 1]
    seed, number = torch.tensor(2**62 + 12345), 7
    grid = (number, levels, GROUP_SIZE)
    got = aten.encode(x, order, seed, *grid)
    flat, own = x.permute(order).reshape(-1), ops.seed_of(int(seed), number)
    expected = reference.dither_quantize(flat, own, levels, GROUP_SIZE)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    restored = torch.empty_like(flat)
    reference.dither_dequantize(*expected, own, levels, GROUP_SIZE, restored)
    out = aten.decode(*got, seed, *grid, list(x.shape), order, dtype)
    assert torch.equal(out.permute(order).reshape(-1), restored)
    assert out.shape == x.shape
    assert out.dtype is dtype


def test_a_tile_with_a_nan_decodes_to_nan_and_no_other_tile_does() -> None:
    x = torch.randn(4, 2048)
    x[1, 5] = float("nan")
    seed, grid = torch.tensor(5), (0, 16, GROUP_SIZE)
    codes = aten.encode(x, [0, 1], seed, *grid)
    out = aten.decode(*codes, seed, *grid, [4, 2048], [0, 1], x.dtype)
    assert out.isnan().all(dim=1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_masks_are_those_of_the_kernels(layout) -> None:
    x, order = values(torch.float32, layout) > 0, [0, 2, 3, 1]
    bits = aten.pack_mask(x, order)
    assert torch.equal(bits, ops.PACK_MASK(x, order))
    assert torch.equal(aten.unpack_mask(bits, list(x.shape), order), x)


def coded(x: Tensor, seed: Tensor) -> Tensor:
    order = list(range(x.dim()))
    codes = ops.ENCODE(x, order, seed, 3, 16, GROUP_SIZE)
    y = ops.DECODE(*codes, seed, 3, 16, GROUP_SIZE, list(x.shape), order, x.dtype)
    bits = ops.PACK_MASK(x > 0, order)
    return torch.where(ops.UNPACK_MASK(bits, list(x.shape), order), y, -y)


def traced(x: Tensor) -> fx.GraphModule:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = mode.from_tensor(x), torch.empty((), dtype=torch.int64)
        return fx.experimental.proxy_tensor.make_fx(coded)(*given)


def test_a_graph_with_the_ops_written_out_computes_the_same() -> None:
    x, seed = torch.randn(8, 2048), torch.tensor(11)
    gm = traced(x)
    assert aten.expand(gm, "cuda") == 0
    assert aten.expand(gm, "cpu") == 4
    names = {getattr(node.target, "namespace", "") for node in gm.graph.nodes}
    assert "elbowroom_graph" not in names
    torch.testing.assert_close(gm(x, seed), coded(x, seed), rtol=0, atol=1e-6)


def test_what_is_no_whole_number_of_tiles_keeps_the_op() -> None:
    gm = traced(torch.randn(8, 100))
    assert aten.expand(gm, "cpu") == 2  # the masks alone
    assert gm.graph.find_nodes(op="call_function", target=ops.ENCODE)
