"""The first steps of a fit, in which forward may begin again: what that takes is in the budget."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting import execute, planner, rehearse
from elbowroom.fitting.commands import TAKE_SMALL
from elbowroom.fitting.forward import FittedSaving
from elbowroom.measure import peak
from elbowroom.runtime.attach import opener_of
from elbowroom.runtime.recompute import state_nbytes
from elbowroom.runtime.saving import Saving
from elbowroom.runtime.undo import Undo


class Masked(nn.Module):
    """A large buffer that forward reads, as a causal mask for the longest sequence is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)
        self.register_buffer("mask", torch.ones(512, 1024))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x))) * self.mask[0, :128]
        return y


class Remembers(nn.Module):
    """A large buffer that forward writes to, as a queue of keys is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)
        self.register_buffer("queue", torch.zeros(1024, 128))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x + self.queue[:1].tanh())))
        with torch.no_grad():
            self.queue.add_(y.mean())
        return y


def trained(make, budget_share, steps=4):
    """Losses with and without a budget; the peaks of the steps inside it, as shares of it."""
    torch.manual_seed(0)
    model = nn.Sequential(make(), make(), make())
    model = nn.Sequential(model, nn.Linear(128, 1))
    plain, x = copy.deepcopy(model), torch.randn(4096, 128)
    owned_nbytes = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    losses: list[list[Tensor]] = [[], []]
    peaks = []

    def step(one, optimizer, told):
        loss = one(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.detach())

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    took = owned_nbytes + max(peak(lambda: step(plain, optimizer, losses[0])) for _ in range(steps))
    budget = owned_nbytes + int(budget_share * (took - owned_nbytes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    er.fit(model, budget=budget, optimizer=optimizer, exact=True)
    for _ in range(steps):
        peaks.append((owned_nbytes + peak(lambda: step(model, optimizer, losses[1]))) / budget)
    er.release(model)
    return losses, peaks


def test_copies_of_large_buffers_do_not_stand_in_the_first_steps():
    (expected, losses), peaks = trained(Masked, 0.75)
    assert all(map(torch.equal, expected, losses))
    assert peaks[0] <= 1.01 * peaks[-1] <= 1, peaks


def test_a_large_buffer_that_forward_changes_is_given_back():
    (expected, losses), _ = trained(Remembers, 0.75)
    assert all(map(torch.equal, expected, losses))


def test_an_undo_lets_go_of_copies_of_what_a_forward_has_left_alone():
    reads, writes = Masked(), Remembers()
    model = nn.Sequential(reads, writes)
    undo = Undo(model, ())
    whole = undo.copied_nbytes
    before = writes.queue.clone()
    model(torch.randn(4, 128))
    undo.let_go()
    assert undo.copied_nbytes == whole - reads.mask.nbytes
    assert undo.changed_large
    undo.back()
    assert torch.equal(writes.queue, before)
    undo.close()


def test_a_change_of_what_was_left_alone_before_cannot_be_undone():
    model = Remembers()
    undo = Undo(model, (), copies=False)
    model(torch.randn(4, 128))
    with pytest.raises(er.errors.PlanError, match="'queue' in place"):
        undo.back()
    undo.close()


def test_a_forward_that_runs_again_makes_its_own_casts_of_weights():
    """Those of the forward before would stand while it is measured, and not in later steps."""
    model, x = nn.Linear(512, 512), torch.randn(1, 512)
    with torch.autocast("cpu", torch.bfloat16):
        undo = Undo(model, ())
        model(x)
        assert peak(lambda: model(x)) < model.weight.numel()
        undo.back()
        assert peak(lambda: model(x)) >= 2 * model.weight.numel()
        undo.close()


class Spreads(nn.Module):
    """Forward itself has the highest moment, of 32 MiB and more, whatever is held for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = (
            nn.ModuleList(nn.Linear(64, 64) for _ in range(24)),
            nn.Linear(64, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        spread = x.detach().repeat(16, 1).exp().mean()
        return (self.head(x) * spread).mean()


def test_a_budget_below_what_forward_takes_is_refused_before_a_step_follows_a_plan():
    torch.manual_seed(0)
    model, x = Spreads(), torch.randn(4096, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updates = []

    def step():
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        updates.append(True)

    er.fit(model, budget="28 MiB", optimizer=optimizer)
    with pytest.raises(BudgetTooSmall) as refused:
        step()
    assert not updates
    assert refused.value.least_nbytes > 32 << 20
    er.fit(model, budget=refused.value.least_nbytes, optimizer=optimizer)
    for _ in range(3):
        step()
    er.release(model)


class Upcast(nn.Module):
    """Small layers, and logits that are rebuilt in other bytes before anything saves them.

    A language model under autocast is such a one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(24))
        self.head = nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.log_softmax(self.head(x).bfloat16().float(), -1)[:, 0].mean()


def test_large_results_that_nobody_saves_end_a_forward_that_holds_too_much(monkeypatch):
    net, x, ended = Upcast(), torch.randn(4096, 64), []
    drop = FittedSaving.drop_everything

    def dropped(saving: FittedSaving) -> None:
        call = saving._consumers.call
        ended.append(call is not None and any(x is net.head.weight for x in call.args))
        drop(saving)

    static = 2 * sum(p.nbytes for p in net.parameters())
    highest = er.peak(lambda: net(x).backward()) + static // 2
    net.zero_grad(set_to_none=True)
    budget = int(static + 0.68 * (highest - static))
    er.fit(net, budget=budget, exact=True)
    monkeypatch.setattr(FittedSaving, "drop_everything", dropped)
    assert er.peak(lambda: net(x).backward()) + static // 2 <= budget
    assert ended[0]  # by the head, before its result is rebuilt twice, and saved
    er.release(net)


class Scan(nn.Module):
    """A loop over time, which saves a small tensor or two in each of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.next = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for one in x:
            h = F.gelu(self.next(h) + self.read(one))
        return h.square().mean()


def test_small_tensors_are_planned_where_no_plan_fits_without_them():
    torch.manual_seed(0)
    net, x = Scan(), torch.randn(16, 64, 64)
    static = sum(p.nbytes for p in net.parameters())

    def step():
        net(x).backward()
        net.zero_grad()

    step()
    room = er.peak(step) - static
    budget = 2 * static + int(0.5 * room)
    er.fit(net, budget=budget)  # each tensor has 16 KiB, a quarter of what fit plans by default
    for _ in range(4):
        step()
    assert static + er.peak(step) <= budget
    er.release(net)


def test_a_forward_that_holds_nothing_lets_go_of_what_it_held_once(monkeypatch):
    net, x, dropped = Upcast(), torch.randn(512, 64), []
    drop = Saving.drop_everything
    monkeypatch.setattr(
        Saving, "drop_everything", lambda saving: (dropped.append(id(saving)), drop(saving))
    )
    static = sum(p.nbytes for p in net.parameters())
    room = er.peak(lambda: net(x).backward())
    net.zero_grad(set_to_none=True)
    er.fit(net, budget=int(2 * static + 0.6 * (room - static)), exact=True)
    net(x).backward()
    # One that was tried; rehearsed ones, as they begin and as they end. It was one a save.
    assert len(dropped) >= 2
    assert max(map(dropped.count, dropped)) <= 2
    er.release(net)


class WithLoss(nn.Module):
    """Gives its loss and its logits, as models of transformers do. The loss saves the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 4000)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x)
        return F.cross_entropy(logits, labels), logits


@pytest.mark.parametrize(
    ("holds", "share"), [(False, 1.5), (True, 2.5)], ids=["let go", "held by the program"]
)
def test_results_that_are_saved_are_counted_as_often_as_they_are_there(caplog, holds, share):
    model = WithLoss()
    x, labels = torch.randn(512, 32), torch.randint(0, 4000, (512,))
    logits_nbytes, weights_nbytes = 512 * 4000 * 4, model.head.weight.nbytes
    er.fit(model, budget=int(share * logits_nbytes) + 2 * weights_nbytes, exact=True)
    for _ in range(3):
        loss, logits = model(x, labels)
        if not holds:
            del logits
        loss.backward()
        model.zero_grad()
        loss = logits = None
    told = er.summary(model)
    assert told.highest_nbytes <= told.budget_nbytes
    assert "measured" not in caplog.text.replace("it is measured", "")
    if holds:
        assert not caplog.records


class Dense(nn.Module):
    """Each part normalizes all that the parts before it have given."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16 * n for n in range(1, 6)]
        self.parts = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(n), nn.ReLU(), nn.Conv2d(n, 16, 1)) for n in widths
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.cat([x, part(x)], 1)
        return x.mean()


def test_a_first_step_that_fits_by_codes_alone_is_not_profiled():
    """A profiled batch norm reads its input restored, and makes one tensor beside the gradient."""
    torch.manual_seed(0)
    model, x = Dense(), torch.randn(4, 16, 48, 48)
    weights_nbytes = sum(t.nbytes for t in model.state_dict().values())
    budget = int(0.45 * (weights_nbytes + peak(lambda: model(x).backward())))
    model.zero_grad()
    er.fit(model, budget=budget, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in range(2):  # the second one ends the measurement of the first
        model(x).backward()
        model.zero_grad()
    assert opener_of(model).highest_nbytes <= 1.05 * budget
    er.release(model)


@pytest.mark.parametrize(
    ("holds", "share"), [(False, 3.3), (True, 4.3)], ids=["let go", "held by the program"]
)
def test_a_loss_outside_of_the_model_is_in_the_first_plan(holds, share):
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 1024), nn.Tanh(), nn.Linear(1024, 32)) for _ in range(4)),
        nn.Linear(32, 4000),
    )
    x, labels = torch.randn(512, 32), torch.randint(0, 4000, (512,))
    logits_nbytes = 512 * 4000 * 4
    weights_nbytes = sum(p.nbytes for p in model.parameters())
    er.fit(model, budget=int(share * logits_nbytes) + 2 * weights_nbytes, exact=True)
    for _ in range(3):
        logits = model(x)
        loss = F.cross_entropy(logits, labels)
        if not holds:
            del logits
        loss.backward()
        model.zero_grad()
        loss = logits = None
    told = er.summary(model)
    assert told.highest_nbytes <= told.budget_nbytes


class Outputs(nn.Module):
    """A recurrent network without its states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(32, 128, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x)[0]
        return outputs


def test_an_estimate_without_the_loss_refuses_no_budget_that_a_profiled_step_keeps():
    """The loss saves as much as a layer, and its gradient is as large. Adam creates states, so that
    the first step was not profiled: 100 MB and all below the 120 MB that it took were refused.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 1000), nn.GELU(), nn.Linear(1000, 1000))
    optimizer = torch.optim.AdamW(model.parameters())
    er.fit(model, budget=106 * 10**6, optimizer=optimizer, exact=True)
    for _ in range(6):
        model(torch.randn(4000, 1000)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert er.summary(model).last_nbytes <= 106 * 10**6


def test_recurrent_layers_are_not_run_as_a_whole_where_one_alone_exceeds_the_budget():
    torch.manual_seed(0)
    model, x = Outputs(), torch.randn(8, 128, 32)
    weights_nbytes = sum(p.nbytes for p in model.parameters())

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    room = peak(step) - weights_nbytes
    budget = 2 * weights_nbytes + int(0.4 * room)
    er.fit(model, budget=budget, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    assert weights_nbytes + peak(step) <= 1.05 * budget
    er.release(model)


def test_no_least_budget_is_searched_for_where_small_tensors_are_planned_next(monkeypatch):
    """A refusal would name it, but the forward is planned again, and nobody reads the refusal."""
    asked, commands = [], []
    refusal, execute = rehearse._refusal, planner.execute
    monkeypatch.setattr(rehearse, "_refusal", lambda *given: asked.append(1) or refusal(*given))
    monkeypatch.setattr(
        planner, "execute", lambda *given: commands.append(given[1]) or execute(*given)
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(64)))
    x = torch.randn(192, 64)  # each layer saves 48 KiB, less than is planned at first

    def step():
        model(x).square().mean().backward()
        model.zero_grad()

    step()
    weights_nbytes = sum(p.nbytes for p in model.parameters())
    budget = weights_nbytes + int(0.8 * peak(step))
    er.fit(model, budget=budget)
    for _ in range(2):
        step()
    assert TAKE_SMALL in commands
    assert not asked
    er.release(model)


def test_no_backward_is_estimated_that_no_plan_is_made_of(monkeypatch):
    """All four cares were estimated before the first plan, which is mostly found by the first."""
    cares, estimated = [], execute.with_backward

    def noted(*args, **settings):
        cares.append(args[3])
        return estimated(*args, **settings)

    monkeypatch.setattr(execute, "with_backward", noted)
    trained(Masked, 0.85)
    assert len(set(cares)) == len(cares) == 2  # and of one that later plans may be made of


def test_what_a_second_run_needs_is_counted_without_memory():
    """Each call of a module in a profiled forward copied the state of the random numbers."""
    inner = nn.BatchNorm1d(8)
    net = nn.Sequential(inner, nn.Sequential(inner, nn.Linear(8, 8)), Masked())
    small = sum(b.nbytes for b in inner.buffers())  # a shared module counts once, a mask not at all
    assert state_nbytes(net) == small + torch.get_rng_state().nbytes
    assert peak(lambda: state_nbytes(net)) == 0


class Spectral(nn.Module):
    """Products of complex matrices, whose lazy conjugates autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.Linear(128, 128)
        weights = [torch.randn(128, 128, dtype=torch.cfloat) / 16 for _ in range(4)]
        self.by = nn.ParameterList(map(nn.Parameter, weights))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.fft(self.of(x))
        for weight in self.by:
            z = z @ weight
            z = torch.polar(z.abs().tanh(), z.angle()) * z.conj()
        y: Tensor = torch.view_as_real(z).flatten(1).abs()
        return y + torch.fft.ifft(z).real.repeat(1, 2)


@pytest.mark.parametrize("share", [1.0, 1.05, 1.1, 1.15, 1.2])
def test_no_more_is_refused_than_plain_autograd_takes_where_tensors_have_no_line(share):
    torch.manual_seed(0)
    model, x = Spectral(), torch.randn(1024, 128)
    plain, owned_nbytes = copy.deepcopy(model), sum(p.nbytes for p in model.parameters())

    def step(one):
        one.zero_grad()
        one(x).square().mean().backward()

    budget = int(share * (owned_nbytes + peak(lambda: step(plain))))
    er.fit(model, budget=budget, exact=True)
    for _ in range(3):
        step(model)
    planned = opener_of(model).planner.plan
    assert planned is None or planned.unlisted_nbytes == planned.held_nbytes - sum(
        line.held for line in planned.lines
    )
    er.release(model)
    assert all(
        torch.equal(p.grad, q.grad)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )


class DeeplySupervised(nn.Module):
    """A result at full resolution, and one at half of it, which is made last."""

    def __init__(self) -> None:
        super().__init__()

        def block(given: int, made: int, stride: int = 1) -> nn.Module:
            conv = nn.Conv2d(given, made, 3, stride, padding=1)
            return nn.Sequential(conv, nn.InstanceNorm2d(made), nn.LeakyReLU())

        self.first, self.down, self.middle = block(1, 16), block(16, 32, 2), block(32, 16)
        self.up, self.last = nn.ConvTranspose2d(16, 16, 2, 2), block(32, 16)
        self.whole, self.halved = nn.Conv2d(16, 2, 1), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first(x)
        middle = self.middle(self.down(first))
        main = self.whole(self.last(torch.cat([self.up(middle), first], 1)))
        return main, self.halved(middle)


@pytest.mark.parametrize("exact", [True, None])
def test_a_first_step_counts_each_result_that_a_loss_can_read(exact, caplog):
    """By the result made last alone, half of the net would have no backward."""
    torch.manual_seed(0)
    model = DeeplySupervised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        x, labels = torch.randn(4, 1, 64, 64), torch.randint(0, 2, (4, 64, 64))
        main, half = model(x)
        loss = F.cross_entropy(main, labels) + F.cross_entropy(half, labels[:, ::2, ::2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    plain = peak(step)
    er.fit(model, budget=int((0.7 if exact else 0.65) * plain), optimizer=optimizer, exact=exact)
    for _ in range(2):  # the second one ends the measurement of the first
        step()
    assert opener_of(model).highest_nbytes <= 1.06 * er.summary(model).budget_nbytes
    er.release(model)
