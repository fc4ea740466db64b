"""Encode: an `Encoded` is held, and decoded in backward.

Encoding frees bytes only if nothing else holds the storage, which cannot be known when it is saved.
So a weak reference stays. If the storage still exists at restore, unchanged, the original is
returned, which is exact and takes no time; `on_survived` is called, so that the site is kept next
time.

The largest buffer of a code may be in another tier (`MovedCodeHandle`). It is fetched each time
that the code is read, and released after that.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from elbowroom.codecs import Affine, BitMask, Codec, Dither, Encoded
from elbowroom.codecs.base import PART, Seed
from elbowroom.codecs.compact import Compact
from elbowroom.codecs.dropped import encoded_or_dropped, refuse_undecodable, suspect
from elbowroom.codecs.facts import Facts
from elbowroom.codecs.quality import is_own
from elbowroom.codecs.room import PayloadRoom
from elbowroom.kernels.fakes import has_values, would_wait
from elbowroom.plan import Action, Encode, Offload, SiteName
from elbowroom.plan.precision_floor import levels_for_range
from elbowroom.plan.site import Rows
from elbowroom.runtime.arena import ARENA
from elbowroom.runtime.handles.offload import OffloadHandle
from elbowroom.runtime.normal import Normalized, OfNormal, Statistics, flat_of, layout_of, of_rows
from elbowroom.runtime.prefetcher import Prefetcher
from elbowroom.runtime.storage import WeakStorage, counted, counter_of, storage_nbytes, version_of
from elbowroom.runtime.tiers import tier_for
from elbowroom.units import show_nbytes

if TYPE_CHECKING:
    from elbowroom.runtime.context import Context

Parts = Callable[[int, int], Tensor]  # first element, number -> flat
_log = logging.getLogger("elbowroom")
_MOST_SAID = 4  # modules that are named where values cannot be encoded
_PARTS = 16  # of a tensor whose noise is drawn again


class EncodeHandle:
    """Holds the code of one dense tensor `base`."""

    __slots__ = (
        "_adds_up",
        "_counter",
        "_encoded",
        "_nbytes",
        "_normal",
        "_offset",
        "_original",
        "_restored",
        "_version",
        "bitmap",
        "is_shared",
        "on_survived",
        "record",
        "unheld",
    )

    def __init__(
        self,
        encoded: Encoded,
        base: Tensor | None,
        on_survived: Callable[[], None] | None = None,
        normal: Normalized | None = None,
        adds_up: int | None = None,
    ) -> None:
        """base: None if it is known that nothing holds it until backward.

        normal: the normalization of the encoded tensor, if base itself is not encoded
        adds_up: as in `Encode`

        bitmap: the bits of what is not zero, where the code holds them
        is_shared: it has several readers, so that one may reuse the tensor of another
        record: of the replayed forward; it lives as long as anything that is held without a slot
        unheld: notes in backward whether base is still there, if it is not known
        """
        self._encoded = encoded
        self.bitmap = encoded.bitmap
        self._normal, self._adds_up = normal, adds_up
        self._original: WeakStorage | None = None
        if base is not None:
            self._offset = base.storage_offset()
            self._original = WeakStorage(base)
            self._counter = counter_of(base)
            self._version = version_of(base)
            self._nbytes = storage_nbytes(base)
        self._restored: tuple[WeakStorage, Tensor, int] | None = None
        self.on_survived, self.is_shared = on_survived, True
        self.record: Any = None
        self.unheld: Any = None

    @property
    def nbytes(self) -> int:
        return self._encoded.nbytes + (0 if self._normal is None else self._normal.own_nbytes)

    @property
    def exact(self) -> bool:
        return self._encoded.codec.lossless or self._encoded.raw

    def normalizes(self, rows: Rows) -> bool:
        """Returns whether the code stands for these rows, each normalized by itself."""
        return self._normal is not None and self._normal.keeps_apart(rows)

    @property
    def label(self) -> str:
        return "raw" if self._encoded.raw else self._encoded.codec.id

    @property
    def codec(self) -> Codec:
        """Codec that made the code."""
        return self._encoded.codec

    @property
    def mask(self) -> Tensor | None:
        """The bits that say which of two codes an element has; None: there is one code."""
        return None if self._encoded.raw else self._encoded.facts.mask

    @property
    def where(self) -> Tensor | None:
        """Bits that say where the code serves any reader; None: everywhere."""
        mask = self.mask
        return None if mask is None or not self._encoded.codec.is_rough_elsewhere else mask

    def restore(self, *, private: bool = False) -> Tensor:
        """The tensor with base's shape and strides."""
        if self.unheld is not None and self.unheld.storage() is not None:
            self.unheld.note()
        if not private:
            seen = self._still_there()
            if seen is not None:
                return seen
        x = self._decoded(None if self._normal is None else self._normal.undo(), None)
        if self._adds_up is not None:
            add_up(x, self._adds_up)
        if not private and self.is_shared and not ARENA.owns(x):
            self._restored = WeakStorage(x), counter_of(x), x._version
        return x

    def restore_mapped(self, affine: Affine, bits: Tensor | None) -> Tensor:
        """Returns an affine of the tensor, made as it is decoded, in private memory.

        bits: it is 0 where one is not set
        """
        both = affine if self._normal is None else self._normal.undo().then(affine)
        if both is not None and self._adds_up is None:
            return self._decoded(both, bits)
        x = self.restore(private=True)
        affine.in_place(flat_of(x), bits)
        return x

    def restore_normalized(self, norm: OfNormal, bits: Tensor | None) -> Tensor | None:
        """Returns what a norm makes of the tensor, decoded so, in private memory.

        None where the code is not one of the norm's normalized input. bits: as `restore_mapped`
        """
        statistics = self._own_statistics()
        if statistics is None or not norm.fits(statistics):
            return None
        return self._decoded(norm.affine(), bits)

    def parts(self, affine: Affine | None = None, bits: Tensor | None = None) -> Parts | None:
        """Returns a function that gives elements start .. start + n of the value, flat [n].

        The value is that of `restore` or `restore_mapped`. Returns None where the code cannot be
        decoded in parts.
        """
        encoded, undo = self._code(), None if self._normal is None else self._normal.undo()
        both = affine if undo is None else undo if affine is None else undo.then(affine)
        composed = both is not None or (undo is None and affine is None)
        if (
            self._adds_up is not None
            or not encoded.has_parts
            or not composed
            or (both is not None and both.scale.dim() > 1)
        ):
            return None

        def part(start: int, n: int) -> Tensor:
            out = ARENA.take(n, encoded.dtype, encoded.buffers[0].device)
            try:
                encoded.decode_part(start, out, both, bits)
            except Exception as error:
                refuse_undecodable(encoded, error)
                raise
            return out

        return part

    def has_made(self, x: Tensor) -> bool:
        """Returns whether a tensor was decoded from the code: it is not the original."""
        original = None if self._original is None else self._original.tensor(x.dtype)
        return original is None or original.data_ptr() != x.data_ptr()

    def is_needed(self) -> bool:
        """Returns whether only the code exists: no original and no restored tensor is left."""
        return self._still_there() is None

    def normalized(self) -> tuple[Encoded, Statistics] | None:
        """The code, if it encodes (x - mean) * rstd, and these; None if x itself exists."""
        statistics = self._own_statistics()
        if statistics is None or not self.is_needed():
            return None
        return self._code(), statistics

    def _own_statistics(self) -> Statistics | None:
        """The mean and rstd of which the code encodes (x - mean) * rstd; None if it does not."""
        normal = self._normal
        return None if normal is None or normal.keep_zeros or normal.rows else normal.statistics

    def factors(self) -> tuple[Tensor, float] | None:
        """Bits and a number, if the tensor is that number where a bit is set and 0 elsewhere."""
        encoded = self._encoded
        value = encoded.facts.value if isinstance(encoded.codec, BitMask) else None
        if value is None or encoded.raw or not self.is_needed():
            return None
        return self._code().buffers[0], value

    def _code(self) -> Encoded:
        """Returns the code, with all of its buffers on the tensor's device."""
        return self._encoded

    def _decoded(self, affine: Affine | None, bits: Tensor | None) -> Tensor:
        encoded = self._code()
        if isinstance(encoded, Compact):
            return encoded.decoded(affine, bits)
        room = ARENA.take(encoded.numel, encoded.dtype, encoded.buffers[0].device)
        try:
            x = encoded.decode_own(room, affine, bits)
        except Exception as error:
            refuse_undecodable(encoded, error)
            raise
        suspect(encoded, x)
        return x

    def drawn_again(self, x: Tensor, codec: Codec, places: Sequence[slice]) -> Tensor:
        """Encodes by `codec` what was decoded, and decodes it again, with noise of its own.

        x: dense, and overwritten; of the value, it is these places in memory order
        """
        encoded, normal = self._encoded, self._normal
        flat, facts = flat_of(x), Facts(has_zeros=encoded.facts.has_zeros)
        if normal is not None:
            _at(normal.normalize(), places, encoded.numel).in_place(flat)
        n = max(flat.numel() // _PARTS // PART, 1) * PART
        for start in range(0, flat.numel(), n):  # so that no more than a part is held besides
            part = flat[start : start + n]
            codec.encode(part, int(encoded.seed) + 1 + start, facts).decode(part)
        if normal is not None:
            _at(normal.undo(), places, encoded.numel).in_place(flat)
        return x

    def original(self) -> Tensor | None:
        """The tensor that was encoded, if something else holds it, and it has not changed."""
        if self._original is None or self._counter._version != self._version:
            return None
        one = self._encoded
        x = self._original.tensor(one.dtype)
        if x is None or storage_nbytes(x) != self._nbytes:  # freed by hand: resize_(0)
            return None
        return counted(self._counter, x.as_strided(one.shape, one.stride, self._offset))

    def _still_there(self) -> Tensor | None:
        """The original, unchanged, or a decoded tensor that a reader in backward still holds."""
        original = self.original()
        if original is not None:
            if self.on_survived is not None:
                self.on_survived()
            return original
        if self._restored is None:
            return None
        storage, counter, version = self._restored
        one = self._encoded
        restored = storage.tensor(one.dtype) if counter._version == version else None
        if restored is None:
            return None
        return counted(counter, restored.as_strided(one.shape, one.stride, 0))


def _at(affine: Affine, places: Sequence[slice], n: int) -> Affine:
    """Returns the map of these places of a tensor [n], which lie beside each other, by element."""
    if places == (slice(0, n),):
        return affine
    at = torch.cat([torch.arange(one.start, one.stop) for one in places])
    channels = (at // affine.inner % affine.scale.numel()).to(affine.scale.device)
    return Affine(affine.scale[channels], affine.shift[channels], 1)


def largest(encoded: Encoded) -> int:
    """Returns the number of the largest buffer of a code, a bitmap of zeros aside."""
    bits = encoded.bitmap
    address = -1 if bits is None else bits.data_ptr()
    nbytes = [-1 if one.data_ptr() == address else one.nbytes for one in encoded.buffers]
    return nbytes.index(max(nbytes))


class MovedCodeHandle(EncodeHandle):
    """Holds a code whose largest buffer has been moved to another tier."""

    __slots__ = ("_which", "away")

    def __init__(
        self,
        encoded: Encoded,
        base: Tensor,
        on_survived: Callable[[], None] | None,
        normal: Normalized | None,
        adds_up: int | None,
        move: Callable[[Tensor], OffloadHandle],
    ) -> None:
        """move: moves a buffer. away: the handle that it gives."""
        self._which = largest(encoded)
        self.away = move(encoded.buffers[self._which])
        nothing = encoded.buffers[self._which].new_empty(0)
        super().__init__(self._with(nothing, encoded), base, on_survived, normal, adds_up)

    @property
    def nbytes(self) -> int:
        """Bytes on the tensor's own device: without the buffer, once that is away."""
        return super().nbytes + self.away.nbytes

    @property
    def full_nbytes(self) -> int:
        """Bytes of the code, wherever they are."""
        return super().nbytes + self.away.full_nbytes

    def _code(self) -> Encoded:
        return self._with(self.away.restore(), self._encoded)

    def _with(self, buffer: Tensor, encoded: Encoded) -> Encoded:
        """Returns the code with this buffer in the place of the one that was moved."""
        buffers = encoded.buffers
        return replace(
            encoded, buffers=(*buffers[: self._which], buffer, *buffers[self._which + 1 :])
        )


def encoded(
    action: Encode,
    base: Tensor,
    seed: Seed,
    on_survived: Callable[[], None] | None,
    statistics: Statistics | None,
    name: SiteName,
    context: "Context | None",
    *,
    is_examined: bool,
) -> EncodeHandle | None:
    """Encodes `base`, and returns the handle that holds the code; see `serving.perform`.

    Returns None if the codec of another package has failed, and is dropped for that.
    """
    codec, facts = action.codec, action.facts
    x = base if action.least is None else _from(action.least, base)
    if action.fewest is not None and isinstance(codec, Dither) and action.fewest < codec.levels:
        codec = _with_few_levels(codec, x, action.fewest)
    normal = normalized(action, x, statistics)
    affine = None if normal is None else normal.normalize()
    # Of one run of bytes, which is not moved.
    coders = None if context is None or action.moved is not None else context.coders
    coder = None if coders is None else coders.of(codec, x, facts)
    drops = is_examined if context is None else context.drops_codecs
    if drops and not is_own(type(codec)):
        room = _room(context, (name, codec, base.numel()), base)
        encode = partial(codec.encode, x, seed, facts, affine, room)
        made = encoded_or_dropped(codec, x, affine, encode, decodes=is_examined)
        if made is None:
            return None
        code = made
    elif coder is not None and not isinstance(seed, Tensor):
        code = coder.encode(x, seed, affine)
    else:
        room = _room(context, (name, codec, base.numel()), base)
        code = codec.encode(x, seed, facts, affine, room)
    if code.raw:
        say_raw(code, name, context)
        normal = None
    own = on_survived, normal, None if code.raw else action.adds_up
    if action.moved is not None and (move := _move(action.moved, code, name, context)):
        return MovedCodeHandle(code, base, *own, move)
    return EncodeHandle(code, base, *own)


def say_raw(code: Encoded, name: SiteName, context: "Context | None") -> None:
    """Warns, once for a module, of a tensor that a fit holds as it is where it planned a code.

    It has a NaN, an Inf or a value beyond the range of the codec, or is smaller than that takes.
    """
    if context is None or not context.learns or name.module in context.held_raw:
        return
    nbytes = code.codec.encoded_nbytes(code.shape, code.dtype, code.facts)
    if code.nbytes <= nbytes:
        return
    context.held_raw.add(name.module)
    if len(context.held_raw) <= _MOST_SAID:
        _log.warning(
            "what '%s' saves in %s has a value that '%s' does not encode (a NaN, an Inf "
            "or one beyond its range), so it is held as it is, in %s where %s were planned: such a "
            "step may exceed the budget%s",
            name.consumer,
            f"module '{name.module}'" if name.module else "the model",
            code.codec.id,
            *map(show_nbytes, (code.nbytes, nbytes)),
            "; no more modules are named" if len(context.held_raw) == _MOST_SAID else "",
        )


def _room(context: "Context | None", kind: Hashable, base: Tensor) -> PayloadRoom | None:
    """Returns memory for a code whose size only the device knows; None: the host knows it."""
    return context.capacities.room(kind) if context is not None and would_wait(base) else None


def prefetcher_of(context: "Context | None") -> Prefetcher | None:
    """Returns what fetches offloaded tensors of this context early; None: nothing does."""
    return None if context is None else context.prefetcher


def _move(
    action: Offload, encoded: Encoded, name: SiteName, context: "Context | None"
) -> Callable[[Tensor], OffloadHandle] | None:
    """Returns what moves the largest buffer of a code; None: no tier takes it, or it is a view."""
    buffer = encoded.buffers[largest(encoded)]
    tier = tier_for(action, buffer)
    if isinstance(tier, str) or not buffer.numel() or storage_nbytes(buffer) != buffer.nbytes:
        return None
    return lambda moved: OffloadHandle(tier, moved, prefetcher_of(context), name)


_PART_NUMEL = 1 << 16  # of log-probabilities at a time


def _from(least: float, x: Tensor) -> Tensor:
    """Returns x clamped from below; x itself, if no element is below."""
    x = x.detach()  # otherwise these ops would save tensors, too
    if not would_wait(x) and has_values(x) and bool(x.amin() >= least):
        return x
    return x.clamp_min(least)


def add_up(logp: Tensor, dim: int) -> None:
    """Makes the exponentials of log-probabilities add up to 1 along a dimension, in place."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        rows = logp.detach().movedim(dim, -1)
        each = rows[:1].numel() if rows.dim() > 1 else 1
        some = max(_PART_NUMEL // max(each, 1), 1)
        for part in torch.split(rows, some) if rows.dim() > 1 else (rows,):
            wide = part.float() if part.element_size() == 2 else part
            part -= wide.logsumexp(-1, keepdim=True).to(part.dtype)


def _with_few_levels(codec: Dither, x: Tensor, fewest: int) -> Dither:
    """Returns the codec with as few levels as the range of those that share a step allows.

    The same where the host would have to wait for the values.
    """
    if would_wait(x) or not has_values(x) or not x.numel() or not x.is_contiguous():
        return codec
    size = codec.group_size
    with torch._C.DisableTorchFunction(), torch.no_grad():
        flat = x.detach().reshape(-1)
        whole = len(flat) // size * size
        parts = [flat[:whole].view(-1, size)] if whole else []
        parts += [flat[whole:].view(1, -1)] if whole < len(flat) else []
        widths = [float((one.amax(1).float() - one.amin(1).float()).amax()) for one in parts]
    levels = min(levels_for_range(max(widths), fewest), codec.levels)
    return codec if levels == codec.levels else replace(codec, levels=levels)


def normalized(action: Encode, base: Tensor, statistics: Statistics | None) -> Normalized | None:
    """Returns what is encoded in place of base: normalized by its rows, or as its norm does."""
    if not is_normalized(action):
        return None
    rows, keep_zeros = action.rows, action.facts.has_zeros
    if rows is None:
        return None if statistics is None else Normalized(statistics, keep_zeros)
    x = base.detach().as_strided(rows.shape, rows.stride, base.storage_offset())
    mean, rstd = of_rows(x, keep_zeros=keep_zeros)
    layout = layout_of(x.shape, x.stride(), mean.shape)
    assert layout is not None
    order, inner, shares = layout
    of_each = Statistics(mean.permute(order), rstd.permute(order), inner, shares)
    return Normalized(of_each, keep_zeros, rows)


def is_normalized(action: Action) -> bool:
    """Returns whether a norm's input is to be encoded in normalized form.

    See `normal.py`.
    """
    if not isinstance(action, Encode) or action.codec.lossless:
        return False
    return action.facts.error_bound is None
