"""What an optimizer's step costs a small parameter, and a step of one large one, beside torch's.

    ./scripts/bench small_parameters [--quick] [--threads 1]

AdamW steps on 400 parameters (in turn 32 x 32 and 32, gradients given), where nearly all is the way
to the kernel, and on one of 10 million elements, where nearly all is the kernel. Ours hold their
states in fp32, int8 and coat; torch's are `foreach=True` and `fused=True`. All take turns in one
process, five steps each; a figure is the least of all steps, and so the one that other work on the
machine disturbs least. Ours look whether gradients are finite, torch's do not.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _common import arguments, facts, finish, out_path, target, tell
from torch import Tensor, nn

import elbowroom as er

FUSED, FOREACH = "torch, fused", "torch, foreach"
IN_A_ROW = 5  # steps of an optimizer in its turn: the first finds the others' data in the caches
STATES = "fp32", "int8", "coat"
Make = Callable[[list[Tensor]], torch.optim.Optimizer]


def makers() -> Iterator[tuple[str, Make]]:
    yield FUSED, lambda params: torch.optim.AdamW(params, fused=True)
    yield FOREACH, lambda params: torch.optim.AdamW(params, foreach=True)
    for state in STATES:
        yield state, lambda params, state=state: er.optim.AdamW(params, state=state)  # type: ignore[misc]


def params(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    made: list[Tensor] = []
    for shape in shapes:
        p = nn.Parameter(torch.randn(shape, generator=draw))
        p.grad = torch.randn(shape, generator=draw) * 1e-2
        made.append(p)
    return made


def least_s(shapes: list[tuple[int, ...]], turns: int) -> dict[str, float]:
    """Seconds of a step, by optimizer."""
    steps = {name: make(params(shapes)).step for name, make in makers()}
    for step in steps.values():
        for _ in range(3):
            step()
    found = dict.fromkeys(steps, float("inf"))
    for _ in range(turns):
        for name, step in steps.items():
            for _ in range(IN_A_ROW):
                start_s = time.perf_counter()
                step()
                found[name] = min(found[name], time.perf_counter() - start_s)
    return found


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    started = facts()
    count, side, turns = (20, 64, 2) if options.quick else (400, 3200, 60)
    small = least_s([(32, 32) if i % 2 else (32,) for i in range(count)], turns)
    tell(f"{count} small parameters")
    large = least_s([(side, side)], turns)
    rows = [
        {
            "optimizer": name,
            "us_a_small_parameter": small[name] * 1e6 / count,
            "ns_an_element": large[name] * 1e9 / side**2,
            "large_over_fused": large[name] / large[FUSED],
        }
        for name, _ in makers()
    ]
    name = "small-parameters" + ("" if options.threads != 1 else "-one-thread")
    finish(result(started, rows, count, side, turns, name), out_path(options, name))


def result(
    started: dict[str, Any],
    rows: list[dict[str, Any]],
    count: int,
    side: int,
    turns: int,
    name: str,
) -> dict[str, Any]:
    by = {row["optimizer"]: row for row in rows}
    targets = [
        target(
            f"{state}: at most 10 us a small parameter",
            f"{by[state]['us_a_small_parameter']:.1f} us",
            by[state]["us_a_small_parameter"] <= 10,
        )
        for state in ("fp32", "int8")
    ] + [
        target(
            f"{state}: a step of {side**2:,} elements at most {limit} x torch's fused",
            f"{by[state]['large_over_fused']:.2f} x",
            by[state]["large_over_fused"] <= limit,
        )
        for state, limit in (("int8", 1.3), ("coat", 2.0))
    ]
    return {
        "name": name,
        "claim": "AdamW's step: what a small parameter costs, and a large one, beside torch's",
        **started,
        "settings": {"small parameters": count, "large elements": side**2, "turns": turns},
        "n": turns,
        "rows": rows,
        "table": {
            "head": ["optimizer", "us a small parameter", "ns an element", "large / fused"],
            "rows": [
                [
                    row["optimizer"],
                    f"{row['us_a_small_parameter']:.2f}",
                    f"{row['ns_an_element']:.3f}",
                    f"{row['large_over_fused']:.2f}",
                ]
                for row in rows
            ],
        },
        "targets": targets,
        "notes": ["Times are the least of all steps; the machine may have done other work."],
    }


if __name__ == "__main__":
    main()
