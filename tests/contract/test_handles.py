"""What every handle promises.

See `runtime/slot.py`, and rules 1, 2, 4 and 9 of DESIGN, section 4.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from elbowroom.codecs import Affine, BitMask, Cast, Codec, Dither, Facts, Group, SparseLossless
from elbowroom.errors import RestoreError
from elbowroom.plan import Encode, Keep, Need, Offload, Rebuild
from elbowroom.runtime.handles import (
    DropHandle,
    EncodeHandle,
    Handle,
    KeepHandle,
    MovedCodeHandle,
    OffloadHandle,
    RebuildHandle,
)
from elbowroom.runtime.handles.rebuild import Op, Ready, Recipe
from elbowroom.runtime.ledger import Ledger
from elbowroom.runtime.masks import mask_bits
from elbowroom.runtime.normal import Normalized, Statistics
from elbowroom.runtime.serving import perform
from elbowroom.runtime.slot import CountedSlot, Geometry, Slot, View
from elbowroom.runtime.storage import storage_nbytes
from elbowroom.runtime.tiers.choose import file_tier


def slot_of(x: Tensor, handle: Handle) -> Slot:
    slot = Slot(x, Ledger().open("", "", "float32", storage_nbytes(x)))
    slot.hold(handle)
    return slot


def encoded(codec: Codec) -> Callable[[Tensor], Handle]:
    return lambda x: EncodeHandle(codec.encode(x, seed=3), x)


def rebuilt(source: Callable[[Tensor], Handle]) -> Callable[[Tensor], Handle]:
    """A handle that makes x again as relu(x + 1) - 1 for x > -1: source and result differ."""

    def make(x: Tensor) -> Handle:
        below = x - 1
        slot = slot_of(below, source(below))
        op = Op(lambda y: y + 1, lambda y: y.add_(1), lambda y: y.add_(1))
        recipe = Recipe.of(op, slot, Geometry.of(below), x, None)
        assert recipe is not None
        ready = recipe.ready()
        assert ready is not None
        return RebuildHandle(ready, x)

    return make


def offloaded(x: Tensor) -> Handle:
    """Away already."""
    handle = OffloadHandle(file_tier(), x)
    file_tier().flush()
    return handle


def moved(x: Tensor) -> Handle:
    """A code whose largest buffer is away already."""
    handle = perform(Encode(Dither(levels=16), moved=Offload("file")), x, Need.LOSSY, None, 3)
    file_tier().flush()
    return handle


HANDLES: dict[str, Callable[[Tensor], Handle]] = {
    "keep": lambda x: KeepHandle(x, "because"),
    "encode, lossless": encoded(SparseLossless()),
    "encode, lossy": encoded(Dither(levels=16)),
    "encode, group": encoded(Group(bits=2)),
    "encode, moved": moved,
    "offload": offloaded,
    "offload, on its way": lambda x: OffloadHandle(file_tier(), x),
    "rebuild, exact": rebuilt(lambda x: KeepHandle(x, "")),
    "rebuild, exact, encoded": rebuilt(encoded(SparseLossless())),
    "rebuild, exact, offloaded": rebuilt(offloaded),
    "rebuild, lossy": rebuilt(encoded(Dither(levels=16))),
    "rebuild twice": rebuilt(rebuilt(lambda x: KeepHandle(x, ""))),
}
GEOMETRIES: dict[str, Callable[[], Tensor]] = {
    "one element": lambda: torch.arange(1.0),
    "0-d": lambda: torch.tensor(3.0),
    "odd": lambda: torch.arange(77.0).view(7, 11),
    "transposed": lambda: torch.arange(77.0).view(7, 11).t(),
    "channels_last": lambda: (
        torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ),
}


@dataclass(frozen=True)
class Case:
    make: Callable[[Tensor], Handle]
    values: Callable[[], Tensor]


CASES = [
    pytest.param(Case(make, values), id=f"{name}-{shape}")
    for name, make in HANDLES.items()
    for shape, values in GEOMETRIES.items()
]
ALL = pytest.mark.parametrize("case", CASES)
EVERY_HANDLE = pytest.mark.parametrize("make", HANDLES.values(), ids=HANDLES.keys())


@ALL
def test_restores_the_geometry_and_if_exact_the_bits(case):
    x = case.values()
    handle = case.make(x.clone(memory_format=torch.preserve_format))
    restored = handle.restore()
    assert (restored.shape, restored.stride(), restored.dtype) == (x.shape, x.stride(), x.dtype)
    assert not restored.requires_grad
    if handle.exact:
        assert torch.equal(restored, x)
    else:
        assert (restored - x).abs().max() <= 120 / 3


@ALL
def test_restores_twice_the_same(case):
    handle = case.make(case.values())
    assert torch.equal(handle.restore(), handle.restore())
    first = handle.restore().clone()
    assert torch.equal(handle.restore(), first)


@EVERY_HANDLE
def test_what_is_private_may_be_overwritten(make):
    alive = torch.arange(77.0).view(7, 11)
    for x in (alive, alive.clone()):
        handle = make(x)
        del x
        before = handle.restore().clone()
        handle.restore(private=True).fill_(-5)
        assert torch.equal(handle.restore(), before)
    assert torch.equal(alive, torch.arange(77.0).view(7, 11))


@EVERY_HANDLE
def test_a_change_in_place_is_refused_or_harmless(make):
    x = torch.arange(77.0).view(7, 11)
    handle = make(x)
    before = handle.restore().clone()
    x[3:].zero_()
    if isinstance(handle, KeepHandle | OffloadHandle):
        with pytest.raises(
            RestoreError, match=r"modified by an inplace operation.*saved at version 0 .* 1"
        ):
            handle.restore()
    elif handle.exact:
        assert torch.equal(handle.restore(), before)
    else:
        assert (handle.restore() - torch.arange(77.0).view(7, 11)).abs().max() < 40


@EVERY_HANDLE
def test_what_was_restored_may_be_changed_and_that_is_noticed(make):
    """A custom Function's backward may write into what it gets; the next reader must not see it."""
    for alive in (False, True):
        x = torch.arange(77.0).view(7, 11)
        handle = make(x)
        before = handle.restore().clone()
        if not alive:
            del x
            before = handle.restore().clone()
        given = handle.restore()
        given.zero_()
        try:
            again = handle.restore()
        except RestoreError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
            continue
        assert handle.exact <= torch.equal(again, before)
        assert not torch.equal(again, given)


@EVERY_HANDLE
def test_counts_its_bytes(make):
    handle = make(torch.arange(1024.0))
    assert handle.nbytes == {"keep": 4096, "rebuild": 0}.get(handle.label, handle.nbytes)
    if isinstance(handle, OffloadHandle):
        file_tier().flush()
        assert (handle.nbytes, handle.full_nbytes) == (0, 4096)
    if isinstance(handle, EncodeHandle):
        assert handle.nbytes == handle._encoded.nbytes < 4096 + 200
    if isinstance(handle, MovedCodeHandle):
        assert (handle.nbytes, handle.full_nbytes - handle.nbytes) == (36, 512)


@EVERY_HANDLE
def test_is_freed_without_the_garbage_collector(make):
    gc.disable()
    try:
        x = torch.arange(4096.0)
        handle = make(x)
        weak = StorageWeakRef(x.untyped_storage())
        given = handle.restore()
        again = StorageWeakRef(given.untyped_storage())
        is_on_its_way = isinstance(handle, OffloadHandle)
        del x, given, handle
        if is_on_its_way:
            file_tier().flush()  # a thread that is writing it right now has it until it is done
        assert weak.expired()
        assert again.expired()
    finally:
        gc.enable()


@EVERY_HANDLE
def test_holds_no_graph(make):
    x = torch.arange(8.0, requires_grad=True) * 2
    handle = make(x)
    assert not handle.restore().requires_grad
    del x
    assert handle.restore().grad_fn is None


@pytest.mark.parametrize(("channels", "inner"), [(6, 10), (60, 1), (3, 20), (1, 1), (4, 7)])
def test_an_image_is_that_of_what_is_restored(channels, inner):
    """In one pass where its channels and those of the way back split each other, else in two."""
    x = torch.randn(50, 6, 10)
    normal = Normalized(Statistics(torch.randn(6), torch.rand(6) + 1, 10), keep_zeros=False)
    handle = EncodeHandle(Dither(levels=4).encode(x, 3), x.clone(), normal=normal)
    forth = torch.randn(2, channels)
    affine, kept = Affine(forth[0], forth[1], inner), torch.rand(x.shape) > 0.5
    bits = BitMask().encode(kept, facts=Facts(value=1.0)).buffers[0]
    image = slot_of(x, handle).restore_mapped(affine, bits)
    expected = affine.of(handle.restore().view(-1)).view(x.shape)
    torch.testing.assert_close(image, torch.where(kept, expected, 0.0), rtol=1e-5, atol=1e-5)
    assert torch.equal(image != 0, kept)


def test_an_encoded_tensor_that_lives_on_is_given_back_as_it_is():
    x = torch.randn(100)
    told = []
    handle = EncodeHandle(Dither(levels=4).encode(x), x, lambda: told.append(1))
    assert torch.equal(handle.restore(), x)
    assert handle.restore().data_ptr() == x.data_ptr()
    assert told == [1, 1]
    kept = x.clone()
    x.add_(1)
    assert not torch.equal(handle.restore(), x)
    assert (handle.restore() - kept).abs().max() < kept.abs().max()
    del x
    told.clear()
    handle.restore()
    assert not told


def test_a_storage_freed_by_hand_is_decoded():
    x = torch.arange(100.0)
    handle = EncodeHandle(Cast().encode(x), x)
    before = x.clone()
    x.untyped_storage().resize_(0)  # as FSDP and Megatron do, without a new version
    assert torch.equal(handle.restore(), before)


def test_two_readers_share_one_decoded_tensor():
    handle = EncodeHandle(Dither(levels=4).encode(torch.randn(100)), torch.randn(100))
    one = handle.restore()
    assert handle.restore().data_ptr() == one.data_ptr()
    assert handle.restore(private=True).data_ptr() != one.data_ptr()


def test_dropped_is_an_error():
    with pytest.raises(RestoreError, match="held nothing, to find out what its budget"):
        DropHandle().restore()


def test_rebuilding_checks_parameters():
    weight = torch.ones(8)

    def ready() -> Ready | None:
        slot = slot_of(torch.ones(8), KeepHandle(torch.ones(8), ""))
        op = Op(lambda y: y * weight, None, fixed=(weight,))
        recipe = Recipe.of(op, slot, slot.base, torch.ones(8), None)
        return None if recipe is None else recipe.ready()

    one = ready()
    weight.add_(1)
    with pytest.raises(RestoreError, match="modified by an inplace operation"):
        RebuildHandle(one, torch.ones(8)).restore()
    assert ready() is None  # nothing is rebuilt from what is known to change
    weight = torch.full((8,), 2.0)
    one = ready()
    assert torch.equal(RebuildHandle(one, torch.ones(8)).restore(), torch.full((8,), 2.0))
    weight.untyped_storage().resize_(0)
    with pytest.raises(RestoreError, match="memory was freed after forward"):
        RebuildHandle(one, torch.ones(8)).restore()


@pytest.mark.parametrize(
    ("op", "match"),
    [
        (Op(lambda y: y.double(), None), "rebuilding gave float64 where float32 was saved"),
        (Op(lambda y: y[:3], None), r"rebuilding gave shape \(3,\) where \(8,\) was saved"),
    ],
)
def test_rebuilding_something_else_is_an_error(op, match):
    x = torch.ones(8)
    slot = slot_of(x, KeepHandle(x, ""))
    ready = Recipe.of(op, slot, slot.base, x, None).ready()
    with pytest.raises(RestoreError, match=match):
        RebuildHandle(ready, x).restore()


def test_a_chain_is_not_longer_than_it_pays():
    x = torch.ones(8)
    slot = slot_of(x, KeepHandle(x, ""))
    link, length = slot, 0
    while link is not None:
        link = Recipe.of(Op(lambda y: y + 1, lambda y: y + 1), link, slot.base, x, None)
        length += link is not None
    assert length == 9


def test_a_recipe_whose_source_is_gone_is_not_ready():
    x = torch.ones(8)
    slot = slot_of(x, KeepHandle(x, ""))
    recipe = Recipe.of(Op(lambda y: y + 1, None), slot, slot.base, x, None)
    assert recipe.ready() is not None
    del slot
    assert recipe.ready() is None


def test_a_recipe_without_a_lossy_form_needs_an_exact_source():
    x = torch.ones(8)
    slot = slot_of(x, EncodeHandle(Dither(levels=4).encode(x), x))
    assert Recipe.of(Op(lambda y: y + 1, None), slot, slot.base, x, None).ready() is None


def test_pinning_reaches_the_first_source():
    x = torch.ones(8)
    first = slot_of(x, KeepHandle(x, ""))
    op = Op(lambda y: y + 1, lambda y: y + 1)
    below = Recipe.of(op, first, first.base, x, None)
    middle = slot_of(x, RebuildHandle(below.ready(), x))
    top = slot_of(x, RebuildHandle(Recipe.of(op, middle, middle.base, x, None).ready(), x))
    top.promise(Need.EXACT, "div")
    assert (top.pinned, middle.pinned, first.pinned) == (True, True, True)


# --- Actions, slots and views


def test_each_action_becomes_its_handle():
    x = torch.randn(64)
    assert isinstance(perform(Keep("why"), x, Need.EXACT, None, 0), KeepHandle)
    handle = perform(Encode(Dither(levels=4)), x, Need.LOSSY, None, 1)
    assert isinstance(handle, EncodeHandle)
    slot = slot_of(x, KeepHandle(x, ""))
    ready = Recipe.of(Op(lambda y: y * 1, None), slot, slot.base, x, None).ready()
    assert isinstance(perform(Offload(), x, Need.EXACT, None, 0), OffloadHandle)
    assert isinstance(perform(Rebuild(), x, Need.EXACT, ready, 0), RebuildHandle)
    assert slot.pinned


def test_what_is_no_action_is_an_error():
    from elbowroom.errors import PlanError

    with pytest.raises(
        PlanError, match="a policy returns Keep, Encode, Rebuild or Offload; got 'keep'"
    ):
        perform("keep", torch.ones(3), Need.EXACT, None, 0)  # type: ignore[arg-type]


def test_bits_of_a_mask():
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e-45])
    as_bits = [int(b) for b in f"{int(mask_bits(x.relu(), 'relu')):08b}"[::-1]]
    assert as_bits == [0, 0, 1, 0, 1, 1, 0, 1]  # NaN <= 0 is false: ReLU lets its gradient pass
    as_bits = [int(b) for b in f"{int(mask_bits(x, 'leaky_relu')):08b}"[::-1]]
    assert as_bits == [0, 0, 1, 0, 0, 1, 0, 1]


def test_every_view_of_a_slot_is_restored_as_geometry():
    storage = torch.arange(120.0)
    base = storage.view(2, 3, 4, 5)
    for handle in (
        KeepHandle(base, ""),
        EncodeHandle(SparseLossless().encode(base), base),
        offloaded(base.clone()),
    ):
        slot = slot_of(base, handle)
        for view in (
            base,
            base.transpose(1, 3),
            base[1, :, 2],
            base.view(120),
            base[:, :1].expand(2, 7, 4, 5),
            base.as_strided((10, 3), (1, 1), 100),
            base[0, 0, 0, 0],
            base[:0],
        ):
            restored = View(slot, Geometry.of(view), Need.EXACT).restore()
            assert torch.equal(restored, view)
            assert restored.stride() == view.stride()


def test_a_mask_serves_relu_through_any_view():
    x = torch.randn(6, 8).relu()
    slot = slot_of(x, EncodeHandle(Group(bits=1).encode(x), x))
    slot.hold_bits(mask_bits(x, "relu"))
    x_t = x.t()[2:]
    restored = View(slot, Geometry.of(x_t), Need.MASK).restore()
    assert torch.equal(restored, (x_t > 0).float())


def test_a_slot_tells_the_ledger():
    ledger = Ledger()
    x = torch.zeros(1000)
    slot = CountedSlot(x, ledger.open("conv", "conv2d", "float32", 4000))
    slot.hold(KeepHandle(x, ""))
    assert (ledger.before_nbytes, ledger.after_nbytes, ledger.held_nbytes) == (4000, 4000, 4000)
    slot.hold_bits(BitMask().encode(x, facts=Facts(value=1.0)).buffers[0])
    assert ledger.held_nbytes == 4125
    slot.hold(EncodeHandle(Dither(levels=4).encode(x, facts=Facts(has_zeros=True)), x))
    assert ledger.held_nbytes == slot.value.nbytes  # its bitmap replaces ours, and is counted once
    assert slot.bits is slot.value.bitmap
    del slot
    assert ledger.held_nbytes == 0
    (row,) = ledger.rows
    assert (row.module, row.action, row.before_nbytes) == ("conv", "dither", 4000)


# --- Through autograd


@pytest.mark.parametrize("activation", [F.gelu, F.silu, F.relu])
def test_double_backward_through_rebuilt_and_encoded(activation):
    import elbowroom as er

    torch.manual_seed(0)
    start, w = torch.randn(5, 8), torch.randn(8, 8)

    def second(context):
        x = start.clone().requires_grad_()
        weight = w.clone().requires_grad_()
        with context:
            y = F.linear(activation(F.layer_norm(F.linear(x, weight), (8,))), weight).square().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), [x, weight])

    plain = second(er.saving("keep"))
    for a, b in zip(second(er.saving(min_nbytes=0)), plain, strict=True):
        assert torch.equal(a, b)
