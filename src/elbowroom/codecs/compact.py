"""A fast path of `dither` and `group` for tensors of one shape: what needs no values is cached.

    x --Coder.encode--> Compact (one tensor of bytes) --decoded--> x~

A settled step encodes tensors of the same shapes in every step. So shapes are checked once, all
buffers of a code lie in one tensor of bytes, and one kernel launch writes or reads it. The bytes
are those of `Codec.encode`; `Compact.buffers` returns them as separate buffers.

It serves float32 on a CPU, on one thread. A tensor that is large enough for several threads takes
so long to encode that this overhead does not matter.
"""

import ctypes
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from elbowroom.codecs.affine import Affine
from elbowroom.codecs.base import Buffers, Codec, Encoded
from elbowroom.codecs.dither import Dither
from elbowroom.codecs.facts import Facts
from elbowroom.codecs.group import Group
from elbowroom.kernels import ops
from elbowroom.kernels.fakes import would_wait
from elbowroom.kernels.layout import groups, packed_nbytes, tiles

_watchers = torch._C._len_torch_dispatch_stack
_CPU = torch.device("cpu")
_NO_AFFINE = 0, 0, 0, 0, 1, 1
_NO_MASK = 0, 0
_MAX_KINDS = 512


class Coder:
    """`Dither.encode` or `Group.encode` for float32 tensors of one shape and strides.

    start   byte at which the second buffer begins; middle: the third, of codes
    most    bytes of the code, or their upper bound if it is not `fixed`
    """

    def __init__(self, codec: Dither | Group, x: Tensor, facts: Facts, kernels: Any) -> None:
        """kernels: those of `kernels/numba/by_address.py`."""
        self.codec, self.facts, self.numel = codec, facts, x.numel()
        self.shape, self.stride = tuple(x.shape), tuple(x.stride())
        self.by_group = isinstance(codec, Group)
        levels = 1 << codec.bits if isinstance(codec, Group) else codec.levels
        self.settings = levels, codec.group_size
        each = 2 * groups(self.numel, codec.group_size)  # bytes
        codes = packed_nbytes(levels, self.numel)
        self.fixed = _is_fixed(codec, facts)
        self.start = each if self.by_group else 4 * tiles(self.numel)
        self.middle = self.start + (each if self.fixed else -(-self.numel // 8))
        self.most = self.middle + codes + (0 if self.fixed else each)
        self.is_small = self.numel <= kernels.SERIAL
        name = "group" if self.by_group else "dither" if self.fixed else "nonzero"
        self.quantize = getattr(kernels, name)
        self.dequantize = getattr(kernels, f"{name}_restored")
        self.known = {
            "coder": self,
            "codec": codec,
            "shape": self.shape,
            "stride": self.stride,
            "dtype": torch.float32,
            "facts": facts,
            "raw": False,
            "spill": None,
        }

    @classmethod
    def of(cls, codec: Codec, x: Tensor, facts: Facts) -> "Coder | None":
        """Returns the coder of tensors like x; None: there is none, and `codec` encodes them."""
        if type(codec) not in (Dither, Group) or would_wait(x):  # a subclass may encode otherwise
            return None
        assert isinstance(codec, Dither | Group)
        kernels = ops.by_address(x)
        if kernels is None or not x.numel() or not torch.ops.aten.is_non_overlapping_and_dense(x):
            return None
        if not _is_fixed(codec, facts) and x.numel() > kernels.MOST_UNSIZED:
            return None
        return cls(codec, x, facts, kernels)

    def is_watched(self) -> bool:
        """Returns whether a dispatch mode is open, which sees ops, or several threads would run."""
        return _watchers() > 0 or not (self.is_small or torch.get_num_threads() == 1)

    def encode(self, x: Tensor, seed: int, affine: Affine | None = None) -> Encoded:
        """Returns the code of x. A tensor that this was not made for is encoded by the codec."""
        by = _NO_AFFINE if affine is None else at_channels(affine, self.numel)
        alike = x.shape == self.shape and x.stride() == self.stride and x.dtype is torch.float32
        if not (alike and x.is_cpu) or by is None or x.is_neg() or self.is_watched():
            return self.codec.encode(x, seed, self.facts, affine)
        most = self.most
        memory = torch.empty(most, dtype=torch.uint8, device=_CPU)
        address = memory.data_ptr()
        coded = x.data_ptr(), self.numel, seed, *self.settings, *by, address, most
        nbytes = self.quantize(*coded)
        if nbytes < 0:  # it is held raw
            return self.codec.encode(x, seed, self.facts, affine)
        if self.fixed:
            return Compact(self, memory, seed)
        exact = torch.empty(nbytes, dtype=torch.uint8, device=_CPU)  # `most` was an upper bound
        ctypes.memmove(exact.data_ptr(), address, nbytes)
        return Compact(self, exact, seed)


class Coders:
    """Cache of coders, by codec, facts, shape, strides, dtype and device."""

    def __init__(self) -> None:
        self._known: dict[Any, Coder | None] = {}

    def of(self, codec: Codec, x: Tensor, facts: Facts) -> Coder | None:
        """Returns the coder of tensors like x; None: there is none, and `codec` encodes them."""
        if type(codec) not in (Dither, Group) or facts.mask is not None:
            return None
        key = codec, x.shape, x.stride(), x.dtype, x.device, facts
        known = self._known
        if key not in known:
            if len(known) >= _MAX_KINDS:
                known.clear()
            known[key] = Coder.of(codec, x, facts)
        return known.get(key)


class Compact(Encoded):
    """The code of one tensor, in one tensor of bytes."""

    coder: Coder
    memory: Tensor

    def __init__(self, coder: Coder, memory: Tensor, seed: int) -> None:
        self.__dict__.update(coder.known, memory=memory, seed=seed)

    @cached_property
    def buffers(self) -> Buffers:
        """The buffers that the codec would have returned, as views."""
        memory, start, middle = self.memory, self.coder.start, self.coder.middle
        if self.coder.by_group:
            step, low = memory[:start], memory[start:middle]
            return memory[middle:], step.view(torch.bfloat16), low.view(torch.bfloat16)
        bounds = memory[:start].view(torch.bfloat16).view(-1, 2)
        if self.coder.fixed:
            return memory[middle:], memory[start:middle].view(-1, 2), bounds
        return memory[start:middle], memory[middle:], bounds

    @property
    def nbytes(self) -> int:
        """Bytes of the code."""
        return self.memory.numel()

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return self.coder.numel

    @property
    def bitmap(self) -> Tensor | None:
        """Bits of the non-zero elements [ceil(N / 8)] if the code has them, else None."""
        coder = self.coder
        if coder.fixed:
            return None
        return self.memory.as_strided((coder.middle - coder.start,), (1,), coder.start)

    def decoded(self, affine: Affine | None = None, bits: Tensor | None = None) -> Tensor:
        """Returns the tensor in new memory, after `affine`, and 0 where a bit is not set."""
        out = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_CPU)
        if not self._writes(out, affine, bits):
            super().decode_own(out.as_strided((self.numel,), (1,)), affine, bits)
        return out

    def decode_own(
        self, out: Tensor, affine: Affine | None = None, bits: Tensor | None = None
    ) -> Tensor:
        """Decodes into out [numel], without checks."""
        if self._writes(out, affine, bits):
            return out.as_strided(self.shape, self.stride)
        return super().decode_own(out, affine, bits)

    def _writes(self, out: Tensor, affine: Affine | None, bits: Tensor | None) -> bool:
        """Decodes into out by addresses; returns whether that was possible."""
        coder, memory = self.coder, self.memory
        by = _NO_AFFINE if affine is None else at_channels(affine, coder.numel)
        if by is None or coder.is_watched():
            return False
        mask = _NO_MASK if bits is None else (bits.data_ptr(), bits.numel())
        code = memory.data_ptr(), memory.numel(), coder.numel, self.seed, *coder.settings
        if not coder.dequantize(*code, *by, *mask, out.data_ptr()):
            raise self.damaged("as many bytes as its bitmap says", str(memory.numel()))
        return True


def _is_fixed(codec: Codec, facts: Facts) -> bool:
    """Returns whether the size of the code does not depend on values."""
    return isinstance(codec, Group) or not facts.has_zeros


def at_channels(affine: Affine, numel: int) -> tuple[int, int, int, int, int, int] | None:
    """Returns an affine map by addresses: scale, shift, R, C; inner, elements of a row.

    Returns None if scale or shift is not contiguous float32.
    """
    scale, shift, inner = affine
    if not (scale.is_contiguous() and shift.is_contiguous()):
        return None
    if not scale.dtype is shift.dtype is torch.float32:
        return None
    columns = scale.shape[-1]
    rows = scale.numel() // columns
    return scale.data_ptr(), shift.data_ptr(), rows, columns, inner, max(numel // rows, 1)
