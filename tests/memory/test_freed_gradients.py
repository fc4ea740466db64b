"""Gradients that go between forward and backward count once, though a CPU's allocator is silent."""

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.measure import memory_curve
from elbowroom.measure.interval import Interval

CPU = torch.device("cpu")
MB = 1 << 20
WIDTH, DEPTH = 512, 4  # 4 MiB of weights


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])


def measured(net: nn.Module, *, keeping: bool = False, dropping: bool = True) -> float:
    """MiB of a step above weights and gradients, of which the gradients are dropped in between."""
    x = torch.randn(16, WIDTH)
    net(x).square().mean().backward()
    gradients = [p.grad for p in net.parameters()]
    interval = Interval.start(0, CPU, gradients)
    kept = [gradient.detach() for gradient in gradients] if keeping else None
    del gradients
    assert interval is not None
    loss = net(x).square().mean()
    if dropping:
        net.zero_grad()
    loss.backward()
    peak = interval.stop()
    del kept
    assert peak is not None
    return peak / MB


def test_dropped_gradients_make_room_for_new_ones() -> None:
    assert measured(model()) < 1.5


def test_gradients_that_somebody_else_holds_make_none() -> None:
    assert measured(model(), keeping=True) > 4


def test_gradients_that_stay_make_none() -> None:
    assert 1 < measured(model(), dropping=False) < 2.5  # a gradient at a time, to be added


def test_parts_of_a_common_buffer_make_none() -> None:
    net = model()
    buffer = torch.zeros(DEPTH, WIDTH, WIDTH)
    for p, part in zip(net.parameters(), buffer, strict=True):
        p.grad = part
    assert measured(net) > 4
    del buffer


def test_a_peak_around_it_counts_what_it_has_seen_taken_and_freed() -> None:
    """Gradients that are taken inside of it are not freed twice."""
    net = model()

    def step() -> None:
        measured(net)

    step()
    net.zero_grad()
    curve = memory_curve(step)
    assert curve.end_nbytes >= 4 * MB  # the gradients of its second backward
    assert min(curve.nbytes) >= 0


@pytest.mark.parametrize("exact", [True, False])
def test_a_fitted_model_is_measured_alike_wherever_gradients_are_dropped(exact: bool) -> None:
    def trained(between: bool) -> tuple[int | None, list[Tensor]]:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        er.fit(net, budget="64 MiB", optimizer=optimizer, exact=exact)
        for _ in range(6):
            if not between:
                optimizer.zero_grad()
            loss = net(torch.randn(16, WIDTH)).square().mean()
            if between:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return er.summary(net).highest_nbytes, list(net.parameters())

    (after, theirs), (before, ours) = trained(between=True), trained(between=False)
    assert after == pytest.approx(before, rel=0.1)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
