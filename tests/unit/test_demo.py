"""The demo's tasks, its loop and its comparison, on networks small enough to wait for."""

import json
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from elbowroom.demo.compare import compare
from elbowroom.demo.models import GPT, ResNet18, UNet
from elbowroom.demo.page import page, rows
from elbowroom.demo.tasks import task
from elbowroom.demo.train import Run, score, train

SMALL = {"resnet18": (4, 16), "unet": (4, 8), "gpt": (32, 4)}  # width, batch


class Ledger(SimpleNamespace):
    def __str__(self):
        return "action  n\nkeep    3"


@contextmanager
def saving():
    """A stand-in for er.saving: changes nothing, claims a third."""
    yield SimpleNamespace(ledger=Ledger(before_nbytes=3000, after_nbytes=1000))


def small(name):
    width, batch = SMALL[name]
    return task(name, width=width, batch=batch)


def test_the_resnet_is_the_usual_one():
    model = ResNet18()
    assert (
        sum(p.numel() for p in model.parameters()) == 11_172_810
    )  # torchvision's, less stem and head
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_the_gpt_does_not_look_ahead():
    model = GPT(32, depth=2).eval()
    tokens = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 10:] = 7
    with torch.no_grad():
        assert torch.allclose(model(tokens)[0, :10], model(changed)[0, :10], atol=1e-5)


def test_the_unet_gives_a_class_to_every_pixel():
    assert UNet(4)(torch.zeros(2, 1, 28, 28)).shape == (2, 11, 28, 28)


@pytest.mark.parametrize("name", SMALL)
def test_one_seed_means_one_training(name):
    losses = [
        [fact.loss for fact in train(Run(small(name), nullcontext, steps=3, seed=seed))]
        for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


@pytest.mark.parametrize("steps", range(1, 12))
def test_any_number_of_steps_has_a_schedule(steps):
    """torch's own divides by the steps in which the rate rises, less one."""
    assert len(list(train(Run(small("gpt"), nullcontext, steps=steps)))) == steps


def test_training_leaves_the_users_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    list(train(Run(small("gpt"), nullcontext, steps=1, seed=3)))
    assert torch.equal(torch.rand(3), expected)


def test_batches_cover_an_epoch_without_repeats():
    chosen = task("resnet18", width=4, batch=4000)
    batches = chosen.batches(0)
    labels = torch.cat([next(batches)[1] for _ in range(3)])
    assert labels.bincount().tolist() == [1200] * 10


def test_a_score_is_the_share_of_right_answers():
    run = Run(small("resnet18"), nullcontext, steps=1)
    with torch.no_grad():
        run.model.head.weight.zero_()
        run.model.head.bias.copy_(torch.eye(10)[3])  # says 3 to everything
    assert score(run) == pytest.approx(0.1)
    assert run.model.training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "vgg"}, "no model 'vgg'; there are resnet18, unet, gpt"),
        ({"name": "resnet18", "width": 0}, "width is at least 1; got 0"),
        ({"name": "resnet18", "batch": -1}, "batch is at least 1; got -1"),
        ({"name": "resnet18", "batch": 12_001}, "more than the 12000 images"),
        ({"name": "gpt", "width": 33}, "divides by 32; got 33"),
        ({"name": "gpt", "folder": "."}, "the gpt trains on text"),
    ],
)
def test_senseless_sizes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        task(**arguments)


@pytest.fixture(scope="module")
def comparison():
    return compare(small("resnet18"), saving, steps=2, pairs=2)


def test_a_comparison_trains_both_sides_alike(comparison):
    assert comparison.plain.losses == comparison.ours.losses  # the stand-in changes nothing
    assert comparison.plain.score == comparison.ours.score
    assert (comparison.plain.saved_nbytes, comparison.ours.saved_nbytes) == (3000, 1000)
    assert comparison.plain.peak_nbytes == comparison.ours.peak_nbytes > 0
    assert [name for name, _ in comparison.plain.curve.marks] == ["backward", "optimizer"]
    assert comparison.plain.curve.end_nbytes == 4  # gradients are dropped; the loss is returned
    assert comparison.timing.n == 2


def test_a_comparison_is_json(comparison):
    told = json.loads(json.dumps(comparison.as_dict()))
    assert told["plain"]["saved_nbytes"] == 3000
    assert told["elbowroom"]["saved_nbytes"] == 1000
    assert told["step_time_pairs"] == 2


def test_a_comparison_as_a_page(comparison):
    shown = page(comparison, {"batch": "16"})
    assert [row.name for row in shown.rows] == [
        "saved bytes",
        "peak bytes",
        "seconds per step",
        "test accuracy",
    ]
    assert {row.kind for row in shown.rows} == {"measured"}
    assert rows(comparison)[0].verdict == "3.0x less"
    assert rows(comparison)[1].verdict == "1.00x"
    assert "scaled to width 4 (full: 64)" in shown.lead


def test_progress_is_told_stage_by_stage():
    told = []
    compare(small("unet"), saving, steps=1, pairs=1, on_progress=told.append)
    assert list(dict.fromkeys(p.stage for p in told)) == ["plain", "elbowroom", "measuring"]
    assert all(0 <= p.done <= p.total for p in told)


def test_no_steps_is_refused():
    with pytest.raises(ValueError, match="steps is at least 1; got 0"):
        compare(small("unet"), saving, steps=0)
