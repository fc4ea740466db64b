"""Measures, once a process, how many bytes of a tensor this machine encodes and decodes a second.

On a tensor of 4 MiB, the best of a few runs; a planner that takes a neighbour's noise for the speed
of a codec plans for the noise.
"""

import threading
import time
from functools import cache

import torch
from torch import Tensor

from elbowroom.codecs import Codec, Facts, Narrow
from elbowroom.errors import PlanError
from elbowroom.measure.timing import least_s
from elbowroom.plan import Offload
from elbowroom.plan.menu import RATED, rate_name
from elbowroom.runtime.tiers import Tier, tier_for

_ELEMENTS = 1 << 20
_RUNS = 5


@cache
def rates(device_type: str) -> dict[str, float]:
    """Bytes a second of all codecs that a plan may use: "encode dither, 4 levels", "decode ..."."""
    device = torch.device(device_type)
    found = {}
    for codec in RATED:
        x, facts = _sample(codec, device)
        encoded = codec.encode(x, 1, facts)  # compiles
        encoded.decode()
        for verb, run in (
            ("encode", lambda codec=codec, x=x, facts=facts: codec.encode(x, 1, facts)),
            ("decode", encoded.decode),
        ):
            found[rate_name(verb, codec)] = x.nbytes / least_s(run, device)
    return found | _links(device)


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


def _sample(codec: Codec, device: torch.device) -> tuple[Tensor, Facts]:
    generator = torch.Generator().manual_seed(0)
    if torch.float32 in codec.dtypes and not codec.lossless:
        return torch.randn(_ELEMENTS, generator=generator).to(device), Facts()
    if isinstance(codec, Narrow):
        x = torch.randint(0, 1000, (_ELEMENTS,), generator=generator)
        return x.to(device), Facts(smallest=0, largest=999)
    x = torch.randint(0, 2, (_ELEMENTS,), generator=generator).float()
    return x.to(device), Facts(value=1.0)
