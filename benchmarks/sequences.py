"""Block averages on sequences: DIVISION on a transformer and on a network of 1-D convolutions.

    ./scripts/bench sequences [--seeds 8] [--train-steps 300] [--quick]

Each code alone, nothing rebuilt, on the same weights and the same batch. Columns:

    bits     8 x encoded bytes / elements of what lossy codes are given
    rel-MSE  sum (x~ - x)^2 / sum x^2 of it, outside of the step; zeros have 1
    gErr2    E |g~ - g|^2 / |g|^2 over noise seeds, of the whole network

"one range a row" is DIVISION as it was: the blocks and the range lie along the last dimension,
whatever that is.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from _common import arguments, facts, finish, out_path, target, tell
from _gradient import GradientError
from _offline import Captured, capture, distortion
from _training import Bench
from _ways import PLAIN, Way
from torch import Tensor, nn

import elbowroom as er
from elbowroom.codecs import Codec, codec
from elbowroom.codecs.names import setting_name
from elbowroom.demo.data import load_text
from elbowroom.demo.tasks import NextByte
from elbowroom.plan import Action, Encode, Lossy, Site

NAME = "sequences"
ROW = "one range a row"


class ConvNet(nn.Module):
    """Six blocks of a dilated 1-D convolution, BatchNorm and GELU over bytes, each added to x."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        dilations = [2**i for i in range(6)]
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=d) for d in dilations)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in dilations)
        self.head = nn.Conv1d(width, 256, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Bytes [B, T] -> scores of the next byte [B, T, 256]; nothing is read from ahead."""
        x = self.token(tokens).transpose(1, 2).contiguous()  # [B, C, T]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            before = nn.functional.pad(x, (2 * conv.dilation[0], 0))  # type: ignore[index]
            x = x + nn.functional.gelu(norm(conv(before)))
        scores: Tensor = self.head(x).transpose(1, 2)
        return scores


@dataclass(frozen=True)
class ConvBytes(NextByte):
    """The next byte, by a network of 1-D convolutions."""

    name: str = "conv1d"

    def model(self) -> nn.Module:
        return ConvNet(self.width, self.context)


@dataclass(frozen=True)
class Row:
    """One code. by_rows: what the op tells of sequences is hidden from it."""

    codec: Codec
    by_rows: bool = False

    @property
    def name(self) -> str:
        return f"{setting_name(self.codec)}{', ' + ROW if self.by_rows else ''}"

    @property
    def way(self) -> Way:
        """As a way to run forward."""
        lossy = Lossy(self.codec, rebuild=False)

        def policy(site: Site) -> Action:
            action = lossy(site)
            if self.by_rows and isinstance(action, Encode):
                return replace(action, facts=replace(action.facts, sequence=None))
            return action

        policy.exact = False  # type: ignore[attr-defined]
        return Way(self.name, lambda seed: er.saving(policy, seed=seed), exact=False, ours=True)

    def given(self, tensors: list[Captured]) -> list[Captured]:
        """The tensors as this code is given them."""
        if not self.by_rows:
            return tensors
        return [replace(one, facts=replace(one.facts, sequence=None)) for one in tensors]


def rows() -> Iterator[Row]:
    for bits in (2, 4):
        yield Row(codec("group", bits=bits))
        yield Row(codec("dither", levels=1 << bits))
        for rounding in ("stochastic", "dither"):
            whole = codec("division", bits=bits, rounding=rounding, range_blocks=64)
            yield Row(whole, by_rows=True)
            yield Row(codec("division", bits=bits, rounding=rounding))


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    found: list[dict[str, Any]] = []
    text = load_text(limit_nbytes=1_000_000)
    for task in (
        NextByte(text, 128, 8, context=256),
        ConvBytes(text, 96, 16, context=256),
    ):
        bench = Bench.trained(task, steps=options.train_steps, batch=8)
        found += _rows(bench, options.seeds)
    result = {
        "name": NAME,
        "claim": __doc__.splitlines()[0],
        **facts(),
        "n": f"{options.seeds} noise seeds",
        "settings": {
            "networks": "gpt: width 128, 4 blocks, batch 8; conv1d: width 96, 6 blocks, batch 16",
            "data": text.origin + ", 256 bytes a sequence",
            "weights": f"after {options.train_steps} steps, seed 0",
        },
        "rows": found,
        "table": {
            "head": ["network: code", "bits", "rel-MSE", "gErr2"],
            "rows": [_cells(row) for row in found],
        },
        "targets": [_goal(found, name) for name in ("gpt", "conv1d")],
        "notes": [],
    }
    finish(result, out_path(options, NAME))


def _options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="noise seeds of a gradient (8)")
    parser.add_argument("--train-steps", type=int, default=300, help="steps to the weights (300)")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.train_steps = 2, 4
    return options


def _rows(bench: Bench, seeds: int) -> list[dict[str, Any]]:
    bench.grads(PLAIN)  # makes the optimizer's states
    g, tensors, found = bench.grads(PLAIN), capture(bench), []
    for row in rows():
        outside = distortion(row.codec, row.given(tensors))
        error = GradientError(g)
        for seed in range(1, seeds + 1):
            error.add(bench.grads(row.way, seed))
        found.append(
            {
                "network": bench.task.name,
                "way": row.name,
                "by_rows": row.by_rows,
                "bits": outside.bits,
                "rel_mse": outside.rel_mse,
                "gerr2": error.gerr2,
                "gerr2_sd": error.gerr2_sd,
            }
        )
        tell(f"{bench.task.name}, {row.name}: {outside.bits:.3f} bits, {error.gerr2:.4f}")
    return found


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['network']}: {row['way']}",
        f"{row['bits']:.3f}",
        f"{row['rel_mse']:.4f}",
        f"{row['gerr2']:.4f} ± {row['gerr2_sd']:.1g}",
    ]


def _goal(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Two bits along the sequence have less error than zeros do, and than a range a row has."""
    two = {row["way"]: row for row in found if row["network"] == name}
    ours = two["division"]
    before = two[f"division, range_blocks=64, {ROW}"]
    return target(
        f"{name}: 2 bits have less error than zeros, and less of the gradient than one range a row",
        f"rel-MSE {ours['rel_mse']:.2f} (before: {before['rel_mse']:.2f}), gErr2 "
        f"{ours['gerr2']:.3f} (before: {before['gerr2']:.3f}) at {ours['bits']:.2f} bits",
        ours["rel_mse"] < 1 and ours["gerr2"] < before["gerr2"],
    )


if __name__ == "__main__":
    main()
