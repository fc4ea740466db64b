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
our step is in it. The first step, which makes states and compiles, is apart: torchao's finds
nothing compiled, our kernels may lie in numba's cache. torchao's and bitsandbytes' classes are
described in `_optimizer_peers.py`; what cannot run here says so in its row.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from _common import arguments, facts, finish, out_path, paired_dict, target, tell, times
from _optimizer_peers import PEERS, Both, Peer, nbytes, nothing_compiled, versions, why_not
from torch import Tensor, nn

import elbowroom as er
from elbowroom.demo.tasks import task
from elbowroom.kernels import ops
from elbowroom.measure.timing import Paired, paired
from elbowroom.optim.formats import format_of, row_of

EPS, BETA1 = 1e-8, 0.9
SIZES: dict[str, dict[str, int]] = {
    "gpt": {"width": 64, "batch": 8},
    "resnet18": {"width": 16, "batch": 32},
    "hashed": {"batch": 8},
}
BITS = {"coat": 8, "int8": 8, "int4": None, "int4x2": 4}  # of a code; int4 has 8 for m, 4 for v


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
    source = task("gpt" if name == "hashed" else name, **SIZES[name])
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


@dataclass
class Row:
    """What is known of one way to hold states; None: not measured."""

    name: str
    code: Both | None = None
    nbytes: float | None = None
    time: Paired | None = None
    first_s: float | None = None
    bits: int | None = None
    problem: str = ""
    errors: dict[str, float] = field(default_factory=dict)


def ours(state: str) -> Both:
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


def rel_mse(states: list[State], code: Both) -> float:
    error = total = 0.0
    for s in states:
        exact, back = s.update(s.m, s.v), s.update(*code(s.m, s.v))
        error += (back - exact).double().square().sum().item()
        total += exact.double().square().sum().item()
    return error / total


class Clock:
    """Steps of one parameter of n elements, each next to one of fused AdamW."""

    def __init__(self, n: int, pairs: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.grad = torch.randn(n // 1024, 1024, generator=draw) * 1e-3
        self.pairs = pairs
        self.fused, *_ = self._started(lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True))

    def clock(self, row: Row, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
        """Fill in the row's times and bytes. Raises what the optimizer raises."""
        step, row.first_s, row.nbytes = self._started(make)
        row.time = paired(self.fused, step, pairs=self.pairs)
        tell(f"{row.name}: {times(row.time)}, first step {row.first_s:.2f} s")

    def _started(
        self, make: Callable[[list[Tensor]], torch.optim.Optimizer]
    ) -> tuple[Callable[[], object], float, float]:
        """Its step, the seconds of the first one, bytes a parameter."""
        p = nn.Parameter(torch.ones_like(self.grad))
        p.grad = self.grad.clone()
        optimizer = make([p])
        start_s = time.perf_counter()
        optimizer.step()
        first_s = time.perf_counter() - start_s
        return optimizer.step, first_s, nbytes(optimizer.state[p]) / p.numel()


def our_rows(clock: Clock) -> list[Row]:
    rows = [Row("fp32", lambda m, v: (m, v))]
    rows += [
        Row("e4m3", e4m3, 2 + 2 * 2 / 128),
        Row("flash", flash, 2 + 2 * 2 / 32),
    ]  # 16-bit scales
    rows += [Row(state, ours(state), bits=bits) for state, bits in BITS.items()]
    for row in rows:
        if row.nbytes is None:
            clock.clock(row, lambda ps, state=row.name: er.optim.AdamW(ps, lr=1e-3, state=state))  # type: ignore[misc]
    return rows


def peer_row(peer: Peer, clock: Clock) -> Row:
    row = Row(peer.name, bits=peer.bits)
    try:
        clock.clock(row, peer.make)
        row.code = peer.coder(peer)
    except Exception as error:  # whatever it is that it cannot do, the row says it
        row.problem = why_not(error, peer)
        tell(f"{peer.name}: {row.problem}")
    return row


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    started = facts()
    started["versions"] |= versions()
    at, pairs, n = ((2, 3), 2, 2**16) if options.quick else ((30, 80, 150), 31, 2**23)
    clock = Clock(n, pairs)
    rows = our_rows(clock)
    with nothing_compiled():
        rows += [peer_row(peer, clock) for peer in PEERS]
    nets = (("gpt", 0.95), ("gpt", 0.999), ("resnet18", 0.999), ("hashed", 0.999))
    for name, beta2 in nets:
        states = record(name, beta2, at)
        for row in rows:
            if row.code is not None:
                row.errors[f"{name} {beta2}"] = rel_mse(states, row.code)
        tell(f"errors of {name}, beta2 {beta2}")
    settings = {"steps recorded": ", ".join(map(str, at)), "group": 128, "timed elements": n}
    made = result(started, rows, [f"{name} {beta2}" for name, beta2 in nets], settings)
    finish(made | {"n": pairs}, out_path(options, "optimizer-states"))


def result(
    started: dict[str, Any], rows: list[Row], nets: list[str], settings: dict[str, Any]
) -> dict[str, Any]:
    head = ["state", "bytes a parameter", *nets, "step / fused AdamW", "first step, s"]
    return {
        "name": "optimizer-states",
        "claim": "AdamW's states in a fourth of the bytes: error of the update, time of the step",
        **started,
        "settings": settings,
        "rows": [as_dict(row) for row in rows],
        "table": {"head": head, "rows": [cells(row, nets) for row in rows]},
        "targets": goals({row.name: row for row in rows}),
        "notes": [
            "bits of a code, which targets compare: 8 in coat, int8 and the peers' 8-bit and FP8 "
            "classes, 4 in int4x2 and AdamW4bit; int4 (8 and 4) has no peer. Peers do not look "
            "whether gradients are finite. An error far above 1 is a v > 0 that became 0.",
        ],
    }


def goals(by: dict[str, Row]) -> list[dict[str, Any]]:
    worst = max(by["int8"].errors.values())
    lines = [
        target(
            "int8: relMSE of the update <= 2e-4 on every network",
            f"worst {worst:.1e}",
            worst <= 2e-4,
        )
    ]
    for state, most in (("coat", 2.19), ("int8", 2.07), ("int4", 1.56), ("int4x2", 1.07)):
        got = by[state].nbytes or 0.0
        lines.append(target(f"{state}: <= {most} bytes a parameter", f"{got:.4f}", got <= most))
    for state, limit in (("int8", 1.3), ("coat", 2.0)):
        time = by[state].time
        assert time is not None
        lines.append(
            target(f"{state}: step <= {limit} x fused AdamW", times(time), time.ratio <= limit)
        )
    for state in ("int8", "coat", "int4x2"):
        lines += [faster(by[state], by[peer.name]) for peer in PEERS if peer.bits == BITS[state]]
    return lines


def faster(our: Row, peer: Row) -> dict[str, Any]:
    """Both times are over fused AdamW, in this run."""
    wanted = f"{our.name}: a step is faster than {peer.name}'s"
    assert our.time is not None
    if peer.time is None:
        return target(wanted, f"not measured; {peer.problem}", met=False)
    measured = f"{times(our.time)} against {times(peer.time)}"
    return target(wanted, measured, our.time.ratio < peer.time.ratio)


def cells(row: Row, nets: list[str]) -> list[str]:
    return [
        row.name,
        "-" if row.nbytes is None else f"{row.nbytes:.4f}",
        *(f"{row.errors[net]:.1e}" if net in row.errors else "-" for net in nets),
        row.problem or ("-" if row.time is None else times(row.time)),
        "-" if row.first_s is None else f"{row.first_s:.2f}",
    ]


def as_dict(row: Row) -> dict[str, Any]:
    return {
        "state": row.name,
        "bits": row.bits,
        "nbytes": row.nbytes,
        "rel_mse": row.errors,
        "time": None if row.time is None else paired_dict(row.time),
        "first_s": row.first_s,
        "problem": row.problem,
    }


if __name__ == "__main__":
    main()
