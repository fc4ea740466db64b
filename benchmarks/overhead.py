"""What it costs to look: a step under hooks that change nothing, against the same step without.

    ./scripts/bench overhead [--quick]

    identity   torch's own saved_tensors_hooks with functions that do nothing: the floor in Python
    keep       er.saving("keep"): every save is named, decided on, counted, and kept in the first
               step; the next ones follow its script
    plan       er.following an exact plan for 97 % of what plain autograd takes: only ops that it
               does something with are examined. What its actions themselves are predicted to take
               stands beside it
    saves      tensors that autograd saves in one step, parameters among them
    a layer    forward milliseconds of the plain net over its layers (modules without children)

Ratios are medians over interleaved pairs of whole steps, forward and backward. The stacks are 20
times convolution, BatchNorm and ReLU on maps whose size is chosen, before anything is compared, so
that a layer takes about as long as the row says.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from _common import arguments, facts, finish, out_path, paired_dict, target, tell, times
from torch import Tensor, nn

import elbowroom as er
from elbowroom.demo.models import GPT, ResNet18
from elbowroom.measure import paired
from elbowroom.plan.make import plain_peak
from elbowroom.plan.plan import Plan

NAME = "overhead"
MOST = 1.03  # of a step, where a layer takes 1 ms or more


@dataclass
class Case:
    """A net, and what it is given."""

    name: str
    net: nn.Module
    x: Tensor

    def step(self, context: Callable[[], AbstractContextManager[Any]] | None = None) -> None:
        self.net.zero_grad()
        if context is None:
            loss = self.net(self.x).square().mean()
        else:
            with context():
                loss = self.net(self.x).square().mean()
        loss.backward()

    @property
    def layers(self) -> int:
        return sum(not list(module.children()) for module in self.net.modules())

    def forward_ms(self) -> float:
        """The least of five forwards."""
        clocked = []
        for _ in range(5):
            begun = time.perf_counter()
            self.net(self.x)
            clocked.append(time.perf_counter() - begun)
        return 1e3 * min(clocked)

    def saves(self) -> int:
        count = 0

        def pack(x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return x

        self.step(lambda: torch.autograd.graph.saved_tensors_hooks(pack, _same))
        return count


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=30, help="pairs of steps (30)")
    options = parser.parse_args()
    if options.quick:
        options.pairs = 2
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    known = facts()
    rows = [_row(case, options.pairs) for case in _cases(quick=options.quick)]
    finish(_result(rows, options.pairs, known), out_path(options, NAME))


def _cases(*, quick: bool) -> list[Case]:
    stacks = [_stack(layer_ms) for layer_ms in ((0.3,) if quick else (0.3, 1.0, 3.0))]
    if quick:
        return stacks
    resnet = Case("ResNet-18, width 32, batch 96", ResNet18(32), torch.randn(96, 1, 28, 28))
    gpt = Case(
        "GPT, 4 blocks of width 256, 8 x 256",
        GPT(width=256, depth=4, context=256),
        torch.randint(0, 255, (8, 256)),
    )
    return [*stacks, resnet, gpt]


def _stack(layer_ms: float) -> Case:
    net = nn.Sequential(*(part for _ in range(20) for part in _block()))
    size = 8
    while True:
        case = Case(f"20 x (conv, BatchNorm, ReLU), {layer_ms} ms", net, _maps(size))
        if case.forward_ms() / case.layers >= layer_ms:
            return case
        size += 4


def _block() -> tuple[nn.Module, ...]:
    return nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)


def _maps(size: int) -> Tensor:
    return torch.randn(16, 32, size, size)


def _row(case: Case, pairs: int) -> dict[str, Any]:
    def timed(context: Any) -> Any:
        return paired(case.step, lambda: case.step(context), pairs=pairs)

    identity = timed(lambda: torch.autograd.graph.saved_tensors_hooks(_same, _same))
    keep = timed(lambda: er.saving("keep"))
    plan = _mild(case)
    planned = timed(lambda: er.following(plan))
    saves, layer_ms = case.saves(), case.forward_ms() / case.layers
    tell(f"{case.name}: {keep.ratio:.3f}, a plan {planned.ratio:.3f}")
    return {
        "name": case.name,
        "layers": case.layers,
        "layer_ms": layer_ms,
        "saves": saves,
        "identity": paired_dict(identity),
        "keep": paired_dict(keep),
        "plan": paired_dict(planned),
        "predicted": 1 + plan.slowdown,
        "beyond": planned.ratio - plan.slowdown,
        "shown": [times(identity), times(keep), times(planned)],
    }


def _mild(case: Case) -> Plan:
    """A plan that does little."""
    profile = er.measure(case.step)
    return er.plan(profile, budget=int(0.97 * plain_peak(profile)), exact=True)


def _same(x: Tensor) -> Tensor:
    return x


def _result(rows: list[dict[str, Any]], pairs: int, known: dict[str, Any]) -> dict[str, Any]:
    slow = [row for row in rows if row["layer_ms"] >= 0.95]
    worst = max((row["keep"]["ratio"] for row in slow), default=float("nan"))
    beyond = max((row["beyond"] for row in slow), default=float("nan"))
    return {
        "name": NAME,
        "claim": "looking at every saved tensor costs at most 3 % where a layer takes 1 ms or more",
        **known,
        "n": pairs,
        "settings": {"pairs": pairs},
        "rows": rows,
        "table": {
            "head": [
                "net",
                "a layer ms",
                "step ms",
                "saves",
                "identity",
                "keep",
                "plan",
                "predicted",
            ],
            "rows": [
                [
                    row["name"],
                    f"{row['layer_ms']:.2f}",
                    f"{1e3 * row['keep']['median_a_s']:.0f}",
                    str(row["saves"]),
                    *row["shown"],
                    f"{row['predicted']:.3f}",
                ]
                for row in rows
            ],
        },
        "targets": [
            target(
                "hook overhead <= 3 % of a step for layers of 1 ms or slower",
                f"at most {worst:.3f} over {len(slow)} nets",
                worst <= MOST,
            ),
            target(
                "a plan's step <= 3 % beyond what its actions take",
                f"at most {beyond:.3f} over {len(slow)} nets",
                beyond <= MOST,
            ),
        ],
        "notes": [],
    }


if __name__ == "__main__":
    main()
