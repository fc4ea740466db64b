"""The base of every codec: a frozen object with `encode` and `decode`; its fields configure it.

    x --encode--> Encoded(buffers, shape, stride, dtype, seed, codec) --decode--> x~ of the same
    shape, dtype, strides

An `Encoded` carries all that undoes it, so a codec reads no global state. A codec sees a tensor as
a flat run in memory order: a channels_last tensor is not copied, and comes back channels_last. What
has gaps or overlaps in memory is made contiguous first, and comes back contiguous.

A new codec is one file: a frozen dataclass with `id`, `lossless`, `dtypes`, its fields, `_layout`,
`_encode` and `_decode_into`; one line in `codecs/__init__.py`; golden bytes; one card in
`docs/codecs/`. By being registered it takes part in every plan, with the settings that `settings`
names. If its size does not depend on the values, `graph_form`, by which it acts inside of compiled
graphs (`graph_form.py`). If its kernels can do an affine in the same pass, `_encode_mapped` and
`_decode_mapped` too. If the size of a buffer depends on the values, `_encode_into`, without which
the host waits for a GPU to read it (`room.py`).

`_layout` says the dtype and size of every buffer once: `encoded_nbytes` adds up the sizes, and
`decode` checks the buffers against them (3 to 7 us, no value is read), so that no kernel reads or
writes outside of its buffers.
"""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from elbowroom.codecs.affine import Affine
from elbowroom.codecs.facts import NOTHING, Facts
from elbowroom.codecs.graph_form import Buffers as Buffers
from elbowroom.codecs.graph_form import GraphForm
from elbowroom.codecs.graph_form import Seed as Seed
from elbowroom.codecs.room import PayloadRoom, Space, Spill
from elbowroom.errors import CodecError, UnsupportedTensor
from elbowroom.kernels.fakes import would_wait
from elbowroom.kernels.layout import TILE

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PART = TILE  # elements: a part of a code begins at a multiple of it


class Expected(NamedTuple):
    """The dtype and shape of one buffer, as `_layout` gives them.

    at_most  the number of elements depends on the values; `shape` is an upper bound
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    at_most: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of such a buffer."""
        return prod(self.shape) * self.dtype.itemsize

    def fits(self, buffer: Tensor) -> bool:
        if buffer.dtype is not self.dtype or not buffer.is_contiguous():
            return False
        return buffer.shape == self.shape or (
            self.at_most and buffer.dim() == 1 and len(buffer) < self.shape[0]
        )

    def __str__(self) -> str:
        return f"{_name(self.dtype)} of shape {self.shape}{' or less' if self.at_most else ''}"


Layout = tuple[Expected, ...]


@dataclass(frozen=True, eq=False)
class Encoded:
    """An encoded tensor: buffers, shape, dtype and the codec.

    raw    True: the codec did not encode the tensor, and the buffer has the elements themselves
    spill  the part of a code that does not fit into its buffer, if the size depends on the values
           (`room.py`); None: the buffer has the exact size
    """

    codec: "Codec"
    buffers: Buffers
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    seed: Seed = 0
    facts: Facts = NOTHING
    raw: bool = False
    spill: Spill | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers: codes, scales, bitmaps and padding, without the spill."""
        return sum([buffer.nbytes for buffer in self.buffers])

    @property
    def numel(self) -> int:
        """Number of elements of the tensor."""
        return prod(self.shape)

    @property
    def has_parts(self) -> bool:
        """True if the tensor can be decoded in parts."""
        return self.codec.has_parts and not self.raw

    @property
    def beyond(self) -> tuple[Tensor, ...]:
        """The memory of the spill as the last argument of a kernel; empty if there is none."""
        return () if self.spill is None else (self.spill.memory,)

    @property
    def bitmap(self) -> Tensor | None:
        """Bits of the non-zero elements [ceil(N / 8)] if the code has them exactly, else None."""
        return None if self.raw else self.codec._bitmap(self)

    def decode(
        self, out: Tensor | None = None, affine: Affine | None = None, bits: Tensor | None = None
    ) -> Tensor:
        """Returns the tensor again, with the same shape, dtype, device and strides.

        out     a flat contiguous tensor [numel] of this dtype, whose memory is used for the result
        affine  an affine map that is applied in the same pass
        bits    [ceil(N / 8)], with an affine map: the result is 0 where a bit is not set

        Raises CodecError if the buffers or `out` do not match codec, shape and dtype.
        """
        self._check_buffers()
        if out is None:
            out = torch.empty(self.numel, dtype=self.dtype, device=self.buffers[0].device)
        else:
            self._check_out(out)
        return self.decode_own(out, affine, bits)

    def decode_own(
        self, out: Tensor, affine: Affine | None = None, bits: Tensor | None = None
    ) -> Tensor:
        """Decodes without the checks of `decode`, for a caller that is the only owner."""
        if self.raw:
            out.copy_(self.buffers[0])
            if affine is not None:
                affine.in_place(out, bits)
        elif affine is None:
            self.codec._decode_into(self, out)
        else:
            self.codec._decode_mapped(self, out, affine, bits)
        return out.as_strided(self.shape, self.stride)

    def decode_part(
        self, start: int, out: Tensor, affine: Affine | None = None, bits: Tensor | None = None
    ) -> None:
        """Writes the elements from `start` on, which is a multiple of PART, to out [n].

        The part must end where a part does, or where the tensor ends. `affine`, of one row, and
        `bits` are those of the whole tensor. Raises CodecError if the tensor cannot be decoded in
        parts.
        """
        if not self.has_parts:
            what = "a tensor that it holds raw" if self.raw else "its codes"
            raise CodecError(
                f"codec '{self.codec.id}' cannot decode a part of {what}; decode() gives all of it."
            )
        self.codec._decode_part(self, start, out, affine, bits)

    def _check_buffers(self) -> None:
        n = self.numel
        layout = (
            (Expected(self.dtype, (n,)),)
            if self.raw
            else self.codec._layout(n, self.dtype, self.facts)
        )
        if len(self.buffers) != len(layout):
            raise self.damaged(f"{len(layout)} buffers", str(len(self.buffers)))
        device = self.buffers[0].device
        for i, (buffer, expected) in enumerate(zip(self.buffers, layout, strict=True)):
            if not expected.fits(buffer) or buffer.device != device:
                raise self.damaged(
                    f"buffer {i} to be {expected}, contiguous, on {device}", show(buffer)
                )
        if not is_dense(self.shape, self.stride):
            raise self.damaged(
                f"strides that order the elements of {self.shape} without gaps", str(self.stride)
            )

    def _check_out(self, out: Tensor) -> None:
        fits = out.dtype is self.dtype and out.shape == (self.numel,) and out.is_contiguous()
        if not fits or out.device != self.buffers[0].device:
            raise CodecError(
                f"codec '{self.codec.id}' decodes into out of shape ({self.numel},), "
                f"{_name(self.dtype)}, contiguous, on {self.buffers[0].device}; got {show(out)}. "
                "Or pass out=None."
            )

    def damaged(self, expected: str, got: str) -> CodecError:
        """Returns the error for buffers that `encode` has not returned."""
        what = f"{_name(self.dtype)} of shape {self.shape}"
        return CodecError(
            f"codec '{self.codec.id}' cannot decode this {what}: expected {expected}; got {got}. "
            "Decode with the Encoded that encode returned, unchanged."
        )


@dataclass(frozen=True)
class Codec(ABC):
    """Base class of all codecs.

    Subclasses are frozen dataclasses. Equality, repr and configuration follow from their fields.
    """

    id: ClassVar[str]
    lossless: ClassVar[bool]
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    has_parts: ClassVar[bool] = False  # whether a part of a code can be decoded alone
    takes_room: ClassVar[bool] = False  # whether `_encode_into` writes to memory that is given
    keeps_zeros: ClassVar[bool] = False  # whether codes have a bitmap where facts.has_zeros
    is_relative: ClassVar[bool] = False  # whether errors are proportional to values, not to ranges

    @classmethod
    def settings(cls) -> tuple["Codec", ...]:
        """Returns the settings that a planner considers for each tensor; by default, `cls()` alone.

        A setting that is never the best one only adds a little time to each plan.
        """
        return (cls(),)

    def ladder(self) -> tuple["Codec", ...]:
        """Returns the settings along which controllers move a tensor, the mildest first.

        Fields that do not set the precision are as in this codec. By default a codec has no ladder.
        """
        return ()

    @property
    def stated_error(self) -> float | None:
        """Upper bound of the squared error on normal data, relative to its square; None: no bound.

        Without a bound, a planner uses what it measures (`quality.py`).
        """
        return 0.0 if self.lossless else None

    @property
    def is_rough_elsewhere(self) -> bool:
        """True if the error is larger than the values where `facts.mask` is not set."""
        return False

    def encode(
        self,
        x: Tensor,
        seed: Seed = 0,
        facts: Facts | None = None,
        affine: Affine | None = None,
        room: PayloadRoom | None = None,
    ) -> Encoded:
        """Encodes x, a tensor of any shape. x is neither changed nor aliased.

        seed    64 bits; the same seed gives the same bits. As a tensor (int64 [1]) on the device of
                x, it may change between the launches of a CUDA graph
        facts   known properties of x (see `Facts`), which make a scan of the values unnecessary
        affine  encodes affine(x) instead of x, and `decode` returns affine(x). If the result is
                raw, it contains x itself. With facts.has_zeros, the affine map must keep zeros, and
                must not create others
        room    provides memory for codes without a fixed size, so that the host need not wait for a
                GPU

        Raises UnsupportedTensor if the codec does not accept the dtype, layout or content.
        """
        self.check(x)
        if not isinstance(seed, int | Tensor) or not (facts is None or isinstance(facts, Facts)):
            raise CodecError(
                f"codec '{self.id}': a seed is an int, and facts are er.Facts(...) or None; got "
                f"seed={seed!r}, facts={facts!r}"
            )
        x = x.detach()
        if x.is_neg():
            x = x.resolve_neg()
        if isinstance(seed, int):
            seed = (seed + 2**63) % 2**64 - 2**63  # an op takes a signed integer
        flat, stride = memory_order(x)
        facts = self._seen(tuple(x.shape), stride, facts or NOTHING)
        buffers, spill = None, None
        if flat.numel():
            facts = self._complete(flat, facts)
            if room is not None:
                buffers, spill = self._encode_within(flat, seed, facts, affine, room)
            elif affine is None:
                buffers = self._encode(flat, seed, facts)
            else:
                buffers = self._encode_mapped(flat, seed, facts, affine)
        raw, held = buffers is None, buffers or (flat.clone(),)
        return Encoded(self, held, tuple(x.shape), stride, x.dtype, seed, facts, raw, spill)

    def _encode_within(
        self, flat: Tensor, seed: Seed, facts: Facts, affine: Affine | None, room: PayloadRoom
    ) -> tuple[Buffers | None, Spill | None]:
        """Returns buffers. A buffer whose size depends on the values is in memory from `room`."""
        layout, at = self._layout(flat.numel(), flat.dtype, facts), None
        if self.takes_room and would_wait(flat):
            at = next((i for i, expected in enumerate(layout) if expected.at_most), None)
        if at is not None:
            of_tile = self._layout(TILE, flat.dtype, facts)[at].nbytes
            space = room.space(layout[at].nbytes, of_tile, flat.device)
            if space is not None:
                return self._encode_into(flat, seed, facts, affine, space), space.spill
        buffers = (  # for the first payload of a site, the host waits for its size
            self._encode(flat, seed, facts)
            if affine is None
            else self._encode_mapped(flat, seed, facts, affine)
        )
        if at is None or buffers is None:
            return buffers, None
        payload, spill = room.first(buffers[at].view(torch.uint8), layout[at].nbytes)
        return (*buffers[:at], payload.view(buffers[at].dtype), *buffers[at + 1 :]), spill

    def decode(self, encoded: Encoded) -> Tensor:
        """Returns the tensor again; the same as `encoded.decode()`."""
        return encoded.decode()

    def encoded_nbytes(
        self, shape: tuple[int, ...], dtype: torch.dtype, facts: Facts | None = None
    ) -> int:
        """Returns the bytes of the encoded tensor, or an upper bound if `fixed_size` is False.

        Raises UnsupportedTensor if the codec does not accept the dtype.
        """
        self._check_dtype(dtype, str(dtype))
        contiguous = torch.empty(shape, device="meta").stride()
        facts = self._seen(shape, contiguous, facts or NOTHING)
        layout = self._layout(prod(shape), dtype, facts)
        return sum(expected.nbytes for expected in layout)

    def largest_nbytes(
        self, shape: tuple[int, ...], dtype: torch.dtype, facts: Facts | None = None
    ) -> int:
        """Returns the bytes of the largest buffer, or an upper bound if `fixed_size` is False.

        A bitmap of zeros is not counted, as masks are read from it. This is the buffer that is
        moved where a code is offloaded.
        """
        facts = self._seen(shape, torch.empty(shape, device="meta").stride(), facts or NOTHING)
        layout = list(self._layout(prod(shape), dtype, facts))
        bits = Expected(torch.uint8, (-(-prod(shape) // 8),))
        if facts.has_zeros and self.keeps_zeros and bits in layout:
            layout.remove(bits)
        return max((expected.nbytes for expected in layout), default=0)

    def fixed_size(self, facts: Facts | None = None) -> bool:
        """Returns whether `encoded_nbytes` is exact.

        A tensor that is stored raw, because of a NaN or an Inf, has its own size in any case.
        """
        return not any(
            expected.at_most for expected in self._layout(1, self.dtypes[0], facts or NOTHING)
        )

    @abstractmethod
    def _layout(self, n: int, dtype: torch.dtype, facts: Facts) -> Layout:
        """Returns dtype and shape of each buffer that `_encode` makes of n elements."""

    def graph_form(self, facts: Facts) -> GraphForm | None:
        """Returns the codec's form in compiled graphs; None: tensors are kept there.

        facts: as `_seen` returns them
        """
        return None

    def _seen(self, shape: tuple[int, ...], stride: tuple[int, ...], facts: Facts) -> Facts:
        """Returns the facts, completed by shape and strides. `_layout` depends on them."""
        return facts

    def _complete(self, flat: Tensor, facts: Facts) -> Facts:
        """Returns the facts that `_encode` and `_decode_into` need.

        A codec scans the values here for facts that the caller did not give.
        """
        return facts

    @abstractmethod
    def _encode(self, flat: Tensor, seed: Seed, facts: Facts) -> Buffers | None:
        """Encodes flat [N], N > 0. Returns the buffers; None: x is to be stored raw."""

    @abstractmethod
    def _decode_into(self, encoded: Encoded, out: Tensor) -> None:
        """Decodes into out [N]."""

    def _encode_into(
        self, flat: Tensor, seed: Seed, facts: Facts, affine: Affine | None, space: Space
    ) -> Buffers | None:
        """Encodes as `_encode` or `_encode_mapped` do, with the payload in memory that is given.

        Codecs with `takes_room` have it. It must not read a value that the host would wait for.
        """
        raise NotImplementedError

    def _encode_mapped(
        self, flat: Tensor, seed: Seed, facts: Facts, affine: Affine
    ) -> Buffers | None:
        """Encodes affine(flat), as `_encode` does."""
        return self._encode(affine.of(flat), seed, facts)

    def _decode_mapped(
        self, encoded: Encoded, out: Tensor, affine: Affine, bits: Tensor | None
    ) -> None:
        """Decodes as `_decode_into` does, then applies the affine; 0 where a bit is not set."""
        self._decode_into(encoded, out)
        affine.in_place(out, bits)

    def _decode_part(
        self, encoded: Encoded, start: int, out: Tensor, affine: Affine | None, bits: Tensor | None
    ) -> None:
        """See `Encoded.decode_part`."""
        raise NotImplementedError  # codecs with `has_parts` override it

    def _bitmap(self, encoded: Encoded) -> Tensor | None:
        """See `Encoded.bitmap`."""
        return None

    def config(self) -> dict[str, Any]:
        """Returns the id and all fields as JSON values; `codec(**config)` gives an equal codec."""
        return {"id": self.id, **asdict(self)}

    def check(self, x: Tensor) -> None:
        """Raises UnsupportedTensor unless x is a plain strided tensor of a supported dtype."""
        if not isinstance(x, Tensor):
            raise UnsupportedTensor(
                f"codec '{self.id}' takes a tensor; got {type(x).__name__}. Use torch.as_tensor(x)."
            )
        self._check_dtype(x.dtype, x)
        if x.layout is not torch.strided or x.is_nested:
            raise UnsupportedTensor(
                f"codec '{self.id}' takes dense tensors; got {show(x)}. {_remedy(x)}"
            )

    def _check_dtype(self, dtype: torch.dtype, x: Tensor | str) -> None:
        """Raises UnsupportedTensor for a dtype that the codec does not accept.

        x: the tensor of this dtype, or its description
        """
        if dtype not in self.dtypes:
            taken = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            got = x if isinstance(x, str) else f"{show(x)}. {_remedy(x)}"
            raise UnsupportedTensor(f"codec '{self.id}' takes {taken}; got {got}")


def memory_order(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Returns x as a flat contiguous tensor, and the strides of the tensor that is decoded.

    x is copied only if it has gaps or overlaps in memory.
    """
    # A contiguous tensor is dense, and `is_contiguous` is 20 times faster.
    if x.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(x):
        return x.as_strided((x.numel(),), (1,)), tuple(x.stride())
    x = x.contiguous()
    return x.view(-1), tuple(x.stride())


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Returns whether the strides order all elements of a shape without gaps and overlaps."""
    if len(shape) != len(stride):
        return False
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if step < 0 or (size != 1 and step != expected):
            return False
        expected *= size
    return True


def show(x: Tensor) -> str:
    """Describes a tensor in an error message: dtype, layout, shape."""
    layout = "nested" if x.is_nested else _name(x.layout)
    shape = "" if x.is_nested else f" of shape {tuple(x.shape)}"
    return f"{_name(x.dtype)} ({layout}){shape}"


def _name(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.").removeprefix("_")


def _remedy(x: Tensor) -> str:
    if x.is_complex():
        return "Encode torch.view_as_real(x) instead."
    if x.is_nested:
        return "Encode x.values() instead."
    if x.layout is not torch.strided:
        return "Convert it with to_dense()."
    return "Convert it first, or leave it as it is."
