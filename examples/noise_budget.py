"""Ask for an effect instead of bits: codes may add a tenth of the noise that mini-batches have.

    python examples/noise_budget.py

A small convolutional net on drawn images. Each tensor gets its own number of levels, which follow
the training; in the end a table shows the noise of each op, predicted and measured.
"""

import torch
from torch import nn
from torch.nn import functional as F

import elbowroom as er


def block(inputs: int, outputs: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


def main() -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
    model = nn.Sequential(block(3, 32), block(32, 32), block(32, 32), head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    control = er.adaptive.NoiseBudget(er.codec("dither", levels=16), noise=0.1)

    for step in range(60):
        y = torch.randint(4, (32,))
        x = torch.randn(32, 3, 24, 24) + 0.3 * y.view(-1, 1, 1, 1)
        optimizer.zero_grad()
        with er.saving(control) as saved:
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            held = saved.ledger.before_nbytes / saved.ledger.after_nbytes
            print(f"step {step}: loss {loss.item():.2f}, {held:.1f}x fewer bytes saved")

    print(saved.error_report())
    state = control.state_dict()  # goes into a checkpoint: a restart goes on with the same choices
    print(f"{len(state['rungs'])} tensors have settings of their own")


if __name__ == "__main__":
    main()
