"""Hold what autograd saves in a tenth of the bytes, and read the ledger.

Ends in a few seconds on a CPU.
"""

import torch
import torch.nn.functional as F
from torch import nn

import elbowroom as er


def block(inputs: int, outputs: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def main() -> None:
    torch.manual_seed(0)
    features = nn.Sequential(block(3, 32), block(32, 32), nn.MaxPool2d(2), block(32, 64))
    model = nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))

    for step in range(5):
        optimizer.zero_grad()
        with er.saving("dither", bits=3) as saved:
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}, {saved.ledger!r}")
    print(saved.ledger)


if __name__ == "__main__":
    main()
