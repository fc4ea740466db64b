"""er.summary says at any time what a fit has done."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.errors import PlanError
from elbowroom.fitting.summary import Summary
from uncompiled import uncompiled as uncompiled


def net() -> nn.Sequential:
    layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())]
    return nn.Sequential(*layers)


def train(model: nn.Module, steps: int, batch: int = 2048) -> None:
    for _ in range(steps):
        model(torch.randn(batch, 128)).square().mean().backward()
        model.zero_grad()


def encoder_told(*, dropout: float, share: float) -> tuple[Summary, int]:
    """What is told of a transformer inside a share of its plain peak, and that peak in bytes."""
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=dropout, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 4), torch.randn(16, 64, 64)

    def step() -> None:
        model(x).square().mean().backward()

    peak = 2 * sum(p.nbytes for p in model.parameters()) + er.peak(step)
    model.zero_grad()
    er.fit(model, budget=int(share * peak), exact=True)
    for _ in range(6):
        step()
        model.zero_grad()
    return er.summary(model), peak


def test_it_tells_budget_peak_and_actions() -> None:
    model = er.fit(net(), budget="12 MiB", exact=True)
    before = er.summary(model)
    assert before.last_nbytes is None
    assert before.steps == 0
    train(model, 12)
    told = er.summary(model)
    assert told.exact
    assert told.last_nbytes is not None
    assert 0 < told.last_nbytes <= told.budget_nbytes == 12 * 2**20
    assert {line.action for line in told.lines}
    table = str(told)
    assert table.startswith("Sequential inside 12.0 MiB\n")
    assert "within the budget" in table
    assert "no bit of a gradient changed" in table
    assert len(table.splitlines()) == 2 + len(told.rows())


def test_the_first_update_under_a_plan_is_among_the_highest_peaks() -> None:
    """It makes the optimizer's states, so it is no later step's; it was left out altogether."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    er.fit(model, budget="8 MiB", optimizer=optimizer, exact=True)
    model(torch.randn(1024, 64)).square().mean().backward()
    optimizer.step()
    model(torch.randn(1024, 64))  # ends the first step
    told = er.summary(model)
    assert told.last_nbytes is None
    assert told.highest_nbytes is not None
    assert 4 * 2**20 < told.highest_nbytes <= told.budget_nbytes
    assert "highest peak" in str(told)


def test_a_model_that_has_room_needs_nothing() -> None:
    model = er.fit(net(), budget="1 GiB", exact=True)
    train(model, 4)
    told = er.summary(model)
    assert not told.lines
    table = str(told)
    assert "nothing needs to be done" in table
    rows = {name: (measured, estimated) for name, measured, estimated, _ in told.rows()}
    assert rows["peak, plain"] == rows["peak"] != ("", "")  # measured: nothing was done


def test_what_plain_training_takes_is_rough_where_no_step_was_profiled() -> None:
    """It said "not known" for a whole training."""
    told, peak = encoder_told(dropout=0.0, share=0.5)
    assert told.plain_is_rough
    assert told.plain_nbytes is not None
    assert 0.9 < told.plain_nbytes / peak < 1.15
    assert "by its forward alone" in str(told)
    assert told.slowdown is None


def test_it_says_where_pytorchs_attention_takes_more_than_the_profiled_step() -> None:
    told, peak = encoder_told(dropout=0.1, share=0.7)
    assert told.plain_is_low
    assert told.plain_nbytes is not None
    assert told.plain_nbytes < peak
    assert "at least: PyTorch's own attention saves more" in str(told)


@pytest.mark.parametrize("budget", ["12 MiB", "1 GiB"])
def test_a_smaller_batch_at_the_end_of_an_epoch_is_not_what_it_tells_of(budget: str) -> None:
    """It told that there was no plan, and that nothing was known of plain training."""
    model = er.fit(net(), budget=budget, exact=True)
    train(model, 12)
    before = er.summary(model)
    train(model, 1, batch=300)
    after = er.summary(model)
    assert before.setting == ("plan" if budget == "12 MiB" else "keep")
    assert replace(after, steps=12, last_nbytes=before.last_nbytes) == before
    figures: dict = {}
    er.log_to(figures)(model, 0)  # a logger is given those of the step
    assert figures["memory/setting"] != before.setting


def test_it_is_of_fitted_models_only() -> None:
    model = net()
    with pytest.raises(PlanError, match=r"this one is not; call er\.fit first"):
        er.summary(model)
    er.release(er.fit(model, budget="1 GiB"))
    with pytest.raises(PlanError, match=r"was released.* print\(callback\.summary\)"):
        er.summary(model)
    er.summary(er.fit(model, budget="1 GiB"))


def test_codes_of_earlier_steps_are_told_from_those_of_now() -> None:
    """It said "codes add noise" beside a plan that had none."""
    model = er.fit(net(), budget="1 GiB")
    train(model, 3)
    told = er.summary(model)
    assert told.exact
    assert told.exact_now
    remark = str(replace(told, exact=False))
    assert "codes added noise to gradients of earlier steps; steps are exact by now" in remark
    assert "codes add noise" in str(replace(told, exact=False, exact_now=False))
    lossy = er.fit(net(), budget="6.6 MiB", exact=False)
    train(lossy, 3)
    told = er.summary(lossy)
    assert not told.exact
    assert not told.exact_now


def test_of_a_compiled_model_all_is_estimated(uncompiled) -> None:
    torch._dynamo.reset()
    model = er.fit(net(), budget="1 GiB", compile=True)
    train(model, 1)
    told = er.summary(model)
    assert told.last_nbytes is None
    assert told.predicted_nbytes is not None
    assert "planned inside torch.compile" in str(told)


def test_a_row_names_as_many_modules_as_fit_a_line() -> None:
    """Names in a language model are long: three of them would take two lines of a terminal."""
    model = er.fit(net(), budget="12 MiB", exact=True)
    train(model, 12)
    told = er.summary(model)
    long = [f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_dropout" for n in range(4)]
    for names, shown in ((long, f"{long[0]} and 3 more"), (["1", "3", "5"], "1, 3, 5")):
        lines = tuple(replace(told.lines[0], action="rebuild", module=name) for name in names)
        assert replace(told, lines=lines).rows()[-1][-1] == shown


def test_an_estimate_above_the_budget_that_a_measurement_refutes_says_so() -> None:
    model = er.fit(net(), budget="12 MiB", exact=True)
    train(model, 12)
    told = replace(er.summary(model), setting="plan", last_setting="plan", last_nbytes=12 * 2**20)
    for predicted, remark in ((12 * 2**20, ""), (13 * 2**20, "the estimate is too high")):
        (row,) = (r for r in replace(told, predicted_nbytes=predicted).rows() if "planned" in r[0])
        assert row[3].startswith(remark)
        assert bool(row[3]) == bool(remark)
