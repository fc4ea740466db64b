"""Tasks that the demo can train: each is a model, its batches, its loss and its score.

    resnet18   ten kinds of clothing                     score: share of test images named right
    unet       the same, pixel by pixel, under noise     score: share of test pixels named right
    gpt        the next byte of Python source            score: share of held-out bytes guessed

Everything random comes from generators that are seeded here, so that two runs with one seed see the
same weights, the same batches and the same noise, whatever happens between forward and backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elbowroom.demo.data import Images, Split, Text, load_images, load_text
from elbowroom.demo.models import GPT, ResNet18, UNet

Batch = tuple[Tensor, Tensor]  # inputs, targets


class Task(Protocol):
    """A model with its data. `score` is a share of right answers, 0 to 1."""

    @property
    def name(self) -> str: ...
    @property
    def origin(self) -> str: ...
    @property
    def score_name(self) -> str: ...
    @property
    def width(self) -> int: ...
    @property
    def batch(self) -> int: ...

    def model(self) -> nn.Module: ...
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer: ...
    def batches(self, seed: int) -> Iterator[Batch]: ...
    def loss(self, scores: Tensor, targets: Tensor) -> Tensor: ...
    def test_batches(self) -> Iterator[Batch]: ...


def _shuffled(count: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Indices [batch], epoch after epoch without end; the short rest of an epoch is dropped."""
    while True:
        order = torch.randperm(count, generator=generator)
        for start in range(0, count - batch + 1, batch):
            yield order[start : start + batch]


@dataclass(frozen=True)
class Clothing:
    """ResNet-18 on Fashion-MNIST."""

    images: Images
    width: int
    batch: int
    name: str = "resnet18"
    score_name: str = "test accuracy"

    @property
    def origin(self) -> str:
        """Source of the data."""
        return self.images.origin

    def model(self) -> nn.Module:
        """A fresh model, from torch's global generator."""
        return ResNet18(self.width)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD with momentum, the recipe of residual networks."""
        return torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4
        )

    def batches(self, seed: int) -> Iterator[Batch]:
        """Images [B, 1, 28, 28] and labels [B], without end."""
        train, generator = self.images.train, torch.Generator().manual_seed(seed)
        for index in _shuffled(len(train), self.batch, generator):
            yield train.pixels(index), train.labels[index]

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy, in nats an image."""
        return F.cross_entropy(scores, targets)

    def test_batches(self) -> Iterator[Batch]:
        """The whole test split."""
        test = self.images.test
        for start in range(0, len(test), 500):
            part = slice(start, start + 500)
            yield test.pixels(part), test.labels[part]


@dataclass(frozen=True)
class Outline:
    """U-Net on Fashion-MNIST: class k at the garment's pixels, 10 elsewhere, from a noisy image."""

    images: Images
    width: int
    batch: int
    name: str = "unet"
    score_name: str = "test pixel accuracy"

    @property
    def origin(self) -> str:
        """Source of the data, and what was done to it."""
        return f"{self.images.origin}, with noise"

    def model(self) -> nn.Module:
        """A fresh model, from torch's global generator."""
        return UNet(self.width)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Noisy images [B, 1, 28, 28] and classes a pixel [B, 28, 28], without end."""
        train, generator = self.images.train, torch.Generator().manual_seed(seed)
        for index in _shuffled(len(train), self.batch, generator):
            yield self._noisy(train, index, generator)

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy, in nats a pixel."""
        return F.cross_entropy(scores, targets)

    def test_batches(self) -> Iterator[Batch]:
        """The whole test split, always under the same noise."""
        test, generator = self.images.test, torch.Generator().manual_seed(0)
        for start in range(0, len(test), 500):
            yield self._noisy(test, slice(start, start + 500), generator)

    @staticmethod
    def _noisy(split: Split, index: Tensor | slice, generator: torch.Generator) -> Batch:
        x = split.pixels(index)
        labels = split.labels[index].view(-1, 1, 1)
        targets = torch.where(split.images[index] > 25, labels, 10)  # 25 of 255: not quite black
        return x + torch.randn(x.shape, generator=generator), targets


@dataclass(frozen=True)
class NextByte:
    """A small GPT on Python source: which byte comes next?"""

    text: Text
    width: int
    batch: int
    context: int = 128
    name: str = "gpt"
    score_name: str = "held-out byte accuracy"

    @property
    def origin(self) -> str:
        """Source of the data."""
        return self.text.origin

    def model(self) -> nn.Module:
        """A fresh model, from torch's global generator."""
        return GPT(self.width, context=self.context)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Bytes [B, T] and the ones after them [B, T], from random places, without end."""
        generator = torch.Generator().manual_seed(seed)
        last = len(self.text.train) - self.context - 1
        while True:
            starts = torch.randint(0, last, (self.batch,), generator=generator)
            yield self._windows(self.text.train, starts)

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy, in nats a byte."""
        return F.cross_entropy(scores.flatten(0, -2), targets.flatten())

    def test_batches(self) -> Iterator[Batch]:
        """512 windows spread evenly over the held-out bytes."""
        last = len(self.text.test) - self.context - 1
        for starts in torch.linspace(0, last, 512).long().view(8, 64):
            yield self._windows(self.text.test, starts)

    def _windows(self, tokens: Tensor, starts: Tensor) -> Batch:
        index = starts.unsqueeze(1) + torch.arange(self.context + 1)  # [B, T + 1]
        window = tokens[index].long()
        return window[:, :-1], window[:, 1:]


FULL_WIDTHS = {"resnet18": 64, "unet": 64, "gpt": 256}
_DEFAULTS = {"resnet18": (32, 128), "unet": (16, 64), "gpt": (128, 32)}  # width, batch; 2 CPU cores


def task(
    name: str, *, width: int | None = None, batch: int | None = None, folder: Path | None = None
) -> Task:
    """The task called `name`; None is the size that fits the demo's three minutes.

    `folder` holds IDX files for the two image tasks. Raises ValueError and DataError.
    """
    if name not in _DEFAULTS:
        raise ValueError(f"no model {name!r}; there are {', '.join(_DEFAULTS)}")
    default_width, default_batch = _DEFAULTS[name]
    width, batch = (
        _positive("width", width, default_width),
        _positive("batch", batch, default_batch),
    )
    if name == "gpt":
        if width % 32 != 0:
            raise ValueError(f"the gpt has heads of 32, so its width divides by 32; got {width}")
        if folder is not None:
            raise ValueError("--data names a folder of images; the gpt trains on text")
        return NextByte(load_text(), width, batch)
    images = load_images(folder)
    if batch > len(images.train):
        raise ValueError(
            f"a batch of {batch} is more than the {len(images.train)} images there are"
        )
    return Clothing(images, width, batch) if name == "resnet18" else Outline(images, width, batch)


def _positive(name: str, value: int | None, default: int) -> int:
    if value is not None and value < 1:
        raise ValueError(f"{name} is at least 1; got {value}")
    return default if value is None else value
