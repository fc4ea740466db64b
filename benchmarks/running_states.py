"""Optimizer states that run: error of an update after hundreds of encodings, and of a single one.

    ./scripts/bench running_states [--steps 1200] [--quick]

Three networks on real data are trained by torch.optim.AdamW (beta2 0.999): a GPT on Python source,
a ResNet-18 on Fashion-MNIST, and hashed embeddings with an MLP (`optimizer_states.py`), most rows
of which see no gradient in a step. Beside it every rule gets the same gradients in every format, on
weights that are 0 before each step of learning rate 1: what a step leaves there is its update.
Against u, that of the same rule over float32 states,

    once      states of the float32 one, encoded once right before the update
    running   states that were encoded after each step since the first
    summed    the same, of the sum of a hundred updates, which is what moves a weight: errors that
              are new in each step are averaged there, those that stay are not

    relMSE = E |u~ - u|^2 / E |u|^2

at three steps (of the last hundred before each), over the parameters that are encoded at all. For
Lion, whose update is a sign, it is four times the share of signs that differ.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from _common import arguments, facts, finish, out_path, tell
from optimizer_states import BETA1, SIZES, Hashed
from torch import Tensor, nn

import elbowroom as er
from elbowroom.demo.tasks import task
from elbowroom.optim.base import EncodedOptimizer
from elbowroom.optim.formats import format_of

NETS = ("gpt", "resnet18", "hashed")
FORMATS = ("coat", "int8", "int4", "int4x2")
FIGURES = ("once", "running", "summed")


class Rule(NamedTuple):
    """`make` is given parameters and settings."""

    name: str
    make: Callable[..., EncodedOptimizer]
    formats: tuple[str, ...]


def _adamw(beta2: float) -> Callable[..., EncodedOptimizer]:
    return partial(er.optim.AdamW, betas=(BETA1, beta2), weight_decay=0.0)


_ONE = tuple(name for name in FORMATS if name != "int4")  # of rules with a single moment
RULES = (
    Rule("AdamW 0.95", _adamw(0.95), FORMATS),
    Rule("AdamW 0.999", _adamw(0.999), FORMATS),
    Rule("Lion 0.99", er.optim.Lion, _ONE),
    Rule("SGD 0.9", er.optim.SGD, _ONE),
    Rule("SGD 0.99", partial(er.optim.SGD, momentum=0.99), _ONE),
)


class Beside:
    """An optimizer of one format that is given gradients, and gives updates."""

    def __init__(self, rule: Rule, state: str, like: list[nn.Parameter]) -> None:
        self.params = [nn.Parameter(torch.zeros_like(p)) for p in like]
        self.optimizer = rule.make(self.params, lr=1.0, state=state)

    def update(self, grads: list[Tensor]) -> list[Tensor]:
        """The negative updates, which the next call overwrites."""
        for p, g in zip(self.params, grads, strict=True):
            p.detach().zero_()
            p.grad = g
        self.optimizer.step()
        return [p.detach() for p in self.params]


@dataclass
class Error:
    """E |u~ - u|^2 / E |u|^2, over all that was added."""

    error: float = 0.0
    total: float = 0.0

    def add(self, got: list[Tensor], exact: list[Tensor]) -> None:
        for a, b in zip(got, exact, strict=True):
            self.error += (a - b).double().square().sum().item()
            self.total += b.double().square().sum().item()

    @property
    def rel_mse(self) -> float:
        return self.error / self.total


class Comparison:
    """All formats of one rule on one network, beside float32."""

    def __init__(self, rule: Rule, like: list[nn.Parameter]) -> None:
        self.rule, self.like = rule, like
        self.exact = Beside(rule, "fp32", like)
        self.others = {state: Beside(rule, state, like) for state in rule.formats}
        self.errors = {state: {name: Error() for name in FIGURES} for state in rule.formats}
        self._sums: dict[str, list[Tensor]] = {}

    def step(self, grads: list[Tensor], *, summed: bool, compared: bool) -> None:
        """One step of each; `summed`: it is one of a window, `compared`: the last one there."""
        once = {state: self._once(state) for state in self.others} if compared else {}
        u = self.exact.update(grads)
        got = {state: one.update(grads) for state, one in self.others.items()}
        if summed:
            for state, update in (got | {"fp32": u}).items():
                sums = self._sums.setdefault(state, [torch.zeros_like(x) for x in update])
                for total, part in zip(sums, update, strict=True):
                    total += part
        if compared:
            for state, errors in self.errors.items():
                errors["once"].add(once[state].update(grads), u)
                errors["running"].add(got[state], u)
                errors["summed"].add(self._sums[state], self._sums["fp32"])
            self._sums.clear()

    def _once(self, state: str) -> Beside:
        made, saved = Beside(self.rule, state, self.like), self.exact.optimizer.state_dict()
        made.optimizer.load_state_dict(saved)
        return made


def compare(net: str, at: tuple[int, ...], window: int) -> list[Comparison]:
    """One training; a comparison a rule."""
    torch.manual_seed(0)
    source = task("gpt" if net == "hashed" else net, **SIZES[net])
    model = Hashed() if net == "hashed" else source.model()
    training = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(BETA1, 0.999))
    watched = [p for p in model.parameters() if encoded(p)]
    made = [Comparison(rule, watched) for rule in RULES]
    for step, (x, y) in zip(range(1, max(at) + 1), source.batches(0), strict=False):
        training.zero_grad()
        source.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        grads = [p.grad for p in watched if p.grad is not None]
        for one in made:
            summed = any(last - window < step <= last for last in at)
            one.step(grads, summed=summed, compared=step in at)
        training.step()
    return made


def encoded(p: Tensor) -> bool:
    """Whether the states of p are, in other formats than fp32."""
    return format_of(p.shape, "int8", second=True).first.kind != "fp32"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=1200, help="of a training (1200)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    started = facts()
    steps, window = (6, 2) if options.quick else (options.steps, 100)
    at = (steps // 3, 2 * steps // 3, steps)
    found: dict[str, list[Comparison]] = {}
    for net in NETS:
        found[net] = compare(net, at, window)
        tell(net)
    finish(result(started, found, at), out_path(options, "running-states"))


def result(
    started: dict[str, Any], found: dict[str, list[Comparison]], at: tuple[int, ...]
) -> dict[str, Any]:
    rows = [
        {"rule": rule.name, "state": state}
        | {
            net: {name: error.rel_mse for name, error in made[i].errors[state].items()}
            for net, made in found.items()
        }
        for i, rule in enumerate(RULES)
        for state in rule.formats
    ]
    head = [f"{net} {name}" for net in found for name in FIGURES]
    return {
        "name": "running-states",
        "claim": "Error of the update by states that were encoded in every step",
        **started,
        "settings": {"compared at steps": ", ".join(map(str, at)), "learning rate": 2e-3},
        "n": len(at),
        "rows": rows,
        "table": {"head": ["rule, state", *head], "rows": [cells(row, found) for row in rows]},
        "targets": [],
        "notes": [
            "once: encoded before this update alone. running: encoded after each step since the "
            "first. summed: as running, of the sum of a hundred updates. For Lion's signs it is "
            "four times the share that differ."
        ],
    }


def cells(row: dict[str, Any], nets: Iterable[str]) -> list[str]:
    figures = [f"{row[net][name]:.1e}" for net in nets for name in FIGURES]
    return [f"{row['rule']}, {row['state']}", *figures]


if __name__ == "__main__":
    main()
