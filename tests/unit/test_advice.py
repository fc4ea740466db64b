"""A context that changed nothing says so, and why."""

import warnings

import pytest
import torch
from torch import nn

import elbowroom as er


def step(context, width=512):
    model, x = nn.Linear(width, width), torch.randn(1024, width, requires_grad=True)
    with context:
        return model(x * 1.0).cumprod(dim=0).sum()


def unknown_op_only(context):
    x = torch.randn(1024, 512, requires_grad=True)
    with context:
        return (x * 1.0).cumprod(dim=0)


def test_what_no_exact_action_helps_is_named_with_a_remedy():
    with pytest.warns(UserWarning, match="changed nothing of the [0-9.]+ MiB.*no exact action"):
        loss = step(er.saving())
    loss.backward()


def test_what_no_codec_may_touch_is_named():
    with pytest.warns(
        UserWarning, match=r"4.00 MiB: 'cumprod': its backward divides.*ledger lists each"
    ):
        unknown_op_only(er.saving("dither"))


@pytest.mark.parametrize(
    ("policy", "width"),
    [("keep", 512), ("dither", 512), (None, 16)],
    ids=["keep", "useful", "small"],
)
def test_no_word_where_there_is_nothing_to_say(policy, width):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(er.saving(policy), width)


@pytest.mark.filterwarnings("error")
def test_no_word_beside_an_error():
    def broken():
        with er.saving() as saving:
            unknown_op_only(saving)  # open already

    with pytest.raises(er.errors.PlanError):
        broken()


def test_an_empty_ledger_says_why_it_may_be():
    with er.saving("dither") as saved, torch.no_grad():
        nn.Linear(8, 8)(torch.randn(2, 8))
    assert "none. Forward ran without gradients, inside a compiled function" in str(saved.ledger)


def test_a_context_that_acts_in_a_compiled_graph_alone_says_nothing() -> None:
    torch._dynamo.reset()
    net = torch.compile(nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)))
    x, weights = torch.randn(2048, 256), torch.randn(2048, 256)  # the loss saves 2 MiB, outside
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with er.saving("dither", levels=16) as saved:
            loss = (net(x) * weights).sum()
    loss.backward()
    assert "in its graph" in saved.ledger.totals("action")
