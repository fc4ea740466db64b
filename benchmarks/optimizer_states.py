"""Optimizer states in fewer bytes: error of the update, bytes a parameter, time of a step.

    ./scripts/bench optimizer_states [--quick]

States are recorded from trainings by torch.optim.AdamW of four networks on real data, at three
steps each: a GPT on Python source (beta2 0.95 and 0.999), a ResNet-18 on Fashion-MNIST, and hashed
embeddings of 1, 2 and 3 bytes with an MLP on the same source (a recommender's shape: most rows see
no gradient). Each recorded exp_avg, exp_avg_sq is encoded once and decoded; the error is

    relMSE = E |u~ - u|^2 / E |u|^2,   u = mhat / (sqrt(vhat) + eps)

over the parameters that are encoded at all. `e4m3` is plain E4M3 in groups of 128 with a bf16
scale; `flash` is FlashOptim's published form (arXiv 2602.23349) written from its formulas: groups
of 32, softsign and square root, float32 scales here. Time is a step of one parameter of 2^23
elements over torch.optim.AdamW(fused=True) on the same gradient, in turn; the finiteness check of
our step is in it.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from _common import arguments, facts, finish, out_path, paired_dict, target, tell, times
from torch import Tensor, nn

import elbowroom as er
from elbowroom.demo.tasks import task
from elbowroom.kernels import ops
from elbowroom.measure.timing import paired
from elbowroom.optim.formats import format_of, row_of

EPS, BETA1 = 1e-8, 0.9
OURS = ("coat", "int8", "int4", "int4x2")
NBYTES = {"e4m3": 2 + 2 * 2 / 128, "flash": 2 + 2 * 2 / 32}  # with 16-bit scales


class Hashed(nn.Module):
    """The next byte from embeddings of the last 1, 2 and 3, hashed into tables."""

    def __init__(self, width: int = 32, rows: tuple[int, ...] = (256, 4096, 16384)) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, width) for n in rows)
        sizes = (width * len(rows), 256, 256)
        hidden = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
        self.mlp = nn.Sequential(*hidden, nn.Linear(256, 256))

    def forward(self, x: Tensor) -> Tensor:
        keys, found = torch.zeros_like(x), []
        for back, table in enumerate(self.tables):
            keys = keys * 257 + torch.roll(x, back, 1)
            found.append(table(keys % table.num_embeddings))
        return self.mlp(torch.cat(found, -1))


class State(NamedTuple):
    """One recorded exp_avg and exp_avg_sq, the step and beta2 it was recorded at."""

    m: Tensor
    v: Tensor
    step: int
    beta2: float

    def update(self, m: Tensor, v: Tensor) -> Tensor:
        mhat, vhat = m / (1 - BETA1**self.step), v / (1 - self.beta2**self.step)
        return mhat / (vhat.sqrt() + EPS)


def record(name: str, beta2: float, at: tuple[int, ...]) -> list[State]:
    """States of the parameters that are large enough to be encoded."""
    torch.manual_seed(0)
    size: dict[str, Any] = {
        "gpt": {"width": 64, "batch": 8},
        "resnet18": {"width": 16, "batch": 32},
    }
    source = task("gpt" if name == "hashed" else name, **size.get(name, {"batch": 8}))
    model = Hashed() if name == "hashed" else source.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(BETA1, beta2))
    made = []
    for step, (x, y) in zip(range(1, max(at) + 1), source.batches(0), strict=False):
        optimizer.zero_grad()
        source.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step in at:
            for p, s in optimizer.state.items():
                if format_of(p.shape, "int8", second=True).first.kind != "fp32":
                    made.append(State(s["exp_avg"].clone(), s["exp_avg_sq"].clone(), step, beta2))
    return made


def ours(state: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def both(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found = format_of(m.shape, state, second=True)
        held = [*found.first.empty(m), *found.second.empty(v), found.first.kind, found.second.kind]
        row = row_of(m.shape)
        ops.moments_quantize(m.view(-1), v.view(-1), *held, row, 1)
        a, b = ops.moments_dequantize(*held, row, m.numel())
        return a.view_as(m), b.view_as(v)

    return both


def e4m3(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.empty(2, m.numel())
    for x, out in zip((m, v), made, strict=True):
        ops.fp8_dequantize(*ops.fp8_quantize(x.reshape(-1), 128, "e4m3"), 128, "e4m3", out)
    return made[0].view_as(m), made[1].view_as(v)


def flash(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = nn.functional.pad(x.reshape(-1), (0, -x.numel() % 32)).view(-1, 32)
        most = rows.abs().amax(1, keepdim=True)
        return rows / most.where(most > 0, 1.0), most

    def back(x: Tensor) -> Tensor:
        return x.view(-1)[: m.numel()].view_as(m)

    y, m_most = scaled(m)
    z = (127 * 2 * y / (1 + y.abs())).round() / 127
    r, v_most = scaled(v.sqrt())
    return back(m_most * z / (2 - z.abs())), back(((r * 255).round() / 255 * v_most) ** 2)


def rel_mse(states: list[State], code: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> float:
    error = total = 0.0
    for s in states:
        exact, back = s.update(s.m, s.v), s.update(*code(s.m, s.v))
        error += (back - exact).double().square().sum().item()
        total += exact.double().square().sum().item()
    return error / total


def step_times(n: int, pairs: int) -> Iterator[tuple[str, Any]]:
    grad = torch.randn(n // 1024, 1024, generator=torch.Generator().manual_seed(0)) * 1e-3

    def stepper(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Callable[[], object]:
        p = nn.Parameter(torch.ones_like(grad))
        p.grad = grad.clone()
        optimizer = make([p])
        optimizer.step()
        return optimizer.step

    fused = stepper(lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True))
    for state in ("fp32", *OURS):
        our = stepper(lambda ps, state=state: er.optim.AdamW(ps, lr=1e-3, state=state))  # type: ignore[misc]
        yield state, paired(fused, our, pairs=pairs)


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    started = facts()
    at, pairs, n = ((2, 3), 2, 2**16) if options.quick else ((30, 80, 150), 31, 2**23)
    clocked = dict(step_times(n, pairs))
    tell("steps are timed")
    recorded = {}
    for name, beta2 in (("gpt", 0.95), ("gpt", 0.999), ("resnet18", 0.999), ("hashed", 0.999)):
        recorded[f"{name} {beta2}"] = record(name, beta2, at)
        tell(f"recorded {name}, beta2 {beta2}")
    p = torch.empty(1024, 1024)
    codes = {"e4m3": e4m3, "flash": flash, **{state: ours(state) for state in OURS}}
    rows = []
    for name, code in codes.items():
        nbytes = NBYTES.get(name) or (er.optim.state_nbytes(p, name) - 4) / p.numel()
        errors = {net: rel_mse(states, code) for net, states in recorded.items()}
        time = paired_dict(clocked[name]) if name in clocked else None
        rows.append({"state": name, "nbytes": nbytes, "rel_mse": errors, "time": time})
    rows.insert(
        0,
        {
            "state": "fp32",
            "nbytes": 8.0,
            "rel_mse": dict.fromkeys(recorded, 0.0),
            "time": paired_dict(clocked["fp32"]),
        },
    )
    finish(result(started, recorded, rows, clocked, pairs), out_path(options, "optimizer-states"))


def result(
    started: dict[str, Any], recorded: dict[str, Any], rows: list[Any], clocked: Any, pairs: int
) -> dict[str, Any]:
    by = {row["state"]: row for row in rows}
    worst = max(by["int8"]["rel_mse"].values())
    lines = [
        target(
            "int8: relMSE of the update <= 2e-4 on every network",
            f"worst {worst:.1e}",
            worst <= 2e-4,
        )
    ]
    for state, most in (("coat", 2.19), ("int8", 2.07), ("int4", 1.56), ("int4x2", 1.07)):
        got = by[state]["nbytes"]
        lines.append(target(f"{state}: <= {most} bytes a parameter", f"{got:.4f}", got <= most))
    for state, limit in (("int8", 1.3), ("coat", 2.0)):
        ratio = clocked[state].ratio
        lines.append(
            target(f"{state}: step <= {limit} x fused AdamW", times(clocked[state]), ratio <= limit)
        )
    table = [
        [
            row["state"],
            f"{row['nbytes']:.4f}",
            *(f"{e:.1e}" for e in row["rel_mse"].values()),
            times(clocked[row["state"]]) if row["state"] in clocked else "-",
        ]
        for row in rows
    ]
    return {
        "name": "optimizer-states",
        "claim": "AdamW's states in a fourth of the bytes: error of the update, time of the step",
        **started,
        "n": pairs,
        "settings": {"steps recorded": "30, 80, 150", "group": 128, "timed elements": 2**23},
        "rows": rows,
        "table": {
            "head": ["state", "bytes a parameter", *recorded, "step / fused AdamW"],
            "rows": table,
        },
        "targets": lines,
        "notes": ["torchao and bitsandbytes are not measured: not installed here."],
    }


if __name__ == "__main__":
    main()
