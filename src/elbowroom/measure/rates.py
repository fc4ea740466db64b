"""Measures, once a process, how many bytes of a tensor this machine encodes and decodes a second.

What nearly every plan needs (bits, small integers; dither, if codes may be lossy) before a training
begins; any other setting of a codec when a plan asks for it, on less, so that no fit begins later
and no kernel is compiled that no plan weighs. On a tensor of 4 MiB, the best of a few runs; a
planner that takes a neighbour's noise for the speed of a codec plans for the noise.
"""

import threading
import time
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from elbowroom.codecs import BitMask, Codec, Dither, Facts, Narrow
from elbowroom.codecs.names import setting_named
from elbowroom.errors import CodecError, PlanError
from elbowroom.measure.timing import least_s
from elbowroom.plan import Offload
from elbowroom.plan.menu import ROWS, rate_name
from elbowroom.runtime.normal import of_rows
from elbowroom.runtime.tiers import Tier, tier_for

_ELEMENTS = 1 << 20
_RUNS = 5


_FEWER = 1 << 18  # elements, on a CPU, of what is measured in the middle of a training
_EXACT = (BitMask(), Narrow())


class Rates(dict[str, float]):
    """Bytes a second, by name. What is missing is measured when it is asked for, if it can be."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __missing__(self, name: str) -> float:
        verb, _, setting = name.partition(" ")
        try:
            if verb not in ("encode", "decode"):
                raise KeyError(name)
            codec = setting_named(setting)
        except (CodecError, ValueError) as error:
            raise KeyError(name) from error
        elements = _FEWER if self.device.type == "cpu" else _ELEMENTS
        self.update(_rated(codec, self.device, elements))
        return self[name]


def rates(device_type: str, *, lossy: bool = True) -> Rates:
    """Bytes a second of the codecs that a plan may use: "encode dither, 4 levels", "decode ...".

    lossy  measure dither now, too, rather than when it is asked for
    """
    found = _begun(device_type)
    for codec in Dither.settings() if lossy else ():
        if rate_name("encode", codec) not in found:
            found.update(_rated(codec, found.device, _ELEMENTS))
    if lossy and ROWS not in found:
        found[ROWS] = _rate_of_rows(found.device)
    return found


def _rate_of_rows(device: torch.device) -> float:
    with unset_fake_temporarily(), torch.no_grad():
        x = torch.ones(_ELEMENTS, device=device).view(-1, 64)
        return x.nbytes / least_s(lambda: of_rows(x, keep_zeros=False), device)


@cache
def _begun(device_type: str) -> Rates:
    """Measures the rates that a plan needs which changes no bit."""
    device = torch.device(device_type)
    found = Rates(device)
    for codec in _EXACT:
        found.update(_rated(codec, device, _ELEMENTS))
    found.update(_links(device))
    return found


def _rated(codec: Codec, device: torch.device, elements: int) -> dict[str, float]:
    """Measures both rates of one setting, by name."""
    with unset_fake_temporarily(), torch.no_grad():
        x, facts = _sample(codec, device, elements)
        encoded = codec.encode(x, 1, facts)  # compiles
        encoded.decode()
        return {
            rate_name("encode", codec): x.nbytes
            / least_s(lambda: codec.encode(x, 1, facts), device),
            rate_name("decode", codec): x.nbytes / least_s(encoded.decode, device),
        }


def _links(device: torch.device) -> dict[str, float]:
    """Bytes a second out of this device's memory and back: "out file", "in host"."""
    found = {}
    x = torch.zeros(_ELEMENTS, device=device).view(torch.uint8)
    for name in ("host", "file") if device.type == "cuda" else ("file",):
        try:
            tier = tier_for(Offload(name), x)
        except PlanError:
            continue  # no file can be made here
        if not isinstance(tier, str):
            for way, seconds in zip(("out", "in"), _round_trip(tier, x), strict=True):
                found[f"{way} {name}"] = x.nbytes / seconds
    return found


def _round_trip(tier: Tier, x: Tensor) -> tuple[float, float]:
    """Seconds out and in, the best of a few."""
    out_s = in_s = float("inf")
    for _ in range(_RUNS):
        away, start_s = threading.Event(), time.perf_counter()
        ticket = tier.put(x)
        ticket.when_away(away.set)
        while not away.wait(0.001):
            tier.put(x[:0]).drop()  # the thread that puts lets go of what is away
        gone_s = time.perf_counter()
        if ticket.source is None:
            ticket.fetch(torch.empty_like(x)).wait()
            in_s = min(in_s, time.perf_counter() - gone_s)
            out_s = min(out_s, gone_s - start_s)
        ticket.drop()
    return out_s, in_s


def _sample(codec: Codec, device: torch.device, elements: int) -> tuple[Tensor, Facts]:
    generator = torch.Generator().manual_seed(0)
    if torch.float32 in codec.dtypes and not codec.lossless:
        return torch.randn(elements, generator=generator).view(4, 16, 64, -1).to(device), Facts()
    if isinstance(codec, Narrow):
        x = torch.randint(0, 1000, (elements,), generator=generator)
        return x.to(device), Facts(smallest=0, largest=999)
    x = torch.randint(0, 2, (elements,), generator=generator).float()
    return x.to(device), Facts(value=1.0)
