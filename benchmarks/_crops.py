"""The small networks of the founding notes, on crops of pictures: which of 16 is it from?

    chain   nine times conv, batch norm, ReLU: 3 of 16 channels, 3 of 32, 3 of 64
    mini    a residual network of the same widths: a stem and three basic blocks

The pictures are those that scikit-image brings along; a crop has 32 x 32 gray pixels, and noise of
half their spread.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elbowroom.demo.models import BasicBlock
from elbowroom.demo.tasks import Batch

_PICTURES = (
    *("astronaut.png", "brick.png", "camera.png", "cell.png", "chelsea.png", "clock_motion.png"),
    *("coffee.png", "coins.png", "grass.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png"),
    *("moon.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg"),
)
_SIZE, _NOISE = 32, 0.5


@dataclass(frozen=True)
class Crops:
    """A task as those of `elbowroom.demo.tasks`, without a score. name: "chain" or "mini"."""

    name: str
    width: int = 16
    batch: int = 48
    origin: str = "crops of 32 x 32 from 16 pictures of scikit-image, and noise"

    def model(self) -> nn.Module:
        return _chain(self.width) if self.name == "chain" else _mini(self.width)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Images [B, 1, 32, 32] and which picture they are of [B], without end."""
        pictures, draw = _pictures(), torch.Generator().manual_seed(seed)
        while True:
            labels = torch.randint(len(pictures), (self.batch,), generator=draw)
            x = torch.stack([_crop(pictures[k], draw) for k in labels.tolist()])[:, None]
            yield x + _NOISE * torch.randn(x.shape, generator=draw), labels

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(scores, targets)


@cache
def _pictures() -> tuple[Tensor, ...]:
    """In gray, each of mean 0 and spread 1. Raises ImportError without scikit-image."""
    import skimage.data
    from skimage.color import rgb2gray
    from skimage.io import imread

    found = []
    for name in _PICTURES:
        pixels = imread(Path(skimage.data.__file__).parent / name)
        gray = rgb2gray(pixels[..., :3]) if pixels.ndim == 3 else pixels / 255
        picture = torch.from_numpy(np.ascontiguousarray(gray, dtype=np.float32))
        found.append((picture - picture.mean()) / picture.std())
    return tuple(found)


def _crop(picture: Tensor, draw: torch.Generator) -> Tensor:
    rows, columns = (
        int(torch.randint(n - _SIZE, (), generator=draw))
        for n in (picture.shape[0], picture.shape[1])
    )
    return picture[rows : rows + _SIZE, columns : columns + _SIZE]


def _chain(width: int) -> nn.Module:
    widths = [1, *(width * 2 ** (i // 3) for i in range(9))]
    layers = [
        layer
        for i, (inputs, outputs) in enumerate(pairwise(widths))
        for layer in _conv_norm_relu(inputs, outputs, 2 if i in (3, 6) else 1)
    ]
    return nn.Sequential(*layers, *_head(4 * width))


def _mini(width: int) -> nn.Module:
    blocks = BasicBlock(width, width, 1), *(BasicBlock(n, 2 * n, 2) for n in (width, 2 * width))
    return nn.Sequential(*_conv_norm_relu(1, width, 1), *blocks, *_head(4 * width))


def _conv_norm_relu(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def _head(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, len(_PICTURES))]
