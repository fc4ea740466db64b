"""Three small networks of the kinds people train: a ResNet-18, a GPT, and a U-Net.

They are written the ordinary way (in-place ReLU, fused attention, nothing rearranged for
elbowroom), because the point of the demo is that a model needs no change. `width` scales all three;
the full width is the default.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and in-place ReLU, and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, inputs, H, W] to [B, outputs, H / stride, W / stride]."""
        y: Tensor = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        z: Tensor = self.relu(y)
        return z


class ResNet18(nn.Module):
    """The CIFAR form of ResNet-18: 3x3 stem, no max-pool, stages of 1, 2, 4 and 8 times `width`."""

    def __init__(self, width: int = 64, channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    BasicBlock(inputs, outputs, 1 if stage == 0 else 2),
                    BasicBlock(outputs, outputs, 1),
                )
                for stage, (inputs, outputs) in enumerate(pairwise(sizes))
            )
        )
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, channels, 28, 28] to scores [B, classes]."""
        y = self.stages(self.stem(x))  # [B, 8 width, 4, 4]
        scores: Tensor = self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))
        return scores


class GPTBlock(nn.Module):
    """Pre-norm attention and MLP; attention is PyTorch's fused kernel: no T x T matrix."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, width] to the same shape."""
        B, T, C = x.shape
        heads = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, C // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [B, heads, T, C / heads]
        y: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.proj(y.transpose(1, 2).reshape(B, T, C)))
        y = self.dropout(self.mlp(self.norm2(x)))
        return x + y


class GPT(nn.Module):
    """A byte-level language model: 256 symbols, learned positions, output tied to nothing."""

    def __init__(
        self, width: int = 192, depth: int = 4, context: int = 128, dropout: float = 0.1
    ) -> None:
        super().__init__()
        heads = max(1, width // 32)
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(GPTBlock(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes [B, T] int64 to scores of the next byte [B, T, 256]."""
        x = self.dropout(self.token(tokens) + self.position[: tokens.shape[1]])
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def _double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """A 2-D U-Net: two poolings, 28 -> 14 -> 7 and back, skip connections by concatenation."""

    def __init__(self, width: int = 32, channels: int = 1, classes: int = 11) -> None:
        super().__init__()
        self.down1 = _double_conv(channels, width)
        self.down2 = _double_conv(width, 2 * width)
        self.bottom = _double_conv(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join2 = _double_conv(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join1 = _double_conv(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, channels, H, W] to scores [B, classes, H, W]; 4 divides H and W."""
        high = self.down1(x)
        middle = self.down2(F.max_pool2d(high, 2))
        low = self.bottom(F.max_pool2d(middle, 2))
        middle = self.join2(torch.cat([self.up2(low), middle], dim=1))
        high = self.join1(torch.cat([self.up1(middle), high], dim=1))
        scores: Tensor = self.head(high)
        return scores
