"""Does it pay to reuse tiles that are alike? Shares on a trained ResNet-18, and the time of a look.

    ./scripts/bench tile_reuse [--train-steps 300] [--quick]

FDSR skips the transform and the codes of a tile whose like has been seen. A tile can be spared only
if one like it is found for less than its code costs. Of all tiles of a tensor:

    same      equal, bit for bit, to an earlier tile of the tensor
    alike     has the signature of an earlier tile (the sums of its quarters, three bits of fraction
              each), and lies within `--error` of it: |x - y|^2 <= error |x|^2
    best      has among 1024 other tiles of the tensor one that, with a mean and a gain of its own,
              lies within `--error` of it: what no look could find for less than a code costs

    look      seconds to sign all tiles and to hold each against the first of its signature
    code      seconds to encode them (`fdsr`, the default)
    needed    the share from which on looking costs less than it spares: look / code

The loop that looks is compiled like the codec's, on as many threads.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from _common import arguments, facts, finish, out_path, target, tell
from _offline import Captured, capture
from _training import Bench
from torch import Tensor

from elbowroom.codecs import Fdsr
from elbowroom.demo.tasks import task
from elbowroom.kernels.bands import best_block
from elbowroom.measure.timing import least_s

NAME = "tile-reuse"
SAMPLE = 1024


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    numba.set_num_threads(options.threads)
    work = task("resnet18", width=16, batch=128)
    bench = Bench.trained(work, steps=options.train_steps, batch=64)
    tensors = [one for one in capture(bench) if one.x.dim() == 4]
    stages: dict[tuple[str, int], list[Captured]] = {}
    for one in tensors:
        kind = "BatchNorm" if one.consumer.endswith("norm") else "convolution"
        stages.setdefault((kind, one.x.shape[-1]), []).append(one)
    found = [_row(*key, stages[key], options.error) for key in sorted(stages, key=str)]
    result = {
        "name": NAME,
        "claim": __doc__.splitlines()[0],
        **facts(),
        "n": f"{len(tensors)} tensors",
        "settings": {
            "network": "the demo's ResNet-18, width 16, batch 128, Fashion-MNIST",
            "weights": f"after {options.train_steps} steps, seed 0",
            "error": options.error,
        },
        "rows": found,
        "table": {
            "head": ["inputs of, side", "tiles", "same", "alike", "best", "needed"],
            "rows": [_cells(row) for row in found],
        },
        "targets": [_goal(found)],
        "notes": [],
    }
    finish(result, out_path(options, NAME))


def _options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--train-steps", type=int, default=300, help="steps to the weights (300)")
    parser.add_argument("--error", type=float, default=0.1, help="allowed share of |x|^2 (0.1)")
    options = parser.parse_args()
    if options.quick:
        options.train_steps = 3
    return options


def _row(kind: str, side: int, tensors: Sequence[Captured], error: float) -> dict[str, Any]:
    block, codec = best_block(side, side), Fdsr(min_numel=0)
    counts = {"tiles": 0, "same": 0.0, "alike": 0.0, "best": 0.0}
    look_s = code_s = 0.0
    for one in tensors:
        tiles = _tiles(one.x, block)
        n = len(tiles)
        counts["tiles"] += n
        counts["same"] += n - len(torch.unique(tiles, dim=0))
        counts["alike"] += _look(tiles, error)
        counts["best"] += n * _best(tiles, error)
        look_s += least_s(lambda t=tiles: _look(t, error), torch.device("cpu"))
        code_s += least_s(lambda x=one.x: codec.encode(x), torch.device("cpu"))
    shares = {name: counts[name] / counts["tiles"] for name in ("same", "alike", "best")}
    row = {"kind": kind, "side": side, "tiles": counts["tiles"], **shares}
    tell(f"{kind} {side}: {shares}")
    return row | {"look_s": look_s, "code_s": code_s, "needed": look_s / code_s}


def _tiles(x: Tensor, block: int) -> Tensor:
    """Maps -> their tiles [T, block^2]; edges are repeated."""
    below, beside = -x.shape[2] % block, -x.shape[3] % block
    x = torch.nn.functional.pad(x, (0, beside, 0, below), mode="replicate")
    return x.unfold(2, block, block).unfold(3, block, block).reshape(-1, block * block)


def _look(tiles: Tensor, error: float) -> int:
    """How many tiles are alike to the first one of their signature."""
    signatures = np.empty(len(tiles), np.uint64)
    _sign(tiles.numpy(), signatures)
    first = np.full(1 << (2 * len(tiles) - 1).bit_length(), -1, np.int64)
    owner = np.empty(len(tiles), np.int64)
    _find(signatures, first, owner)
    return int(_compare(tiles.numpy(), owner, error))


@numba.njit(parallel=True)
def _sign(tiles, signatures):  # type: ignore[no-untyped-def]
    """The sums of a tile's quarters, each with three bits of fraction, as one number."""
    n, size = tiles.shape
    side = 8 if size == 64 else 7 if size == 49 else 4
    half = side // 2
    for i in numba.prange(n):
        sums = np.zeros(4, np.float32)
        for r in range(side):
            for c in range(side):
                sums[2 * (r >= half) + (c >= half)] += tiles[i, r * side + c]
        word = np.uint64(0)
        for bits in sums.view(np.uint32):
            word = word * np.uint64(0x9E3779B97F4A7C15) + np.uint64(bits >> np.uint32(20))
        signatures[i] = word


@numba.njit
def _find(signatures, first, owner):  # type: ignore[no-untyped-def]
    """owner[i] <- the first tile with the signature of tile i."""
    mask = np.uint64(len(first) - 1)
    for i in range(len(signatures)):
        at = (signatures[i] * np.uint64(0xD6E8FEB86659FD93) >> np.uint64(20)) & mask
        while first[at] >= 0 and signatures[first[at]] != signatures[i]:
            at = (at + np.uint64(1)) & mask
        if first[at] < 0:
            first[at] = i
        owner[i] = first[at]


@numba.njit(parallel=True)
def _compare(tiles, owner, error):  # type: ignore[no-untyped-def]
    """How many are no owners themselves, and lie within the error of theirs."""
    count = 0
    for i in numba.prange(len(owner)):
        if owner[i] == i:
            continue
        gap = square = np.float32(0)
        for k in range(tiles.shape[1]):
            x, y = tiles[i, k], tiles[owner[i], k]
            gap += (x - y) * (x - y)
            square += x * x
        if gap <= error * square:
            count += 1
    return count


def _best(tiles: Tensor, error: float) -> float:
    """The share of a sample that another sample explains but for the error, by mean and gain."""
    order = torch.randperm(len(tiles), generator=torch.Generator().manual_seed(0))
    half = min(SAMPLE, len(tiles) // 2)
    shapes = tiles - tiles.mean(dim=1, keepdim=True)
    unit = shapes / shapes.norm(dim=1, keepdim=True).clamp(min=1e-30)
    asked, others = order[:half], order[half : 2 * half]
    closest = (unit[asked] @ unit[others].T).amax(dim=1)
    left = (1 - closest.square()) * shapes[asked].square().sum(dim=1)
    return float((left <= error * tiles[asked].square().sum(dim=1)).float().mean())


def _cells(row: dict[str, Any]) -> list[str]:
    shares = (f"{100 * row[name]:.1f} %" for name in ("same", "alike", "best", "needed"))
    return [f"{row['kind']}, {row['side']} x {row['side']}", f"{row['tiles']}", *shares]


def _goal(found: list[dict[str, Any]]) -> dict[str, Any]:
    tiles = sum(row["tiles"] for row in found)
    shown = sum(row["alike"] * row["tiles"] for row in found) / tiles
    needed = sum(row["look_s"] for row in found) / sum(row["code_s"] for row in found)
    return target(
        "more tiles are alike than must be for looking to pay",
        f"{100 * shown:.1f} % of all are; {100 * needed:.0f} % would have to be",
        shown > needed,
    )


if __name__ == "__main__":
    main()
