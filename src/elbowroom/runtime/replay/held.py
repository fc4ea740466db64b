"""Autograd holds one tuple for a tensor of a settled step, wherever that is enough.

    Kept      the tensor, and its version
    Rebuilt   the kept tensors that it is recomputed from, exactly
    Coded     a code of it, and how it was normalized
    HeldMask  where it is positive, for the backward of a ReLU (`masks.py`)

A slot lets several readers share a value, and lets it change after it was saved. A script says
beforehand of most storages that neither happens: `Flat` finds these. Nothing is looked up, counted
or decided on for them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, call
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from elbowroom.codecs.compact import Coder, Compact
from elbowroom.errors import RestoreError
from elbowroom.plan import Need
from elbowroom.plan.action import Encode, Rebuild
from elbowroom.plan.site import SiteName
from elbowroom.runtime.fingerprints import Fingerprints
from elbowroom.runtime.handles import EncodeHandle, Handle, KeepHandle
from elbowroom.runtime.handles.encode import is_normalized, normalized, say_raw
from elbowroom.runtime.handles.rebuild import OTHER_SHAPE, as_base, laid_out
from elbowroom.runtime.kernel_settings import OF_OPS, kernels_as
from elbowroom.runtime.masks import MASKED_OUTPUT, HeldMask, mask_bits
from elbowroom.runtime.normal import Normalized
from elbowroom.runtime.overwritten import COPIED
from elbowroom.runtime.replay.script import (
    NOWHERE,
    Instruction,
    NumberedRecipe,
    Ref,
    ScriptedCall,
    ScriptedSave,
    instructions_of,
)
from elbowroom.runtime.replay.sizes import Varying
from elbowroom.runtime.serving import perform
from elbowroom.runtime.slot import Geometry, Slot
from elbowroom.runtime.storage import (
    check_parameters,
    check_version,
    clone_with_storage,
    version_of,
)

if TYPE_CHECKING:
    from elbowroom.runtime.replay.replay import Replay

HoldFlat: TypeAlias = "Callable[[Replay, Tensor], Kept | Rebuilt | HeldMask]"
_Run = Callable[[list[Tensor], tuple[Tensor, ...]], Tensor]
_version = attrgetter("_version")


class ForwardRecord:
    """Facts of one replayed forward that what it holds refers to.

    It lives as long as anything that is held without a slot.

    fingerprints  of the parameters that backward reads again
    kernels       settings by which torch chooses kernels (`kernel_settings.py`)
    copied        sources that lie in memory of their own since an op was about to change them
    """

    __slots__ = ("__weakref__", "copied", "fingerprints", "kernels")

    def __init__(self) -> None:
        self.fingerprints = Fingerprints()
        self.kernels: tuple[Any, ...] = ()
        self.copied: list[Tensor] = []

    def check_source(self, x: Tensor, version: int) -> None:
        """Raises RestoreError if a source is not what it was at this version."""
        if not any(x is one for one in self.copied):
            check_version(x, version)


class Kept(tuple[Tensor, int, ForwardRecord | None]):
    """A tensor that is only kept, with the version check that hooks switch off.

    The tensor without its node; its version; the record of the forward. A tuple, for a class of
    ours would take a call of Python's to make.
    """

    __slots__ = ()

    def restore(self) -> Tensor:
        """Returns the tensor. Raises RestoreError if it was changed in place."""
        x, version, _ = self
        check_version(x, version)
        return x


class RebuildSpec(NamedTuple):
    """How a tensor is rebuilt.

    run    gives the whole of it, of the geometry `base`; view: of the part that was saved
    fixed  parameters that are read
    """

    run: _Run
    fixed: tuple[Tensor, ...]
    base: Geometry
    view: Geometry | None
    dtype: torch.dtype


class Rebuilt(
    tuple[RebuildSpec, tuple[Kept, ...], tuple[Tensor, ...], tuple[int, ...], ForwardRecord]
):
    """A tensor that is recomputed from others, which are kept.

    How; its sources; statistics of this forward; versions of the parameters that are read; and the
    record of the forward.
    """

    __slots__ = ()

    def restore(self) -> Tensor:
        """Returns the tensor. Raises RestoreError if a source or a parameter was changed."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.restore()
        (run, fixed, base, view, dtype), sources, given, versions, record = self
        if record.kernels != tuple(map(call, OF_OPS)):
            with kernels_as(record.kernels):
                return self.restore()
        device = sources[0][0].device.type
        if torch.is_autocast_enabled(device):  # which would run other kernels than forward did
            with torch.autocast(device, enabled=False):
                return self.restore()
        if fixed:
            check_parameters(fixed, versions, record.fingerprints)
        tensors = []
        for x, version, _ in sources:
            if x.is_inference() or x._version != version:
                record.check_source(x, version)
            tensors.append(x)
        whole = as_base(run(tensors, given), base, dtype)
        return whole if view is None else view.within(base, whole)


class Unheld(NamedTuple):
    """A storage that nothing but a code's reader needs, as far as the recorded step tells.

    storage          a weak reference
    survivors, name  where, and under which name, it is noted that something else holds it
    """

    storage: weakref.ref[torch.UntypedStorage]
    survivors: set[SiteName]
    name: SiteName

    def note(self) -> None:
        """Notes, in backward, that the tensor is still there: later steps give back that."""
        self.survivors.add(self.name)


class Coded(tuple[Compact, Normalized | None, ForwardRecord | None, Unheld]):
    """A tensor that is held as a code, which nothing but one op of torch's reads.

    The code; the normalization of the encoded tensor, or None; the record of the forward; and the
    storage. Unlike an `EncodeHandle`, it does not give back the encoded tensor,
    which in the recorded step nothing held until backward.
    """

    __slots__ = ()

    def restore(self) -> Tensor:
        """Returns the decoded tensor, in new memory."""
        code, normal, _, unheld = self
        if unheld.storage() is not None:
            unheld.note()
        return code.decoded(None if normal is None else normal.undo())


def kept(replay: Replay, x: Tensor) -> Kept:
    """Returns what is held of a tensor that is only kept."""
    alone = x if x.is_leaf else x.detach()  # reading `grad_fn` creates an object
    try:
        return Kept((alone, x._version, replay.record))
    except RuntimeError:  # an inference tensor has no version
        return Kept((alone, 0, replay.record))


def keep_values(
    sources: Iterable[Kept | None], slots: Iterable[Slot | None], changed: Iterable[Tensor]
) -> None:
    """Copies the sources of recipes that lie where an op is about to change memory.

    They are given memory of their own: nothing can be put in their place in tuples.
    """
    storages = {x.untyped_storage()._cdata for x in changed}
    for source in sources:
        x = None if source is None else source[0]
        if x is None or x.is_inference() or x.untyped_storage()._cdata not in storages:
            continue
        if source is not None and source[2] is not None and x._version == source[1]:
            x.data = clone_with_storage(x)
            source[2].copied.append(x)
    for slot in slots:
        if slot is not None and isinstance(slot.value, KeepHandle) and not slot.value.was_changed:
            x = slot.value.restore()
            if x.untyped_storage()._cdata in storages:
                slot.hold(KeepHandle(clone_with_storage(x), COPIED))


class Flat:
    """The storages of a script of which no slot is made, by the numbers of their slots.

    kept    nothing is done with them
    acting  their saved tensors are rebuilt from kept ones, once, or are bits, or both
    coded   one op of torch's reads a code of them, which nothing is rebuilt from
    """

    def __init__(self, steps: Sequence[ScriptedCall], last: Sequence[Instruction]) -> None:
        self._saves: dict[int, list[tuple[ScriptedCall, ScriptedSave]]] = defaultdict(list)
        for step in steps:
            for save in step.saves or ():
                if save is not None and save.slot != NOWHERE:
                    self._saves[save.slot].append((step, save))
        later = {instruction.slot for step in steps for instruction in (*step.before, *step.after)}
        later |= {instruction.slot for instruction in last}
        later |= {slot for step in steps for _, slot in step.copies}
        known = {n for n in self._saves if n not in later and self._is_fixed(n)}
        self.kept = {n for n in known if not any(save.instruction for _, save in self._saves[n])}
        self.coded = {n for n in known - self.kept if self._is_coded(n)}
        self.acting = {n for n in known - self.kept - self.coded if self._acts_once(n)}
        self._settle(list(instructions_of(steps, last)))

    @property
    def numbers(self) -> set[int]:
        """All of them."""
        return self.kept | self.acting | self.coded

    def _settle(self, instructions: list[Instruction]) -> None:
        """Drops what reads, or is read by, what needs a slot."""
        count = -1
        while count != len(self.numbers):
            count = len(self.numbers)
            for instruction in instructions:
                if instruction.slot in self.acting:
                    read = {n for one in instruction.recipe or () for n in one.sources}
                    if not read <= self.kept:
                        self.acting.discard(instruction.slot)
                    self.acting -= read
                    self.coded -= read
                else:
                    read = {instruction.mask}.union(
                        *(one.slots for one in instruction.recipe or ())
                    )
                    for numbers in (self.kept, self.acting, self.coded):
                        numbers -= read

    def _is_fixed(self, number: int) -> bool:
        """Returns whether the script knows the sizes of all that is saved of it."""
        return self._saves[number][0][1].fresh and not any(
            isinstance(one, Varying) or save.waits
            for _, save in self._saves[number]
            for one in (save.geometry, save.whole)
        )

    def _acts_once(self, number: int) -> bool:
        bits = [save for _, save in self._saves[number] if _takes_bits(save)]
        values = [(step, s) for step, s in self._saves[number] if not _takes_bits(s)]
        return len(bits) <= 1 and len(values) <= 1 and all(_rebuilds(*one) for one in values)

    def _is_coded(self, number: int) -> bool:
        """Returns whether a code of a fixed size is all that is held, for one reader."""
        (step, save), *others = self._saves[number]
        one = save.instruction
        if one is None or not isinstance(one.action, Encode) or others or not _is_of_torch(step):
            return False
        action = one.action
        fixed = action.codec.fixed_size(action.facts) and action.facts.mask is None
        fixed = fixed and not action.facts.has_zeros and action.moved is None
        return fixed and save.need is Need.LOSSY and save.whole in (None, save.geometry)

    def holder(self, save: ScriptedSave) -> HoldFlat | None:
        """Returns the function that holds what is saved; None: a slot does, or a code."""
        if save.slot == NOWHERE:
            return kept
        if save.slot in self.kept:
            return _keep_source(save) if save.fresh and not self.is_source(save) else kept
        if save.slot not in self.acting:
            return None
        assert save.instruction is not None
        if save.instruction.bits:
            return _hold_bits(save.instruction, save.geometry, save.dtype)
        assert save.instruction.recipe is not None
        return _rebuild(save.instruction.recipe, self._whole, save)

    def is_source(self, save: ScriptedSave) -> bool:
        """Returns whether others may be rebuilt from what is only kept, and is all of a storage."""
        covers = save.whole is None or save.whole == save.geometry
        return save.slot in self.kept and save.fresh and covers

    def _whole(self, number: int) -> Geometry:
        """The geometry of all of a storage."""
        (_, save), *_ = self._saves[number]
        return save.geometry if save.whole is None else save.whole


def _takes_bits(save: ScriptedSave) -> bool:
    """Returns whether the bits of a ReLU are all that is held for this reader."""
    instruction = save.instruction
    covers = save.whole is None or save.whole == save.geometry
    return (
        instruction is not None
        and instruction.bits in MASKED_OUTPUT
        and save.need is Need.MASK
        and covers
    )


def _is_of_torch(step: ScriptedCall) -> bool:
    """Returns whether torch's own op saves it: our nodes and checkpoints know other forms alone."""
    return step.run is None and step.module is None and not (step.inputs or step.opens)


def _rebuilds(step: ScriptedCall, save: ScriptedSave) -> bool:
    """Returns whether a recipe of exact tensors, whose sizes are known, is all that is held."""
    instruction = save.instruction
    if (
        instruction is None
        or instruction.recipe is None
        or not isinstance(instruction.action, Rebuild)
    ):
        return False
    each = [one for recipe in instruction.recipe for one in _geometries(recipe)]
    varies = any(isinstance(g, Varying) for g in each)
    return _is_of_torch(step) and save.need is not Need.MASK and not varies


def _geometries(recipe: NumberedRecipe) -> Iterator[Geometry]:
    yield from (recipe.seen, recipe.made, *(ref.geometry for ref in recipe.given))
    yield from (seen for _, seen in recipe.op.others)


def _keep_source(save: ScriptedSave) -> HoldFlat:
    """Keeps a part of a storage, from all of which others may be rebuilt."""
    number, whole = save.slot, save.whole
    assert whole is not None

    def keep(replay: Replay, x: Tensor) -> Kept:
        # An input's data may be exchanged until backward: a recipe reads what forward has read.
        replay.sources[number] = kept(replay, whole.on(x).detach())
        return kept(replay, x)

    return keep


def _hold_bits(instruction: Instruction, geometry: Geometry, dtype: torch.dtype) -> HoldFlat:
    (shape, stride, _), op, covers = geometry, instruction.bits, instruction.covers

    def hold(replay: Replay, x: Tensor) -> HeldMask:
        bits = mask_bits(x, op, only_output=covers)
        assert bits is not None  # of a ReLU
        return HeldMask((bits, shape, stride, dtype, replay.record))

    return hold


def _rebuild(
    recipe: NumberedRecipe, whole: Callable[[int], Geometry], save: ScriptedSave
) -> HoldFlat:
    """Holds the sources of a recipe, all of which are kept: its ops run on exact tensors."""
    steps = tuple(recipe)
    numbers = tuple(dict.fromkeys(number for one in steps for number in one.sources))
    fixed = tuple(tensor for one in steps for tensor in one.op.fixed)
    refs = tuple(ref for one in steps for ref in _read(one))
    are_whole = all(ref.is_whole for ref in refs)
    numbers_of_given = tuple(ref.noted for ref in refs) if are_whole else None
    run = _ReplayedRecipe(steps, {number: i for i, number in enumerate(numbers)}, whole).run(recipe)
    base = save.geometry if save.whole is None else save.whole
    view = None if save.geometry == base else save.geometry
    version = version_of if any(one.is_inference() for one in fixed) else _version
    how = RebuildSpec(run, fixed, base, view, save.dtype)

    def rebuild(replay: Replay, x: Tensor) -> Rebuilt:
        sources = tuple(map(replay.sources.__getitem__, numbers))
        if numbers_of_given is None:
            given = tuple([ref.tensor(replay) for ref in refs])
        else:
            given = tuple(map(replay.noted.__getitem__, numbers_of_given))
        versions = tuple(map(version, fixed))
        record = replay.record
        if fixed:
            record.fingerprints.note(fixed)
        return Rebuilt((how, sources, given, versions, record))

    return rebuild


def _read(recipe: NumberedRecipe) -> tuple[Ref, ...]:
    """The statistics that a recipe reads although its sources are exact."""
    return () if recipe.op.of_given is None else recipe.given


class _ReplayedRecipe:
    """The ops of a recipe as functions of its sources, as `Ready` runs them on exact ones.

    Each takes the tensors that are kept, and the statistics of this forward.
    """

    def __init__(
        self,
        steps: tuple[NumberedRecipe, ...],
        at: dict[int, int],
        whole: Callable[[int], Geometry],
    ) -> None:
        """at: the place of each slot's tensor among the kept ones."""
        self._at, self._whole = at, whole
        self._given: dict[int, slice] = {}
        start = 0
        for one in steps:
            end = start + len(_read(one))
            self._given[id(one)], start = slice(start, end), end

    def run(self, recipe: NumberedRecipe) -> _Run:
        """Returns the function that makes a tensor with the geometry that it was made in."""
        source, op, made = self._operand(recipe.source, recipe.seen), recipe.op, recipe.made
        if recipe.others:
            return self._with_others(recipe, source)
        is_private, of_given, mine = self._is_private(recipe), op.of_given, self._given[id(recipe)]
        if recipe.noise != NOWHERE:
            at = self._at[recipe.noise]

            def masked(tensors: list[Tensor], given: tuple[Tensor, ...]) -> Tensor:
                x, noise = source(tensors, given), tensors[at]
                if noise.shape != x.shape:
                    raise RestoreError(OTHER_SHAPE)
                return laid_out(x.mul_(noise) if is_private else x * noise, made)

            return masked
        if of_given is not None:
            return lambda tensors, given: laid_out(
                of_given(source(tensors, given), *given[mine]), made
            )
        exact = op.in_place if is_private and op.in_place is not None else op.exact
        if isinstance(recipe.source, int) and recipe.seen == self._whole(recipe.source):
            at = self._at[recipe.source]
            return lambda tensors, given: laid_out(exact(tensors[at]), made)
        return lambda tensors, given: laid_out(exact(source(tensors, given)), made)

    def _operand(self, one: int | NumberedRecipe, seen: Geometry) -> _Run:
        """Returns the function that gives a view of a kept tensor, or of one that is rebuilt."""
        if isinstance(one, NumberedRecipe):
            below, base = self.run(one), one.made
            if seen == base:
                return below
            return lambda tensors, given: seen.within(base, below(tensors, given))
        at, whole = self._at[one], self._whole(one)
        if seen == whole:
            return lambda tensors, given: tensors[at]
        return lambda tensors, given: seen.within(whole, tensors[at])

    def _is_private(self, recipe: NumberedRecipe) -> bool:
        """Returns whether the op may overwrite its input."""
        source, (shape, stride, _) = recipe.source, recipe.seen
        if not isinstance(source, NumberedRecipe):
            return False
        like = torch.empty_strided(shape, stride, device="meta")
        return recipe.seen == source.made or bool(torch.ops.aten.is_non_overlapping_and_dense(like))

    def _with_others(self, recipe: NumberedRecipe, source: _Run) -> _Run:
        """Returns the function of an op of several operands, of which deeper ones come first."""
        combine, made, is_private = recipe.op.combine, recipe.made, self._is_private(recipe)
        assert combine is not None
        seens = [seen for _, seen in recipe.op.others]
        others = [self._operand(*one) for one in zip(recipe.others, seens, strict=True)]
        depths = [_depth(one) for one in recipe.others]
        least = _depth(recipe.source)
        first = [i for i, depth in enumerate(depths) if depth > least]
        first.sort(key=lambda i: -depths[i])

        def run(tensors: list[Tensor], given: tuple[Tensor, ...]) -> Tensor:
            known = {i: others[i](tensors, given) for i in first}
            x = source(tensors, given)
            for i, other in enumerate(others):
                if i not in known:
                    known[i] = other(tensors, given)
            operands = [known[i] for i in range(len(others))]
            fits = is_private and tuple(x.shape) == made.shape
            fits = fits and all(torch.result_type(x, y) is x.dtype for y in operands)
            return laid_out(combine(x, *operands, out=x if fits else None), made)

        return run


def _depth(one: int | NumberedRecipe) -> int:
    return 1 + max(map(_depth, (one.source, *one.others))) if isinstance(one, NumberedRecipe) else 0


def encoder(
    instruction: Instruction, *, alone: bool = False
) -> Callable[[Replay, Tensor], Handle | Coded]:
    """Returns a function that encodes a tensor: by a coder of its shape, if the codec has one.

    There is no reference to the encoded tensor, unless one of this site has lasted until backward.

    alone: a slot is not needed
    """
    action, perform_it, name = instruction.action, performer(instruction), instruction.name
    assert isinstance(action, Encode)
    is_longer = action.least is not None or action.moved is not None
    if instruction.mask != NOWHERE or is_longer or instruction.varies:
        # Bits of this forward; other values, or another place; another number of rows.
        return perform_it
    codec, facts, nth, norm = action.codec, action.facts, instruction.draw, instruction.norm
    is_normal = is_normalized(action) and (action.rows is not None or norm is not None)
    coders: list[Coder | None] = []  # one, made of the first tensor

    def encode(replay: Replay, whole: Tensor) -> Handle | Coded:
        if not coders:
            coders.append(Coder.of(codec, whole, facts))
        coder = coders[0]
        if coder is None:
            return perform_it(replay, whole)
        normal = None
        if is_normal:
            normal = normalized(action, whole, None if norm is None else norm.statistics(replay))
        affine = None if normal is None else normal.normalize()
        encoded = coder.encode(whole, replay.draw(nth), affine)
        base = whole if name in (survivors := replay.context.survivors) else None
        unheld = Unheld(weakref.ref(whole.untyped_storage()), survivors, name)
        if alone and base is None and type(encoded) is Compact:
            return Coded((encoded, normal, replay.record, unheld))
        if encoded.raw:
            say_raw(encoded, name, replay.context)
            normal = None
        handle = EncodeHandle(encoded, base, None, normal)
        handle.unheld = unheld
        return handle

    return encode


def performer(instruction: Instruction) -> Callable[[Replay, Tensor], Handle]:
    """Returns a function that performs an action, and returns the handle."""
    action = instruction.action
    assert action is not None
    takes_seed = isinstance(action, Encode)

    def perform_it(replay: Replay, whole: Tensor) -> Handle:
        now = (
            action
            if instruction.mask == NOWHERE
            else instruction.masked(replay.slots[instruction.mask].bits)
        )
        seed = replay.draw_for(whole, instruction.draw) if takes_seed else 0
        norm = None if instruction.norm is None else instruction.norm.statistics(replay)
        need, name = instruction.need, instruction.name
        return perform(now, whole, need, None, seed, None, norm, name, replay.context)

    return perform_it
