"""`er.nn`: what its modules hold of a Llama block and of a head, and what gradients pay for it.

    ./scripts/bench nn_modules [--quick]

The second of three blocks with torch's RMSNorm and nn.SiLU, in bf16, converted in place: bytes that
are saved (U = batch x sequence x hidden x 2 bytes), counted by a context that keeps everything;
gErr2 of all gradients against plain bf16 (FP8: `fp8_flow.py`). Then a head with its loss: the
allocator's peak of forward and backward, plain and chunked, fp32. No time is measured.
"""

from collections.abc import Callable
from typing import Any

import torch
from _common import arguments, facts, finish, mib, out_path, target, tell
from _gradient import GradientError
from coat_block import Bench
from torch import nn
from torch.nn import functional as F

import elbowroom as er

NAME = "nn_modules"
HEAD = ("what", "setting", "held", "less", "gErr2")
Change = Callable[[nn.Module], object]
CHANGES: dict[str, Change] = {
    "plain": lambda net: None,
    "norms": lambda net: er.convert(net),
    "activations": lambda net: er.convert(net, norms=False, activations=True),
    "norms, activations": lambda net: er.convert(net, activations=True),
}


def main() -> None:
    """Measure and write."""
    parser = arguments(__doc__, batch=2, tokens=512, hidden=768, heads=12, steps=20, seeds=5)
    options = parser.parse_args()
    options.classes = 32000
    if options.quick:
        options.batch, options.tokens, options.hidden, options.heads = 1, 64, 96, 2
        options.steps, options.seeds, options.classes = 1, 2, 1000
    torch.set_num_threads(options.threads)
    known, rows = facts(), _blocks(options)
    rows += _heads(options)
    finish(_result(rows, options, known), out_path(options, NAME))


def _blocks(options: Any) -> list[dict[str, Any]]:
    bench, rows = Bench(options, fused=True), []
    g, ledger = bench.grads("keep", {}, 0)
    plain, _ = bench.units(ledger)
    for name, change in CHANGES.items():
        for policy in ("keep", "coat"):
            tell(f"{name}, {policy}")
            change(bench.net)
            error = GradientError(g)
            for seed in range(options.seeds):
                torch.manual_seed(seed)
                grads, ledger = bench.grads(policy, {}, seed)
                error.add(grads)
            er.nn.revert(bench.net)
            row = {"what": "block", "setting": name, "policy": policy, "plain": plain}
            rows.append(row | {"held": bench.units(ledger)[1], "gerr2": error.gerr2})
    return rows


def _heads(options: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    x = torch.randn(options.batch * options.tokens, options.hidden, requires_grad=True)
    labels = torch.randint(0, options.classes, (len(x),))
    head = nn.Linear(options.hidden, options.classes, bias=False)
    losses: dict[str, Callable[[], torch.Tensor]] = {
        "F.cross_entropy": lambda: F.cross_entropy(head(x), labels),
        "linear_cross_entropy": lambda: er.nn.linear_cross_entropy(x, head.weight, labels),
    }
    rows: list[dict[str, Any]] = []
    grads = {}
    for name, loss in losses.items():

        def step(loss: Callable[[], torch.Tensor] = loss) -> None:
            x.grad = head.weight.grad = None
            loss().backward()  # type: ignore[no-untyped-call]

        step()
        grads[name] = [x.grad, head.weight.grad]
        held = er.peak(step)
        rows.append({"what": "head", "setting": name, "policy": "", "held": held})
    error = GradientError(grads["F.cross_entropy"])
    error.add(grads["linear_cross_entropy"])
    rows[0] |= {"plain": rows[0]["held"], "gerr2": 0.0}
    rows[1] |= {"plain": rows[0]["held"], "gerr2": error.gerr2}
    return rows


def _result(rows: list[dict[str, Any]], options: Any, known: dict[str, Any]) -> dict[str, Any]:
    head = rows[-1]
    table = []
    for row in rows:
        setting = row["setting"] + (
            f", er.saving('{row['policy']}')" if row["policy"] == "coat" else ""
        )
        held = f"{row['held']:.2f} U" if row["what"] == "block" else f"{mib(row['held'])} MiB"
        less = f"{row['plain'] / row['held']:.2f}x"
        table.append([row["what"], setting, held, less, f"{row['gerr2']:.2g}"])
    sizes = ("batch", "tokens", "hidden", "heads", "steps", "classes")
    return {
        "name": NAME,
        "claim": __doc__.splitlines()[0],
        **known,
        "n": f"{options.seeds} seeds",
        "settings": {name: getattr(options, name) for name in sizes},
        "rows": rows,
        "table": {"head": list(HEAD), "rows": table},
        "targets": [
            target(
                "the head's gradients equal torch's within fp32's rounding, at half the peak",
                f"gErr2 {head['gerr2']:.2g}, {head['plain'] / head['held']:.2f}x less",
                head["gerr2"] < 1e-10 and head["plain"] >= 2 * head["held"],
            ),
        ],
        "notes": [
            "On a CPU, nn.RMSNorm is composed of other ops and saves two fp32 tensors; on a GPU it "
            "saves its input. The head's peak includes the gradient of its weights."
        ],
    }


if __name__ == "__main__":
    main()
