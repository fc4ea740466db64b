"""Is it ours to touch, and have we seen it before?"""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from elbowroom.runtime.ledger import Ledger
from elbowroom.runtime.slot import Slot
from elbowroom.runtime.sources import Sources
from elbowroom.runtime.storage import (
    Origin,
    dense_base,
    is_made_of_parameters,
    is_parameter,
    untouchable,
)


def slot_of(x):
    return Slot(x, Ledger().open("", "", "", 0))


def remember(seen, x, slot):
    seen.stored(x).slots[x._version, x.dtype] = weakref.ref(slot)


def test_one_slot_for_all_views_of_a_storage_at_one_version():
    seen, x = Sources(), torch.randn(4, 6)
    assert seen.slot(x) is None
    slot = slot_of(x)
    remember(seen, x, slot)
    for view in (x, x.t(), x[1:], x.detach(), x.view(24), x.expand(2, 4, 6)):
        assert seen.slot(view) is slot
    assert seen.slot(x.clone()) is None
    assert seen.slot(x.view(torch.int32)) is None
    assert seen.slots() == [slot]


def test_a_change_in_place_is_another_content():
    seen, x = Sources(), torch.randn(4)
    first = slot_of(x)
    remember(seen, x, first)
    x.add_(1)
    assert seen.slot(x) is None
    second = slot_of(x)
    remember(seen, x, second)
    assert seen.slot(x) is second
    assert set(seen.slots()) == {first, second}


def test_a_slot_is_forgotten_with_its_last_view():
    seen, x = Sources(), torch.randn(4)
    slot = slot_of(x)
    remember(seen, x, slot)
    del slot
    assert seen.slot(x) is None
    assert seen.slots() == []


def test_an_address_used_again_is_not_mistaken():
    seen = Sources()
    kept = []
    for _ in range(300):
        x = torch.randn(64)
        assert seen.slot(x) is None
        assert seen.origin(x) is None
        kept.append(slot_of(x))
        remember(seen, x, kept[-1])
        seen.made(x, Origin("relu"))
        del x


def test_records_of_dead_storages_are_purged():
    seen = Sources()
    for _ in range(2000):
        x = torch.randn(64)
        seen.made(x, Origin("relu"))
    assert len(seen._storages) <= 600
    seen.clear()
    assert seen.origin(x) is None


def test_what_is_held_for_a_dead_storage_is_not_purged():
    seen, kept = Sources(), []
    for _ in range(1000):  # each was made smaller, and its tensor died
        x = torch.randn(64)
        kept.append(slot_of(x))
        remember(seen, x, kept[-1])
        del x
    assert set(seen.slots()) == set(kept)
    del kept[500:]
    assert len(seen.slots()) == 500


def test_an_origin_belongs_to_a_version():
    seen, x = Sources(), torch.randn(4)
    seen.made(x, Origin("gelu"))
    x.mul_(2)
    assert seen.origin(x) is None
    assert seen.origin(x, 0).op == "gelu"
    seen.made(x, Origin("relu", has_zeros=True))
    assert (seen.origin(x).op, seen.origin(x, 0).op) == ("relu", "gelu")


class Sub(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.randn(3), ""),
        (lambda: nn.Parameter(torch.randn(3)), ""),
        (lambda: torch.randn(3, 3).t(), ""),
        (lambda: torch.randn(3).to(torch.complex64), ""),
        (lambda: torch.randn(3).as_subclass(Sub), "tensor subclass Sub"),
        (lambda: torch.eye(3).to_sparse(), "layout sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "layout sparse_csr"),
        (lambda: torch.eye(3).to_mkldnn(), "layout _mkldnn"),
        (lambda: torch.empty(3, device="meta"), "device meta"),
        (lambda: torch.randn(3).to(torch.complex64).conj(), "a lazy conjugate or negative view"),
        (
            lambda: torch.randn(3).to(torch.complex64).conj().imag,
            "a lazy conjugate or negative view",
        ),
    ],
)
def test_what_is_untouchable(make, why):
    assert why in untouchable(make())
    assert bool(untouchable(make())) == bool(why)


def test_inside_a_transform_nothing_is_touched():
    seen = []
    torch.vmap(lambda x: seen.append(untouchable(x)) or x)(torch.randn(3, 4))
    assert seen == ["inside a torch.func transform"]


def linear(**kwargs):
    return nn.Linear(6, 6, **kwargs)


def test_parameters_and_their_views():
    weight = linear().weight
    frozen = linear().requires_grad_(False).weight
    leaf = torch.randn(6, 6, requires_grad=True)
    for x in (
        weight,
        weight.t(),
        weight[1:],
        weight.view(36).view(4, 9),
        frozen,
        frozen.t(),
        leaf,
        leaf.t(),
    ):
        assert is_parameter(x)
    data = torch.randn(6, 6)
    for x in (
        data,
        data.t(),
        weight * 2,
        F.linear(data, weight),
        F.linear(data, weight).t(),
        weight.detach(),
    ):
        assert not is_parameter(x)


def made_of_parameters():
    with torch.autocast("cpu", torch.bfloat16):
        layer = linear()
        saved = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda x: saved.append(x) or x.detach(), lambda x: x
        )
        with hooks:
            layer(torch.randn(6, 6).requires_grad_() * 1)
        yield next(
            x for x in saved if x.dtype is torch.bfloat16 and "TBackward" in x.grad_fn.name()
        )
    yield linear().weight * linear().weight
    yield parametrizations.weight_norm(linear()).weight
    yield parametrizations.spectral_norm(linear()).weight
    pruned = prune.random_unstructured(linear(), "weight", 0.5)
    pruned(torch.randn(1, 6))
    yield pruned.weight
    yield pruned.weight.t()
    a, b = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 6))
    yield linear().weight + a @ b  # LoRA
    yield a.expand(4, 6, 2)
    yield F.normalize(linear().weight)


def made_of_data():
    data, layer, table = torch.randn(6, 6), linear(), nn.Embedding(9, 6)
    yield data
    yield layer(data)
    yield layer(layer(data))
    yield table(torch.tensor([1, 2]))
    yield F.layer_norm(table(torch.tensor([1, 2])) + nn.Parameter(torch.randn(2, 6)), (6,))
    yield layer.weight[torch.tensor([0, 1])]
    yield layer.weight.index_select(0, torch.tensor([0, 1]))
    yield layer.weight.gather(0, torch.zeros(2, 6, dtype=torch.int64))
    yield F.dropout(table(torch.tensor([1, 2])), 0.5)
    yield data[:2] * nn.Parameter(torch.randn(6))  # an input, scaled
    yield F.conv1d(data[None], nn.Parameter(torch.randn(6, 6, 1)))
    yield data * nn.Parameter(torch.randn(()))


@pytest.mark.parametrize("x", list(made_of_parameters()), ids=lambda x: x.grad_fn.name())
def test_what_a_graph_makes_of_parameters_only(x):
    assert is_made_of_parameters(x)


@pytest.mark.parametrize(
    "x", list(made_of_data()), ids=lambda x: f"{x.grad_fn and x.grad_fn.name()}"
)
def test_what_a_graph_makes_of_data(x):
    assert not is_made_of_parameters(x)


def test_a_deep_graph_is_data():
    x = nn.Parameter(torch.randn(6))
    for _ in range(100):
        x = x * x
    assert not is_made_of_parameters(x)


def window(x, size):
    """A new tensor on a part of x's storage, without being a view of x."""
    return torch.empty(0).set_(x.untyped_storage(), 8, (size,))


@pytest.mark.parametrize(
    ("view", "covers"),
    [
        (lambda x: x, lambda x, base: base is x),
        (lambda x: x.t(), lambda x, base: base.stride() == (1, 8)),
        (lambda x: x[2:], lambda x, base: base.shape == (12, 8)),
        (lambda x: x[:, ::2], lambda x, base: base.shape == (12, 8)),
        (lambda x: x[:1].expand(5, 8), lambda x, base: base.shape == (12, 8)),
        (lambda x: x.unfold(0, 3, 1), lambda x, base: base.shape == (12, 8)),
        (lambda x: x.view(torch.int32), lambda x, base: base.dtype is torch.int32),
        (lambda x: window(x, 50), lambda x, base: base.shape == (96,)),
        (lambda x: window(x, 20), lambda x, base: base is None),
        (lambda x: window(x, 0), lambda x, base: base is None),
    ],
)  # fmt: skip
def test_the_dense_tensor_that_covers_a_storage(view, covers):
    x = torch.randn(12, 8)
    seen = view(x)
    base = dense_base(seen)
    assert covers(x, base)
    if base is not None:
        assert base.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert base.storage_offset() == 0
        assert base._version == seen._version  # and so it notices what x's owner does
