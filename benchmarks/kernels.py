"""How fast the kernels are, next to a plain copy of the same tensor.

    ./scripts/bench kernels [--device cuda] [--quick]

x is 128 MiB: normal float32 (half of it zero for nonzero, on either side for sided; maps of 64 x
64, or 64 channels of them, for division), int64 below 100 for narrow. Speed is GB/s of x, in 1e9
bytes; "of a copy" is the time of `torch.Tensor.copy_` of x into a warm buffer over that of the op,
run in turn: 1 means as fast as a copy. Quantizers allocate what they return. Dequantizers
write into a warm buffer; "fresh" ones allocate `out` each time. On CUDA, events take the times.
Nothing is timed unless every op equals the reference on this device.
"""

import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from _common import arguments, facts, finish, out_path, paired_dict, target, tell, times
from torch import Tensor

from elbowroom.kernels import ops, reference
from elbowroom.measure.timing import Paired, paired

SEED = 12345
TARGETS = {  # on a CPU: the deed, and how fast it should be, where a copy is 1
    "group 2 bits G=256 quantize": 0.35,
    "group 2 bits G=256 dequantize": 1.0,
    "dither 2 bits G=256 quantize": 0.3,
    "dither 2 bits G=256 dequantize": 0.5,
    "sided 4 + 2 levels G=64 quantize": 0.15,
    "sided 4 + 2 levels G=64 dequantize": 0.3,
}
TARGET_NBYTES, TARGET_THREADS = 100_000_000, 2
FDSR = (  # bands, levels, tiles of 32 with reuse, dither
    ("6/4/3/1.6/1.6/1.6/0", (63, 15, 7, 3, 3, 3, 0), 0, False),
    ("4/1.6 dither", (16, 3), 0, True),
    ("6/4/3/1.6/1.6/0 reuse", (63, 15, 7, 3, 3, 0), 16, False),
)
_QUEUEING_CYCLES = 4_000_000  # about 2 ms
Step = Callable[[], object]


class Row(NamedTuple):
    """One timed deed: what a table calls it, the deed, and the tensor that a copy would move."""

    name: str
    step: Step
    x: Tensor


def rows(n: int, device: str) -> Iterator[Row]:
    """All deeds on `n` float32, each with its own data and a warm `out`."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(device)
    out = torch.zeros_like(x)
    for group_size in (256, 64):
        for kind, stored_noise in (("group", ()), ("dither", (SEED,))):
            settings = (4, group_size)
            name = f"{kind} 2 bits G={group_size}"
            yield from both(kind, name, x, (SEED, *settings), (*stored_noise, *settings), out)
    settings = (SEED, 4, 256)
    yield from both("nonzero", "nonzero 2 bits G=256", x.relu(), settings, settings, out)
    for layout in ("", " channels_last"):
        how = 4, 8, 0, [n // 2**18, 64, 64, 64] if layout else [n // 4096, 64, 64, 1]
        name = f"division 2 bits{layout}"
        yield from both("division", name, x, (SEED, *how), (SEED, *how, True), out)
    yield from comet(x.relu(), out)
    yield from sided(x, out)
    for fmt in ("e4m3", "e5m2"):
        yield from both("fp8", f"fp8 {fmt} G=256", x, (256, fmt), (256, fmt), out)
    maps = (n // 16384, 128, 128, 1)
    for name, levels, kept, dither in FDSR:
        settings = (SEED, maps, 8, levels, kept, dither)
        yield from both("fdsr", f"fdsr {name}", x, settings, settings, out)
    yield from bits(x, out)
    yield from narrow(n // 2, device)
    yield from affine(x, out)


def both(
    kind: str, name: str, x: Tensor, encode: tuple[Any, ...], decode: tuple[Any, ...], out: Tensor
) -> Iterator[Row]:
    """Quantize, and dequantize into a warm and into a fresh `out`."""
    quantize, dequantize = getattr(ops, f"{kind}_quantize"), getattr(ops, f"{kind}_dequantize")
    yield Row(f"{name} quantize", lambda: quantize(x, *encode), x)
    stored = quantize(x, *encode)
    yield Row(f"{name} dequantize", lambda: dequantize(*stored, *decode, out), x)
    fresh = lambda: dequantize(*stored, *decode, torch.empty_like(x))  # noqa: E731
    yield Row(f"{name} dequantize, fresh", fresh, x)


def comet(x: Tensor, out: Tensor) -> Iterator[Row]:
    """A bound of 1 % of the range, about 3.8 bits a value; once more with 2-D prediction."""
    grid = torch.tensor([0.05, 0.0999, 1 / 0.0999], device=x.device)
    for name, maps in (("comet", (0, 0, 0)), ("comet 2d", (64, 64, 1))):
        encode, decode = (grid, SEED, "dither", False, *maps), (grid, SEED, "dither", *maps)
        yield from both("comet", name, x, encode, decode, out)


def sided(x: Tensor, out: Tensor) -> Iterator[Row]:
    """The bitmap is there before: a ReLU's."""
    mask = ops.pack_bits(x.relu())
    yield from _sided("sided 4 + 2 levels G=64", x, mask, (SEED, 4, 2, 64, 1), out)
    yield from _sided("sided 4 + 4 levels G=64, fold 8", x, mask, (SEED, 4, 4, 64, 8), out)


def _sided(
    name: str, x: Tensor, mask: Tensor, settings: tuple[int, ...], out: Tensor
) -> Iterator[Row]:
    yield Row(f"{name} quantize", lambda: ops.sided_quantize(x, mask, *settings), x)
    stored = (mask, *ops.sided_quantize(x, mask, *settings), *settings)
    yield Row(f"{name} dequantize", lambda: ops.sided_dequantize(*stored, out), x)
    fresh = lambda: ops.sided_dequantize(*stored, torch.empty_like(x))  # noqa: E731
    yield Row(f"{name} dequantize, fresh", fresh, x)


def bits(x: Tensor, out: Tensor) -> Iterator[Row]:
    packed = ops.pack_bits(x)
    yield Row("pack_bits float32", lambda: ops.pack_bits(x), x)
    yield Row("unpack_bits float32", lambda: ops.unpack_bits(packed, 1.0, out), x)
    yield Row(
        "unpack_bits float32, fresh",
        lambda: ops.unpack_bits(packed, 1.0, torch.empty_like(x)),
        x,
    )
    mask = x > 0
    yield Row("pack_bits bool", lambda: ops.pack_bits(mask), mask)


def narrow(n: int, device: str) -> Iterator[Row]:
    x = torch.randint(100, (n,), generator=torch.Generator().manual_seed(0)).to(device)
    yield Row("narrow int64 -> uint8", lambda: ops.narrow(x, torch.uint8), x)


def affine(x: Tensor, out: Tensor) -> Iterator[Row]:
    """In place, with the values of a 64 x 56 x 56 image; x stays bounded."""
    scale = torch.ones(64, device=x.device)
    shift = torch.zeros(64, device=x.device)
    packed = ops.pack_bits(x)
    y = out.copy_(x)
    yield Row("affine", lambda: ops.affine(y, scale, shift, 3136, None, y), x)
    yield Row("affine, masked", lambda: ops.affine(y, scale, shift, 3136, packed, y), x)
    settings, by = (SEED, 4, 64), (scale, shift, 3136)
    yield Row("dither + affine quantize", lambda: ops.dither_quantize(x, *settings, *by), x)
    stored = (*ops.dither_quantize(x, *settings), *settings)
    one_pass = lambda: ops.dither_dequantize(*stored, out, *by, packed)  # noqa: E731
    yield Row("dither + affine, masked dequantize", one_pass, x)


# --- timing ---


def against_copy(row: Row, pairs: int) -> Paired:
    """The deed (a) and a copy of its tensor (b), in turn."""
    room = torch.zeros_like(row.x)
    if not row.x.is_cuda:
        return paired(row.step, lambda: room.copy_(row.x), pairs=pairs)
    steps = (row.step, lambda: room.copy_(row.x))
    for step in steps:
        by_events(step)  # warm: compiled
    taken = [(by_events(steps[0]), by_events(steps[1])) for _ in range(pairs)]
    return Paired(tuple(a for a, _ in taken), tuple(b for _, b in taken))


def by_events(step: Step) -> float:
    """Seconds on the device, which is kept busy until all launches of the step are queued."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_QUEUEING_CYCLES)
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def price_of_a_call(device: str, calls: int = 2000) -> dict[str, float]:
    """Microseconds a call beyond the function's own, median of 11 rounds run in turn."""
    x = torch.zeros(8, device=device)
    kinds = {"direct": _one, "library": _by_library(), "custom_op": _by_custom_op()}
    rounds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(11):
        for name, function in kinds.items():
            start_s = time.perf_counter()
            for _ in range(calls):
                function(x)
            rounds[name].append((time.perf_counter() - start_s) / calls * 1e6)
    medians = {name: statistics.median(took) for name, took in rounds.items()}
    return {name: medians[name] - medians["direct"] for name in ("library", "custom_op")}


def _one(x: Tensor) -> Tensor:
    return torch.empty(1)


_library = torch.library.Library("elbowroom_bench", "FRAGMENT")


def _by_library() -> Callable[[Tensor], Tensor]:
    _library.define("by_library(Tensor x) -> Tensor")
    _library.impl("by_library", _one, "CompositeExplicitAutograd")
    return torch.ops.elbowroom_bench.by_library.default


def _by_custom_op() -> Callable[[Tensor], Tensor]:
    return torch.library.custom_op("elbowroom_bench::by_custom_op", _one, mutates_args=())


# --- the gate ---


def unequal(device: str) -> list[str]:
    """The ops that do not equal the reference on this device, on a small tensor."""
    wrong = []
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    for kind, settings in (
        ("group", (SEED, 4, 64)),
        ("dither", (SEED, 4, 64)),
        ("nonzero", (SEED, 4, 64)),
        ("division", (SEED, 4, 8, 0, [2, 50, 50, 1])),
        ("fp8", (64, "e4m3")),
        ("fdsr", (SEED, (8, 25, 25, 1), 8, (32, 8, 3, 0), 16, True)),
    ):
        given = x.relu() if kind == "nonzero" else x
        noise = settings[1:] if kind == "group" else settings
        results = []
        for where, home in ((ops, device), (reference, "cpu")):
            stored = getattr(where, f"{kind}_quantize")(given.to(home), *settings)
            out = torch.empty_like(x, device=home)
            last = (True, out) if kind == "division" else (out,)
            getattr(where, f"{kind}_dequantize")(*stored, *noise, *last)
            results.append([*stored, out])
        wrong += [kind for a, b in zip(*results, strict=True) if not torch.equal(a.cpu(), b)]
    grid = torch.tensor([0.05, 0.0999, 1 / 0.0999])
    results = []
    for where, home in ((ops, device), (reference, "cpu")):
        settings = (grid.to(home), SEED, "dither")
        stored = where.comet_quantize(x.relu().to(home), *settings, False, 5, 10, 1)
        out = torch.empty_like(x, device=home)
        where.comet_dequantize(*stored, *settings, 5, 10, 1, out)
        results.append([*stored, out])
    wrong += ["comet" for a, b in zip(*results, strict=True) if not torch.equal(a.cpu(), b)]
    packed = ops.pack_bits(x.relu().to(device))
    if not torch.equal(packed.cpu(), reference.pack_bits(x.relu())):
        wrong.append("pack_bits")
    results = []
    for where, home in ((ops, device), (reference, "cpu")):
        y, mask = torch.empty_like(x, device=home), packed.to(home)
        stored = where.sided_quantize(x.to(home), mask, SEED, 4, 4, 64, 8)
        where.sided_dequantize(mask, *stored, SEED, 4, 4, 64, 8, y)
        results.append([*stored, y])
    wrong += ["sided" for a, b in zip(*results, strict=True) if not torch.equal(a.cpu(), b)]
    results = []
    for where, home in ((ops, device), (reference, "cpu")):
        y, unpacked = x.to(home, copy=True), torch.empty_like(x, device=home)
        channels = torch.arange(1.0, 4.0, device=home)
        where.affine(y, channels, channels, 7, packed.to(home), y)
        where.unpack_bits(packed.to(home), 1.5, unpacked)
        small, lost = where.narrow((x * 200).long().to(home), torch.int8)
        results.append([y, unpacked, small, lost])
    names = ("affine", "unpack_bits", "narrow", "narrow")
    same = (torch.equal(a.cpu(), b) for a, b in zip(*results, strict=True))
    return wrong + [name for name, equal in zip(names, same, strict=True) if not equal]


# --- the report ---


def slug(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu-{platform.machine()}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def main() -> None:
    parser = arguments(__doc__)
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=best)
    parser.add_argument("--pairs", type=int, default=11, help="runs of each deed (11)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if wrong := unequal(options.device):
        raise SystemExit(f"not timed: {', '.join(wrong)} differ from the reference; see the tests")
    n = 2**20 if options.quick else 32 * 2**20
    pairs = 3 if options.quick else options.pairs
    found = []
    for row in rows(n, options.device):
        tell(row.name)
        found.append((row, against_copy(row, pairs)))
    price = price_of_a_call(options.device, 100 if options.quick else 2000)
    finish(result(options, found, price, n), out_path(options, f"kernels-{slug(options.device)}"))


def result(
    options: Any, found: list[tuple[Row, Paired]], price: dict[str, float], n: int
) -> dict[str, Any]:
    table = [
        [row.name, rate(row.x, took.median_a_s), rate(row.x, took.median_b_s), times(took)]
        for row, took in found
    ]
    table += [[f"call of an op by {kind}", f"+{us:.1f} us", "-", "-"] for kind, us in price.items()]
    deeds = [
        {"deed": row.name, "x_nbytes": row.x.nbytes, **paired_dict(took)} for row, took in found
    ]
    known = facts()
    if options.device == "cuda":
        known["device"]["gpu"] = torch.cuda.get_device_name()
    return {
        "name": f"kernels-{slug(options.device)}",
        "claim": "the kernels run at the speed of memory",
        **known,
        "n": found[0][1].n,
        "settings": {"elements": n, "levels": 4, "device": options.device},
        "rows": deeds,
        "price_of_a_call_us": price,
        "table": {"head": ["deed", "GB/s", "copy GB/s", "of a copy"], "rows": table},
        "targets": targets(deeds, known["threads"]) if options.device == "cpu" else [],
        "notes": ["quantizers allocate their outputs; medians and quartiles of pairs run in turn"],
    }


def targets(deeds: list[dict[str, Any]], threads: int) -> list[dict[str, Any]]:
    """Each target, and what came of it; a run that is too small or on other threads meets none."""
    by_name = {deed["deed"]: deed for deed in deeds}
    lines = []
    for name, least in TARGETS.items():
        deed = by_name[name]
        low, high = deed["ratio_quartiles"]
        lines.append(
            target(
                f"{name}, float32, at least {TARGET_NBYTES / 1e6:g} MB, {TARGET_THREADS} threads: "
                f">= {least:g}x of a copy",
                f"{deed['ratio']:.3f}x ({low:.3f}..{high:.3f}), {deed['x_nbytes'] / 1e6:.0f} MB, "
                f"{threads} threads, n = {deed['pairs']}",
                deed["ratio"] >= least
                and deed["x_nbytes"] >= TARGET_NBYTES
                and threads == TARGET_THREADS,
            )
        )
    return lines


def rate(x: Tensor, seconds: float) -> str:
    return f"{x.nbytes / seconds / 1e9:.2f}"


if __name__ == "__main__":
    main()
