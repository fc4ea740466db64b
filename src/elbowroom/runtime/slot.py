"""One storage at one version: what is held for it, however many ops and views save it.

Handle      interface of all replacements of a storage; the others: `handles/`
KeepHandle  the tensor itself: as in plain autograd, with the version check that hooks switch off
DropHandle  nothing is held
Slot, View  the storage's, and each op's

A slot's `value` stands for the whole storage; its `bits` say where it is positive, for ReLU's
backward, which needs no more. Each op that saves the storage gets a `View`: slot + geometry + what
that op needs. The slot is freed with its last view, and the ledger is notified.
"""

import weakref
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from elbowroom.codecs import Affine
from elbowroom.errors import ElbowroomError, NothingHeld, RestoreError
from elbowroom.plan import Need, Site
from elbowroom.plan.site import Formula
from elbowroom.runtime.handles.encode import EncodeHandle, MovedCodeHandle
from elbowroom.runtime.handles.offload import OffloadHandle
from elbowroom.runtime.ledger import Entry, NoEntry
from elbowroom.runtime.masks import CAPPED, MASKED_OUTPUT, unpacked
from elbowroom.runtime.normal import Statistics, flat_of
from elbowroom.runtime.storage import check_version, storage_nbytes, version_of

# A named tuple's own constructor is a Python function.
_new: "Callable[[type[Geometry], Any], Geometry]" = tuple.__new__
_Moved = OffloadHandle | MovedCodeHandle
_MANY_VIEWS = 8
_MAX_SHARED = 4  # restored tensors that are held at a time for their next readers


class Handle(Protocol):
    """Stands in for one storage at one version.

    nbytes  bytes that this handle alone holds
    exact   whether what `restore` gives equals what was saved, bit for bit
    label   what the ledger calls it
    """

    @property
    def nbytes(self) -> int: ...
    @property
    def exact(self) -> bool: ...
    @property
    def label(self) -> str: ...

    def restore(self, *, private: bool = False) -> Tensor:
        """The tensor with the dense geometry it was made from.

        private: the caller will overwrite it, so its memory must not be shared.
        """
        ...


class KeepHandle:
    """Keep: holds the tensor itself, of any kind.

    1. `x.detach()` is held, never x: x -> its node -> this handle -> x would never die. But a
       parameter or buffer without a node is held itself, as in plain autograd: its data may be
       exchanged until backward (FSDP).
    2. Saved-tensor hooks disable autograd's in-place check (a changed tensor silently gives a wrong
       gradient), so the version is stored here and compared on every restore.
    """

    __slots__ = ("_tensor", "_version", "why")

    exact = True

    def __init__(self, x: Tensor, why: str, *, is_owned: bool = False) -> None:
        """is_owned: by a module, or by the user; it is no value of the step."""
        self._tensor = x if is_owned and x.grad_fn is None else x.detach()
        self._version = version_of(x)
        self.why = why

    @property
    def nbytes(self) -> int:
        return storage_nbytes(self._tensor)

    @property
    def label(self) -> str:
        return "keep"

    @property
    def was_changed(self) -> bool:
        """True if the tensor was changed in place since, so that it cannot be restored any more."""
        return version_of(self._tensor) != self._version

    def restore(self, *, private: bool = False) -> Tensor:
        x = self._tensor
        if x.is_inference() or x._version != self._version:
            check_version(x, self._version)
        return x.clone() if private else x


class DropHandle:
    """Drop: holds nothing, and cannot be restored.

    For a forward that continues only to count the bytes that a budget would need.
    """

    __slots__ = ()

    nbytes = 0
    exact = True  # irrelevant, since nothing is rebuilt from it
    label = "drop"

    def restore(self, *, private: bool = False) -> Tensor:
        raise NothingHeld(
            "this forward held nothing, to find out what its budget would have to be; "
            "its graph cannot run backward"
        )


class Geometry(NamedTuple):
    """Shape, strides and offset of a tensor in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, x: Tensor) -> "Geometry":
        return _new(cls, (tuple(x.shape), x.stride(), int(x.storage_offset())))

    def on(self, x: Tensor) -> Tensor:
        """The tensor of this geometry on x's storage: x itself, if it has it."""
        if self == (x.shape, x.stride(), x.storage_offset()):
            return x
        return x.detach().as_strided(self.shape, self.stride, self.offset)

    def is_run_like(self, other: "Geometry") -> bool:
        """Returns whether both are the same elements in the same order, without gaps."""
        places = {(prod(one.shape), one.offset) for one in (self, other)}
        return len(places) == 1 and all(is_in_order(one.shape, one.stride) for one in (self, other))

    def within(self, base: "Geometry", x: Tensor) -> Tensor:
        """The part of x, which has the geometry `base`, that has this one."""
        if self is base or self == base:
            return x
        return x.as_strided(self.shape, self.stride, self.offset - base.offset + x.storage_offset())


def same_order(shape: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Returns whether two strides order the elements of a shape alike."""
    return one == other or all(
        a == b for a, b, length in zip(one, other, shape, strict=True) if length > 1
    )


def is_in_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Returns whether a tensor lies contiguously in memory."""
    expected = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length > 1 and step != expected:
            return False
        expected *= length
    return True


class MadeAgain:
    """The last few restored tensors that wait for more readers; the others are freed.

    Readers of one tensor, and of its results, follow each other in backward: a query, a key and a
    value of one norm; a SiLU's input, which is rebuilt on the way to its output.

    takes_codes: what is decoded waits, too, as a plan has counted it
    """

    def __init__(self, *, takes_codes: bool = False) -> None:
        self.takes_codes = takes_codes
        self._slots: list[weakref.ref[Slot]] = []

    def note(self, slot: "Slot") -> None:
        """Keeps the restored tensor of this slot, and frees the oldest of too many.

        A tensor that many views read stays: between two reads of a whole sequence in a loop there
        are others, and it would be rebuilt for each step of the loop.
        """
        if slot.has_many_views:
            return
        known = []
        for one in self._slots:
            other = one()
            if other is not None and other is not slot and other.whole is not None:
                known.append(one)
        known.append(weakref.ref(slot))
        for one in known[:-_MAX_SHARED]:
            if (oldest := one()) is not None:
                oldest.whole = None
        self._slots = known[-_MAX_SHARED:]


class Slot:
    """Value that stands for one storage at one version, shared by all views of it.

    base             the geometry of a dense tensor that covers it
    bits             of a mask; mask_of: of which op's, if one has requested it
    statistics       of the norm that it is the input of
    views            made so far; views_asked: of them, restored so far; readers: that read values
    whole            restored, while more views will ask for it
    shared           a tensor that is rebuilt or decoded for one reader waits there for the next;
                     None: it does not
    sites            those that were decided on; empty if it is kept whatever the policy
    is_window        base covers only a small part of the storage
    is_source        a tensor is rebuilt from it; pinned: an exact one, so it stays exact
    is_gathered      rows of it are gathered as they are read (`gathered.py`)
    waits            it will be encoded once it is known what follows (`deferred.py`)
    lossy_views      how many ops read it that bear an error; asked_exact: whether one does not
    is_lent          its memory may change without a version: nothing is rebuilt from it
    is_unseen        it was not first saved by a call from Python: no waiting tensor is rebuilt from
                     it
    shape_is_enough  so far every op needs the geometry only
    of_product      a linear layer may run again for it; known where a plan decides on that
    has_logits      its code is, or will be, fine enough for the softmax of its product
    logits_levels   the fewest of that code
    max_depth       in a profiled step: ops that make it, if all on the way is rebuilt; 0: none
    when_ended       of a slot of a recorded forward: is called at its end, with all that it holds
    """

    # Most slots of a step have these values, so they are class attributes.
    value: Handle | None = None
    bits: Tensor | None = None
    mask_of = ""
    statistics: Statistics | None = None
    views = views_asked = lossy_views = readers = max_depth = 0
    whole: Tensor | None = None
    asked_exact = is_source = waits = pinned = shape_is_enough = is_unseen = of_product = False
    has_logits, logits_levels = False, 0
    is_lent = is_gathered = False
    shared: MadeAgain | None = None
    when_ended: "Callable[[Slot], None] | None" = None

    def __init__(
        self,
        base: Tensor,
        entry: Entry | NoEntry,
        *,
        is_window: bool = False,
        geometry: Geometry | None = None,
    ) -> None:
        """geometry: base's, if it is known."""
        self.base = Geometry.of(base) if geometry is None else geometry
        self.is_window = is_window
        self.dtype, self.device = base.dtype, base.device
        self.entry = entry
        self.sites: list[Site] = []

    @property
    def bits_of(self) -> str:
        """The op whose mask the bits are, or would be; those of a code with zeros are ReLU's."""
        return self.mask_of or ("" if self.bits is None else MASKED_OUTPUT[0])

    @property
    def exact(self) -> bool:
        return self.value is not None and self.value.exact

    @property
    def where(self) -> Tensor | None:
        """Bits that say where what is held serves any reader; None: everywhere."""
        return getattr(self.value, "where", None)

    def root(self) -> "Slot":
        """Returns the slot whose bytes it all comes from: itself, or that of its recipe."""
        below = getattr(self.value, "source", None)
        return self if below is None else below.root()

    @property
    def is_cut(self) -> bool:
        """True if a code of it has no values below a limit, which only exp of them may read."""
        return bool(self.sites) and self.sites[0].formula is Formula.LOG_PROBABILITY

    @property
    def has_tails(self) -> bool:
        """True if it is exact for good, or its code is fine enough where exp of it is read."""
        if self.pinned or (self.exact and not self.sites):
            return True
        if any(site.formula is Formula.TAIL for site in self.sites):
            return True
        ready = getattr(self.value, "ready", None)  # of what is rebuilt
        return ready is not None and all(slot.has_tails for slot in ready.slots)

    def serves(self, need: Need) -> bool:
        """Returns whether what is held suffices for this need."""
        if need is Need.SHAPE:
            return self.shape_is_enough or self.value is not None or self.bits is not None
        if need is Need.MASK:
            return self.bits is not None or self.exact
        if need is Need.LOSSY:
            return self.value is not None and self.where is None
        return self.exact

    def promise(self, need: Need, consumer: str) -> None:
        """Records a promise to an op, which must hold however tight the policy becomes."""
        if need is Need.LOSSY:
            self.lossy_views += 1
        elif need is Need.MASK and (self.bits is not None or isinstance(self.value, KeepHandle)):
            self.mask_of = consumer
        elif need is not Need.SHAPE:
            self.asked_exact |= need is Need.EXACT
            self.pin()

    def pin(self) -> None:
        """Makes the value, and whatever it is rebuilt from, stay exact from now on."""
        self.pinned = True
        pin_sources = getattr(self.value, "pin", None)
        if pin_sources is not None:
            pin_sources()

    def hold(self, value: Handle) -> None:
        """Sets the value, in place of the present one; a slot that was dropped stays so.

        Bits of the new value replace those of the slot, also in other holders of these: the code of
        a norm's input has them as its mask.
        """
        if isinstance(self.value, DropHandle):
            return
        self.value = value
        if isinstance(value, EncodeHandle):
            bitmap = value.bitmap
            if bitmap is not None and self.mask_of not in CAPPED:
                if self.bits is not None:
                    self.bits.set_(bitmap)  # type: ignore[call-overload]  # the same bits, once
                self.bits = bitmap
        elif isinstance(value, KeepHandle):
            self.entry.why = value.why
        self._tell()
        if isinstance(value, _Moved):
            value.away.when_away(partial(self.entry.move_away, value.away.full_nbytes))

    def drop(self) -> None:
        """Replaces the value, if there is one, by a handle that holds nothing."""
        if not (self.value is None or isinstance(self.value, DropHandle)):
            self.hold(DropHandle())

    def hold_bits(self, bits: Tensor) -> None:
        """Takes the bits of a mask (`masks.py`)."""
        self.bits = bits
        self._tell()

    def drop_needless_bits(self) -> None:
        """Drops the bits if the tensor itself is kept, which shows where it is positive."""
        if self.bits is not None and isinstance(self.value, KeepHandle):
            self.bits = None
            self._tell()

    @property
    def is_pending(self) -> bool:
        """True if it holds nothing yet, and copies its tensor if that is asked for."""
        return False

    def hold_shape(self) -> None:
        """Notes that no op needs more than the geometry."""
        self.shape_is_enough = True
        self._tell()

    def _tell(self) -> None:
        entry = self.entry
        if not entry.counts:
            return
        value, bits, nbytes = self.value, self.bits, 0
        if value is not None:
            entry.action = value.label
            nbytes = value.full_nbytes if isinstance(value, _Moved) else value.nbytes
        elif bits is not None:
            entry.action = "bits"
        else:
            entry.action = entry.action or "shape"
        if bits is not None and bits is not getattr(value, "bitmap", None):
            nbytes += bits.numel()
        entry.hold(nbytes)

    def restore_value(self, *, private: bool = False) -> Tensor:
        """Returns the whole tensor that the slot was made from."""
        assert self.value is not None
        return self.value.restore(private=private)

    def restore_shared(self) -> Tensor:
        """Returns the whole tensor for one of its views, which only reads it.

        A loop over time saves hundreds of slices of one tensor: it is restored once for all of
        them, and held until the last one was restored.
        """
        many = self.views >= _MANY_VIEWS
        if not many and (self.shared is None or not self.is_shared):
            value = self.value
            assert value is not None
            if type(value) is EncodeHandle:
                value.is_shared = self.readers > 1 or self.is_source
            return value.restore()
        self.views_asked += 1
        whole = self.restore_value() if self.whole is None else self.whole
        # A view that only asks for bits reads nothing of it.
        asked_for = self.views if many else self.readers
        self.whole = whole if self.views_asked < asked_for and self._may_hold(whole) else None
        if self.whole is not None and self.shared is not None and self.is_shared:
            self.shared.note(self)
        return whole

    def restore_private(self) -> Tensor:
        """Returns the whole tensor for one of its views, which may overwrite it."""
        self.views_asked += 1
        whole, self.whole = self.whole, self.whole if self.views_asked < self.readers else None
        return self.restore_value(private=True) if whole is None else whole.clone()

    @property
    def has_many_views(self) -> bool:
        """True if it is restored once for all of its views."""
        return self.views >= _MANY_VIEWS

    @property
    def is_shared(self) -> bool:
        """True if the value is recomputed or decoded, and the result waits for its next readers."""
        waits = self.shared
        return waits is not None and (
            hasattr(self.value, "ready")
            or (waits.takes_codes and isinstance(self.value, EncodeHandle))
        )

    @property
    def is_shared_now(self) -> bool:
        """True if a recipe may start at the shared result, because that is exact."""
        return self.is_shared and self.exact and hasattr(self.value, "ready")

    @property
    def waits_now(self) -> bool:
        """True if what is restored now is held for a view that has not asked for it yet."""
        return self.views_asked < self.readers and self.is_shared

    def restore_source(self) -> Tensor:
        """The whole tensor for a recipe that only reads it, shared with views restored later."""
        if self.whole is not None:
            return self.whole
        if type(self.value) is KeepHandle:
            return self.value.restore()
        watched = isinstance(self.value, EncodeHandle) and torch._C._current_graph_task_id() == -1
        whole = self.restore_value(private=watched)  # of a code, whose error a watch is to see
        if not watched and self.shared is not None and self.waits_now and self._may_hold(whole):
            self.whole = whole
            self.shared.note(self)
        return whole

    def restore_operand(self, *, exact: bool) -> tuple[Tensor, bool]:
        """Returns the whole tensor for a recipe, and whether that may overwrite it.

        exact: the recipe runs on exact tensors, which it leaves as they are where others read them
        """
        if type(self.value) is KeepHandle:
            return self.value.restore(), False
        if not (exact or self.stays_whole()):
            return self.restore_value(private=True), True
        whole = self.restore_source()
        return whole, self.whole is not whole and hasattr(self.value, "ready")

    def stays_whole(self) -> bool:
        """Returns whether the whole tensor is there, or will wait for views once it is restored."""
        if self.whole is not None or isinstance(self.value, KeepHandle):
            return True
        return self.waits_now and torch._C._current_graph_task_id() != -1

    def _may_hold(self, whole: Tensor) -> bool:
        """Returns whether a restored tensor is memory of its own, not that of its first owner."""
        return not isinstance(self.value, EncodeHandle) or self.value.has_made(whole)

    def restore_mapped(self, affine: Affine, bits: Tensor | None) -> Tensor:
        """Returns an affine of the whole tensor, which the caller may overwrite.

        bits: it is 0 where one is not set
        """
        if isinstance(self.value, EncodeHandle):
            return self.value.restore_mapped(affine, bits)
        x = self.restore_value(private=True)
        affine.in_place(flat_of(x), bits)
        return x

    def restore_side(self) -> Tensor | None:
        """1 where the upper one of two codes is held, 0 elsewhere; None: one code is held."""
        mask = getattr(self.value, "mask", None)
        return None if mask is None else self.unpacked(mask)

    def unpacked(self, bits: Tensor) -> Tensor:
        """1 where a bit is set, 0 elsewhere."""
        return unpacked(bits, self.base.shape, self.base.stride, self.dtype)


class CountedSlot(Slot):
    """A slot whose ledger is notified of its end."""

    entry: Entry

    def __del__(self) -> None:
        self.entry.close()
        if self.when_ended is not None:
            self.when_ended(self)


class View:
    """View of a slot, which autograd holds for one op."""

    __slots__ = ("__weakref__", "geometry", "need", "slot")

    def __init__(self, slot: Slot, geometry: Geometry, need: Need) -> None:
        self.slot, self.geometry, self.need = slot, geometry, need
        slot.views += 1
        if need is Need.LOSSY or need is Need.EXACT:
            slot.readers += 1

    @property
    def is_alone(self) -> bool:
        """True if no other op has saved what its slot holds, and nothing is rebuilt from it."""
        return self.slot.views == 1 and not self.slot.is_source

    def restore(self) -> Tensor:
        """Returns the saved tensor again: same shape, dtype, device, strides."""
        slot = self.slot
        if slot.entry.notes_requests:
            slot.entry.ask()
        if type(slot.value) is KeepHandle and self.geometry == slot.base:
            return slot.value.restore()
        if not torch.is_grad_enabled():
            return self._restored()
        if slot.where is not None:
            raise RestoreError(
                "backward with create_graph=True is not linear in the tensor that was saved for a "
                "batch norm, and for the values that the next ReLU sets to zero only a rough code "
                "is stored; "
                "er.saving('lean', fold=1) stores a finer one."
            )
        with torch.no_grad():
            return self._restored()

    def restore_alone(self) -> Tensor:
        """Returns the saved tensor in memory that its caller may overwrite."""
        slot = self.slot
        slot.entry.ask()
        return self.geometry.within(slot.base, slot.restore_private())

    def _restored(self) -> Tensor:
        slot = self.slot
        if self.need is Need.SHAPE and not isinstance(slot.value, KeepHandle):
            return self._blank()
        if self.need is Need.MASK and slot.bits is not None:
            return self.geometry.within(slot.base, slot.unpacked(slot.bits))
        return self.geometry.within(slot.base, slot.restore_shared())

    def restore_side(self) -> Tensor | None:
        """1 where the upper one of two codes is held, 0 elsewhere; None: one code is held."""
        mask = self.slot.restore_side()
        return None if mask is None else self.geometry.within(self.slot.base, mask)

    def _blank(self) -> Tensor:
        """A tensor of this geometry whose values mean nothing.

        Without memory where its strides allow it.
        """
        shape, stride = self.geometry.shape, self.geometry.stride
        one = torch.zeros((), dtype=self.slot.dtype, device=self.slot.device)
        expanded = one.expand(shape)
        if torch.empty(shape, device="meta").stride() == stride:
            return expanded
        return torch.empty_strided(shape, stride, dtype=self.slot.dtype, device=self.slot.device)


def unpack(held: Any) -> Tensor:
    """Returns the saved tensor to autograd: the unpack hook."""
    try:
        x: Tensor = held.restore()
        return x
    except ElbowroomError:
        raise
    except Exception as error:
        raise RestoreError(
            f"a saved tensor could not be given back to backward: {error}"
        ) from error
