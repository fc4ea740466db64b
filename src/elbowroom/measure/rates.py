"""Measures, once a process, what codes and copies take on this machine.

    seconds of a tensor = fixed + bytes / rate

The rate is what two sizes differ by, in a loop that does nothing else. The fixed part (Python, the
launch of a kernel, the handle) is measured between other work, as in a step: a loop over one small
tensor has its code and data in the nearest caches and takes a fourth to a tenth of that.

Settings that nearly every plan needs (bits, small integers; dither, if codes may be lossy) are
measured before a training begins. Any other setting is measured when a plan first needs it, so that
no kernel is compiled in vain. That is in the middle of a step, whose memory is counted; so it is
measured on less data and beside less other work, and the difference that this makes for a mask is
added. Rates are the best of a few runs on a tensor of 4 MiB, because a planner must not take the
noise of other processes for the speed of a codec. A GPU's rates are those of its own work, without
the launches, on 16 MiB.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from statistics import median

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from elbowroom.codecs import BitMask, Codec, Dither, Facts, Narrow
from elbowroom.codecs.names import setting_named
from elbowroom.codecs.quality import dtypes_of
from elbowroom.errors import CodecError, PlanError
from elbowroom.measure.timing import busy_s, typical_s
from elbowroom.plan import Encode, Need, Offload
from elbowroom.plan.prices import ATTENTION_LOOK, ROWS, fixed_name, of_zeros, rate_name
from elbowroom.runtime.direct.attention import spread, spread_of_values
from elbowroom.runtime.handles.offload import OffloadHandle
from elbowroom.runtime.normal import of_rows
from elbowroom.runtime.prefetcher import Prefetcher
from elbowroom.runtime.serving import perform
from elbowroom.runtime.tiers import Tier, tier_for
from elbowroom.runtime.tiers.file import FileTier

_log = logging.getLogger("elbowroom.measure")
_ELEMENTS = 1 << 20
_SMALL = 1 << 14  # elements of the tensor that the fixed part is measured with
_RUNS = 5
_TRIPS, _PIECES = 3, 16  # times, of tensors of 4 MiB, to a file and back
_MOVED, _MOVES = 1 << 18, 8  # elements of tensors that are moved in a step, and their number
_TURNS = 3
_OTHER_WORK = 1 << 22  # elements that are copied between two runs: most of what caches hold
_ON_GPU = 1 << 22  # elements: less is over before the next kernel is launched
_UNNOTICED_S = 3.0
_FEWER = 1 << 18  # elements of either in the middle of a training
_EXACT = (BitMask(), Narrow())
_OF_ZEROS = Dither(levels=4)


class Rates(dict[str, float]):
    """Bytes a second, by name. What is missing is measured when it is asked for, if it can be.

    fixed_s    seconds that each tensor takes besides, by name
    has_links  links were measured, too: rates of moving a tensor away and back, where that can be
    missing_s  seconds that encoding and decoding a small tensor take longer between all of the
               other work than between a part of it
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.fixed_s: dict[str, float] = {}
        self.has_links = False
        self._taken_s = 0.0
        whole_s = _between_other_work(_EXACT[0], device, _OTHER_WORK)
        part_s = _between_other_work(_EXACT[0], device, _FEWER)
        both = zip(whole_s, part_s, strict=True)
        self.missing_s = [max(whole - part, 0.0) for whole, part in both]

    def __missing__(self, name: str) -> float:
        verb, _, setting = name.partition(" ")
        try:
            if verb not in ("encode", "decode"):
                raise KeyError(name)
            codec = setting_named(setting)
        except (CodecError, ValueError) as error:
            raise KeyError(name) from error
        self.measure(codec, in_training=True)
        return self[name]

    def measure(self, codec: Codec, *, in_training: bool = False) -> None:
        """Measures both rates of one setting, and the fixed part of its class if it is not known.

        All settings of a class run the same code but for the innermost loop.
        """
        began_s = time.perf_counter()
        on_cpu = _FEWER if in_training else _ELEMENTS
        elements = _ON_GPU if self.device.type == "cuda" else on_cpu
        self.update(_rated(codec, self.device, elements))
        names = [rate_name(verb, codec) for verb in ("encode", "decode")]
        known = [fixed_name(verb, codec) for verb in ("encode", "decode")]
        if known[0] not in self.fixed_s:
            small_s = _between_other_work(
                codec, self.device, _FEWER if in_training else _OTHER_WORK
            )
            if in_training:
                small_s = [each + more for each, more in zip(small_s, self.missing_s, strict=True)]
            for name, fixed, seconds in zip(names, known, small_s, strict=True):
                nbytes = _sample(codec, self.device, _SMALL)[0].nbytes
                self.fixed_s[fixed] = max(seconds - nbytes / self[name], 0.0)
        self._say_if_slow(time.perf_counter() - began_s)

    def measure_of_zeros(self, codec: Codec) -> None:
        """Measures a setting on a tensor with zeros, of which its codes have a bitmap."""
        elements = _ON_GPU if self.device.type == "cuda" else _ELEMENTS
        rated = _rated(codec, self.device, elements, has_zeros=True).values()
        small_s = _between_other_work(codec, self.device, _OTHER_WORK, has_zeros=True)
        nbytes = _sample(codec, self.device, _SMALL)[0].nbytes
        for verb, rate, seconds in zip(("encode", "decode"), rated, small_s, strict=True):
            name = of_zeros(fixed_name(verb, codec))
            self[name], self.fixed_s[name] = rate, max(seconds - nbytes / rate, 0.0)

    def _say_if_slow(self, seconds: float) -> None:
        """Says once why a first step takes long: a GPU's kernels are compiled when first called."""
        before_s, self._taken_s = self._taken_s, self._taken_s + seconds
        if self.device.type == "cuda" and before_s <= _UNNOTICED_S < self._taken_s:
            _log.warning(
                "compiling kernels for this GPU, each once for this installation: up to a minute "
                "in all. `elbowroom doctor --compile` does it in advance"
            )


def rates(device_type: str, *, lossy: bool = True, moves: bool = True) -> Rates:
    """Bytes a second of the codecs that a plan may use: "encode dither, 4 levels", "decode ...".

    lossy  measure dither now, too, rather than when it is asked for
    moves  measure what moving tensors to a file or to the host takes, too, with threads that stay
    """
    found = _begun(device_type)
    if moves and not found.has_links:
        found.has_links = True
        found.update(_links(found.device))
        if found.device.type == "cpu" and "out file" in found:
            sizes = _SMALL, _MOVED
            small_s, large_s = (_beside_work(found.device, elements) for elements in sizes)
            for way, small, large in zip(("out", "in"), small_s, large_s, strict=True):
                name = f"copy {way} file"
                beside = 4 * (_MOVED - _SMALL) / max(large - small, large / 16)
                found[name] = min(found[name], beside)
                found.fixed_s[name] = max(small - 4 * _SMALL / found[name], 0.0)
    for codec in Dither.settings() if lossy else ():
        if rate_name("encode", codec) not in found:
            found.measure(codec)
    if lossy and of_zeros(fixed_name("encode", _OF_ZEROS)) not in found:
        found.measure_of_zeros(_OF_ZEROS)
    if lossy and ROWS not in found:
        _measure_looks(found)
    return found


def _measure_looks(rates: Rates) -> None:
    """Measures what finds out about values: of rows, and, on a CPU, of what an attention saves.

    It is many small ops, so most of it is fixed: a tensor of a fourth of a MiB has as many as one
    of 4 MiB.
    """

    def of_each_row(x: Tensor) -> object:
        return of_rows(x.view(-1, 64), keep_zeros=False)

    def of_attention(x: Tensor) -> object:
        x = x.view(2, 4, -1, 64)
        return spread(x, x), spread_of_values(x)

    ways = {ROWS: (of_each_row, 1)}
    if rates.device.type == "cpu":
        ways[ATTENTION_LOOK] = of_attention, 3
    generator = torch.Generator().manual_seed(0)
    with unset_fake_temporarily(), torch.no_grad():
        small, large = (
            torch.randn(elements, generator=generator).to(rates.device)
            for elements in (_SMALL, _ELEMENTS // 4)
        )
        work = torch.zeros(2, _OTHER_WORK, device=rates.device)
        between = partial(work[0].copy_, work[1])
        for name, (way, tensors) in ways.items():
            small_s, large_s = (busy_s(partial(way, x), rates.device) for x in (small, large))
            more = tensors * (large.nbytes - small.nbytes)
            rates[name] = more / max(large_s - small_s, large_s / 16)
            whole_s = typical_s(partial(way, small), between, rates.device)
            rates.fixed_s[name] = max(whole_s - tensors * small.nbytes / rates[name], 0.0)


@cache
def _begun(device_type: str) -> Rates:
    """Measures the rates that a plan needs which changes no bit."""
    device = torch.device(device_type)
    found = Rates(device)
    for codec in _EXACT:
        found.measure(codec)
    return found


def _rated(
    codec: Codec, device: torch.device, elements: int, *, has_zeros: bool = False
) -> dict[str, float]:
    """Measures both rates of one setting, by name."""
    nbytes: list[int] = []
    taken_s: dict[str, list[float]] = {rate_name(verb, codec): [] for verb in ("encode", "decode")}
    with unset_fake_temporarily(), torch.no_grad():
        for size in (min(_SMALL, elements // 4), elements):
            x, facts = _sample(codec, device, size, has_zeros=has_zeros)
            encoded = codec.encode(x, 1, facts)  # compiles
            ways: list[Callable[[], object]] = [partial(codec.encode, x, 1, facts), encoded.decode]
            nbytes.append(x.nbytes)
            for seconds, way in zip(taken_s.values(), ways, strict=True):
                seconds.append(busy_s(way, device))
    more = nbytes[1] - nbytes[0]
    return {
        # Where launches are all there is, both sizes take as long.
        name: more / max(large_s - small_s, large_s / 16)
        for name, (small_s, large_s) in taken_s.items()
    }


def _between_other_work(
    codec: Codec, device: torch.device, elements: int, *, has_zeros: bool = False
) -> list[float]:
    """Seconds to hold a small tensor and to give it back, in the middle of other work.

    elements  that are copied between two runs
    """
    with unset_fake_temporarily(), torch.no_grad():
        x, facts = _sample(codec, device, _SMALL, has_zeros=has_zeros)
        action = Encode(codec, facts)
        held = perform(action, x, Need.EXACT, None, 1)
        work = torch.zeros(2, elements, device=device)
        ways: list[Callable[[], object]] = [
            partial(perform, action, x, Need.EXACT, None, 1),
            partial(held.restore, private=True),
        ]
        between = partial(work[0].copy_, work[1])
        return [typical_s(way, between, device) for way in ways]


def _links(device: torch.device) -> dict[str, float]:
    """Bytes a second out of this device's memory and back: "out file", "in host".

    On a CPU also those of the processor, which copies and cannot compute meanwhile: "copy out
    file". While a disk is waited for, or another process runs, only the former pass.
    """
    found: dict[str, float] = {}
    x = torch.zeros(_ELEMENTS, device=device).view(torch.uint8)
    for name in ("host", "file") if device.type == "cuda" else ("file",):
        try:
            tier = tier_for(Offload(name), x)
        except PlanError:
            continue  # no file can be made here
        if isinstance(tier, FileTier):
            found |= _through_file(tier, x)
        elif not isinstance(tier, str):
            passed_s = _round_trip(tier, x)
            for way, seconds in zip(("out", "in"), passed_s, strict=True):
                found[f"{way} {name}"] = x.nbytes / seconds
    return found


def _through_file(tier: FileTier, x: Tensor) -> dict[str, float]:
    """Bytes a second to a file and back, by the clock and of all processors: the median of a few.

    A step moves more than one tensor. Pages of the file that were just freed are in the nearest
    caches, and a second write of the same few MiB takes a third of what many take.
    """
    taken_s: dict[str, list[float]] = defaultdict(list)
    back = torch.empty_like(x)
    for _ in range(_TRIPS):
        began = time.perf_counter(), time.process_time()
        tickets = [tier.put(x) for _ in range(_PIECES)]
        tier.flush()
        gone = time.perf_counter(), time.process_time()
        if any(ticket.source is not None for ticket in tickets):
            return {}  # the disk is full
        for ticket in tickets:
            ticket.fetch(back).wait()
        there = time.perf_counter(), time.process_time()
        for ticket in tickets:
            ticket.drop()
        for way, start, end in (("out", began, gone), ("in", gone, there)):
            taken_s[f"{way} file"].append(end[0] - start[0])
            taken_s[f"copy {way} file"].append(end[1] - start[1])
    return {name: _PIECES * x.nbytes / max(median(each), 1e-9) for name, each in taken_s.items()}


def _round_trip(tier: Tier, x: Tensor) -> tuple[float, float]:
    """Seconds out and in, the best of a few."""
    clock, out_s, in_s = time.perf_counter, float("inf"), float("inf")
    for _ in range(_RUNS):
        away, start_s = threading.Event(), clock()
        ticket = tier.put(x)
        ticket.when_away(away.set)
        while not away.wait(0.001):
            tier.put(x[:0]).drop()  # the thread that puts lets go of what is away
        gone_s = clock()
        if ticket.source is None:
            ticket.fetch(torch.empty_like(x)).wait()
            in_s = min(in_s, clock() - gone_s)
            out_s = min(out_s, gone_s - start_s)
        ticket.drop()
    return out_s, in_s


def _beside_work(device: torch.device, elements: int) -> tuple[float, float]:
    """Seconds of all processors in which a tensor goes to a file, and comes back.

    In the middle of other work, which takes longer beside it: a small tensor four times what it
    takes alone, most of it Python and the change of threads; a large one up to twice that.
    """
    work = torch.zeros(2, _OTHER_WORK, device=device)
    between = partial(work[0].copy_, work[1])
    away_s, back_s = [], []
    for _ in range(_TURNS):
        prefetcher = Prefetcher()
        tensors = [torch.zeros(elements, device=device) for _ in range(_MOVES)]
        tier = tier_for(Offload("file"), tensors[0])
        assert isinstance(tier, FileTier)
        start_s = time.process_time()
        for _ in tensors:
            between()
        began_s = time.process_time()
        handles = []
        while tensors:
            between()
            handles.append(OffloadHandle(tier, tensors.pop(), prefetcher))
        tier.flush()
        gone_s = time.process_time()
        while handles:
            between()
            handles.pop().restore(private=True)
        alone_s = began_s - start_s
        away_s.append((gone_s - began_s - alone_s) / _MOVES)
        back_s.append((time.process_time() - gone_s - alone_s) / _MOVES)
    return median(away_s), median(back_s)


def _sample(
    codec: Codec, device: torch.device, elements: int, *, has_zeros: bool = False
) -> tuple[Tensor, Facts]:
    generator = torch.Generator().manual_seed(0)
    dtypes = dtypes_of(codec)
    if dtypes and not codec.lossless:
        x = torch.randn(elements, generator=generator).view(4, 16, 64, -1)
        x = x.relu() if has_zeros else x
        return x.to(device, dtypes[0]), Facts(has_zeros=has_zeros)
    if isinstance(codec, Narrow):
        x = torch.randint(0, 1000, (elements,), generator=generator)
        return x.to(device), Facts(smallest=0, largest=999)
    x = torch.randint(0, 2, (elements,), generator=generator)
    return x.to(device, dtypes[0] if dtypes else torch.float32), Facts(value=1.0)
