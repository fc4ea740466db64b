"""Optimizers of others over encoded states, for `optimizer_states.py`: torchao's, bitsandbytes'.

    AdamW8bit  both: codes of a dynamic map, groups of 256 with an fp32 scale
    AdamWFp8   torchao: E4M3, groups of 256
    AdamW4bit  torchao: m in a dynamic map of 16 codes, v in 16 even steps, groups of 128

A step of torchao's is compiled by torch.compile: its first one takes seconds and needs a C++
compiler. bitsandbytes' is, on a CPU, separate PyTorch ops around compiled conversions. Neither
looks whether gradients are finite, as ours does.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from _common import INSTALL
from torch import Tensor, nn

Both = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # m, v encoded and decoded


@dataclass(frozen=True)
class Peer:
    """One class of a package. bits: of a code, in both states."""

    package: str
    module: str
    kind: str
    bits: int
    coder: Callable[["Peer"], Both]

    @property
    def name(self) -> str:
        return f"{self.package} {self.kind}"

    def make(self, params: list[Tensor]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(import_module(self.module), self.kind)(
            params, lr=1e-3
        )
        return made


def _torchao(peer: Peer) -> Both:
    optimizer: Any = peer.make([nn.Parameter(torch.empty(0))])

    def through(x: Tensor, *, signed: bool) -> Tensor:
        held = optimizer._new_buffer(x, signed)  # by its own rule: float32 for what it leaves alone
        held.copy_(x)
        decoded: Tensor = held.dequantize()
        return decoded

    return lambda m, v: (through(m, signed=True), through(v, signed=False))


def _bitsandbytes(peer: Peer) -> Both:
    functional = import_module("bitsandbytes.functional")

    def through(x: Tensor, *, signed: bool) -> Tensor:
        code = functional.create_dynamic_map(signed=signed)
        codes, state = functional.quantize_blockwise(x, code=code, blocksize=256)
        decoded: Tensor = functional.dequantize_blockwise(codes, state)
        return decoded

    return lambda m, v: (through(m, signed=True), through(v, signed=False))


PEERS = (
    Peer("torchao", "torchao.optim", "AdamW8bit", 8, _torchao),
    Peer("torchao", "torchao.optim", "AdamWFp8", 8, _torchao),
    Peer("torchao", "torchao.optim", "AdamW4bit", 4, _torchao),
    Peer("bitsandbytes", "bitsandbytes.optim", "AdamW8bit", 8, _bitsandbytes),
)


def why_not(error: Exception, peer: Peer) -> str:
    """What its row says in place of figures: how to get it, or its own words."""
    if isinstance(error, ModuleNotFoundError) and error.name == peer.package:
        return f"not installed: {INSTALL}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {}
    for package in dict.fromkeys(peer.package for peer in PEERS):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def nbytes(state: dict[str, Any]) -> int:
    """Of one parameter's states: codes, scales and maps; the number of the step left out."""
    return sum(_nbytes(x) for key, x in state.items() if isinstance(x, Tensor) and key != "step")


def _nbytes(x: Tensor) -> int:
    if type(x) is Tensor:
        return x.nbytes
    names, _ = x.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(_nbytes(getattr(x, name)) for name in names)


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Inside, torch.compile finds nothing of an earlier run: a first step compiles."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    torch.compiler.reset()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
