"""state="auto": fit chooses how optimizer states are held, beside what it does to activations."""

import copy
import gc
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.errors import BudgetTooSmall, PlanError
from elbowroom.fitting import Fitting, state_formats
from elbowroom.optim import auto
from elbowroom.plan.plan import Plan
from elbowroom.runtime.attach import opener_of

MIN_NBYTES = 4096
WIDTH, DEPTH = 256, 4
LARGE, SOME, FEW = 1024, 256, 8  # rows of a batch: large activations, some, and next to none

pytestmark = pytest.mark.usefixtures("one_thread", "nothing_stays_attached")


class Net(nn.Module):
    """Residual blocks of a norm, a linear layer and a GELU."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            for _ in range(DEPTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Training:
    """One model, one optimizer, one batch."""

    def __init__(self, state: str = "auto", rows: int = LARGE, cls=er.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = cls(self.model.parameters(), lr=1e-4, state=state)
        self.x = torch.randn(rows, WIDTH)

    def __call__(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self, budget: int, **settings) -> Fitting:
        settings = {"optimizer": self.optimizer, "min_nbytes": MIN_NBYTES, **settings}
        er.fit(self.model, budget=budget, **settings)
        return opener_of(self.model)

    @property
    def static_nbytes(self) -> int:
        states = [x for state in self.optimizer.state.values() for x in state.values()]
        return sum(x.nbytes for x in (*self.model.parameters(), *states))

    @property
    def held_as(self) -> str:
        return self.optimizer.param_groups[0]["state"]

    def peak(self) -> int:
        self.optimizer.zero_grad(set_to_none=True)
        return self.static_nbytes + er.peak(self)


def needs(state: str, rows: int) -> int:
    """Bytes of a plain step."""
    training = Training(state, rows)
    training()
    return training.peak()


def between(rows: int, share: float) -> int:
    """A budget between what plain steps need with states of int8 (0) and of fp32 (1)."""
    least, most = needs("int8", rows), needs("fp32", rows)
    return int(least + share * (most - least))


def least(state: str, rows: int, *, exact: bool | None) -> int:
    """Bytes that a step needs at the least with states held so."""
    training = Training(state, rows)

    def step() -> None:
        training()
        training.optimizer.zero_grad(set_to_none=True)

    profile = er.measure(step, min_nbytes=MIN_NBYTES)
    with pytest.raises(BudgetTooSmall) as refused:
        er.plan(profile, budget=1, exact=exact)
    # What else this process holds is no part of it.
    return refused.value.least_nbytes - profile.static + training.static_nbytes


def without_room() -> int:
    """A budget for SOME rows, beside int8 states only."""
    return (least("int8", SOME, exact=True) + least("fp32", SOME, exact=None)) // 2


def losses(state: str, rows: int, steps: int) -> list[float]:
    training = Training(state, rows)
    return [training() for _ in range(steps)]


# --- what is chosen ---


def test_states_are_encoded_where_activations_are_too_few_to_make_room(caplog) -> None:
    budget, training = between(FEW, 0.3), Training(rows=FEW)
    fitting = training.fit(budget)
    with caplog.at_level(logging.INFO, "elbowroom"):
        found = [training() for _ in range(6)]
    assert training.held_as == "int8"
    assert fitting.was_exact
    assert fitting.highest_nbytes <= budget
    assert training.peak() <= budget
    assert found == losses("int8", FEW, 6)  # they were born so
    assert found == pytest.approx(losses("fp32", FEW, 6), rel=1e-3)
    assert "those of fp32 do not fit beside weights and gradients" in caplog.text
    assert caplog.text.count("optimizer states") == 1
    er.release(training.model)
    assert training.held_as == "int8"


def test_states_that_exist_are_converted_before_the_step_that_has_no_room(caplog) -> None:
    budget, training = without_room(), Training(rows=SOME)
    first = training()
    fitting = training.fit(budget)
    with caplog.at_level(logging.INFO, "elbowroom"):
        found = [first, *(training() for _ in range(7))]
    assert training.held_as != "fp32"
    assert fitting.planner.plan.exact
    assert "those of 4 parameters were converted" in caplog.text
    assert fitting.highest_nbytes <= budget
    assert training.peak() <= budget
    assert found == pytest.approx(losses("fp32", SOME, 8), rel=1e-3)


def test_no_refusal_of_a_format_is_left_to_the_garbage_collector() -> None:
    """Its frames would hold the output of a step while the next one is measured."""
    budget, training = without_room(), Training(rows=SOME)
    training()
    training.fit(budget)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            training()
        assert not [one for one in gc.get_objects() if type(one) is BudgetTooSmall]
    finally:
        gc.enable()
    assert training.held_as != "fp32"


def test_the_first_steps_stay_inside() -> None:
    for rows, budget in ((FEW, between(FEW, 0.3)), (SOME, without_room())):
        training = Training(rows=rows)
        training.fit(budget)
        assert training.static_nbytes + er.peak(training) <= budget


def test_activations_are_encoded_where_that_is_cheaper(monkeypatch) -> None:
    # With int8 states all modules could run again, next to it; beside fp32 it takes a few codes.
    monkeypatch.setattr(state_formats, "update_s", lambda _, state, __: (state != "fp32") * 1e-6)
    budget, training = int(1.01 * least("int8", LARGE, exact=True)), Training()
    fitting = training.fit(budget)
    for _ in range(6):
        training()
    assert training.held_as == "fp32"
    assert not fitting.planner.plan.exact


def test_exact_refuses_rather_than_to_encode_states() -> None:
    training = Training(rows=FEW)
    training.fit(between(FEW, 0.3), exact=True)
    with pytest.raises(BudgetTooSmall, match="codes and optimizer states with exact=None"):
        training()
    assert training.held_as == "fp32"


def test_all_is_fp32_where_there_is_room_and_without_fit() -> None:
    plain = losses("fp32", LARGE, 4)
    assert losses("auto", LARGE, 4) == plain
    for exact in (None, True, False):
        training = Training()
        training.fit(1 << 30, exact=exact)
        assert [training() for _ in range(4)] == plain
        assert training.held_as == "fp32"


def test_with_more_room_states_are_fp32_again() -> None:
    training = Training(rows=FEW)
    training.fit(between(FEW, 0.3))
    training()
    assert training.held_as == "int8"
    training.fit(1 << 30)
    for _ in range(4):
        training()
    assert training.held_as == "fp32"
    assert all("exp_avg" in state for state in training.optimizer.state.values())


@pytest.mark.parametrize("cls", [er.optim.SGD, er.optim.Lion])
def test_rules_with_one_moment(cls) -> None:
    probes = []
    for state in ("int8", "fp32"):
        probe = Training(state, FEW, cls)
        probe()
        probes.append(probe.peak())
    budget, training = int(0.6 * probes[0] + 0.4 * probes[1]), Training("auto", FEW, cls)
    fitting = training.fit(budget)
    for _ in range(5):
        training()
    assert training.held_as == "int8"
    assert fitting.highest_nbytes <= budget


def test_groups_with_a_format_of_their_own_keep_it() -> None:
    training = Training(rows=FEW)
    first, others = training.model.blocks[0], training.model.blocks[1:]
    groups = [{"params": first.parameters(), "state": "fp32"}, {"params": others.parameters()}]
    training.optimizer = er.optim.AdamW(groups, lr=1e-4, state="auto")
    budget = between(FEW, 0.45)
    training.fit(budget)
    for _ in range(5):
        training()
    assert [group["state"] for group in training.optimizer.param_groups] == ["fp32", "int8"]
    assert training.peak() <= budget


def test_released_gradients() -> None:
    plain = Training("int8", FEW)
    plain.optimizer.release_gradients()
    plain()
    budget, training = int(1.3 * plain.peak()), Training(rows=FEW)
    release = training.optimizer.release_gradients()
    fitting = training.fit(budget)
    found = [training() for _ in range(5)]
    assert training.held_as == "int8"
    assert fitting.highest_nbytes <= budget
    assert found == losses("int8", FEW, 5)
    release.remove()


# --- who owns an optimizer ---


def test_one_optimizer_of_two_fitted_models_is_refused() -> None:
    training, other = Training(), Training()
    training.optimizer.add_param_group({"params": list(other.model.parameters())})
    training.fit(1 << 30)
    with pytest.raises(PlanError, match="for another fitted model"):
        er.fit(other.model, budget=1 << 30, optimizer=training.optimizer)
    er.release(training.model)
    er.fit(other.model, budget=1 << 30, optimizer=training.optimizer)


def test_a_later_group_is_held_as_the_others() -> None:
    training = Training(rows=FEW)
    training.fit(between(FEW, 0.3))
    training()
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(64, 64))]})
    assert training.optimizer.param_groups[1]["state"] == "int8"


# --- files ---


def test_a_resumed_run_has_the_same_bits() -> None:
    budget, training = between(FEW, 0.3), Training(rows=FEW)
    training.fit(budget)
    for _ in range(4):
        training()
    resumed = Training(rows=FEW)
    resumed.model.load_state_dict(copy.deepcopy(training.model.state_dict()))
    resumed.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    assert resumed.held_as == "int8"
    resumed.fit(budget)
    assert [resumed() for _ in range(4)] == [training() for _ in range(4)]


def test_what_was_loaded_is_not_made_larger_and_can_be_given_back() -> None:
    source = Training("int8", FEW)
    source()
    training = Training(rows=FEW)
    training.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
    training.fit(1 << 30)
    for _ in range(4):
        training()
    assert training.held_as == "int8"
    plain = torch.optim.AdamW(training.model.parameters())
    plain.load_state_dict(training.optimizer.portable_state_dict())
    assert "auto" not in plain.param_groups[0]
    other = er.optim.AdamW(training.model.parameters(), state="int4")
    other.load_state_dict(training.optimizer.state_dict())
    assert other.param_groups[0]["state"] == "int4"
    assert "auto" not in other.param_groups[0]


# --- conversion ---


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [x for state in optimizer.state.values() for x in state.values()]


def test_a_conversion_takes_no_more_than_one_parameter_on_the_way() -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(1024, 1024)) for _ in range(4)]
    for p in params:
        p.grad = torch.randn_like(p)

    def begin() -> er.optim.AdamW:
        optimizer = er.optim.AdamW(params, state="auto")
        optimizer.step()
        return optimizer

    optimizer = begin()
    large, small = (optimizer.state_nbytes(params[0], state) for state in ("fp32", "int8"))
    assert sum(x.nbytes for x in states(optimizer)) == 4 * large
    # The profiler sees what is freed only if it has seen it taken.
    taken = er.peak(lambda: auto.hold(begin(), "int8")) - er.peak(begin)
    assert small <= taken <= large + small


def test_an_error_on_the_way_leaves_all_as_they_were(monkeypatch) -> None:
    training = Training()
    training()
    plain, calls = auto.transcode, []

    def failing(*args) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError
        plain(*args)

    monkeypatch.setattr(auto, "transcode", failing)
    with pytest.raises(MemoryError):
        auto.hold(training.optimizer, "int8")
    assert training.held_as == "fp32"
    assert all("exp_avg" in state for state in training.optimizer.state.values())
    training()


def test_inside_er_step_old_states_are_let_go_of_and_the_step_can_be_undone() -> None:
    budget, training = without_room(), Training(rows=SOME)
    first = training()
    fitting = training.fit(budget)
    tries = []

    def run() -> float:
        tries.append(training.held_as)
        if len(tries) == 4:
            training.model(training.x)
            raise torch.OutOfMemoryError("out of memory")
        return training()

    found = [first, *(er.step(run) for _ in range(7))]
    assert tries[0] == "fp32"
    assert training.held_as != "fp32"
    assert fitting.highest_nbytes <= 1.05 * budget  # the first step goes by an estimate
    assert all(torch.isfinite(torch.tensor(found)))
    assert found == pytest.approx(losses("fp32", SOME, 8), rel=0.02)


# --- what is said ---


def test_explain_says_bytes_a_parameter_of_any_optimizer(tmp_path: Path) -> None:
    budget, training = between(LARGE, 0.5), Training()
    training.fit(budget)
    for _ in range(5):
        training()
    plan = opener_of(training.model).planner.plan
    said = "states fp32: 8.00 bytes a parameter (fp32 8.00), weights 4.00, gradients 4.00"
    assert plan.explain().splitlines()[-1] == said
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    plain = Training()
    plain.optimizer = torch.optim.SGD(plain.model.parameters(), lr=1e-3)
    plain.fit(int(0.8 * needs("fp32", LARGE)))
    for _ in range(5):
        plain()
    explained = opener_of(plain.model).planner.plan.explain()
    assert explained.splitlines()[-1] == (
        "no optimizer states; bytes a parameter: weights 4.00, gradients 4.00"
    )


def test_a_dry_run_knows_them_too(tmp_path: Path) -> None:
    training = Training()
    plain = torch.optim.AdamW(training.model.parameters())
    profile = er.dry_run(
        training.model,
        lambda: training.x,
        loss=lambda model, x: model(x).square().mean(),
        optimizer=plain,
    )
    profile.save(tmp_path / "profile.json")
    plan = er.plan(type(profile).load(tmp_path / "profile.json"), budget=1 << 30)
    assert "states fp32: 8.00 bytes a parameter (fp32 8.00), weights 4.00" in plan.explain()


@pytest.mark.parametrize("state", ["int8", "fp32"])
def test_a_measured_step_knows_them_of_the_model_that_it_is_given(state: str) -> None:
    training = Training()
    optimizer = er.optim.AdamW(training.model.parameters(), state=state)

    def step() -> None:
        optimizer.zero_grad()
        training.model(training.x).square().mean().backward()
        optimizer.step()

    profile = er.measure(step, model=training.model, optimizer=optimizer)
    held = sum(x.nbytes for one in optimizer.state.values() for x in one.values())
    each = held / sum(p.numel() for p in training.model.parameters())
    last = er.plan(profile, budget=1 << 30).explain().splitlines()[-1]
    assert last == (
        f"states {state}: {each:.2f} bytes a parameter (fp32 8.00), weights 4.00, gradients 4.00"
    )
    alone = er.measure(step, model=training.model)
    assert "no optimizer states" in er.plan(alone, budget=1 << 30).explain()
    assert er.measure(step).standing is None
    with pytest.raises(PlanError, match="model="):
        er.measure(step, optimizer=optimizer)
    with pytest.raises(PlanError, match=r"measure takes a torch\.nn\.Module"):
        er.measure(step, model=optimizer)


def test_a_given_plan_brings_its_format() -> None:
    budget, training = without_room(), Training(rows=SOME)
    fitting = training.fit(budget)
    for _ in range(8):
        training()
    plan = fitting.planner.plan
    assert plan.standing.states == training.held_as != "fp32"
    again = Training(rows=SOME)
    later = again.fit(budget, plan=plan)
    for _ in range(4):
        again()
    assert again.held_as == training.held_as
    assert later.planner.plan is later.planner.given
    assert again.peak() <= budget
