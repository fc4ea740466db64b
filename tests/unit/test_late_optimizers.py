"""An optimizer that is made after the model was fitted is counted, by hand or under `run`."""

import gc

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks_of_all

import elbowroom as er
from elbowroom.errors import PlanError
from elbowroom.fitting import late_optimizers
from elbowroom.fitting.session import Fitting
from elbowroom.runtime.attach import opener_of
from elbowroom.tools import Discovery


def fitted() -> tuple[nn.Module, Fitting]:
    model = er.fit(nn.Linear(256, 256), budget="64 MiB")
    fitting = opener_of(model)
    assert isinstance(fitting, Fitting)
    return model, fitting


def test_states_of_an_optimizer_that_is_added_later_are_counted() -> None:
    model, fitting = fitted()
    assert fitting.model_state.unallocated_state_nbytes() == 0
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # twice is once
        er.add_optimizer(model, optimizer)
        assert fitting.model_state.unallocated_state_nbytes() >= 2 * sum(
            p.nbytes for p in model.parameters()
        )
    assert fitting.model_state.optimizers() == [optimizer]
    er.release(model)


def test_an_optimizer_that_nobody_told_of_is_found_as_it_steps() -> None:
    model, fitting = fitted()
    other = nn.Linear(256, 256)
    optimizers = [torch.optim.AdamW(net.parameters()) for net in (model, other)]
    for _ in range(2):
        model(torch.randn(4, 256)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert fitting.model_state.optimizers() == optimizers[:1]
    er.release(model)


class Autoencoder(nn.Module):
    """A model with methods that programs call in place of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.GELU())
        self.decoder = nn.Sequential(nn.Linear(64, 64), nn.GELU())

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encode(x))


@pytest.mark.parametrize("kind", ["model", "methods"])
def test_a_model_whose_own_forward_is_not_called_is_named(kind, caplog) -> None:
    model = er.fit(Autoencoder(), budget="64 MiB")
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(4):
        x = torch.randn(4, 64)
        out = model(x) if kind == "model" else model.decoder(model.encode(x))
        out.sum().backward()
        optimizer.step()
    said = [line for line in caplog.messages if "without a call of the model itself" in line]
    assert len(said) == (kind == "methods")
    assert all("er.fit(model.encoder, ...), er.fit(model.decoder, ...)" in line for line in said)
    er.release(model)


def test_a_step_before_the_first_forward_is_no_reason_to_warn(caplog) -> None:
    model = er.fit(Autoencoder(), budget="64 MiB")
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # creates the states, as a checkpoint is loaded
    for _ in range(4):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
    assert not [line for line in caplog.messages if "without a call of the model itself" in line]
    er.release(model)


def test_one_whose_format_is_to_be_chosen_has_to_be_given() -> None:
    model, fitting = fitted()
    optimizer = er.optim.AdamW(model.parameters(), state="auto")
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    assert fitting.model_state.optimizers() == []
    er.release(model)


def test_no_hook_is_left_once_no_model_is_fitted() -> None:
    def hooks() -> int:
        return sum(hook is late_optimizers._before_step for hook in hooks_of_all.values())

    model, fitting = fitted()
    assert hooks() == 1
    others = len(late_optimizers._owners) - 1  # of other tests
    er.release(model)
    del fitting
    gc.collect()
    assert len(late_optimizers._owners) <= others
    assert hooks() == bool(late_optimizers._owners)


def test_what_cannot_be_added_is_said() -> None:
    model, _ = fitted()
    with pytest.raises(PlanError, match=r"add_optimizer takes a torch.optim.Optimizer; got None"):
        er.add_optimizer(model, None)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"add_optimizer takes a torch.optim.Optimizer; got dict"):
        er.add_optimizer(model, {})  # type: ignore[arg-type]
    several = [torch.optim.SGD([p], 0.1) for p in model.parameters()]
    with pytest.raises(PlanError, match=r"got list. Pass one, and each further one to er.add_opt"):
        er.fit(model, budget="1 GiB", optimizer=several)  # type: ignore[arg-type]
    er.release(model)
    with pytest.raises(PlanError, match=r"takes a fitted model, and this one was released"):
        er.add_optimizer(model, torch.optim.SGD(model.parameters(), 0.1))
    model = nn.Linear(2, 2)
    with pytest.raises(PlanError, match=r"takes a fitted model, and this one is not; call er.fit"):
        er.add_optimizer(model, torch.optim.SGD(model.parameters(), 0.1))


def test_a_program_that_is_watched_tells_of_each_optimizer_it_makes() -> None:
    made: list[torch.optim.Optimizer] = []
    model = nn.Linear(2, 2)
    with Discovery(lambda _: None, made.append):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        assert made == [optimizer]
    torch.optim.SGD(model.parameters(), 0.1)
    assert made == [optimizer]


def test_an_optimizer_that_was_made_before_the_program_was_watched_is_found() -> None:
    """The imports that a spawned process begins with may make it."""
    found: list[nn.Module] = []
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Discovery(found.append) as discovery:
        model(torch.randn(3, 2))
        assert not found
        discovery.find_made()
        assert discovery.made_optimizers
        assert discovery.optimizers_of(model) == [optimizer]
        model(torch.randn(3, 2))
    assert found == [model]
