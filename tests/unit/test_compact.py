"""Codes in one run of bytes are those of the codec, and kernels by address those of ops."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from elbowroom.codecs import Affine, Cast, Codec, Dither, Facts, Group, compact
from elbowroom.codecs.compact import Coder, Coders, Compact
from elbowroom.errors import CodecError
from elbowroom.kernels import ops
from elbowroom.plan import Encode, Need
from elbowroom.runtime.context import Context
from elbowroom.runtime.handles import EncodeHandle
from elbowroom.runtime.masks import mask_bits
from elbowroom.runtime.serving import perform

pytest.importorskip("numba")
SHAPES = [(64, 32), (5,), (3, 7, 11), (2049,)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def coded(x: Tensor, codec: Codec, zeros: bool, affine: Affine | None = None) -> tuple[Any, Any]:
    """x encoded by the codec, and by a coder of such tensors."""
    facts = Facts(has_zeros=zeros)
    coder = Coder.of(codec, x, facts)
    assert coder is not None
    return codec.encode(x, 12345, facts, affine), coder.encode(x, 12345, affine)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    "codec",
    [
        *(Dither(levels=levels) for levels in (2, 3, 6, 16, 256)),
        *(Group(bits=bits, group_size=32) for bits in (1, 2, 3, 8)),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_code_has_the_bytes_of_the_codec(shape: Any, codec: Codec, zeros: bool) -> None:
    x = torch.randn(shape).relu() if zeros else torch.randn(shape)
    width = shape[-1]
    scale, shift = torch.rand(width) + 0.5, torch.zeros(width) if zeros else torch.randn(width)
    bits = torch.randint(0, 256, (-(-x.numel() // 8),), dtype=torch.uint8)
    for affine in (None, Affine(scale, shift, 1)):
        plain, short = coded(x, codec, zeros, affine)
        assert type(short) is Compact
        assert short.nbytes == plain.nbytes
        for one, other in zip(plain.buffers, short.buffers, strict=True):
            assert one.dtype is other.dtype
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        undo, mask = (None, None) if affine is None else (Affine(1 / scale, shift, 1), bits)
        wanted = plain.decode(affine=undo, bits=mask)
        assert torch.equal(short.decoded(undo, mask), wanted)
        assert torch.equal(short.decode(affine=undo, bits=mask), wanted)
        assert (short.bitmap is None) == (plain.bitmap is None)
        assert plain.bitmap is None or torch.equal(short.bitmap, plain.bitmap)


def test_another_tensor_than_the_coder_was_made_for_goes_to_the_codec() -> None:
    coder = Coder.of(Dither(levels=4), torch.randn(64, 32), Facts())
    assert coder is not None
    for other in (torch.randn(32, 64), torch.randn(32, 64).t(), torch.randn(64, 32).bfloat16()):
        encoded = coder.encode(other, 5)
        assert type(encoded) is not Compact
        assert encoded.shape == other.shape


def test_strides_come_back() -> None:
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    plain, short = coded(x, Dither(levels=4), zeros=False)
    assert short.decoded().stride() == x.stride()
    assert torch.equal(short.decoded(), plain.decode())


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("codec", [Dither(levels=4), Group(bits=2)], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e38])
def test_what_has_no_code_is_held_raw(value: float, codec: Codec, zeros: bool) -> None:
    x = torch.randn(70, 32)
    x[69, 3] = value
    plain, short = coded(x, codec, zeros)
    assert plain.raw
    assert short.raw
    assert torch.equal(short.decode().nan_to_num(), x.nan_to_num())


def test_a_code_that_was_cut_is_refused() -> None:
    _, short = coded(torch.randn(64, 32).relu(), Dither(levels=4), zeros=True)
    cut = Compact(short.coder, short.memory[:-1].clone(), short.seed)
    with pytest.raises(CodecError, match="cannot decode"):
        cut.decoded()


class Seeing(TorchDispatchMode):
    """Notes what runs of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_ops() -> None:
    x = torch.randn(64, 32)
    coder = Coder.of(Dither(levels=4), x, Facts())
    assert coder is not None
    with Seeing() as mode:
        encoded = coder.encode(x, 5)
        mask_bits(x, "relu")
    assert type(encoded) is not Compact
    assert "elbowroom.dither_quantize.default" in mode.seen
    assert "elbowroom.pack_bits.default" in mode.seen


def test_only_what_runs_on_one_thread_is_taken() -> None:
    facts = Facts()
    large = torch.randn(70000)
    assert Coder.of(Dither(levels=4), large, Facts(has_zeros=True)) is None
    assert Coder.of(Dither(levels=4), large.bfloat16(), facts) is None
    assert Coder.of(Dither(levels=4), large[::2], facts) is None
    coder = Coder.of(Dither(levels=4), large, facts)
    assert coder is not None
    one = coder.encode(large, 5)
    assert type(one) is Compact
    torch.set_num_threads(2)
    assert Coder.of(Dither(levels=4), large, facts) is None
    other = coder.encode(large, 5)
    assert type(other) is not Compact
    assert torch.equal(one.decode(), other.decode())
    assert torch.equal(one.decoded(), other.decode())


@pytest.mark.parametrize("n", [1, 7, 2048, 5001])
def test_masks_by_address_are_those_of_ops(n: int) -> None:
    x, grad = torch.randn(n), torch.randn(n)
    x[0], grad[-1] = float("nan"), -0.0
    kernels = ops.by_address(x)
    assert kernels is not None
    bits, made = mask_bits(x, "relu"), torch.empty(n)
    assert bits is not None
    assert torch.equal(bits, ops.pack_bits(~(x <= 0)))
    kernels.masked(grad.data_ptr(), n, bits.data_ptr(), made.data_ptr())
    wanted = torch.empty(n)
    ops.masked(grad, bits, wanted)
    assert torch.equal(made.view(torch.int32), wanted.view(torch.int32))


def test_a_step_that_is_looked_at_makes_codes_by_a_coder() -> None:
    x = torch.randn(64, 32)
    coders, action = Coders(), Encode(Dither(levels=4))
    coder = coders.of(action.codec, x, Facts())
    assert coder is not None
    encoded = coder.encode(x, 3)
    assert type(encoded) is Compact
    assert torch.equal(encoded.decode(), action.codec.encode(x, 3).decode())
    handle = perform(action, x, Need.LOSSY, None, 3, context=Context())
    assert isinstance(handle, EncodeHandle)
    assert type(handle._encoded) is Compact
    assert handle.nbytes == action.codec.encode(x, 3).nbytes


def test_coders_leave_to_the_codec_what_they_have_no_kernel_for() -> None:
    coders, dither = Coders(), Dither(levels=4)
    mask = Facts(mask=torch.zeros(256, dtype=torch.uint8))
    for codec, x, facts in [
        (dither, torch.randn(64, 32, dtype=torch.bfloat16), Facts()),
        (dither, torch.randn(64, 32), mask),
        (dither, torch.tensor([]), Facts()),
        (Cast("bf16"), torch.randn(64, 32), Facts()),
    ]:
        for _ in range(2):
            assert coders.of(codec, x, facts) is None
        action = Encode(codec, facts)
        handle = perform(action, x, Need.LOSSY, None, 3, context=Context())
        assert isinstance(handle, EncodeHandle)
        assert type(handle._encoded) is not Compact
        assert torch.equal(handle.restore(private=True), codec.encode(x, 3, facts).decode())


def test_coders_know_few_kinds_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "_MAX_KINDS", 4)
    coders = Coders()
    for size in range(3, 20):
        assert coders.of(Dither(levels=4), torch.randn(size), Facts()) is not None
        assert len(coders._known) <= 4
