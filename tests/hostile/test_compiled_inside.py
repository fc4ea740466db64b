"""Fitted models that the program compiles later, by itself or as a part, and losses beside them.

All run without Inductor's code generation (`uncompiled.py`); plain torch.compile runs so, too.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.compiled.partition import Decision, listening
from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.session import Fitting
from elbowroom.fitting.uncompiled import uncompiled_nbytes
from elbowroom.runtime.attach import attached
from uncompiled import nothing_compiled as nothing_compiled
from uncompiled import uncompiled as uncompiled

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # Inductor's import
    # Dynamo asks its inputs for their gradients, and hides the warning but from who raises it.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
WIDTH, WORDS = 32, 500
X, Y = torch.randn(256, WIDTH), torch.randint(0, WORDS, (256,))


@pytest.fixture(autouse=True)
def nothing_attached():
    release_all()  # of other files
    yield
    release_all()


def release_all() -> None:
    for model, _ in attached():
        er.release(model)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(model: nn.Module, loss: Callable[[], Tensor], steps: int = 2) -> list[Tensor]:
    """The loss and gradients of each step."""
    found = []
    for _ in range(steps):
        model.zero_grad()
        out = loss()
        out.backward()
        found += [out.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    return found


def trained_plainly(
    make: Callable[[nn.Module], Callable[[], Tensor]],
) -> tuple[list[Tensor], list[Decision]]:
    """The same, of plain torch.compile, and its decisions."""
    model = Classifier()
    decided: list[Decision] = []
    with listening(decided.append):
        found = trained(model, make(model))
    torch._dynamo.reset()
    return found, decided


def weights(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def step_of(model: nn.Module, **given: Any) -> Callable[[], Tensor]:
    """A loss that the program compiles, with the model inside."""
    step = torch.compile(lambda x, y: F.cross_entropy(model(x), y), **given)
    return lambda: step(X, Y)


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("part", ["model", "blocks"])
def test_a_region_that_contains_a_fitted_model_is_planned(part, fullgraph, uncompiled) -> None:
    expected, (plain,) = trained_plainly(lambda model: step_of(model, backend="elbowroom"))
    model = Classifier()
    fitted = model if part == "model" else model.blocks
    budget = weights(fitted) + int(0.8 * plain.plain_nbytes)
    er.fit(fitted, budget=budget, exact=True)
    decided: list[Decision] = []
    with listening(decided.append):
        found = trained(model, step_of(model, fullgraph=fullgraph))
    assert same(found, expected)
    assert len(decided) == 1
    assert decided[0].peak_nbytes <= 0.8 * plain.plain_nbytes
    summary = er.summary(fitted)
    assert summary.predicted_nbytes == weights(fitted) + decided[0].peak_nbytes


def test_a_region_of_a_fitted_model_that_cannot_be_planned_names_a_budget(uncompiled) -> None:
    model = Classifier()
    er.fit(model, budget=weights(model) + 10_000, exact=True)
    with pytest.raises(BudgetTooSmall, match="weights, buffers and optimizer states 19") as refused:
        step_of(model)()
    er.fit(model, budget=refused.value.least_nbytes, exact=True)
    torch._dynamo.reset()
    step_of(model)().backward()


def test_regions_of_other_models_are_left_to_inductor(uncompiled) -> None:
    plain = torch._TorchCompileInductorWrapper.__call__
    model, other = Classifier(), Classifier()
    er.fit(model, budget="1 GiB")
    step_of(other)()
    assert "custom_partitioner_fn" not in uncompiled[-1]
    torch._dynamo.reset()  # else its code would serve models of the same class
    with torch.no_grad():
        step_of(model)()
    assert "custom_partitioner_fn" not in uncompiled[-1]
    step_of(model)()
    assert "custom_partitioner_fn" in uncompiled[-1]
    er.release(model)
    assert torch._TorchCompileInductorWrapper.__call__ is plain


@pytest.mark.parametrize("way", ["wrapper", "compile()", "forward"])
@pytest.mark.parametrize("trained_before", [False, True])
def test_a_fitted_model_that_is_compiled_later_is_planned_in_its_graph(
    way: str, trained_before: bool, uncompiled
) -> None:
    def wrapped(model: nn.Module) -> Callable[[], Tensor]:
        called = torch.compile(model, backend="elbowroom")
        return lambda: F.cross_entropy(called(X), Y)

    expected, (plain,) = trained_plainly(wrapped)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    budget = weights(model) + int(0.8 * plain.plain_nbytes)
    er.fit(model, budget=budget, optimizer=optimizer, exact=True)
    if trained_before:
        trained(model, lambda: F.cross_entropy(model(X), Y))
        model.zero_grad()
    called: Any = model
    if way == "wrapper":
        called = torch.compile(model)
    elif way == "compile()":
        model.compile()
    else:
        model.forward = torch.compile(model.forward)
    decided: list[Decision] = []
    with listening(decided.append), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "The .grad attribute")
        found = trained(model, lambda: F.cross_entropy(called(X), Y))
    assert same(found, expected)
    assert len(decided) == 1
    assert decided[0].peak_nbytes <= 0.8 * plain.plain_nbytes
    assert er.summary(model).setting == "compiled"
    assert er.release(model) is model


def test_what_only_the_eager_engine_can_do_keeps_a_model_there(uncompiled) -> None:
    model = Classifier()
    er.fit(model, budget="1 GiB", worst=X)
    called = torch.compile(model)
    with pytest.warns(UserWarning, match="is compiled, and runs eagerly inside"):
        F.cross_entropy(called(X), Y).backward()
    assert er.summary(model).setting != "compiled"


def both(model: nn.Module, loss: nn.Module) -> Callable[[], Tensor]:
    called = torch.compile(model, backend="elbowroom")
    criterion = torch.compile(loss, backend="elbowroom")
    return lambda: criterion(called(X), Y)


@pytest.mark.parametrize(("share", "is_reserved"), [(1.2, False), (0.85, True)])
def test_the_loss_of_a_compiled_model_is_compiled_in_what_that_leaves(
    share: float, is_reserved: bool, uncompiled
) -> None:
    """Without Inductor's patterns the loss needs twice the logits, more than the model leaves."""
    loss = nn.CrossEntropyLoss()
    expected, plain = trained_plainly(lambda model: both(model, loss))
    model = Classifier()
    budget = weights(model) + int(share * plain[0].plain_nbytes)
    called = er.fit(torch.compile(model), budget=budget, exact=True, loss=loss)
    decided: list[Decision] = []
    with listening(decided.append), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = trained(model, lambda: loss(called(X), Y), steps=3)
    said = [str(one.message) for one in seen if "the loss CrossEntropyLoss" in str(one.message)]
    each = len(found) // 3
    assert same(found[each:], [*expected[each:], *expected[each:]])
    assert len(said) == is_reserved
    model_region, loss_region = decided[-2:]
    needed = loss_region.peak_nbytes + loss_region.inputs_nbytes + model_region.saved_nbytes
    assert weights(model) + needed <= budget
    er.release(called)
    assert not attached()


def test_a_library_that_copies_what_is_compiled_with_it_is_no_obstacle(
    uncompiled, monkeypatch
) -> None:
    """As Lightning's torch.compile does (lightning/fabric/wrappers.py)."""
    compile_plainly, copies = torch.compile, []

    def compile_and_copy(model: Any, **settings: Any) -> Any:
        done = compile_plainly(model, **settings)
        copies.append((settings.get("backend"), copy.deepcopy(settings).get("backend")))
        return done

    monkeypatch.setattr(torch, "compile", compile_and_copy)
    model, criterion = Classifier(), nn.CrossEntropyLoss()
    fitted = er.fit(torch.compile(model), budget="1 GiB", exact=True, loss=criterion)
    trained(model, lambda: criterion(fitted(X), Y))
    backends = [(given, copied) for given, copied in copies if callable(given)]
    assert len(backends) == 2  # of the model and of the loss
    assert all(given is copied for given, copied in backends)


def test_a_loss_that_no_plan_leaves_room_for_is_refused_with_what_the_model_holds(
    uncompiled,
) -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = x.T @ x
            for _ in range(8):
                z = (z @ z).sin()
            return z.sum()

    model, loss = Classifier(), Wide()
    budget = weights(model) + 3 * 2**20
    called = er.fit(torch.compile(model), budget=budget, exact=True, loss=loss)
    with pytest.raises(BudgetTooSmall, match="what the model holds"):
        loss(called(X), Y)


def test_a_loss_runs_with_the_eager_engine_where_that_has_taken_over(
    uncompiled, monkeypatch
) -> None:
    import torch._inductor.compile_fx as compile_fx

    def fail(*_, **__):
        raise RuntimeError("no such kernel")

    model, loss = Classifier(), nn.CrossEntropyLoss()
    plainly = trained(model, lambda: loss(model(X), Y))
    monkeypatch.setattr(compile_fx, "compile_fx", fail)
    called = er.fit(torch.compile(model), budget="1 GiB", exact=True, loss=loss)
    with pytest.warns(UserWarning, match="Classifier runs eagerly: torch.compile has failed"):
        assert same(trained(model, lambda: loss(called(X), Y)), plainly)


class Broken(Classifier):
    """Code between two regions of the graph holds for backward what nobody plans."""

    @torch.compiler.disable
    def between(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = x.sin()
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        x = self.between(x)
        return self.head(self.blocks[3](self.blocks[2](x)))


def refused(called: nn.Module, rows: int) -> BudgetTooSmall:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs eagerly
        with pytest.raises(BudgetTooSmall) as found:
            called(X[:rows])
    return found.value


def test_a_refusal_names_what_all_shapes_need_that_were_refused(uncompiled) -> None:
    """Each named what it needs alone: what the second one named was refused by the first."""
    called = er.fit(torch.compile(Classifier(), dynamic=False), budget="20 KiB", exact=True)
    large = refused(called, 256)
    small = refused(called, 64)
    assert small.least_nbytes == large.least_nbytes
    er.release(called)
    torch._dynamo.reset()
    model = Classifier()
    called = er.fit(torch.compile(model, dynamic=False), budget=small.least_nbytes, exact=True)
    for rows in (256, 64):
        model.zero_grad()
        F.cross_entropy(called(X[:rows]), Y[:rows]).backward()


def test_the_eager_engine_names_no_more_than_a_compiled_step_needs(uncompiled, monkeypatch) -> None:
    asked = er.fit(torch.compile(Classifier()), budget="20 KiB", exact=True)
    least = refused(asked, 256).least_nbytes
    er.release(asked)
    torch._dynamo.reset()

    def run(self, *_: Any) -> None:
        raise BudgetTooSmall("budget 20 KiB is below", least_nbytes=2 * least)

    monkeypatch.setattr(Fitting, "run", run)
    called = er.fit(torch.compile(Classifier()), budget="20 KiB")
    assert refused(called, 256).least_nbytes <= least


class Pieces(nn.Module):
    """Blocks whose graphs run many times, as a break in a loop leaves the loop uncompiled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


class Uncompiled(Pieces):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("make", [Pieces, Uncompiled])
def test_a_first_forward_holds_no_more_than_the_budget(make, uncompiled) -> None:
    """It recorded all to its end, 1.9 of this budget, before it was known to hold too much."""
    x = torch.randn(4096, WIDTH)

    def step(called: nn.Module) -> None:
        called(x).square().mean().backward()

    plainly = er.peak(lambda: step(make()), device="cpu")
    model, plain = make(), make()
    step(torch.compile(plain))
    torch._dynamo.reset()
    called = er.fit(torch.compile(model), budget=plainly // 2, exact=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs eagerly
        assert er.peak(lambda: step(called), device="cpu") <= 0.65 * plainly
    grads = [[p.grad for p in one.parameters()] for one in (model, plain)]
    assert same(*grads)


def test_hooks_of_the_program_unpack_nothing_to_be_counted() -> None:
    asked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.half(), asked.append):
        made = Broken().between(X.clone().requires_grad_())
    assert uncompiled_nbytes([made], []) == 10 * X.nbytes
    inside = checkpoint(Broken().between, X.clone().requires_grad_(), use_reentrant=False)
    assert uncompiled_nbytes([inside], [X]) <= X.nbytes
    assert asked == []


def test_what_code_between_regions_holds_is_counted(uncompiled) -> None:
    held = 20 * X.nbytes
    model = Broken()
    assert uncompiled_nbytes([model.between(X.clone().requires_grad_())], []) == held
    called = er.fit(torch.compile(model), budget="1 GiB", exact=True)
    plainly = trained(model, lambda: F.cross_entropy(called(X), Y))
    peak = er.summary(called).predicted_nbytes
    assert peak is not None
    er.release(called)
    torch._dynamo.reset()
    model = Broken()
    called = er.fit(torch.compile(model), budget=peak + held // 2, exact=True)
    with pytest.raises(BudgetTooSmall, match="held by uncompiled code 640 KiB") as refused:
        called(X)
    er.release(called)
    torch._dynamo.reset()
    called = er.fit(torch.compile(model), budget=refused.value.least_nbytes, exact=True)
    assert same(trained(model, lambda: F.cross_entropy(called(X), Y)), plainly)


def test_a_model_of_which_nothing_is_compiled_runs_in_the_eager_engine(uncompiled) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.lstm = nn.LSTM(WIDTH, WORDS)  # torch 2.15 compiles what follows

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    model = Recurrent()
    plainly = trained(model, lambda: F.cross_entropy(model(X), Y), steps=3)
    called = er.fit(torch.compile(model), budget="1 GiB", exact=True)
    with pytest.warns(UserWarning, match="Recurrent runs eagerly: torch.compile finds nothing"):
        found = trained(model, lambda: F.cross_entropy(called(X), Y), steps=3)
    assert same(found, plainly)
    assert er.summary(called).last_nbytes


def test_states_of_generators_that_checkpoints_need_are_counted(uncompiled) -> None:
    class Dropping(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(lambda x: F.dropout(block(x), 0.1), x, use_reentrant=False)  # noqa: B023
            return self.head(x)

    model = Dropping()
    called = er.fit(torch.compile(model), budget=weights(model), exact=True)
    with pytest.raises(BudgetTooSmall) as refused:
        called(X)
    er.release(called)
    torch._dynamo.reset()
    called = er.fit(torch.compile(model), budget=refused.value.least_nbytes, exact=True)
    F.cross_entropy(called(X), Y).backward()
