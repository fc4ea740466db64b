"""Codes of probabilities in compiled graphs, where a model has learned its data."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from elbowroom.compiled.exponents import is_probability
from elbowroom.compiled.logits import LARGEST, LEAST, MOST, AsLogit
from elbowroom.compiled.partition import Partitioner, listening
from uncompiled import nothing_compiled as nothing_compiled
from uncompiled import without_codegen

pytestmark = pytest.mark.usefixtures("one_thread", "nothing_compiled")
ROWS, CLASSES = 4096, 10


def computed(as_logit: AsLogit, value: Tensor, error: float) -> Tensor:
    """A value that is computed from its logit, which is off by so much."""
    logit = as_logit.logit_of(value, lambda _, op, *args: op(*args))
    return as_logit.of_logit(logit + error, lambda _, op, *args: op(*args))


@pytest.mark.parametrize("error", [0.0, 0.05])
def test_errors_of_a_logit_are_relative_to_what_is_small(error: float) -> None:
    logits = torch.linspace(-20, 20, 1001, dtype=torch.float64)
    p, rest = logits.sigmoid(), (-logits).sigmoid()
    got = computed(AsLogit.PROBABILITY, p, error)
    assert ((got - p).abs() <= 1.1 * error * torch.minimum(p, rest) + 1e-12).all()
    got = computed(AsLogit.LOGARITHM, p.log(), error).exp()
    assert ((got - p).abs() <= 1.1 * error * torch.minimum(p, rest) + 1e-12).all()


def test_bounds_of_float32_have_finite_logits() -> None:
    ends = torch.tensor([LEAST, MOST])
    assert torch.allclose(computed(AsLogit.PROBABILITY, ends, 0.0), ends, rtol=1e-5)
    ends = torch.tensor([-24.0, LARGEST])
    assert torch.allclose(computed(AsLogit.LOGARITHM, ends, 0.0), ends, rtol=1e-3)


@pytest.mark.parametrize("margin", [8.0, 12.0])
def test_cross_entropy_of_data_that_is_learned(margin: float) -> None:
    """It had 0.007 and 24: log-probabilities of nearly 0 had the error of those near -24."""
    torch.manual_seed(0)
    labels = torch.randint(CLASSES, (ROWS,))
    given = F.one_hot(labels, CLASSES).float() + 0.1 * torch.randn(ROWS, CLASSES)
    layer, found = nn.Linear(CLASSES, CLASSES), []
    with torch.no_grad():
        layer.weight.copy_(margin * torch.eye(CLASSES))
        layer.weight[:, 0] -= margin  # one class is far below the others
    for settings in ({}, {"codes": "dither, 16 levels", "min_nbytes": 0}):
        torch._dynamo.reset()
        layer.zero_grad()
        step = torch.compile(
            lambda: F.cross_entropy(layer(given), labels),
            backend=without_codegen(Partitioner(**settings)),
        )
        with listening(lambda one: found.append(one.is_lossy)):
            step().backward()
        assert layer.weight.grad is not None
        found.append(layer.weight.grad.clone())
    _, true, is_lossy, got = found
    assert is_lossy
    assert float((got - true).square().sum() / true.square().sum()) < 0.003


@pytest.mark.parametrize("views", [False, True])
def test_results_of_a_log_softmax_that_are_raised_are_probabilities(views: bool) -> None:
    """Behind a view they were taken for any value, which may have four levels."""
    graph, aten = fx.Graph(), torch.ops.aten
    x = graph.placeholder("x")
    total = graph.call_function(aten.sum.dim_IntList, (graph.call_function(aten.exp, (x,)), [1]))
    log = graph.call_function(aten.log.default, (total,))
    logarithm = graph.call_function(aten.sub.Tensor, (x, log))
    read = graph.call_function(aten.alias.default, (logarithm,)) if views else logarithm
    assert is_probability(graph.call_function(aten.exp.default, (read,)))
    assert not is_probability(graph.call_function(aten.exp.default, (x,)))
