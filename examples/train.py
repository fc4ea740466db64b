"""A training script that has never heard of elbowroom, for `elbowroom run` and `profile`."""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy


def block(channels: int, out: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
steps = parser.parse_args().steps

torch.manual_seed(0)
model = nn.Sequential(
    *(*block(3, 64), *block(64, 64), nn.MaxPool2d(2), *block(64, 128), *block(128, 128)),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
images, labels = torch.randn(40, 3, 32, 32), torch.randint(0, 10, (40,))
for step in range(steps):
    optimizer.zero_grad()
    loss = cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    print(step, loss.item())
