"""Train under a hard cap on the memory of this process: run by `test_cap.py`, in a fresh one.

Prints one JSON object: for each case the losses, or the first line of the error that ended it.
"""

import ctypes
import json
import resource
import sys

import torch
from torch import nn

import elbowroom as er
from elbowroom.measure import peak

WIDTH, ROWS, STEPS = 64, 12288, 2
MIB = 1 << 20
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Dropout(0.1))
            for _ in range(8)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def make():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randn(ROWS, WIDTH)


def one(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def train(run=lambda step: step(), budget=None):
    model, optimizer, x = make()
    if budget is not None:
        er.fit(model, budget=budget, optimizer=optimizer, exact=True)
    try:
        return [run(lambda: one(model, optimizer, x)) for _ in range(STEPS)]
    except (RuntimeError, MemoryError) as error:
        return str(error).strip().splitlines()[0]
    finally:
        er.release(model)


def peak_nbytes():
    model, optimizer, x = make()
    one(model, optimizer, x)
    return peak(lambda: one(model, optimizer, x))


def data_nbytes():
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["VmData"].split()[0]) << 10


class Cap:
    """Inside, this process may take so many bytes more than it has now."""

    def __init__(self, nbytes):
        self.nbytes = nbytes

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (data_nbytes() + self.nbytes, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_DATA, self.before)


def main():
    libc = ctypes.CDLL(None)  # else what is freed stays with the process
    libc.mallopt(_M_MMAP_THRESHOLD, 128 << 10)
    libc.mallopt(_M_TRIM_THRESHOLD, 0)
    told = {"plain": train()}
    needs = peak_nbytes()
    budget, cap = int(0.6 * needs), int(0.85 * needs)
    train(budget=budget)  # compilers and solvers have taken what they take
    with Cap(cap):
        told["plain capped"] = train()
        told["fitted capped"] = train(budget=budget)
        # A budget that the device does not have: found out, and put right.
        told["repeated capped"] = train(er.step, budget=2 * needs)
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
