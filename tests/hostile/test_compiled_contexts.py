"""er.saving around compiled modules: their graphs hold what the policy asks for."""

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.compiled import GROUP_SIZE, rewrite
from elbowroom.runtime import compiler
from uncompiled import uncompiled as uncompiled

# Inductor's import of torch.jit; nothing of ours.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    monkeypatch.setattr(compiler, "_said", False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(3):
        layers += [nn.Conv2d(16 if i else 3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        layers += [nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 16 * 16, 4)), torch.randn(
        8, 3, 16, 16
    )


def step(model, called, x, context=None) -> Tensor:
    model.zero_grad()
    torch.manual_seed(1)
    if context is None:
        loss = called(x).square().mean()
    else:
        with context:
            loss = called(x).square().mean()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def error(got: Tensor, exact: Tensor) -> float:
    return float((got - exact).square().sum() / exact.square().sum())


def test_a_policy_acts_in_the_graph_is_compiled_once_and_leaves_the_plain_graph(uncompiled) -> None:
    model, x = make()
    called = torch.compile(model)
    plain = step(model, called, x)
    exact, coded = er.saving("exact"), er.saving("dither", levels=16, seed=3)
    masks = step(model, called, x, exact)
    assert error(masks, plain) < 1e-12  # masks come back in Inductor's layout, which is not here
    noisy = step(model, called, x, coded)
    assert 0 < error(noisy, plain) < 0.02
    assert exact.ledger.after_nbytes < exact.ledger.before_nbytes
    assert coded.ledger.after_nbytes < exact.ledger.before_nbytes / 3
    assert "compiled region" in str(coded.ledger)
    assert len(uncompiled) == 3
    for _ in range(2):  # settled contexts follow a script
        assert torch.equal(step(model, called, x), plain)
        assert torch.equal(step(model, called, x, er.saving("exact")), masks)
        again = er.saving("dither", levels=16, seed=3)
        assert torch.equal(step(model, called, x, again), noisy)
        assert again.ledger.after_nbytes == coded.ledger.after_nbytes
        assert not torch.equal(step(model, called, x, er.saving("dither", levels=16)), noisy)
    assert len(uncompiled) == 3
    assert not compiler.ran_eagerly()


class Halves(nn.Module):
    """Parts of one result: views that torch makes of it behind the compiled region."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        whole = self.layers(x)
        return whole[:, :32], whole[:, 32:]


def test_a_region_whose_results_are_views_is_counted(uncompiled) -> None:
    """It was an error: nothing can refer weakly to the node of a view."""
    torch.manual_seed(0)
    model, x, coded = Halves(), torch.randn(512, 64), er.saving("dither", levels=16, seed=3)
    compiled = torch.compile(model)
    called = lambda x: torch.mul(*compiled(x))  # noqa: E731
    assert 0 < error(step(model, called, x, coded), step(model, called, x)) < 0.02
    assert 0 < coded.ledger.after_nbytes < coded.ledger.before_nbytes / 3
    assert coded.ledger.held_nbytes == 0


def test_keep_leaves_the_plain_graph(uncompiled) -> None:
    model, x = make()
    called = torch.compile(model)
    plain = step(model, called, x)
    assert torch.equal(step(model, called, x, er.saving("keep")), plain)
    assert len(uncompiled) == 1


class Block(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


# Dynamo asks its inputs for their gradients, and hides the warning but from those who raise it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_modules_that_are_compiled_one_by_one_have_the_policy_each(uncompiled) -> None:
    model, x = make()
    blocks = nn.Sequential(torch.compile(model[:6]), Block(model[6:12]), model[12:])
    blocks[1].compile(mode="max-autotune-no-cudagraphs")  # in place
    plain = step(model, blocks, x)
    saved = er.saving("dither", levels=16)
    got = step(model, blocks, x, saved)
    rows = {row.module for row in saved.ledger.rows if row.consumer == "compiled region"}
    assert rows == {"0", "1"}
    assert 0 < error(got, plain) < 0.05
    assert [options.get("max_autotune") for options in uncompiled] == [None, True, None, True]
    assert not compiler.ran_eagerly()


def test_policies_without_a_form_for_graphs_run_eagerly_and_say_so(uncompiled) -> None:
    model, x = make()
    called = torch.compile(model)
    with (
        pytest.warns(UserWarning, match="Sequential is compiled, and runs eagerly"),
        pytest.warns(UserWarning, match="there are global hooks"),  # of torch's own
    ):
        step(model, called, x, er.saving("group"))
    assert uncompiled == []


def test_a_compiled_function_runs_eagerly_and_says_so_once(uncompiled) -> None:
    model, x = make()
    called, asked = (
        torch.compile(lambda x: model(x)),
        torch._dynamo.eval_frame._callback_from_stance,
    )
    with pytest.warns(UserWarning, match="A compiled function is called, and runs eagerly"):
        step(model, called, x, er.saving("exact"))
    step(model, called, x, er.saving("exact"))  # a second warning would be an error
    assert uncompiled == []
    step(model, called, x)
    assert len(uncompiled) == 1
    assert torch._dynamo.eval_frame._callback_from_stance is asked


def test_a_stance_of_the_users_is_kept(uncompiled) -> None:
    model, x = make()
    called = torch.compile(model)
    with torch.compiler.set_stance("force_eager"):
        step(model, called, x, er.saving("exact"))
    assert uncompiled == []


def test_what_was_saved_and_then_changed_in_place_is_an_error(uncompiled) -> None:
    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x.exp()
            return y, y.square()

    called = torch.compile(Doubled())
    for _ in range(2):  # the first run counts through hooks of ours
        x = torch.randn(128, 128, requires_grad=True)
        with er.saving("exact"):
            y, z = called(x)
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
            z.sum().backward()


def test_the_group_size_is_that_of_the_codes_in_graphs() -> None:
    assert rewrite.GROUP_SIZE == GROUP_SIZE
