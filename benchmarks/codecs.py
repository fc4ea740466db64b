"""The table under "Measured" in a codec's card: bits a value, error, and speed against a copy.

    python benchmarks/codecs.py [ID ...]

Data are synthetic: x normal, its ReLU (half zeros), a mask, indices below 1000, for the codecs of
maps smooth ones (spectrum 1 / f; smoother: 1 / f^1.5; blurred: 8 x 8 normal numbers, interpolated
to 64 x 64). 64 MiB of float32 (or as many elements of another dtype), 2 threads, ops warm. Speed:
time of `torch.Tensor.copy_` of x into a warm buffer / time of an encode (or of a decode into a warm
`out`), median of 11 pairs run in turn, quartiles in brackets. rel-MSE is sum (x~ - x)^2 / sum x^2.
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from elbowroom.codecs import Codec, Facts, codec, codecs
from elbowroom.codecs.fdsr import VARIANTS
from elbowroom.measure.timing import Paired, paired

N = 16 * 2**20
ZEROS = Facts(has_zeros=True)


class Row(NamedTuple):
    """One line of a table: a codec and what it is given."""

    codec: Codec
    data: str
    facts: Facts = Facts()
    shape: tuple[int, ...] = (N,)


def data(name: str) -> Tensor:
    x = torch.randn(N, generator=torch.Generator().manual_seed(0))
    return {
        "normal": lambda: x,
        "ReLU": lambda: x.relu_(),
        "blurred": lambda: interpolate(x[: N // 64].view(-1, 64, 8, 8), 64, mode="bicubic"),
        "mask": lambda: x > 0,
        "dropout": lambda: (x > 0).float() * 2,
        "indices": lambda: (x.abs_() * 1000).long() % 1000,
    }[name]()


def smooth(row: Row) -> Tensor:
    """Maps of variance 1 with the spectrum of photographs: amplitude 1 / f, phases at random."""
    side = row.shape[-1]
    f = torch.fft.fftfreq(side).square()[:, None] + torch.fft.rfftfreq(side).square()
    fall = (f + side**-2).sqrt() ** (1.5 if "smoother" in row.data else 1.0)
    spectrum = torch.fft.rfft2(data("normal").view(row.shape)) / fall
    x = torch.fft.irfft2(spectrum, s=row.shape[-2:])
    x /= x.std()
    return x.to(memory_format=torch.channels_last) if "last" in row.data else x


def rows(id: str) -> Iterator[Row]:
    """The settings that a card shows."""
    if id == "bitmask":
        yield Row(codec(id), "mask", Facts(value=1.0))
        yield Row(codec(id), "dropout", Facts(value=2.0))
        yield Row(codec(id), "dropout")
    elif id == "narrow":
        yield Row(codec(id), "indices", Facts(smallest=0, largest=999))
        yield Row(codec(id), "indices")
    elif id == "sparse_lossless":
        yield Row(codec(id), "ReLU")
    elif id == "cast":
        yield from (
            Row(codec(id, to=to), "normal") for to in ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
        )
    elif id == "group":
        yield from (Row(codec(id, bits=bits), "normal") for bits in (1, 2, 4, 8))
        yield Row(codec(id, group_size=64), "normal")
        yield Row(codec(id), "ReLU")
    elif id == "dither":
        yield from (Row(codec(id, levels=levels), "normal") for levels in (2, 3, 4, 16, 256))
        yield Row(codec(id, group_size=256), "normal")
        yield Row(codec(id), "ReLU")
        yield from (Row(codec(id, levels=levels), "ReLU", ZEROS) for levels in (3, 4))
    elif id == "division":
        maps = N // 2**20, 64, 128, 128
        for chosen in (
            *({"bits": bits} for bits in (1, 2, 4, 8)),
            *({"rounding": "dither", "range_blocks": side} for side in (0, 1, 2)),
        ):
            yield Row(codec(id, **chosen), "smooth maps", shape=maps)
        yield Row(codec(id), "normal", shape=maps)
        yield Row(codec(id), "smooth channels_last", shape=maps)
    elif id == "fdsr":
        maps = N // 2**20, 64, 128, 128
        yield from (Row(variant, "smoother maps", shape=maps) for variant in VARIANTS)
        for levels in (3, 4):
            yield Row(codec("dither", levels=levels), "smoother maps", shape=maps)
    elif id == "comet":
        for name, facts in (("normal", Facts()), ("ReLU", Facts()), ("ReLU", ZEROS)):
            yield from (Row(codec(id, bound=bound), name, facts) for bound in (1e-1, 1e-2, 1e-3))
        for rounding in ("stochastic", "nearest"):
            yield Row(codec(id, rounding=rounding), "ReLU")
        for prediction in ("none", "1d", "2d"):
            yield Row(codec(id, prediction=prediction), "blurred", shape=(N // 2**18, 64, 64, 64))
    elif id == "sided":
        for upper, lower in ((4, 2), (4, 4), (8, 2), (16, 16)):
            yield Row(codec(id, upper=upper, lower=lower), "normal")
    else:
        yield Row(codec(id), "normal")


def measured(row: Row) -> str:
    x = smooth(row) if "smooth" in row.data else data(row.data).view(row.shape)
    room, out = torch.empty_like(x), torch.empty(N, dtype=x.dtype)
    encoded = row.codec.encode(x, facts=row.facts)
    y = encoded.decode()
    error = float((y.double() - x.double()).square().sum() / x.double().square().sum())
    encode = paired(lambda: row.codec.encode(x, facts=row.facts), lambda: room.copy_(x), pairs=11)
    decode = paired(lambda: encoded.decode(out=out.view(-1)), lambda: room.copy_(x), pairs=11)
    fields = ", ".join(str(v) for k, v in row.codec.config().items() if k != "id") or "-"
    facts = {k: v for k, v in vars(row.facts).items() if v is not None and v is not False}
    known = ", ".join(f"{name}={value}" for name, value in facts.items()) or "-"
    ratio = x.element_size() * N / encoded.nbytes
    bits = 8 * encoded.nbytes / N
    shown = "0" if error == 0 else f"{error:.2g}"
    told = f"| {fields} | {row.data} | {known} | {bits:.3f} | {ratio:.1f} | {shown} |"
    return f"{told} {speed(encode)} | {speed(decode)} |"


def speed(pairs: Paired) -> str:
    low, high = pairs.ratio_iqr
    return f"{pairs.ratio:.2f} ({low:.2f}..{high:.2f})"


def main() -> None:
    torch.set_num_threads(2)
    for id in sys.argv[1:] or codecs():
        print(f"\n{id}, torch {torch.__version__}, {N} elements\n")
        print("| fields | data | facts | bits a value | ratio | rel-MSE | encode | decode |")
        print("|---|---|---|--:|--:|--:|--:|--:|")
        for row in rows(id):
            print(measured(row), flush=True)


if __name__ == "__main__":
    main()
