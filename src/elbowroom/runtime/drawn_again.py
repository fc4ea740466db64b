"""Values that a node of backward reads, with the noise of their codes drawn again, on a sample.

    Sample         some elements of a gradient, and of what is multiplied with them
    SampledValues  what the node reads of codes, or of what is rebuilt from codes, there

`redrawn.py` compares what the node makes of both draws.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from elbowroom.codecs import Dither
from elbowroom.codecs.base import PART
from elbowroom.runtime.context import mixed
from elbowroom.runtime.handles import EncodeHandle
from elbowroom.runtime.slot import Slot, View, is_in_order

_EACH, _MIN, _MAX = 16, 2, 4  # parts that are compared: one of so many; at least, and at most
_FAR, _FEW = 64, 256  # of single elements: one of so many, but as many


class Sample(NamedTuple):
    """Some elements of a gradient, and of what is multiplied with them.

    shape   of the gradient
    places  of the elements, in logical order
    """

    shape: tuple[int, ...]
    places: tuple[slice, ...]

    @classmethod
    def parts(cls, shape: tuple[int, ...], seed: int) -> "Sample":
        """Returns parts that a code can be decoded in, spread over all; each seed has its own."""
        n = prod(shape)
        parts = -(-n // PART)
        wanted = min(max(parts // _EACH, _MIN), _MAX)
        if parts <= wanted:
            return cls(shape, (slice(0, n),))
        bounds = [nth * parts // wanted for nth in range(wanted + 1)]
        starts = (
            PART * (first + mixed(seed + first) % (end - first)) for first, end in pairwise(bounds)
        )
        return cls(shape, tuple(slice(start, min(start + PART, n)) for start in starts))

    @classmethod
    def apart(cls, shape: tuple[int, ...], seed: int) -> "Sample":
        """Returns few elements, each apart from the others."""
        n = prod(shape)
        every = max(min(n // _FEW, _FAR), n // (_MAX * PART)) | 1  # odd: in every channel
        return cls(shape, (slice(mixed(seed) % every, n, every),))

    def taken(self, x: Tensor) -> Tensor:
        """Returns these elements of a tensor that has the gradient's shape, or is broadcast."""
        x = x.expand(self.shape)
        if x.is_contiguous():
            flat = x.view(-1)
            return torch.cat([flat[at] for at in self.places])
        ranges = [torch.arange(at.start, at.stop, at.step or 1) for at in self.places]
        return x[torch.unravel_index(torch.cat(ranges).to(x.device), self.shape)]


class SampledValues(NamedTuple):
    """Sampled values of what a node reads.

    are_parts  of codes; otherwise each tensor is restored, of which few elements are held: it takes
               as much as for the node itself
    """

    views: tuple[View, ...]
    sample: Sample
    are_parts: bool

    @classmethod
    def of(cls, views: Iterable[View], shape: Sequence[int], seed: int) -> "SampledValues":
        shape, views = tuple(shape), tuple(views)
        are_parts = all(_has_parts(view, shape) for view in views)
        sample = Sample.parts(shape, seed) if are_parts else Sample.apart(shape, seed)
        return cls(views, sample, are_parts)

    def read(self, dithers: Mapping[Slot, Dither]) -> tuple[list[Tensor], dict[Slot, list[Tensor]]]:
        """Returns what each view reads, and the same with other noise of each of these codes."""
        if self.are_parts:
            own = [self._decoded(code_of(view.slot)) for view in self.views]
            pairs = [*zip(self.views, own, strict=True)]
            return own, {
                root: [
                    code_of(root).drawn_again(x.clone(), codec, self.sample.places)
                    if view.slot is root
                    else x
                    for view, x in pairs
                ]
                for root, codec in dithers.items()
            }
        with _undisturbed(self.views):
            again = {root: self._restored(root, codec) for root, codec in dithers.items()}
            own = [self._of(view) for view in self.views]
        others = {
            root: [x if y is None else y for x, y in zip(own, values, strict=True)]
            for root, values in again.items()
        }
        return own, others

    def _decoded(self, code: EncodeHandle) -> Tensor:
        part = code.parts()
        assert part is not None
        return torch.cat([part(at.start, at.stop - at.start) for at in self.sample.places])

    def _restored(self, root: Slot, codec: Dither) -> list[Tensor | None]:
        """Returns what views read with other noise of a code; None: it is not made of that."""
        found: list[Tensor | None] = []
        for view in self.views:
            if root in upstream(view.slot):
                with _drawn_again(root, view.slot, codec):
                    found.append(self._of(view))
            else:
                found.append(None)
        return found

    def _of(self, view: View) -> Tensor:
        slot = view.slot
        whole = slot.restore_value() if slot.whole is None else slot.whole
        return self.sample.taken(view.geometry.within(slot.base, whole))


def _has_parts(view: View, shape: tuple[int, ...]) -> bool:
    """Returns whether a view of this shape reads a code that can be decoded in parts."""
    held, at = view.slot.value, view.geometry
    if not isinstance(held, EncodeHandle) or held.parts() is None:
        return False
    is_base = at == view.slot.base and at.shape == shape and not view.slot.is_window
    return is_base and is_in_order(at.shape, at.stride)


class _DrawnAgain:
    """Handle: what a code decodes to, with its noise drawn again. It is decoded for each reader."""

    exact = False
    label = "drawn again"

    def __init__(self, held: EncodeHandle, codec: Dither) -> None:
        self.nbytes, self.mask, self.where = held.nbytes, held.mask, held.where
        self._held, self._codec = held, codec

    def restore(self, *, private: bool = False) -> Tensor:
        x = self._held.restore(private=True)
        return self._held.drawn_again(x, self._codec, (slice(0, x.numel()),))


def upstream(slot: Slot) -> Iterator[Slot]:
    """Yields a slot, and those that it is rebuilt from."""
    yield slot
    ready = getattr(slot.value, "ready", None)
    for one in () if ready is None else ready.slots:
        yield from upstream(one)


def code_of(slot: Slot) -> EncodeHandle:
    """Returns the code that a slot holds."""
    assert isinstance(slot.value, EncodeHandle)
    return slot.value


@contextmanager
def _undisturbed(views: Iterable[View]) -> Iterator[None]:
    """Lets nothing wait for later readers that is restored meanwhile."""
    known = {id(one): one for view in views for one in upstream(view.slot)}
    before = [(one, one.whole, one.views_asked) for one in known.values()]
    for one in known.values():
        one.views_asked = max(one.views, one.readers)
    try:
        yield
    finally:
        for one, whole, asked in before:
            one.whole, one.views_asked = whole, asked


@contextmanager
def _drawn_again(root: Slot, read: Slot, codec: Dither) -> Iterator[None]:
    """Lets a slot hold what another draw of its code's noise would have given."""
    held = root.value
    waiting = [(one, one.whole) for one in upstream(read) if root in upstream(one)]
    root.value = _DrawnAgain(code_of(root), codec)
    for one, _ in waiting:
        one.whole = None
    try:
        yield
    finally:
        root.value = held
        for one, whole in waiting:
            one.whole = whole
