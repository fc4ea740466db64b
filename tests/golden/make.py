"""Adds golden files for new codecs, settings and format versions. Never rewrites one.

    python tests/golden/make.py

A file holds what an `Encoded` holds, and what the plain torch reference decoded from it that day:

    <name>.v<format>.safetensors    buffer.0, buffer.1, ..., decoded     flat, in memory order
                                    mask, where the facts had one (`facts.mask`)
    metadata "encoded"               JSON: config, facts, seed, raw, dtype, shape, stride

SHA256SUMS lists every file; the test fails if one changes, is missing, or stands there unlisted. A
codec that has to change its bytes gets a new `format` here and keeps reading the old files. (Until
0.1.0 is released nobody holds old bytes: a file may be deleted, with its line in SHA256SUMS, and
made anew.)
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from elbowroom.codecs import Encoded, Facts, codec
from elbowroom.codecs.facts import NOTHING
from elbowroom.kernels import ops, reference

HERE = Path(__file__).parent
SUMS = HERE / "SHA256SUMS"


@dataclass(frozen=True)
class Golden:
    """One file: a codec's settings, and what it is given."""

    name: str
    settings: dict[str, Any]
    x: Tensor
    facts: Facts = NOTHING
    seed: int = 0x9E3779B97F4A7C15
    format: int = 1

    @property
    def path(self) -> Path:
        return HERE / f"{self.name}.v{self.format}.safetensors"


def wave(scale: float = 1.0) -> Tensor:
    """[50, 43], transposed in memory: two tiles, no multiple of a group; no generator behind it."""
    i = torch.arange(43 * 50, dtype=torch.float64)
    mixed = (i * 0.7391).sin() + 0.3 * (i * i * 0.0137).sin()
    return (mixed * scale * (1 + i / 1000)).float().view(43, 50).t()


def small_maps(rows: int, columns: int) -> Tensor:
    """[2, 5, rows, columns] out of the same waves."""
    i = torch.arange(10 * rows * columns, dtype=torch.float64)
    y = (i * 0.0839).sin() + 0.4 * (i * i * 0.000137).sin()
    return (y * (1 + i / 1000)).float().view(2, 5, rows, columns)


def third_of(x: Tensor) -> Tensor:
    """A mask that is not the sign of x: every third element, in memory order."""
    chosen = (torch.arange(x.numel()) % 3 == 0).view(x.t().shape).t()
    return codec("bitmask").encode(chosen).buffers[0]


def goldens() -> list[Golden]:
    x, zeros = wave(), Facts(has_zeros=True)
    bad = wave()
    bad[7, 3] = float("nan")
    maps = torch.stack([wave(), wave(3).flip(0), wave() + 5]).view(1, 3, 50, 43)
    last = maps.to(memory_format=torch.channels_last)
    division = {"id": "division"}
    ranged = {"bits": 3, "block": 4, "rounding": "dither", "range_blocks": 2}
    return [
        Golden("bitmask", {"id": "bitmask"}, x > 0),
        Golden("bitmask-dropout", {"id": "bitmask"}, (x > 0).float() / 0.9),
        Golden("narrow", {"id": "narrow"}, (x * 100).long()),
        Golden("narrow-facts", {"id": "narrow"}, (x * 9).int(), Facts(smallest=-99, largest=99)),
        Golden("sparse_lossless", {"id": "sparse_lossless"}, x.relu()),
        Golden("cast-bf16", {"id": "cast"}, x),
        Golden("cast-fp16", {"id": "cast", "to": "fp16"}, x),
        Golden("cast-fp8_e4m3", {"id": "cast", "to": "fp8_e4m3"}, x),
        Golden("cast-fp8_e5m2", {"id": "cast", "to": "fp8_e5m2", "group_size": 32}, x),
        Golden("cast-sparse", {"id": "cast", "to": "fp8_e4m3", "sparse": True}, x.relu()),
        Golden("group", {"id": "group"}, x),
        Golden("group-3-64", {"id": "group", "bits": 3, "group_size": 64}, x.half()),
        Golden("dither", {"id": "dither"}, x),
        Golden("dither-zeros", {"id": "dither"}, x.relu(), zeros),
        Golden("dither-3-128", {"id": "dither", "levels": 3, "group_size": 128}, x.bfloat16()),
        Golden(
            "dither-3-128-zeros", {"id": "dither", "levels": 3, "group_size": 128}, x.relu(), zeros
        ),
        Golden("dither-6-32", {"id": "dither", "levels": 6, "group_size": 32}, x.half()),
        Golden("dither-256-256", {"id": "dither", "bits": 8, "group_size": 256}, x),
        Golden("division", division, maps),
        Golden("division-dither", division | {"rounding": "dither"}, last),
        Golden("division-3-4-2", division | ranged, last.half()),
        Golden("division-rows", division | {"block": 4}, x),
        Golden("division-sequence", division | {"block": 4}, maps[0, :2], Facts(sequence=-2)),
        Golden("fdsr", {"id": "fdsr", "min_numel": 0}, small_maps(24, 19)),
        Golden(
            "fdsr-dither",
            {"id": "fdsr", "min_numel": 0, "bands": "5/2/1.6", "rounding": "dither"},
            small_maps(14, 14).bfloat16().to(memory_format=torch.channels_last),
        ),
        Golden(
            "fdsr-reuse",
            {"id": "fdsr", "min_numel": 0, "bands": "6/4/0", "reuse": True, "rho": 0.5, "block": 8},
            small_maps(24, 16).half(),
        ),
        Golden("dither-raw", {"id": "dither"}, bad),
        Golden("comet", {"id": "comet"}, x),
        Golden("comet-zeros", {"id": "comet", "bound": 0.1}, x.relu().bfloat16(), zeros),
        Golden(
            "comet-stochastic-1d",
            {"id": "comet", "bound": 0.01, "relative": False}
            | {"rounding": "stochastic", "prediction": "1d"},
            x.half(),
        ),
        Golden("comet-2d", {"id": "comet", "prediction": "2d"}, x.t().reshape(2, 5, 5, 43).relu()),
        Golden("sided", {"id": "sided"}, x),
        Golden("sided-3-5-32", {"id": "sided", "upper": 3, "lower": 5, "group_size": 32}, x.half()),
        Golden("sided-mask", {"id": "sided"}, x.bfloat16(), Facts(mask=third_of(x))),
        Golden("sided-fold", {"id": "sided", "lower": 4, "fold": 8}, x, Facts(mask=third_of(x))),
    ]


@contextmanager
def on_reference() -> Iterator[None]:
    """Inside, every op is served by the plain torch reference."""
    served = {op: getattr(ops, op) for op in ops.NAMES}
    try:
        for op in ops.NAMES:
            setattr(ops, op, getattr(reference, op))
        yield
    finally:
        for op, serve in served.items():
            setattr(ops, op, serve)


def flat(x: Tensor) -> Tensor:
    return x.as_strided((x.numel(),), (1,))


def write(golden: Golden) -> None:
    encoded = codec(**golden.settings).encode(golden.x, seed=golden.seed, facts=golden.facts)
    with on_reference():
        decoded = flat(encoded.decode())
    facts = asdict(encoded.facts)
    mask = facts.pop("mask")
    told = {
        "config": encoded.codec.config(),
        "facts": facts,
        "seed": encoded.seed,
        "raw": encoded.raw,
        "dtype": str(encoded.dtype).removeprefix("torch."),
        "shape": encoded.shape,
        "stride": encoded.stride,
    }
    tensors = {f"buffer.{i}": buffer for i, buffer in enumerate(encoded.buffers)}
    tensors |= {} if mask is None else {"mask": mask}
    save_file(tensors | {"decoded": decoded}, golden.path, {"encoded": json.dumps(told)})
    with SUMS.open("a") as sums:
        sums.write(f"{sha256(golden.path)}  {golden.path.name}\n")


def read(told: dict[str, Any], tensors: dict[str, Tensor]) -> Encoded:
    """The `Encoded` of a file, from its metadata and its tensors."""
    return Encoded(
        codec=codec(**told["config"]),
        buffers=tuple(tensors[name] for name in sorted(tensors) if name.startswith("buffer.")),
        shape=tuple(told["shape"]),
        stride=tuple(told["stride"]),
        dtype=getattr(torch, told["dtype"]),
        seed=told["seed"],
        facts=Facts(**told["facts"], mask=tensors.get("mask")),
        raw=told["raw"],
    )


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    listed = SUMS.read_text() if SUMS.exists() else ""
    for golden in goldens():
        if golden.path.name not in listed and not golden.path.exists():
            write(golden)
            print("added", golden.path.name)  # noqa: T201  a script


if __name__ == "__main__":
    main()
