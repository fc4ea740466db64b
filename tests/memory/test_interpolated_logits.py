"""Logits of a segmentation, which are interpolated: the loss saves them at the images' full size,
and they are made again from a copy of the small ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.runtime.saving import Saving
from programs import same

CLASSES, SIZE = 12, 64
_Loss = Callable[[Tensor, Tensor], Tensor]


def of_maps(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=255)


class Segmentation(nn.Module):
    def __init__(self, mode: str, loss: _Loss, times: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Conv2d(3, 16, 3, stride=times, padding=1)
        self.logits = nn.Conv2d(16, CLASSES, 1)
        self.mode, self.loss = mode, loss
        corners = {"align_corners": False} if mode != "nearest" else {}
        self.enlarge = lambda x: F.interpolate(x, size=(SIZE, SIZE), mode=mode, **corners)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.enlarge(self.logits(self.features(x).relu())), labels)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    labels = torch.randint(0, CLASSES, (4, SIZE, SIZE))
    labels[:, :4] = 255
    return torch.randn(4, 3, SIZE, SIZE), labels


def gradients(net: nn.Module, loss: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]


def plain(net: nn.Module) -> list[Tensor]:
    return gradients(net, net(*batch()))


def held_nbytes(saved: Saving, consumer: str) -> int:
    return sum(row.after_nbytes for row in saved.ledger.rows if row.consumer == consumer)


FULL = 4 * 4 * CLASSES * SIZE * SIZE  # bytes of the large logits


@pytest.mark.parametrize("how", [{}, {"policy": "dither", "levels": 16}])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_only_the_small_logits_are_held(how: dict[str, Any], mode: str) -> None:
    net = Segmentation(mode, of_maps)
    for _ in range(3):  # examined, and then by a script
        saved = er.saving(**how, min_nbytes=0)
        with saved:
            out = net(*batch())
        found = gradients(net, out)
        # Without what gradients do not read, each is plain's: a code of features alone adds noise.
        assert same(found if not how else found[:1], plain(net) if not how else plain(net)[:1])
        # The bias's gradient reads nothing but the logits, in their exact bits.
        assert torch.equal(found[-1], plain(net)[-1])
        kept = [r for r in saved.ledger.rows if r.consumer in ("cross_entropy", "interpolate")]
        labels = 8 * 4 * SIZE * SIZE
        assert sum(r.after_nbytes for r in kept) <= FULL / 16 + labels + 1024


@pytest.mark.parametrize("times", [1, 2])
def test_logits_that_are_hardly_larger_have_no_copy(times: int) -> None:
    """A copy of a quarter of them takes more room than a code does."""
    net = Segmentation("bilinear", of_maps, times)
    with er.saving("dither", levels=16, min_nbytes=0) as saved:
        out = net(*batch())
    assert 0 < held_nbytes(saved, "cross_entropy") - 8 * 4 * SIZE * SIZE <= FULL / 7
    assert held_nbytes(saved, "interpolate") == 0
    gradients(net, out)


def test_who_forbids_to_rebuild_gets_a_code() -> None:
    net = Segmentation("bilinear", of_maps)
    with er.saving("dither", levels=16, rebuild=False, min_nbytes=0) as saved:
        net(*batch())
    assert held_nbytes(saved, "interpolate") == 0
    assert FULL / 9 < held_nbytes(saved, "cross_entropy") - 8 * 4 * SIZE * SIZE <= FULL / 7


def test_small_logits_that_the_program_changes_are_not_read() -> None:
    """They are copied as they were, or the large ones are held."""
    net = Segmentation("bilinear", of_maps)

    def changed(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        small = net.logits(net.features(x).relu())
        value = of_maps(net.enlarge(small), labels)
        with torch.no_grad():
            small.mul_(3)
        return value, small

    want = gradients(net, changed(*batch())[0])
    with er.saving(min_nbytes=0):
        value, _small = changed(*batch())
    assert same(gradients(net, value), want)


def test_a_plan_makes_them_again() -> None:
    net = Segmentation("bilinear", of_maps)
    want = plain(net)
    weights = sum(p.nbytes for p in net.parameters())

    def step() -> list[Tensor]:
        return gradients(net, net(*batch()))

    peak = er.peak(step) + weights
    # Beside the large logits, and what the loss makes of them, as they pass: nothing of their size.
    er.fit(net, budget=peak - FULL // 2, exact=True, min_nbytes=0)
    for _ in range(5):
        assert same(step(), want)
    assert er.peak(step) + weights <= peak - FULL // 2
    er.release(net)
