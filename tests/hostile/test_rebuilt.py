"""What exact contexts make again: how often, by which kernel, and to plain autograd's bits."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import elbowroom as er
from elbowroom.runtime.context import Context
from elbowroom.runtime.direct.attention import math_path
from elbowroom.runtime.direct.attention.math_path import MATH_ATTENTION
from elbowroom.runtime.ledger import NOT_COUNTED
from elbowroom.runtime.producers import products
from elbowroom.runtime.slot import _MAX_SHARED, Slot

_aten: Any = torch.ops.aten


class Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the ops that run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.ran[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


def both(
    run: Callable[[], Tensor], *wanted: Tensor, steps: int = 3
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Gradients of plain autograd and of an exact context, step by step."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        plain = torch.autograd.grad(run(), wanted)
        torch.manual_seed(step)
        with er.saving(min_nbytes=0):
            out = run()
        found.append((list(plain), list(torch.autograd.grad(out, wanted))))
    return found


def same(found: list[tuple[list[Tensor], list[Tensor]]]) -> bool:
    return all(
        torch.equal(a, b) and a.stride() == b.stride()
        for plain, ours in found
        for a, b in zip(plain, ours, strict=True)
    )


@pytest.mark.parametrize("given", ["both", "none"])
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((3, 5, 4, 7), "contiguous"),
        ((3, 5, 4, 7), "channels_last"),
        ((3, 5, 4, 7), "strided"),
        ((9, 6), "contiguous"),
        ((2, 3, 2, 5, 3), "contiguous"),
    ],
)
def test_a_batch_norm_is_made_again_by_the_statistics_it_had(
    shape: tuple[int, ...], order: str, given: str
) -> None:
    x = torch.randn(shape) * 3 + 1
    if order == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    if order == "strided":
        x = x.transpose(2, 3)
    x.requires_grad_()
    weight, bias = (
        (torch.randn(shape[1]), torch.randn(shape[1])) if given == "both" else (None, None)
    )

    def run() -> Tensor:
        return F.silu(F.batch_norm(x * 1.5, None, None, weight, bias, training=True)).square().sum()

    assert same(both(run, x))


def test_a_batch_norm_is_not_counted_again() -> None:
    x = torch.randn(4, 8, 6, 6, requires_grad=True)
    norm, conv = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
    for _ in range(2):
        with er.saving(min_nbytes=0):
            out = conv(F.silu(norm(x * 2))).sum()
        counted = norm.running_mean.clone() if norm.running_mean is not None else None
        with Ops() as ops:
            out.backward()
        assert counted is not None
        assert torch.equal(counted, norm.running_mean)
        assert ops.ran[_aten.native_batch_norm] == 1  # for the convolution, and for the SiLU


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_linear_layer_of_a_transposed_tensor_runs_by_the_kernel_of_forward(
    has_bias: bool, learns: bool, autocast: bool
) -> None:
    layer, conv = nn.Linear(4, 4, bias=has_bias), nn.Conv1d(16, 16, 3, padding=1, bias=False)
    layer.weight.requires_grad_(learns)
    x, scale = torch.randn(17, 16, requires_grad=True), torch.randn(16)
    steps = []

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = F.relu(conv(x.t()[None])).squeeze(0).t().contiguous()
            q = y.view(1, -1, 4, 4).transpose(1, 2)
            y = F.scaled_dot_product_attention(layer(q), q.to(layer(q).dtype), layer(q))
            means = y.transpose(1, 2).reshape(-1, 16).cumsum(0) / torch.arange(1, 18)[:, None]
            return (means * scale).float().square().mean()

    for step in range(4):
        torch.manual_seed(step)
        for one in (x, scale, layer.weight):
            one.data.normal_()
        steps += both(run, x, conv.weight, steps=2)
    assert same(steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", ["first rows", "last rows", "a half", "all"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_an_rms_norm_of_a_part_is_made_again_of_that_part(
    is_weighted: bool, part: str, dtype: torch.dtype
) -> None:
    x = torch.randn(12, 8, dtype=dtype, requires_grad=True)
    weight = nn.Parameter(torch.randn(8, dtype=dtype)) if is_weighted else None
    scale = nn.Parameter(torch.randn(8, dtype=dtype))

    def run() -> Tensor:
        y = F.gelu(x * scale) * 1e-2  # so small that its norm is not what the norm of that is
        y = {"first rows": y[:9], "last rows": y[2:], "a half": y.chunk(2)[1], "all": y}[part]
        z = F.rms_norm(y, (8,), weight)
        return (z * scale).square().sum().float() + torch.tanh(y).sum().float()

    assert same(both(run, x, scale))


def test_readers_of_one_norm_make_it_once() -> None:
    x = torch.randn(16, 32, requires_grad=True)
    norm, linears = nn.LayerNorm(32), nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
    for _ in range(2):
        with er.saving(min_nbytes=0) as saved:
            y = norm(x * 2)
            out = sum(linear(y).square().sum() for linear in linears)
        assert any(row.action == "rebuild" for row in saved.ledger.rows)
        with Ops() as ops:
            out.backward()
        assert ops.ran[_aten.native_layer_norm] == 1


def test_few_tensors_wait_for_their_next_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []
    slots: list[Slot] = []
    plain = Slot.restore_shared

    def restore(self: Slot) -> Tensor:
        slots.append(self)
        found = plain(self)
        waiting.append(len({id(one) for one in slots if one.whole is not None}))
        return found

    monkeypatch.setattr(Slot, "restore_shared", restore)
    x = torch.randn(8, 16, requires_grad=True)
    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(12)]
    with er.saving(min_nbytes=0):
        made = [F.gelu(x * (1 + i)) for i in range(12)]
        # The first readers in backward are those of all, and the second ones come much later.
        early = sum((y @ w).sum() for y, w in zip(made, weights, strict=True))
        late = sum((y @ w).sum() for y, w in zip(made, weights, strict=True))
    (early + late).backward()
    assert 2 <= max(waiting) <= _MAX_SHARED
    assert not any(one.whole is not None for one in slots[:-_MAX_SHARED])


def test_a_chain_goes_through_what_is_made_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_LONG", {})  # a tanh would be held in so small a net
    x = torch.randn(16, 16, requires_grad=True)
    w = torch.randn(16, 16, requires_grad=True)

    def run() -> Tensor:
        y = x * 1.5
        return ((0.5 * y * (1.0 + torch.tanh(y + 0.04 * y.pow(3)))) @ w).square().sum()

    assert same(both(run, x, w))
    with er.saving(min_nbytes=0):
        out = run()
    with Ops() as ops:
        out.backward()
    assert ops.ran[_aten.tanh] == 1  # for the product, for 1 + tanh, and for tanh's own backward


def heads(*shape: int) -> Tensor:
    return torch.randn(shape).transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "learned"])
def test_written_out_attention_has_the_bits_of_torchs(mask: str) -> None:
    MATH_ATTENTION._agrees.clear()
    q, k, v = heads(2, 128, 4, 8), heads(2, 96, 4, 8), heads(2, 96, 4, 8)
    given: Tensor | None = None
    if mask == "bool":
        given = torch.rand(2, 1, 128, 96) > 0.2
        given[0, 0, 3] = False  # nothing is examined
    if mask == "learned":
        given = torch.randn(1, 4, 128, 96, requires_grad=True)

    def run() -> Tensor:
        wanted = given * 1 if given is not None and given.requires_grad else given
        out = F.scaled_dot_product_attention(q * 1, k * 1, v * 1, wanted, 0.2, mask == "causal")
        return out.transpose(1, 2).square().sum()

    learned = (given,) if given is not None and given.requires_grad else ()
    assert same(both(run, q, k, v, *learned))
    assert list(MATH_ATTENTION._agrees.values()) == [True, True]  # forward, backward


def test_attention_that_is_not_torchs_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    MATH_ATTENTION._agrees.clear()
    right = math_path._weights
    monkeypatch.setattr(math_path, "_weights", lambda *given: right(*given) * 1.0001)
    q, k, v = heads(2, 128, 4, 8), heads(2, 128, 4, 8), heads(2, 128, 4, 8)

    def run() -> Tensor:
        return F.scaled_dot_product_attention(q * 1, k * 1, v * 1, None, 0.2).square().sum()

    assert same(both(run, q, k, v))
    assert list(MATH_ATTENTION._agrees.values()) == [False, False]
    MATH_ATTENTION._agrees.clear()


def test_a_moved_copy_of_an_ops_own_result_is_made_again() -> None:
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    w = torch.randn(32, 32, requires_grad=True)

    def run() -> Tensor:
        out = F.scaled_dot_product_attention(q * 1, k * 1, v * 1)
        return (out.transpose(1, 2).reshape(2, 16, 32) @ w).square().sum()

    assert same(both(run, q, k, v, w))
    with er.saving(min_nbytes=0) as saved:
        run()
    assert any(row.action == "rebuild" and row.consumer == "matmul" for row in saved.ledger.rows)


def test_a_moved_copy_of_what_another_op_holds_is_kept() -> None:
    """A change of the original in place is no error, if that op has no part in backward."""
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    for _ in range(3):
        with er.saving(min_nbytes=0):
            y = x + 1
            unused = y @ torch.randn(16, 4, requires_grad=True)
            z = y.t().contiguous() @ w
        with torch.no_grad():
            y.add_(1)
        torch.autograd.grad(z.sum(), w)
        del unused


@pytest.mark.parametrize("changes", [False, True])
def test_pieces_of_unsafe_chunk_are_made_again_each_of_its_own_part(changes: bool) -> None:
    """Five pieces share a storage, but no tensor covers it; `x.is_sparse` changes nothing."""
    leaf = torch.randn(6, 10, 5, requires_grad=True)

    def run() -> Tensor:
        pieces = torch.unsafe_chunk(leaf * 1.0, 5, 1)
        terms = []
        for piece in pieces:
            assert not piece.is_sparse
            gated = F.silu(piece)
            terms.append((gated * gated).sum())
        if changes:  # each piece counts its own changes
            with torch.no_grad():
                pieces[0].mul_(2)
        return torch.stack(terms[1:]).sum()

    assert same(both(run, leaf))


def test_a_property_of_a_source_does_not_copy_it() -> None:
    """`x.mT` and `x.T` change nothing, although autograd names their calls `__get__`."""
    leaf = torch.randn(8, 8, requires_grad=True)
    with er.saving(min_nbytes=0), Ops() as ops:
        x = leaf * 1.0
        gated = F.silu(x)
        out = (gated * gated) @ x.mT
    out.sum().backward()
    assert ops.ran[_aten.silu] == 1
    assert not ops.ran[_aten.clone]


def test_modules_calls_are_not_seen_in_steps_that_call_nothing_compiled() -> None:
    import torch._dynamo

    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8)
    plain, seen = nn.Module.__call__, []

    def step() -> None:
        with er.saving(min_nbytes=0):
            out = model(x)
            seen.append(nn.Module.__call__ is not plain)
        out.sum().backward()

    for _ in range(3):
        step()
    assert seen == [True, False, False]
    torch.compile(nn.Linear(2, 2), backend="eager")  # it might be a part of the model by now
    step()
    assert seen[-1]
    step()
    assert not seen[-1]


def test_what_one_context_has_made_again_takes_no_place_of_another() -> None:
    contexts = [Context() for _ in range(2)]
    slots = []
    for context in contexts:
        for _ in range(_MAX_SHARED):
            slot = Slot(torch.ones(2), NOT_COUNTED)
            slot.whole = torch.ones(2)
            context.made_again.note(slot)
            slots.append(slot)
    assert all(slot.whole is not None for slot in slots)
    contexts[0].made_again.note(slots[0])  # which is the newest now
    slot = Slot(torch.ones(2), NOT_COUNTED)
    slot.whole = torch.ones(2)
    contexts[0].made_again.note(slot)
    assert [n for n, slot in enumerate(slots) if slot.whole is None] == [1]
