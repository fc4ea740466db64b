"""Integers whose range a graph tells, and those of which it tells nothing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from elbowroom.codecs import Facts
from elbowroom.compiled.codable import range_of

PLACES = Facts(smallest=0, largest=6)  # of a dimension of 7
READ = Facts(smallest=-7, largest=6)


def found(f: Callable[..., Tensor], *given: Tensor) -> Facts | None:
    """What is known of the integer that f passes to `kept`."""
    gm = fx.experimental.proxy_tensor.make_fx(f)(*given)
    ids = [n for n in gm.graph.nodes if n.op != "output" and n.meta["val"] is not None]
    ids = [n for n in ids if getattr(n.meta["val"], "dtype", None) is torch.int64]
    after = set(gm.graph.nodes)
    return range_of(ids[-1], after)


X, I = torch.randn(5, 7), torch.zeros(5, 7, dtype=torch.int64)


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x: x.sort(dim=1)[1], PLACES),
        (lambda x: x.topk(3, dim=1)[1], PLACES),
        (lambda x: x.argmax(dim=1), PLACES),
        (lambda x: x.argmax(dim=1).unsqueeze(0).expand(3, 5).clone(), PLACES),
        (lambda x: x.min(dim=1)[1], PLACES),
        (lambda x: x.argmax(), None),  # a place among 35
        (lambda x: x.argmax(dim=1) * 1000, None),
        (lambda x: x.sort(dim=1)[0].long(), None),
    ],
)
def test_places_are_below_the_size_of_what_was_searched(f, expected) -> None:
    assert found(f, X) == expected


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x, i: x.gather(1, i), READ),
        (lambda x, i: x.gather(1, i.view(5, 7).clone()), READ),
        (lambda x, i: x.gather(1, i) + x.gather(0, i), READ),
        (lambda x, i: x[:, i[0]], READ),
        (lambda x, i: torch.zeros_like(x).scatter_add(1, i, x), READ),
        (lambda x, i: x.gather(1, i) * i, None),
        (lambda x, i: x.gather(1, i.clamp(0, 6)) * (i != -100), None),
        (lambda x, i: torch.zeros(5, 7, dtype=torch.int64).scatter(1, i, i), None),
        (lambda x, i: torch.where(i < 0, 0.0, x), None),
    ],
)
def test_what_only_indexes_is_within_what_it_indexes(f, expected) -> None:
    gm = fx.experimental.proxy_tensor.make_fx(f)(X, I)
    index = gm.graph.find_nodes(op="placeholder")[1]
    assert range_of(index, set(gm.graph.nodes)) == expected


def test_nothing_is_known_of_what_backward_does_not_read() -> None:
    gm = fx.experimental.proxy_tensor.make_fx(lambda x, i: x.gather(1, i))(X, I)
    assert range_of(gm.graph.find_nodes(op="placeholder")[1], set()) is None
