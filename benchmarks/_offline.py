"""A codec on the tensors that a real step saves, outside of the step: rate, distortion, speed.

    bits     8 x encoded bytes / elements, all buffers counted
    rel-MSE  sum (x~ - x)^2 / sum x^2 over all of them
    speed    bytes of x a second; and time of `copy_` of all of them into a warm buffer / time of an
             encode (or of a decode into it), in pairs run in turn: 1 is as fast as a copy

Recorded are inputs of convolutions, linears and norms as a codec is given them, with the facts of
their site: a norm's input comes normalized (runtime/normal.py), small tensors do not come at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from _common import paired_dict
from _peers import Peer
from _training import Bench
from _ways import Way
from torch import Tensor

import elbowroom as er
from elbowroom.codecs import Affine, Codec, Encoded, Facts, codec
from elbowroom.codecs.base import FLOATS, Buffers, Expected, Layout, memory_order
from elbowroom.codecs.room import PayloadRoom
from elbowroom.measure import paired
from elbowroom.plan import Action, Encode, Lossy, Site

_LINEARS = ("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm")


@dataclass(frozen=True, eq=False)
class Captured:
    """One saved tensor, with what its site knows of it."""

    x: Tensor
    facts: Facts
    consumer: str


@dataclass(frozen=True, eq=False)
class _Recorder(Codec):
    """Notes what it is given, and holds it unchanged. Not called lossless: else nothing comes."""

    id: ClassVar[str] = "recorder"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATS

    consumer: str = ""
    into: list[Captured] = field(default_factory=list)

    def encode(
        self,
        x: Tensor,
        seed: int = 0,
        facts: Facts | None = None,
        affine: Affine | None = None,
        room: PayloadRoom | None = None,
    ) -> Encoded:
        encoded = super().encode(x, seed, facts, affine, room)
        self.into.append(Captured(encoded.decode(), facts or Facts(), self.consumer))
        return encoded

    def config(self) -> dict[str, Any]:
        return {"id": self.id, "consumer": self.consumer}  # not what it has noted

    def _layout(self, n: int, dtype: torch.dtype, facts: Facts) -> Layout:
        return (Expected(dtype, (n,)),)

    def _encode(self, flat: Tensor, seed: int, facts: Facts) -> Buffers | None:
        return (flat.clone(),)

    def _decode_into(self, encoded: Encoded, out: Tensor) -> None:
        out.copy_(encoded.buffers[0])


def capture(bench: Bench) -> list[Captured]:
    """What lossy codes would be given in one step of `bench`, in the order of saving."""
    seen: list[Captured] = []
    lossy = Lossy(codec("dither", levels=256), rebuild=False)  # fine enough for every reader

    def policy(site: Site) -> Action:
        action = lossy(site)
        if isinstance(action, Encode) and not action.codec.lossless:
            return Encode(_Recorder(site.consumer, seen), action.facts)
        return action

    policy.exact = False  # type: ignore[attr-defined]
    bench.grads(Way("recording", lambda seed: er.saving(policy, seed=seed)))
    return [one for one in seen if _is_counted(one.consumer)]


def _is_counted(consumer: str) -> bool:
    return consumer.startswith("conv") or consumer in _LINEARS or consumer.endswith("_norm")


@dataclass(frozen=True)
class Distortion:
    """What a codec makes of all that was recorded."""

    nbytes: int
    elements: int
    rel_mse: float

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / self.elements


def distortion(codec: Codec, tensors: Sequence[Captured]) -> Distortion:
    """Encode and decode all. Raises AssertionError if a peer misses the bound it was given."""
    nbytes = elements = 0
    error2 = norm2 = 0.0
    for i, one in enumerate(tensors):
        encoded = codec.encode(one.x, seed=i, facts=one.facts)
        error = encoded.decode().double() - one.x.double()
        if isinstance(codec, Peer):
            _check_bound(codec, one.x, error)
        nbytes += encoded.nbytes
        elements += one.x.numel()
        error2 += float(error.square().sum())
        norm2 += float(one.x.double().square().sum())
    return Distortion(nbytes, elements, error2 / norm2)


def _check_bound(peer: Peer, x: Tensor, error: Tensor) -> None:
    least, most = (float(end) for end in x.aminmax())
    rounding = 4 * torch.finfo(x.dtype).eps * max(-least, most)
    off = float(error.abs().max())
    if off > peer.relative * (most - least) + rounding:
        raise AssertionError(f"{peer}: off by {off:g} on {tuple(x.shape)}, beyond its bound")


def speed(codec: Codec, tensors: Sequence[Captured], pairs: int) -> dict[str, Any]:
    """Encode and decode against a copy: GB/s (10^9 bytes of x), share of a copy's speed, times."""
    flats = [memory_order(one.x)[0] for one in tensors]
    room = torch.empty(max(map(len, flats)), dtype=flats[0].dtype)
    encoded = [codec.encode(one.x, facts=one.facts) for one in tensors]

    def encode() -> None:
        for one in tensors:
            codec.encode(one.x, facts=one.facts)

    def decode() -> None:
        for code in encoded:
            code.decode(room[: code.numel])

    def copy() -> None:
        for flat in flats:
            room[: len(flat)].copy_(flat)

    nbytes = sum(flat.numel() * flat.element_size() for flat in flats)
    shown = {}
    for name, deed in (("encode", encode), ("decode", decode)):
        timed = paired(deed, copy, pairs=pairs)
        shown[name] = {"gb_s": nbytes / timed.median_a_s / 1e9, **paired_dict(timed)}
    return shown
