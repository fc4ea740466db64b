"""One code for norm, ReLU and convolution: bits and gradient error on the notes' small networks.

    ./scripts/bench small_cnn [--seeds 32] [--train-steps 1300] [--quick]

bits    8 x (all bytes held before backward, but the images) / (elements of the inputs of batch
        norms and of convolutions): codes, masks, scales, statistics, all of it
gErr2   E |g~ - g|^2 / |g|^2 over noise seeds
share   gErr2 over that of 2-bit groups of 256, each tensor with a code of its own

The notes measured other weights (63 % right where these are 71 %), on which 2-bit groups had a
gErr2 of 0.055 at 2.57 bits; their goals are 0.04 at 1.4 bits and 0.008 at 2.0. So a goal stands
twice: as it is, and as that share (0.73, 0.145) of what 2-bit groups have here.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from _common import arguments, facts, finish, out_path, target, tell
from _crops import Crops
from _gradient import GradientError, Grads
from _settings import Setting
from _training import Bench
from _ways import PLAIN
from torch import Tensor, nn

import elbowroom as er
from elbowroom.codecs import codec
from elbowroom.plan import Lean

NAME = "small-cnn"
GOALS = ((1.4, 0.04), (2.0, 0.008))  # bits, gErr2
NOTES = 0.055  # gErr2 of 2-bit groups there


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for name in ("chain", "mini"):
        bench = Bench.trained(Crops(name), steps=options.train_steps, batch=48)
        rows += _rows(name, bench, options.seeds)
    result = {
        "name": NAME,
        "claim": __doc__.splitlines()[0],
        **facts(),
        "n": f"{options.seeds} noise seeds",
        "settings": {
            "networks": "chain: nine conv-BN-ReLU; mini: stem and three basic blocks; width 16",
            "data": Crops("mini").origin,
            "batch": 48,
            "weights": f"after {options.train_steps} steps, seed 0",
        },
        "rows": rows,
        "table": {"head": _HEAD, "rows": [_cells(row) for row in rows]},
        "targets": [
            _goal(name, rows, bits, gerr2) for name in ("chain", "mini") for bits, gerr2 in GOALS
        ],
        "notes": ["The share makes up for other weights than the notes had; see the docstring."],
    }
    finish(result, out_path(options, NAME))


def _options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=32, help="noise seeds of a gradient (32)")
    parser.add_argument("--train-steps", type=int, default=1300, help="steps to the weights (1300)")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.train_steps = 2, 10
    return options


def settings() -> Iterator[Setting]:
    """Rivals first: the first row is what all are held against."""
    yield Setting("group", "baseline", codec("group", bits=2, group_size=256))
    yield Setting("group", "baseline", codec("group", bits=2, group_size=64))
    yield Setting("division", "baseline", codec("division", bits=2))
    yield Setting("fdsr", "ours", codec("fdsr", min_numel=0))
    for levels in (3, 4, 8):
        yield Setting("dither", "ours", codec("dither", levels=levels))
    for levels in (4, 8):
        yield Setting("dither, rebuild", "ours", codec("dither", levels=levels), rebuild=True)
    for lean in (
        Lean(upper=3, plain=3, group_size=128),
        Lean(upper=4, plain=3, group_size=128),
        Lean(upper=4, plain=4, group_size=128),
        Lean(upper=6, plain=4),
        Lean(upper=8, plain=6),
        Lean(upper=8, plain=6, fold=4),
        Lean(upper=4, lower=2, plain=4, group_size=128, fold=1),
        Lean(upper=8, lower=2, plain=6, fold=1),
    ):
        dither = codec("dither", levels=lean.upper)
        yield Setting("lean", "ours", dither, rebuild=True, lean=lean)


def _rows(name: str, bench: Bench, seeds: int) -> list[dict[str, Any]]:
    bench.grads(PLAIN)  # makes the optimizer's states
    g, elements, rows = bench.grads(PLAIN), elements_of(bench), []
    for setting in settings():
        row = {"network": name, "way": setting.name, "family": setting.family}
        rows.append(row | _measured(bench, setting, g, elements, seeds))
        rows[-1]["share"] = rows[-1]["gerr2"] / rows[0]["gerr2"]
        tell(f"{name}, {setting.name}: {rows[-1]['bits']:.3f} bits, {rows[-1]['gerr2']:.4f}")
    return rows


def _measured(
    bench: Bench, setting: Setting, g: Grads, elements: int, seeds: int
) -> dict[str, float]:
    error = GradientError(g)
    for seed in range(1, seeds + 1):
        error.add(bench.grads(setting.way, seed))
        if seed == 2 and error.errors2[0] == error.errors2[1]:
            break  # it has no noise
    images, labels = bench.batch
    with setting.way.context(1) as saved:
        loss = bench.task.loss(bench.model(images), labels)
    held_nbytes = saved.ledger.after_nbytes - bench.input_nbytes
    loss.backward()
    bench.take_grads()
    return {
        "bits": 8 * held_nbytes / elements,
        "gerr2": error.gerr2,
        "gerr2_sd": error.gerr2_sd,
        "bias2": error.bias2,
        "sampling2": error.sampling2,
    }


def elements_of(bench: Bench) -> int:
    """Elements of the inputs of batch norms and of convolutions, each tensor once, no images."""
    images, _ = bench.batch
    found: dict[int, Tensor] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        found[args[0].data_ptr()] = args[0]  # held, so that no address comes twice

    kinds = nn.BatchNorm2d, nn.Conv2d
    modules = [module for module in bench.model.modules() if isinstance(module, kinds)]
    handles = [module.register_forward_pre_hook(note) for module in modules]
    with torch.no_grad(), er.saving("keep"):
        bench.model(images)
    for handle in handles:
        handle.remove()
    return sum(x.numel() for x in found.values() if x.data_ptr() != images.data_ptr())


_HEAD = ["network: forward inside", "bits", "gErr2", "share", "bias^2 (sampling)"]


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['network']}: {row['way']}",
        f"{row['bits']:.3f}",
        f"{row['gerr2']:.4f} ± {row['gerr2_sd']:.1g}",
        f"{row['share']:.3f}",
        f"{row['bias2']:.1e} ({row['sampling2']:.1e})",
    ]


def _goal(name: str, rows: list[dict[str, Any]], bits: float, gerr2: float) -> dict[str, Any]:
    allowed = [row for row in rows if row["network"] == name and row["bits"] <= bits]
    best = min(allowed, key=lambda row: row["gerr2"], default=None)
    text = f"{name}: gErr2 {gerr2:g}, and {gerr2 / NOTES:.3f} of 2-bit groups, at {bits:g} bits"
    if best is None:
        return target(text, "no row has so few bits", met=False)
    met = best["gerr2"] <= gerr2 and best["share"] <= gerr2 / NOTES
    shown = f"{best['gerr2']:.4f}, {best['share']:.3f} at {best['bits']:.3f}: {best['way']}"
    return target(text, shown, met)


if __name__ == "__main__":
    main()
