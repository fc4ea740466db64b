"""What codecs declare for compiled graphs: in aten ops the bits of the reference, at any size."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from elbowroom.codecs import BitMask, Cast, Codec, Dither, Division, Facts, Group, Narrow
from elbowroom.codecs.base import Expected
from elbowroom.compiled import expand, ops
from elbowroom.kernels import aten, reference

SEED = 2**62 + 12345
SIZES = (1, 63, 64, 2047, 2048, 5001)
LOSSY = [
    *(Dither(levels=levels) for levels in (2, 3, 4, 6, 8, 16, 128, 256)),
    Dither(levels=16, group_size=256),
    *(Group(bits=bits) for bits in (1, 2, 3, 4, 8)),
    Group(bits=4, group_size=32),
    Cast("bf16"),
    Cast("fp16"),
    Cast("fp8_e4m3"),
    Cast("fp8_e5m2", group_size=32),
    Division(),
    Division(bits=5, block=4, rounding="dither"),
    Division(bits=4, range_blocks=2),
]


def values(n: int, dtype: torch.dtype, odd: float | None = None) -> Tensor:
    torch.manual_seed(n)
    x = torch.randn(n) * torch.logspace(-3, 3, n)
    x[: n // 3] = x[: n // 3].relu()
    if odd is not None:
        x[n // 2] = odd
    return x.to(dtype)


def by_reference(codec: Codec, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The buffers of a flat tensor, and what they decode to, by the kernels' specification."""
    out = torch.empty_like(x)
    match codec:
        case Dither(levels=levels, group_size=size):
            buffers = reference.dither_quantize(x, SEED, levels, size)
            reference.dither_dequantize(*buffers, SEED, levels, size, out)
        case Group(bits=bits, group_size=size):
            buffers = reference.group_quantize(x, SEED, 1 << bits, size)
            reference.group_dequantize(*buffers, 1 << bits, size, out)
        case Cast(to=to) if to.startswith("fp8"):
            how = codec.group_size, to.removeprefix("fp8_")
            buffers = reference.fp8_quantize(x, *how)
            reference.fp8_dequantize(*buffers, *how, out)
        case Cast(to=to):
            buffers = (x.to({"bf16": torch.bfloat16, "fp16": torch.float16}[to]),)
            out.copy_(buffers[0])
        case Division(bits=bits, rounding=rounding):
            how = 1 << bits, *codec._how(len(x), Facts())
            buffers = reference.division_quantize(x, SEED, *how)
            reference.division_dequantize(*buffers, SEED, *how, rounding == "dither", out)
    return buffers, out


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))


@pytest.mark.parametrize("codec", LOSSY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_written_codes_are_those_of_the_reference(codec: Codec, dtype: torch.dtype) -> None:
    encode, decode = codec.graph_form(Facts()).written
    seed = torch.tensor([SEED])
    for n in SIZES:
        for odd in (None, float("nan"), float("-inf"), 1e38):
            x = values(n, dtype, odd)
            got, (buffers, restored) = encode(x, seed), by_reference(codec, x)
            assert all(same_bits(a, b) for a, b in zip(got, buffers, strict=True))
            layout = codec._layout(n, dtype, Facts())
            assert [(one.dtype, one.shape) for one in layout] == [(b.dtype, b.shape) for b in got]
            assert same_bits(decode(got, seed, n, dtype), restored)


def test_a_tile_with_a_nan_decodes_to_nan_and_no_other_tile_does() -> None:
    x, seed = torch.randn(4 * 2048), torch.tensor([5])
    x[2048 + 5] = float("nan")
    encode, decode = Dither(levels=16).graph_form(Facts()).written
    out = decode(encode(x, seed), seed, len(x), x.dtype).view(4, 2048)
    assert out.isnan().all(dim=1).tolist() == [False, True, False, False]


EXACT = [
    (BitMask(), Facts(value=1.0), torch.rand(2049) < 0.3),
    (BitMask(), Facts(value=1.25), (torch.rand(77) < 0.3) * 1.25),
    (Narrow(), Facts(smallest=0, largest=255), torch.randint(0, 256, (2049,))),
    (Narrow(), Facts(smallest=-30000, largest=29999), torch.randint(-30000, 30000, (77,))),
]


@pytest.mark.parametrize(("codec", "facts", "x"), EXACT)
def test_exact_codes_give_back_every_bit(codec: Codec, facts: Facts, x: Tensor) -> None:
    form, seed = codec.graph_form(facts), torch.tensor([0])
    buffers = form.written[0](x, seed)
    assert all(same_bits(a, b) for a, b in zip(buffers, form.quantize(x, 0), strict=True))
    layout = codec._layout(len(x), x.dtype, facts)
    assert [(one.dtype, one.shape) for one in layout] == [(b.dtype, b.shape) for b in buffers]
    assert same_bits(form.written[1](buffers, seed, len(x), x.dtype), x)
    out = torch.empty_like(x)
    form.dequantize(buffers, 0, out)
    assert same_bits(out, x)


LAYOUTS = [([0, 1, 2, 3], torch.contiguous_format), ([0, 2, 3, 1], torch.channels_last)]


@pytest.mark.parametrize(("order", "layout"), LAYOUTS)
@pytest.mark.parametrize("codec", LOSSY, ids=str)
def test_ops_of_graphs_are_the_kernels_in_any_order_of_memory(codec, order, layout) -> None:
    x = torch.randn(3, 5, 9, 11).contiguous(memory_format=layout)
    coding, seed, number = ops.coding_name(codec), torch.tensor([77]), 6
    own = ops.seed_of(77, number)
    for given in (x, x.transpose(0, 1)[:, :3].transpose(0, 1), x[..., ::2]):
        buffers = ops.ENCODE(given, order, coding, seed, number)
        out = ops.DECODE(buffers, coding, seed, number, list(given.shape), order, x.dtype)
        there = given.contiguous(memory_format=layout)
        eager = codec.encode(there, own)
        assert all(same_bits(a, b) for a, b in zip(buffers, eager.buffers, strict=True))
        assert same_bits(out, eager.decode())
        assert out.stride() == there.stride()


def test_nothing_is_coded_of_an_empty_tensor() -> None:
    x, seed = torch.empty(0, 5), torch.tensor([1])
    for codec in LOSSY:
        coding = ops.coding_name(codec)
        buffers = ops.ENCODE(x, [0, 1], coding, seed, 0)
        assert ops.DECODE(buffers, coding, seed, 0, [0, 5], [0, 1], x.dtype).shape == x.shape


def test_a_seed_on_a_device_is_the_one_of_the_host() -> None:
    base = torch.tensor([SEED])
    for number in (0, 1, 7, 2**20):
        assert int(aten.seed_of(base, number)) == ops.seed_of(SEED, number)
        assert int(aten.seed_of(base, torch.tensor([number]))) == ops.seed_of(SEED, number)


@dataclass(frozen=True)
class Halved(Codec):
    """A codec of another package, with a form of its own."""

    id: ClassVar[str] = "halved"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)

    def _layout(self, n, dtype, facts):
        return (Expected(torch.bfloat16, (n,)),)

    def _encode(self, flat, seed, facts):
        return (flat.bfloat16(),)

    def _decode_into(self, encoded, out):
        out.copy_(encoded.buffers[0])

    def graph_form(self, facts):
        return Cast("bf16").graph_form(facts)


def coded(x: Tensor, seed: Tensor, codec: Codec) -> Tensor:
    order, how = list(range(x.dim())), (ops.coding_name(codec), seed, 3)
    y = ops.DECODE(ops.ENCODE(x, order, *how), *how, list(x.shape), order, x.dtype)
    mask = ops.coding_name(BitMask(), Facts(value=1.0)), None, 0
    bits = ops.ENCODE(x > 0, order, *mask)
    return torch.where(ops.DECODE(bits, *mask, list(x.shape), order, torch.bool), y, -y)


def traced(x: Tensor, codec: Codec) -> fx.GraphModule:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = mode.from_tensor(x), torch.empty((1,), dtype=torch.int64)
        make = fx.experimental.proxy_tensor.make_fx(lambda x, seed: coded(x, seed, codec))
        return make(*given)


@pytest.mark.parametrize(
    "codec", [Dither(), Group(), Cast("fp8_e4m3"), Cast(), Division()], ids=str
)
@pytest.mark.parametrize("size", [(8, 2048), (7, 333)])
def test_a_graph_with_the_ops_written_out_computes_the_same(codec, size) -> None:
    x, seed = torch.randn(size), torch.tensor([11])
    gm = traced(x, codec)
    assert expand.expand(gm, "cuda") == 0
    assert expand.expand(gm, "cpu") == 4
    names = {getattr(node.target, "namespace", "") for node in gm.graph.nodes}
    assert "elbowroom_graph" not in names
    torch.testing.assert_close(gm(x, seed), coded(x, seed, codec), rtol=0, atol=1e-6)
