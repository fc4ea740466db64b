"""Settled steps whose tensors are held as tuples (`replay/held.py`), against plain autograd.

Each test also checks that the tensors it is about are held so, and that as many of them are rebuilt
as it says.
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.errors import RestoreError
from elbowroom.plan import Action, Keep, Rebuild, Rebuildable, Site
from elbowroom.runtime.context import PROCESS
from elbowroom.runtime.handles import EncodeHandle
from elbowroom.runtime.masks import HeldMask
from elbowroom.runtime.replay.held import Coded, Kept, Rebuilt
from elbowroom.runtime.replay.replay import Replay
from elbowroom.runtime.replay.script import Script
from elbowroom.runtime.replay.tracer import Tracer
from elbowroom.runtime.saving import Saving
from programs import looking, same

pytestmark = pytest.mark.usefixtures("one_thread")


class Watched(Replay):
    """A replay that counts what its tensors are held as."""

    def __init__(self, script: Script) -> None:
        super().__init__(script, PROCESS)
        self.held: Counter[type] = Counter()

    def look(self) -> Saving:
        return looking(min_nbytes=0)

    def _pack(self, x: Tensor) -> Any:
        held = super()._pack(x)
        self.held[type(held)] += 1
        return held


def written(forward: Callable[[], Any], **how: Any) -> Script:
    saving = looking(**({"min_nbytes": 0} | how))
    saving.tracer = Tracer()
    with saving:
        out = forward()  # whose graph lives until the end
    del out
    assert saving.tracer.script is not None, saving.tracer.why
    return saving.tracer.script


def grads(
    forward: Callable[[], Tensor], wanted: list[Tensor], context: Any = None, **how: Any
) -> list[Tensor | None]:
    torch.manual_seed(3)
    with context or contextlib.nullcontext():
        loss = forward()
    return list(torch.autograd.grad(loss, wanted, allow_unused=True, **how))


def check(
    forward: Callable[[], Tensor], wanted: list[Tensor], rebuilt: int, bits: int = 0, **how: Any
) -> Watched:
    replay = Watched(written(forward, **how))
    got = grads(forward, wanted, replay)
    assert same(got, grads(forward, wanted))
    assert not replay.diverged
    assert (replay.held[Rebuilt], replay.held[HeldMask]) == (rebuilt, bits), replay.held
    assert replay.held[Kept]
    return replay


def weighed(y: Tensor) -> Tensor:
    """A loss that saves nothing which a recipe could make."""
    return (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()


class Rebuilds:
    """Policy that rebuilds what can be rebuilt exactly, and keeps the rest: masks, too."""

    exact = True

    def __call__(self, site: Site) -> Action:
        return Rebuild() if site.rebuildable is Rebuildable.EXACT else Keep("")


def test_one_op_of_a_kept_tensor():
    torch.manual_seed(0)
    up, down = nn.Linear(16, 32), nn.Linear(32, 4)
    x = torch.randn(8, 16)
    check(lambda: weighed(down(F.gelu(up(x)))), [*up.parameters()], rebuilt=1)


def test_a_part_of_what_a_recipe_makes():
    """The last linear layer saves rows of the GELU's output, as they lie in it and turned."""
    torch.manual_seed(0)
    up, down = nn.Linear(16, 32), nn.Linear(8, 4)
    x = torch.randn(8, 16)
    for view in (lambda h: h[2:5], lambda h: h.t()):
        check(lambda v=view: down(v(F.gelu(up(x)))[..., :8]).sum(), [up.weight], rebuilt=1)


def test_a_norm_and_a_relu_by_the_statistics_of_each_forward():
    torch.manual_seed(0)
    first, norm, last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)
    data = [torch.randn(2, 3, 9, 9)]

    def forward() -> Tensor:
        return last(F.relu(norm(first(data[0])))).square().sum()

    wanted = [*first.parameters(), *norm.parameters(), *last.parameters()]
    replay = check(forward, wanted, rebuilt=1, bits=1)
    data[0] = data[0] * 30 + 7
    again = Watched(replay.script)
    assert same(grads(forward, wanted, again), grads(forward, wanted))
    assert again.held == replay.held


def test_dropout_is_the_noise_times_its_input():
    torch.manual_seed(0)
    up, down = nn.Linear(16, 32), nn.Linear(32, 4)
    x = torch.randn(8, 16)

    def forward() -> Tensor:
        return weighed(down(F.dropout(F.gelu(up(x)), 0.4)))

    check(forward, [*up.parameters(), *down.parameters()], rebuilt=1, policy=Rebuilds())


def test_recipes_of_several_operands_and_of_each_other():
    torch.manual_seed(0)
    up, beside, down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 4)
    x = torch.randn(8, 16)

    def forward() -> Tensor:
        return weighed(down(F.silu(up(x)) + torch.sin(beside(x))))

    check(forward, [*up.parameters(), *beside.parameters(), *down.parameters()], rebuilt=1)


def test_an_input_whose_data_is_exchanged_before_backward():
    """Plain autograd has the GELU's output; a recipe has what it was computed from."""
    torch.manual_seed(0)
    data, norm, down = torch.randn(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward() -> Tensor:
        return weighed(down(norm(data)))

    script = written(forward)

    def weight_gradient(context: Any) -> Tensor:
        before = data.detach().clone()
        with context:
            loss = forward()
        data.data = torch.randn(8, 16)
        (grad,) = torch.autograd.grad(loss, [down.weight])
        data.data = before
        return grad

    plain, replay = weight_gradient(contextlib.nullcontext()), Watched(script)
    assert torch.equal(weight_gradient(replay), plain)
    assert replay.held[Rebuilt] == 1


def test_a_source_or_a_parameter_that_was_changed_is_an_error():
    torch.manual_seed(0)
    up, norm, down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)
    x, made = torch.randn(8, 16), []

    def forward() -> Tensor:
        hidden = up(x)
        made[:] = [hidden]
        return weighed(down(norm(hidden)))

    script = written(forward)
    for change in (lambda: made[0].add_(1), lambda: norm.weight.mul_(1)):
        replay = Watched(script)
        with replay:
            loss = forward()
        assert replay.held[Rebuilt] == 1
        with torch.no_grad():
            change()
        with pytest.raises(RestoreError, match="modified by an inplace"):
            torch.autograd.grad(loss, [down.weight])


def test_backward_of_backward_and_inside_of_autocast():
    torch.manual_seed(0)
    up, down = nn.Linear(16, 32), nn.Linear(32, 4)
    x = torch.randn(8, 16, requires_grad=True)

    def forward() -> Tensor:
        return down(F.relu(up(x)).tanh()).square().sum()

    def second(context: Any) -> Tensor:
        (grad,) = grads(forward, [x], context, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [up.weight])[0]

    script = written(forward)
    assert torch.equal(second(Watched(script)), second(contextlib.nullcontext()))
    with Watched(script):
        loss = forward()
    plain = forward()
    with torch.autocast("cpu", torch.bfloat16):
        got, known = (torch.autograd.grad(one, [up.weight])[0] for one in (loss, plain))
    assert torch.equal(got, known)


def test_a_second_reader_makes_a_slot_of_it():
    torch.manual_seed(0)
    up, down, beside = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 4)
    x = torch.randn(8, 16)

    def forward() -> Tensor:
        hidden = F.gelu(up(x))
        return (down(hidden) * beside(hidden)).sum()

    replay = Watched(written(forward))
    assert same(grads(forward, [up.weight], replay), grads(forward, [up.weight]))
    assert replay.held[Rebuilt] == 0
    assert not replay.diverged


def test_codes_beside_them_stay_codes():
    """What a code's recipe reads has a slot; what is rebuilt from kept tensors has none."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64))
    net.append(nn.Linear(64, 64))
    x = torch.randn(256, 64)
    how = {"policy": "dither", "levels": 16}
    replay = Watched(written(lambda: net(x).sum(), **how))
    wanted = list(net.parameters())
    got, plain = grads(lambda: net(x).sum(), wanted, replay), grads(lambda: net(x).sum(), wanted)
    error = sum((a - b).square().sum() for a, b in zip(got, plain, strict=True))
    assert error < 0.01 * sum(b.square().sum() for b in plain)
    assert replay.held[Rebuilt] == 0
    assert not replay.diverged


def test_the_bytes_of_a_followed_step_by_hand_end_with_its_backward():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
    net.append(nn.Linear(32, 4))
    x, counts = torch.randn(64, 16), []
    for _ in range(4):
        with er.saving(min_nbytes=0) as saved:
            loss = net(x).square().sum()
        ledger = saved.ledger
        counts.append((ledger.before_nbytes, ledger.after_nbytes, ledger.held_nbytes))
        loss.backward()
        del loss
        assert ledger.held_nbytes == 0
    assert counts[0] == counts[-1]


def coded_net() -> tuple[nn.Module, Callable[[float], Tensor]]:
    """A network whose second linear layer alone reads a code, and its loss for a factor of x."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), torch.randn(64, 16)
    return net, lambda factor: weighed(net(factor * x))


CODED = [("dither", {"levels": 16}), ("group", {"bits": 4}), ("cast", {})]


@pytest.mark.parametrize(("policy", "fields"), CODED)
def test_a_code_that_one_op_reads_has_no_slot_and_the_same_bits(policy, fields, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(PROCESS, "survivors", set())  # those of other tests have such names, too
    (net, loss), how = coded_net(), {"policy": policy, "rebuild": False, **fields}
    wanted, script = list(net.parameters()), written(lambda: loss(1.0), **how)
    monkeypatch.setattr(PROCESS, "count", 0)
    examined = grads(lambda: loss(1.0), wanted, looking(min_nbytes=0, **how))
    monkeypatch.setattr(PROCESS, "count", 0)
    replay = Watched(script)
    got = grads(lambda: loss(1.0), wanted, replay)
    assert not replay.diverged
    assert replay.held[EncodeHandle if policy == "cast" else Coded] == 1
    assert same(got, examined)
    assert not same(got, grads(lambda: loss(1.0), wanted))
    monkeypatch.setattr(PROCESS, "count", 0)
    twice = grads(lambda: loss(1.0), wanted, Watched(script), create_graph=True)
    assert same(twice[2:], got[2:])


@pytest.mark.parametrize(("policy", "fields"), CODED[:2])
def test_a_tensor_that_is_held_until_backward_is_read_itself_in_every_step(policy, fields):
    """A code alone would be read in its place, if the step that was recorded had not seen it."""
    pytest.importorskip("numba")
    (net, loss), held = coded_net(), []
    for layer in net:
        layer.register_forward_hook(lambda module, given, out: held.extend((*given, out)))
    how, plain = {"min_nbytes": 0, "rebuild": False, **fields}, None
    wanted = list(net.parameters())
    for step in range(4):
        held.clear()
        with er.saving(policy, **how) if step else contextlib.nullcontext():
            value = loss(1.0)
        got = list(torch.autograd.grad(value, wanted))
        plain = got if plain is None else plain
        assert same(got, plain), step


def test_codes_in_slots_have_no_reference_to_what_was_encoded(monkeypatch):
    """Codes of a ReLU's results take another number of bytes in each step, so they have slots."""
    pytest.importorskip("numba")
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
    net, x = nn.Sequential(*layers, nn.Linear(32, 4)), torch.randn(64, 32)
    script = written(lambda: net(x).sum(), policy="dither", levels=16, rebuild=False)
    monkeypatch.setattr(PROCESS, "survivors", set())  # by sites of the same names in other tests
    made = []
    with monkeypatch.context() as patch, Watched(script) as replay:
        patch.setattr("elbowroom.runtime.handles.encode.WeakStorage", made.append)
        loss = net(x).sum()
    assert not replay.diverged
    assert sum(replay.held.values()) > 6
    assert made == []
    assert all(g is not None for g in torch.autograd.grad(loss, list(net.parameters())))


@pytest.mark.parametrize("rows", [64, 63])  # coded alone, and in a slot
def test_what_the_program_begins_to_hold_is_read_itself_from_the_next_step_on(rows, monkeypatch):
    """It was read by its code in every replayed step."""
    pytest.importorskip("numba")
    monkeypatch.setattr(PROCESS, "survivors", set())
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Sigmoid(), nn.Linear(32, 32))
    x, weight = torch.randn(rows, 32), net[2].weight

    def step(holds, context):
        held = []
        hook = (
            net[1].register_forward_hook(lambda _, args, out: held.append(out)) if holds else None
        )
        with context:
            loss = net(x).sum()
        (got,) = torch.autograd.grad(loss, [weight])
        if hook is not None:
            hook.remove()
        return got

    def saving():
        return er.saving("dither", levels=32, rebuild=False, min_nbytes=0)

    exact = step(False, contextlib.nullcontext())
    for _ in range(4):
        assert not torch.equal(step(False, saving()), exact)
    assert [torch.equal(step(True, saving()), exact) for _ in range(3)] == [False, True, True]


@pytest.mark.parametrize(("policy", "fields"), CODED[:2])
def test_a_code_that_one_op_reads_is_the_tensor_where_that_is_infinite(policy, fields):
    """Its ledger counts the bytes that are held, from the end of forward to that of the graph."""
    pytest.importorskip("numba")
    (net, loss), held = coded_net(), []
    for factor in (1.0, 1.0, 1.0, 1e38, 1.0):
        with er.saving(policy, rebuild=False, min_nbytes=0, **fields) as saved:
            out = loss(factor)
        ledger = saved.ledger
        assert ledger.held_nbytes == ledger.after_nbytes
        held.append(ledger.held_nbytes)
        if factor != 1.0:
            got = torch.autograd.grad(out, [net[2].weight], retain_graph=True)
            assert same(list(got), grads(lambda: loss(1e38), [net[2].weight]))
        out.backward()
        del out
        assert ledger.held_nbytes == 0
    assert held[0] == held[2] == held[4] < held[3]
