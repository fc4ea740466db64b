"""The arguments of a replayed call are compared with those of its script in one call."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elbowroom.runtime.replay import compiled
from elbowroom.runtime.replay.script import NOWHERE, Like
from elbowroom.runtime.slot import Geometry

REPLAY: Any = SimpleNamespace()  # nothing is asked of it: no place is compared


def like(x: Tensor) -> Like:
    traits = x.dtype, x.device, x.requires_grad, x.layout
    fixed = (x, x.data_ptr()) if type(x) is nn.Parameter else ()
    return Like(type(x), traits, Geometry.of(x), NOWHERE, NOWHERE, *fixed)


def compared() -> tuple[Callable[[Any, Any], bool], list[Any]]:
    values = [torch.randn(4, 6, requires_grad=True), 2.0, nn.Parameter(torch.randn(6))]
    return compiled._alike([(0, like(values[0])), (2, like(values[2]))]), values


def test_alike_tensors_are_compared_in_one_call_from_the_second_time_on(monkeypatch):
    are_alike, values = compared()
    assert are_alike(REPLAY, values)
    monkeypatch.setattr(compiled, "_is_of_kind", None)
    for _ in range(3):
        values[0] = torch.randn(4, 6, requires_grad=True)
        assert are_alike(REPLAY, values)


OTHERS: dict[str, Callable[[], Any]] = {
    "dtype": lambda: torch.randn(4, 6, dtype=torch.float64, requires_grad=True),
    "shape": lambda: torch.randn(6, 4, requires_grad=True),
    "dimensions": lambda: torch.randn(4, 6, 1, requires_grad=True),
    "strides": lambda: torch.randn(6, 4).t().requires_grad_(),
    "offset": lambda: torch.randn(5, 6)[1:].requires_grad_(),
    "requires_grad": lambda: torch.randn(4, 6),
    "class": lambda: nn.Parameter(torch.randn(4, 6)),
    "device": lambda: torch.randn(4, 6, device="meta", requires_grad=True),
    "layout": lambda: torch.randn(4, 6).to_sparse().requires_grad_(),
    "no tensor": lambda: 3.0,
    "nothing": lambda: None,
}


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_what_differs_is_found_before_and_after(other, seen):
    are_alike, values = compared()
    assert not seen or are_alike(REPLAY, values)
    assert not are_alike(REPLAY, [other(), *values[1:]])
    assert are_alike(REPLAY, values)


def test_a_parameter_must_be_the_same_one_in_the_same_place():
    are_alike, values = compared()
    assert are_alike(REPLAY, values)
    assert not are_alike(REPLAY, [*values[:2], nn.Parameter(values[2].detach())])
    values[2].data = values[2].detach().clone()
    assert not are_alike(REPLAY, values)


def test_tensors_that_have_other_dispatch_keys_alone_are_as_before():
    are_alike, values = compared()
    assert are_alike(REPLAY, values)
    with torch.autocast("cpu"), torch.no_grad():
        assert are_alike(REPLAY, values)
    assert are_alike(REPLAY, values)
