"""A settled compiled step enters as many functions of ours whatever its graph saves."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.compiled import partition
from elbowroom.compiled.expand import expand
from uncompiled import nothing_compiled as nothing_compiled
from uncompiled import uncompiled as uncompiled

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
OURS = str(Path(er.__file__).parent)
# Dynamo asks this one for each op that runs in Python; in a compiled graph none does.
ASKED = str(Path(OURS) / "runtime" / "compiler.py")


def net(depth: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [one for _ in range(depth) for one in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(64, 64)), torch.randn(256, 64)


def entered(step: Callable[[], None]) -> int:
    """The functions of ours that a step enters."""
    count = 0

    def look(frame, event, _) -> None:
        nonlocal count
        path = frame.f_code.co_filename
        count += event == "call" and path.startswith(OURS) and path != ASKED

    sys.setprofile(look)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def settled(model: nn.Module, x: Tensor, policy: str, **fields: int) -> int:
    called = torch.compile(model)

    def step() -> None:
        with er.saving(policy, **fields, min_nbytes=0):
            loss = called(x).square().mean()
        loss.backward()

    for _ in range(4):
        step()
    return entered(step)


def test_codes_that_are_written_out_enter_nothing_for_each_tensor(uncompiled, monkeypatch) -> None:
    """As on a GPU: the draw of a seed is all that is left of our ops."""
    monkeypatch.setattr(partition, "expand", lambda gm: expand(gm, "cpu"))
    few, many = (settled(*net(depth), "dither", levels=16) for depth in (1, 3))
    assert few == many


def test_an_exact_step_enters_nothing_for_each_tensor(uncompiled) -> None:
    counts = [settled(*net(depth), "exact") for depth in (2, 6)]
    assert counts[0] == counts[1]


def test_a_fitted_step_enters_nothing_for_each_tensor(uncompiled) -> None:
    counts = []
    for depth in (2, 6):
        model, x = net(depth)
        model = er.fit(torch.compile(model), budget="1 GiB", exact=True)

        def step(model: nn.Module = model, x: Tensor = x) -> None:
            model(x).square().mean().backward()

        for _ in range(4):
            step()
        counts.append(entered(step))
    assert counts[0] == counts[1]
