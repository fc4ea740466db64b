"""er.saving around compiled modules: their graphs hold what the policy asks for."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.codecs import Codec, registry
from elbowroom.codecs.base import Expected
from elbowroom.codecs.graph_form import converted
from elbowroom.errors import PlanError
from elbowroom.runtime import compiler
from uncompiled import nothing_compiled as nothing_compiled
from uncompiled import uncompiled as uncompiled

# Inductor's import of torch.jit; nothing of ours.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


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


CODES = {
    "group": {"bits": 4},
    "cast": {"to": "fp8_e4m3"},
    "division": {"bits": 4},
    "dither": {"levels": 6, "group_size": 128},
    "lean": {},
}


def rows(depth: int = 2) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [one for _ in range(depth) for one in (nn.Linear(64, 64), nn.GELU(), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 64)), torch.randn(256, 64)


@pytest.mark.parametrize("policy", CODES)
def test_each_codec_that_has_a_form_for_graphs_acts_in_them(uncompiled, policy) -> None:
    model, x = rows()
    called = torch.compile(model)
    plain = step(model, called, x)
    saved = er.saving(policy, **CODES[policy], seed=3)
    got = step(model, called, x, saved)
    assert 0 < error(got, plain) < (0.3 if policy == "lean" else 0.05)
    assert saved.ledger.after_nbytes < saved.ledger.before_nbytes / 1.5
    assert len(uncompiled) == 2
    again = er.saving(policy, **CODES[policy], seed=3)
    assert torch.equal(step(model, called, x, again), got)
    assert len(uncompiled) == 2
    assert not compiler.ran_eagerly()


def test_a_fitted_compiled_model_passes_on_the_codecs_that_it_may_use(uncompiled) -> None:
    for codecs in (["group"], ["comet", "division"]):
        model, x = rows()
        plain = step(model, torch.compile(model), x)
        fitted = er.fit(torch.compile(model), budget="1 GiB", codecs=codecs)
        assert torch.equal(step(model, fitted, x), plain)  # nothing is needed
        partitioner = uncompiled[-1]["custom_partitioner_fn"]
        assert {name.split(",")[0] for name in partitioner.menu} == set(codecs)
    with pytest.raises(PlanError, match="codecs without a form for graphs"):
        er.fit(rows()[0], budget="1 GiB", codecs=["comet"], compile=True)


class Chosen(nn.Module):
    """Picks the largest of each row: backward needs to know where these were."""

    def forward(self, x: Tensor) -> Tensor:
        values, places = x.sort(dim=-1)
        return values * x.gather(-1, places.flip(-1))


@pytest.mark.parametrize("policy", ["exact", "narrow"])
def test_indices_are_held_in_as_few_bytes_as_their_dimension_needs(uncompiled, policy) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(200, 200), torch.randn(64, 200)
    model = nn.Sequential(layer, Chosen())
    called = torch.compile(model)
    plain = step(model, called, x)
    saved = er.saving(policy)
    assert torch.equal(step(model, called, x, saved), plain)
    indices = 8 * x.numel()  # int64, one byte each of 200 places
    assert saved.ledger.before_nbytes - saved.ledger.after_nbytes >= 7 / 8 * indices


@dataclass(frozen=True)
class Halves16(Codec):
    """A codec of another package, which declares how it acts in graphs."""

    id: ClassVar[str] = "halves16"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)

    def _layout(self, n, dtype, facts):
        return (Expected(torch.float16, (n,)),)

    def _encode(self, flat, seed, facts):
        return (flat.half(),)

    def _decode_into(self, encoded, out):
        out.copy_(encoded.buffers[0])

    def graph_form(self, facts):
        return converted(torch.float16)


def test_a_codec_of_another_package_acts_in_graphs(uncompiled, monkeypatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    registry.register(Halves16)
    model, x = rows()
    called = torch.compile(model)
    plain, saved = step(model, called, x), er.saving("halves16")
    assert 0 < error(step(model, called, x, saved), plain) < 1e-5
    assert saved.ledger.after_nbytes < saved.ledger.before_nbytes / 1.8
    assert not compiler.ran_eagerly()


def test_policies_without_a_form_for_graphs_run_eagerly_and_say_so(uncompiled) -> None:
    model, x = make()
    called = torch.compile(model)
    with (
        pytest.warns(UserWarning, match="Sequential is compiled, and runs eagerly"),
        pytest.warns(UserWarning, match="there are global hooks"),  # of torch's own
    ):
        step(model, called, x, er.saving("comet"))
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


@pytest.mark.parametrize("how", ["saving", "fit"])
def test_options_of_our_backend_do_not_reach_inductor(how: str, uncompiled) -> None:
    """Inductor has no option "noise", and raised an error that ended the training."""
    model, x = make()
    ours = {"budget": "1 GiB", "exact": None, "noise": 0.1, "offload": "file"}
    options = {**ours, "max-autotune": True}
    called = torch.compile(model, backend="elbowroom", options=options)
    if how == "saving":
        step(model, called, x, er.saving("dither", levels=16))
    else:
        step(model, er.fit(called, budget="1 GiB"), x)
    (given,) = uncompiled
    assert given["max_autotune"] is True
    assert not given.keys() & {*ours, "max-autotune"}
    assert not compiler.ran_eagerly()


@pytest.mark.filterwarnings("ignore:Using `torch.compile", "ignore:Gate is compiled, and runs")
def test_a_policy_that_runs_eagerly_takes_a_compiled_module_without_a_length():
    """The truth value of a compiled module is its `len()`, which most modules do not have."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(torch.sigmoid(self.inner(x)))

    compiled, x = torch.compile(Gate(), backend="eager"), torch.randn(2048, 64)
    with er.saving("comet") as saved:
        loss = compiled(x).square().mean()
    loss.backward()
    assert saved.ledger.after_nbytes < saved.ledger.before_nbytes
