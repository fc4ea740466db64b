"""One line: train a small GPT inside a budget of bytes, and see which setting was chosen for it."""

import logging

import torch
import torch.nn.functional as F

import elbowroom as er
from elbowroom.demo.models import GPT


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    torch.manual_seed(0)
    model = GPT(width=96, depth=3, context=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (8, 129))

    model = er.fit(model, budget="24 MiB", optimizer=optimizer)
    for step in range(6):
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")
    er.release(model)

    try:
        er.fit(model, budget="1 MiB", optimizer=optimizer)
        model(tokens[:, :-1])
    except er.errors.BudgetTooSmall as error:
        print(error)
    finally:
        er.release(model)


if __name__ == "__main__":
    main()
