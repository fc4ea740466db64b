"""er.step: a step that runs out of memory is undone, planned with less, and run again."""

import logging
import weakref

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.errors import BudgetTooSmall, OutOfMemory, PlanError
from elbowroom.runtime.attach import opener_of
from elbowroom.runtime.exhaustion import is_out_of_memory

pytestmark = pytest.mark.usefixtures("nothing_stays_attached")
WIDTH = 64
X = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(0))

LEFT = [0]  # how often it still fails: no attribute of the model, which is what it was then
NAME = "LEFT"


class Failing(torch.autograd.Function):
    """The identity, whose forward or backward finds no memory so many times."""

    @staticmethod
    def forward(ctx, x, model):
        ctx.model = model
        run_out(model, "forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        run_out(ctx.model, "backward")
        return gradient.clone(), None


ERRORS = {
    "cpu": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"),
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "numpy": lambda: MemoryError("Unable to allocate 2 GiB"),
}


def run_out(model, where):
    left = globals()[NAME]  # by a name that no code has: what is undone does not count
    if model.where == where and left[0]:
        left[0] -= 1
        raise model.error()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.where, self.error = "", ERRORS["cpu"]
        LEFT[0] = 0
        self.body = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout()
                )
                for _ in range(4)
            )
        )

    def forward(self, x):
        for i, block in enumerate(self.body):
            x = block(x)
            if i == 1:
                x = Failing.apply(x, self)
        return x


def make(fitted=True, budget="64 MiB"):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if fitted:
        er.fit(model, budget=budget, optimizer=optimizer, min_nbytes=0, exact=True)
    return model, optimizer


def run(model, optimizer, *, update=True, zero=True):
    def once():
        if zero:
            optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        if update:
            optimizer.step()
        return loss.detach()

    return once


def everything(model, optimizer):
    states = [v for s in optimizer.state.values() for v in s.values()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.state_dict().values(), *states, *gradients, torch.get_rng_state()]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize(("where", "kind"), [("forward", "cuda"), ("backward", "cpu")])
def test_a_step_without_memory_is_run_again_as_if_for_the_first_time(where, kind, caplog):
    ends = []
    for fitted in (False, True):
        model, optimizer = make(fitted)
        model.error = ERRORS[kind]
        for i in range(5):
            model.where, LEFT[0] = where, (2 if fitted and i in (0, 2, 4) else 0)
            once = run(model, optimizer, update=i < 3, zero=i < 3)  # the last two accumulate
            with caplog.at_level(logging.WARNING, logger="elbowroom"):
                loss = er.step(once) if fitted else once()
            ends.append((loss, *(t.clone() for t in everything(model, optimizer))))
    assert all(same(*pair) for pair in zip(ends[:5], ends[5:], strict=True))
    assert caplog.text.count("there was no memory left within the budget 64.0 MiB") == 1
    assert opener_of(model).options.budget_nbytes < 64 << 20


def test_a_step_that_never_has_memory_is_given_up_and_undone():
    model, optimizer = make()
    er.step(run(model, optimizer))
    before = [t.clone() for t in everything(model, optimizer)]
    model.where, LEFT[0] = "backward", 1000
    with pytest.raises(OutOfMemory, match=r"again and again within the budget of 64.0 MiB.*Halve"):
        er.step(run(model, optimizer, zero=False))
    assert same(everything(model, optimizer), before)
    assert not any(p._backward_hooks for p in model.parameters())


def test_a_budget_that_becomes_too_small_is_given_up_with_the_reason():
    model, optimizer = make(budget="1300 KiB")
    model.where, LEFT[0] = "backward", 1000
    with pytest.raises(OutOfMemory, match="that should suffice for this step"):
        er.step(run(model, optimizer))


def test_an_update_that_has_begun_cannot_be_run_again():
    model, optimizer = make()
    er.step(run(model, optimizer))

    def torn(during):
        run(model, optimizer, update=False)()
        with torch.no_grad():
            during()
        raise ERRORS["cpu"]()

    weight = model.body[0][0].weight
    for during, what in (
        (lambda: weight.mul_(1), r"the parameter 'body.0.0.weight'"),
        (lambda: optimizer.state[weight]["exp_avg"].mul_(1), "the optimizer's states"),
    ):
        with pytest.raises(OutOfMemory, match=f"ran out of memory when .*{what} had been changed"):
            er.step(lambda during=during: torn(during))


def test_states_that_a_torn_first_update_made_are_removed():
    plain = make(fitted=False)
    run(*plain)()
    expected = everything(*plain)
    model, optimizer = make()
    left = [1]

    def torn():
        loss = run(model, optimizer, update=False)()
        if left.pop():
            weight = model.body[0][0].weight
            optimizer.state[weight]["step"] = torch.zeros(())  # and no memory for the rest
            left.append(0)
            raise ERRORS["cpu"]()
        optimizer.step()
        return loss

    er.step(torn)
    assert same(expected, everything(model, optimizer))


def test_the_graph_is_freed_before_the_step_is_run_again():
    model, _ = make()
    model.where, LEFT[0] = "backward", 1
    alive, seen = [], []

    def once():
        seen.append([graph() is not None for graph in alive])
        loss = model(X).square().mean()
        alive.append(weakref.ref(loss))
        loss.backward()

    er.step(once)
    assert seen == [[], [False]]


def test_without_step_a_forward_without_memory_is_raised_and_the_next_one_is_smaller():
    model, optimizer = make()
    run(model, optimizer)()
    model.where, LEFT[0] = "forward", 1
    with pytest.raises(RuntimeError, match="can't allocate"):
        run(model, optimizer)()
    run(model, optimizer)()
    assert opener_of(model).options.budget_nbytes < 64 << 20


def test_other_errors_are_none_of_ours():
    model, optimizer = make()
    model.where, LEFT[0] = "forward", 1
    model.error = lambda: RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match="shapes do not match"):
        er.step(run(model, optimizer))
    assert opener_of(model).options.budget_nbytes == 64 << 20
    er.fit(model, budget="1 KiB", optimizer=optimizer)
    with pytest.raises(BudgetTooSmall):
        er.step(run(model, optimizer))
    er.release(model)
    with pytest.raises(PlanError, match=r"there is none; call er\.fit first"):
        er.step(run(model, optimizer))


def test_what_says_that_there_is_no_memory():
    wrapped = RuntimeError("while decoding")
    wrapped.__cause__ = MemoryError()
    for error in (*(make_error() for make_error in ERRORS.values()), wrapped):
        assert is_out_of_memory(error)
    looped = ValueError("can't allocate memory")  # of a kind that no allocator raises
    looped.__context__ = looped
    for error in (None, looped, RuntimeError("no"), KeyboardInterrupt()):
        assert not is_out_of_memory(error)


def least_budget():
    """What a budget that is far too small is told, in bytes."""
    model, optimizer = make(budget="64 KiB")
    with pytest.raises(BudgetTooSmall) as error:
        run(model, optimizer)()
    return error.value.least_nbytes


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_half_a_budget_that_is_too_small_is_not_the_end(where):
    """A guess at what the device has: less than the budget, and more than the least, may do."""
    plain = make(fitted=False)
    expected = run(*plain)()
    budget = int(1.3 * least_budget())
    model, optimizer = make(budget=budget)
    model.where, LEFT[0] = where, 1
    assert torch.equal(er.step(run(model, optimizer)), expected)
    assert same(everything(model, optimizer), everything(*plain))  # statistics updated once
    assert budget // 2 < opener_of(model).options.budget_nbytes < budget
