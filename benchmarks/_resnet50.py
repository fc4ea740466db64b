"""ResNet-50 and -101 for images of 224 x 224 (arXiv 1512.03385; stride in the 3x3 convolution)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elbowroom.demo.tasks import Batch


def _conv_norm(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up to four times `width`, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.down = _conv_norm(inputs, width, 1)
        self.middle = _conv_norm(width, width, 3, stride)
        self.up = _conv_norm(width, 4 * width, 1)
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else _conv_norm(inputs, 4 * width, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.relu(self.middle(self.relu(self.down(x)))))
        y += self.shortcut(x)
        z: Tensor = self.relu(y)
        return z


def resnet101() -> nn.Sequential:
    """3, 4, 23 and 3 bottlenecks."""
    return resnet50(depths=(3, 4, 23, 3))


def resnet50(
    classes: int = 1000, depths: tuple[int, ...] = (3, 4, 6, 3), first: int = 64
) -> nn.Sequential:
    """3, 4, 6 and 3 bottlenecks of width 64, 128, 256 and 512; first: another width than 64."""
    blocks: list[nn.Module] = []
    inputs = first
    for stage, count in enumerate(depths):
        width = first << stage
        for i in range(count):
            blocks.append(Bottleneck(inputs, width, 2 if stage and i == 0 else 1))
            inputs = 4 * width
    stem = (_conv_norm(3, first, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)
    )


@dataclass(frozen=True)
class Noise:
    """Random images and labels: bytes and seconds depend on neither."""

    batch: int
    classes: int = 1000

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(scores, targets)

    def batches(self, seed: int) -> Iterator[Batch]:
        draw = torch.Generator().manual_seed(seed)
        while True:
            images = torch.randn(self.batch, 3, 224, 224, generator=draw)
            yield images, torch.randint(self.classes, (self.batch,), generator=draw)
