"""The three stages: measure a step, plan it for a budget, follow the plan."""

import torch
import torch.nn.functional as F

import elbowroom as er
from elbowroom.demo.models import ResNet18
from elbowroom.units import show_nbytes


def main() -> None:
    torch.manual_seed(0)
    model = ResNet18(width=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    profile = er.measure(
        step, model=model, optimizer=optimizer
    )  # runs it three times; it really trains
    plain = er.plan(profile, budget="1 TiB").peak
    print(
        f"plain autograd needs {show_nbytes(plain)}; {show_nbytes(profile.saved_nbytes)} are saved"
    )

    for share in (0.8, 0.6, 0.5):
        try:
            plan = er.plan(profile, budget=int(share * plain), exact=True)
        except er.errors.BudgetTooSmall as error:
            print(f"{share:.0%} of that, exact: no. The least is {show_nbytes(error.least_nbytes)}")
            continue
        print(plan)

    plan = er.plan(profile, budget=int(0.5 * plain))  # lossy if it must be
    print(plan.explain())
    for _ in range(3):
        optimizer.zero_grad()
        with er.following(plan):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
