"""FP8 flow: a small Llama whose layers compute in FP8 and save FP8 learns as it does in bf16.

    ./scripts/bench fp8_flow [--seeds 5] [--steps 250] [--fresh] [--quick]

All arms have bf16 weights with er.optim's residual and fp32 states, so that they differ in what
layers compute and save. A seed is one recipe: the same weights at the start, the same batches.

    saved      bytes that autograd holds of one block before backward, in U = batch x sequence x
               hidden x 2 bytes, the angles of RoPE left out; the same inside er.saving()
    gErr2      |g~ - g|^2 / |g|^2 of that block's gradients, g being that of bf16
    final      training loss, nats, mean over the last tenth of the steps
    held-out   loss at the end on 51,200 bytes not trained on, computed as in training
    difference in thousandths of a nat, mean over the paired seeds, and in brackets the one-sided
               95 % bound; noise and within as in loss_curves.py

Products are emulated where the device has no FP8: no time is measured.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any

import torch
from _common import arguments, facts, out_path, show, target, tell, write_json
from _gradient import GradientError
from _llama import RECIPE, Hidden, Llama
from _resume import earlier
from loss_curves import LOSSES, ORDER, PLAIN, rows_of
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.demo.data import load_text
from elbowroom.demo.llama import LlamaBlock
from elbowroom.demo.tasks import NextByte
from elbowroom.demo.train import Run, train

NAME = "fp8-flow"
FLOW = "flow"
HELD_OUT = 100  # batches


@dataclass(frozen=True)
class Arm:
    """What is done to the model before it is trained."""

    told: str
    change: Callable[[nn.Module], object] | None = None
    other_order: bool = False


def _fp8(model: nn.Module, **settings: Any) -> object:
    kept = [name for name, _ in model.named_children() if name == "head"]
    return er.nn.fp8(model, keep=kept, **settings)


ARMS = {
    PLAIN: Arm("bf16"),
    ORDER: Arm("the same, other batch order", other_order=True),
    FLOW: Arm("er.nn.fp8(model)", _fp8),
    "linear": Arm("er.nn.fp8(model, flow=False)", partial(_fp8, flow=False)),
    "no attention": Arm("er.nn.fp8(model, attention=False)", partial(_fp8, attention=False)),
}
PROMISED_U = 7.0


@dataclass(frozen=True)
class Training:
    """A task of the demo, as one arm trains it."""

    task: NextByte
    arm: Arm
    depth: int
    heads: int

    def model(self) -> nn.Module:
        made = Llama(self.task.width, self.depth, self.heads).bfloat16()
        if self.arm.change is not None:
            self.arm.change(made)
        return made

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return er.optim.AdamW(model.parameters(), state="fp32", weights="residual", **RECIPE)

    def batches(self, seed: int) -> Any:
        return self.task.batches(seed + 1000 * self.arm.other_order)

    def loss(self, hidden: Hidden, targets: Tensor) -> Tensor:
        logits = F.linear(hidden.x, hidden.head)
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())

    def test_batches(self) -> Any:
        return self.task.test_batches()


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    path, known, text = out_path(options, NAME), facts(), load_text()
    settings = {
        "losses": f"hidden {options.hidden}, {options.depth} blocks, {options.heads} heads, "
        f"{options.batch} x {options.tokens} bytes, {options.steps} steps, one cycle to 0.002, "
        "weight decay 0.01, betas 0.9 and 0.95",
        "saved": "one block, hidden 768, 12 heads, 2 x 512, bf16",
        "data": text.origin,
        "threads": options.threads,
    }
    runs = {} if options.freshly else earlier(path, settings, known["versions"]).get("runs", {})
    saved = blocks(options)
    tell(f"{len(runs)} trainings are done already; saved: {saved}")
    task = NextByte(text, options.hidden, options.batch, options.tokens)
    for name, arm in ARMS.items():
        for seed in range(options.seeds):
            if (key := f"{name}/{seed}") in runs:
                continue
            training: Any = Training(task, arm, options.depth, options.heads)
            runs[key] = trained(Run(training, nullcontext, options.steps, seed))
            tell(f"{key}: held-out {runs[key]['held_out']:.4f}")
            write_json(path, result(runs, saved, settings, known))
    write_json(path, made := result(runs, saved, settings, known))
    show(made)


def _options() -> argparse.Namespace:
    parser = arguments(__doc__, threads=1)
    sizes = {"hidden": 128, "depth": 2, "heads": 4, "batch": 8, "tokens": 64}
    for name, size in (sizes | {"steps": 250, "seeds": 5}).items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"({size})")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run has done")
    options = parser.parse_args()
    if options.quick:
        options.hidden, options.depth, options.batch, options.steps, options.seeds = 32, 1, 2, 2, 2
    if options.seeds < 2:
        parser.error(f"{options.seeds} seeds have no spread; give 2 or more")
    options.freshly = options.fresh or options.quick
    return options


class Block:
    """One block as an arm has it: what it saves, and its gradients."""

    def __init__(self, arm: Arm, hidden: int, heads: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.net, self.angles = LlamaBlock(hidden, heads).bfloat16(), (tokens, hidden // heads)
        self.x = torch.randn(2, tokens, hidden, dtype=torch.bfloat16).requires_grad_()
        if arm.change is not None:
            arm.change(self.net)

    def saved_u(self) -> float:
        """U of distinct storages that plain autograd saves, but for parameters' own."""
        own = {p.untyped_storage().data_ptr() for p in self.net.parameters()}
        held: dict[int, Tensor] = {}

        def pack(t: Tensor) -> Tensor:
            if t.untyped_storage().data_ptr() not in own and t.shape != self.angles:
                held[t.untyped_storage().data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            self.net(self.x * 1.0)
        return sum(t.untyped_storage().nbytes() for t in held.values()) / self.x.nbytes

    def saving_u(self) -> float:
        """U that er.saving() counts as held, the angles with it."""
        with er.saving(min_nbytes=0) as saved:
            self.net(self.x * 1.0)
        rows = (r for r in saved.ledger.rows if "owner" not in r.why)
        return sum(r.after_nbytes for r in rows) / self.x.nbytes

    def grads(self) -> list[Tensor]:
        leaves = [self.x, *self.net.parameters()]
        loss = self.net(self.x * 1.0).float().square().mean()
        return [g.float() for g in torch.autograd.grad(loss, leaves)]


def blocks(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What each arm saves of a block, and what becomes of its gradients."""
    size = (64, 2, 32) if options.quick else (768, 12, 512)
    true, found = Block(ARMS[PLAIN], *size).grads(), {}
    for name, arm in ARMS.items():
        block = Block(arm, *size)
        error = GradientError(true)
        error.add(block.grads())
        found[name] = {
            "saved_u": block.saved_u(),
            "saving_u": block.saving_u(),
            "gerr2": error.gerr2,
        }
    return found


def trained(run: Run) -> dict[str, Any]:
    """One training: its last and its held-out loss, and its curve in ten points."""
    losses = [fact.loss for fact in train(run)]
    tenth = max(1, len(losses) // 10)
    curve = [fmean(losses[i : i + tenth]) for i in range(0, len(losses), tenth)]
    return {"final": fmean(losses[-tenth:]), "held_out": held_out(run), "curve": curve, "nbytes": 0}


@torch.no_grad()
def held_out(run: Run) -> float:
    """Nats a byte over the first batches of the test set."""
    total = count = 0.0
    batches: Any = run.task.test_batches()
    inputs: Tensor
    for inputs, targets in islice(batches, HELD_OUT):
        total += float(run.task.loss(run.model(inputs), targets)) * targets.numel()
        count += targets.numel()
    return total / count


def result(
    runs: dict[str, dict[str, Any]],
    saved: dict[str, dict[str, float]],
    settings: dict[str, Any],
    known: dict[str, Any],
) -> dict[str, Any]:
    by_seed: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in ARMS}
    for key, run in runs.items():
        name, _, seed = key.rpartition("/")
        by_seed[name][seed] = run
    rows = [row | saved[row["arm"]] for row in rows_of(by_seed)]
    flow = next(row for row in rows if row["arm"] == FLOW)
    return {
        "name": NAME,
        "claim": __doc__.splitlines()[0],
        **known,
        "n": f"{min(row['n'] for row in rows)} paired seeds",
        "settings": settings,
        "runs": runs,
        "rows": rows,
        "table": {
            "head": [
                *("layers", "saved of a block", "in er.saving()", "gErr2"),
                *("final loss", "difference (bound)", "held-out loss", "difference (bound)"),
                "within noise",
            ],
            "rows": [cells(row) for row in rows],
        },
        "targets": [
            target(
                f"a Llama block saves <= {PROMISED_U} U, in er.saving() and without",
                f"{flow['saving_u']:.2f} U and {flow['saved_u']:.2f} U",
                max(flow["saved_u"], flow["saving_u"]) <= PROMISED_U,
            ),
            target(
                "flow: final and held-out loss within seed noise of bf16, over 5 seeds",
                flow.get("within", "too few seeds"),
                flow.get("within") == "yes" and flow["n"] >= 5,
            ),
        ],
        "notes": [
            "`linear`: inputs of linear layers alone; what norms and activations save beside them "
            "stays."
        ],
    }


def cells(row: dict[str, Any]) -> list[str]:
    told = [f"{row['arm']}: {ARMS[row['arm']].told}", f"{row['saved_u']:.2f} U"]
    told += [f"{row['saving_u']:.2f} U", f"{row['gerr2']:.2g}"]
    for loss in LOSSES:
        told.append("" if row[loss] is None else f"{row[loss]:.4f}")
        known = f"{loss}_bound" in row and row["arm"] != PLAIN
        of = (1e3 * row[f"{loss}_mean"], 1e3 * row[f"{loss}_bound"]) if known else None
        noise = f"noise {1e3 * row['noise'][loss]:.1f}" if loss in row["noise"] else ""
        told.append(noise if row["arm"] == ORDER else f"{of[0]:+.1f} ({of[1]:+.1f})" if of else "")
    return [*told, row.get("within", "")]


if __name__ == "__main__":
    main()
