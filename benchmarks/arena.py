"""The arena, where restored tensors take turns in one memory: seconds saved, bytes it costs.

    ./scripts/bench arena [--quick]

    off, on      a step with ARENA.enabled = False and with True, interleaved
    peak         allocator's highest level of one step, the arena's blocks among it, plus what it
                 held before
    most held    the arena's own bytes at their most
    one tensor   a chain of SiLUs on [128, 64, 28, 28] (24.5 MiB) or twice that: backward restores
                 one after the other

Memory that comes fresh from the kernel is paid for when it is first written. glibc hands out freed
blocks of up to 32 MiB again, so single tensors are clocked on both sides of that size. Gradients
with and without the arena must be bit-equal before anything is timed. Weights are random: they do
not matter here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _common import arguments, facts, finish, mib, out_path, paired_dict, tell, times
from _training import Bench, memory
from _ways import Way, saving
from torch import Tensor
from training_gpt import DeepNextByte

from elbowroom.codecs import codec
from elbowroom.demo.data import load_images, load_text
from elbowroom.demo.tasks import Clothing, Task
from elbowroom.measure import Paired, memory_curve, paired
from elbowroom.runtime.arena import ARENA

NAME = "arena"
CHAIN = 8
EXACT, LOSSY = saving(), saving("dither", levels=4)


@dataclass
class Side:
    """What one setting of the arena took."""

    peak_nbytes: int
    most_held_nbytes: int


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of steps (10)")
    options = parser.parse_args()
    if options.quick:
        options.pairs = 2
    torch.set_num_threads(options.threads)
    known = facts()
    rows = []
    for name, task in _tasks(options.quick):
        torch.manual_seed(0)
        bench = Bench(task, task.model(), next(task.batches(0)))
        for way in (EXACT, LOSSY):
            rows.append(_steps(name, bench, way, options.pairs))
            tell(f"{name}, {way.name}: {rows[-1]['time']['ratio']:.3f}")
    rows += _one_tensor(options.pairs, small=options.quick)
    finish(_result(rows, options.pairs, known), out_path(options, NAME))


def _tasks(quick: bool) -> list[tuple[str, Task]]:
    images, text = load_images(), load_text()
    narrow = ("ResNet-18, width 16, batch 128", Clothing(images, 16, 128))
    if quick:
        return [("ResNet-18, width 16, batch 32", Clothing(images, 16, 32))]
    wide = ("ResNet-18, width 64, batch 128", Clothing(images, 64, 128))
    gpt = ("GPT, 6 blocks of width 256, 16 x 256", DeepNextByte(text, 256, 16, 256, depth=6))
    return [narrow, wide, gpt]


def _steps(name: str, bench: Bench, way: Way, pairs: int) -> dict[str, Any]:
    """Gradients, then bytes, then time, with and without."""
    off, on = (
        _with(False, lambda: bench.grads(way, seed=1)),
        _with(True, lambda: bench.grads(way, seed=1)),
    )
    if not all(map(torch.equal, off, on)):
        raise AssertionError(f"{name}, {way.name}: the arena changed a gradient")
    del off, on
    sides = [_with(enabled, lambda: _side(bench, way)) for enabled in (False, True)]

    def step() -> None:
        bench.step(way, seed=2)
        bench.optimizer.zero_grad(set_to_none=True)

    timing = _off_and_on(step, pairs)
    return {"what": f"a step of {name}", "way": way.name, **_numbers(sides, timing)}


def _side(bench: Bench, way: Way) -> Side:
    with _Watched() as watched:
        found = memory(bench, way)
    return Side(found.peak_nbytes, watched.max_nbytes)


class _Watched:
    """Notes the most bytes that the arena held while it was watched."""

    def __enter__(self) -> "_Watched":
        self.max_nbytes = 0
        take = ARENA.take

        def noting(*args: Any) -> Tensor:
            x = take(*args)
            self.max_nbytes = max(self.max_nbytes, ARENA.nbytes)
            return x

        ARENA.take = noting  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        del ARENA.take  # the method of its class shows again


def _with(enabled: bool, act: Callable[[], Any]) -> Any:
    before, ARENA.enabled = ARENA.enabled, enabled
    try:
        return act()
    finally:
        ARENA.enabled = before


def _off_and_on(step: Callable[[], object], pairs: int) -> Paired:
    return paired(lambda: _with(False, step), lambda: _with(True, step), pairs=pairs)


def _numbers(sides: list[Side], timing: Paired) -> dict[str, Any]:
    off, on = sides
    return {
        "peak_off_nbytes": off.peak_nbytes,
        "peak_on_nbytes": on.peak_nbytes,
        "most_held_nbytes": on.most_held_nbytes,
        "time": paired_dict(timing),
        "shown": times(timing),
    }


def _one_tensor(pairs: int, *, small: bool) -> list[dict[str, Any]]:
    """One restored tensor at a time: inside a backward, and the decoding alone."""
    shape = (8 if small else 128, 64, 28, 28)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    sizes = [x, torch.cat([x, x])]
    return [_chained(x, pairs) for x in sizes] + [_decoding(x, pairs) for x in sizes]


def _chained(x: Tensor, pairs: int) -> dict[str, Any]:
    """Forward and backward of a chain whose backward restores CHAIN tensors."""
    chain = _Chain(x)
    off, on = _with(False, chain.gradient), _with(True, chain.gradient)
    if not torch.equal(off, on):
        raise AssertionError("SiLU chain: the arena changed a gradient")
    sides = [_with(enabled, chain.side) for enabled in (False, True)]
    return {
        "what": f"forward and backward of {CHAIN} SiLUs, {mib(x.nbytes)} MiB each",
        "way": 'er.saving("dither", levels=4, rebuild=False)',
        **_numbers(sides, _off_and_on(chain.run, pairs)),
    }


def _decoding(x: Tensor, pairs: int) -> dict[str, Any]:
    """Decoding alone, into new memory and into a block that is there."""
    encoded, room = codec("dither", levels=4).encode(x), torch.empty(x.numel())
    timing = paired(encoded.decode, lambda: encoded.decode(room), pairs=max(pairs, 11))
    return {
        "what": f"decoding {mib(x.nbytes)} MiB into new memory (off), a warm block (on)",
        "way": 'er.codec("dither", levels=4)',
        **_numbers([Side(x.nbytes, 0), Side(x.nbytes, x.nbytes)], timing),
    }


class _Chain:
    """SiLUs one after the other: each saves its input and needs nothing else."""

    def __init__(self, x: Tensor) -> None:
        self._x, self._scale = x, torch.ones(1, requires_grad=True)
        self._way = saving("dither", levels=4, rebuild=False)

    def run(self) -> None:
        with self._way.context(1):
            y = self._x * self._scale
            for _ in range(CHAIN):
                y = F.silu(y)
            total = y.sum()
        del y
        self._scale.grad = None
        total.backward()  # type: ignore[no-untyped-call]

    def gradient(self) -> Tensor:
        self.run()
        assert self._scale.grad is not None
        return self._scale.grad

    def side(self) -> Side:
        held_nbytes = ARENA.nbytes
        with _Watched() as watched:
            curve = memory_curve(self.run)
        return Side(curve.peak_nbytes + held_nbytes, watched.max_nbytes)


def _result(rows: list[dict[str, Any]], pairs: int, known: dict[str, Any]) -> dict[str, Any]:
    head = [
        "what",
        "forward inside",
        "time on / off",
        "off",
        "on",
        "peak off",
        "peak on",
        "most held",
    ]
    lines = [
        [
            row["what"],
            row["way"],
            row["shown"],
            f"{row['time']['median_a_s'] * 1e3:.1f} ms",
            f"{row['time']['median_b_s'] * 1e3:.1f} ms",
            f"{mib(row['peak_off_nbytes'])} MiB",
            f"{mib(row['peak_on_nbytes'])} MiB",
            f"{mib(row['most_held_nbytes'])} MiB",
        ]
        for row in rows
    ]
    return {
        "name": NAME,
        "claim": __doc__.splitlines()[0],
        **known,
        "n": f"{pairs} pairs (11 for decoding alone)",
        "settings": {"arena": "elbowroom.runtime.arena.ARENA, off and on", "weights": "random"},
        "rows": rows,
        "table": {"head": head, "rows": lines},
        "targets": [],
        "notes": [
            "Decoding alone: the peak is that of the restored tensor; a warm block has to be held.",
            "glibc keeps freed blocks of up to 32 MiB for the next allocation, so that new memory "
            "is mostly warm below that size, and comes from the kernel above.",
        ],
    }


if __name__ == "__main__":
    main()
