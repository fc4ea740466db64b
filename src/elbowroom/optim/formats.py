"""The formats in which the states of a parameter are held, and their bytes.

    state   first moment             second moment   bytes a parameter (rows of 128)
    fp32    float32                  float32         8
    coat    E4M3, expanded range     the same        2.0625
    int8    8 bits, companded        8 bits, log     2.0469
    int4    8 bits, companded        4 bits, log     1.5469
    int4x2  4 bits, companded        4 bits, log     1.0469

    auto    fp32, unless `er.fit` chooses int8 or int4

With `int4x2` an update errs by 9 to 53 % of its square (AdamW, hundreds of steps later; by 1 to 2 %
if encoded once; hashed embeddings at beta2 = 0.95: by 720 % and 38 %): for fine-tuning, or what
does not fit with `int4`. All figures: benchmarks/results/running-states.json.

SGD and Lion have a first moment only. Parameters of one dimension, with fewer than 4096 elements,
or with rows (all but the first dimension) shorter than 32 keep float32 states: they are few, and
their groups would be short. The rule reads the whole shape, which is the same on every rank.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elbowroom.errors import InvalidSetting
from elbowroom.kernels.states import CODES, bound_shape, code_shape
from elbowroom.optim.order import order_of
from elbowroom.optim.sharded import local

Group = dict[str, Any]  # of torch's param_groups
AUTO, MILDEST = "auto", "fp32"
MIN_ELEMENTS, MIN_ROW = 4096, 32


@dataclass(frozen=True)
class Moment:
    """One state of a parameter, held as `kind` (`kernels/states.py`)."""

    kind: str

    def empty(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and bounds that stand for 0; codes of fp32 are like p."""
        if self.kind == "fp32":
            return torch.zeros_like(p, dtype=torch.float32), p.new_empty(0, dtype=torch.int16)
        dtype = CODES.get(self.kind, torch.uint8)
        shapes = self._shapes(p.numel(), row_of(p.shape))
        return p.new_zeros(shapes[0], dtype=dtype), p.new_zeros(shapes[1], dtype=torch.int16)

    def nbytes(self, n: int, row: int) -> int:
        """Returns the bytes of codes and bounds."""
        (rows, codes), (_, bounds) = self._shapes(n, row)
        return rows * (codes * (4 if self.kind == "fp32" else 1) + 2 * bounds)

    def _shapes(self, n: int, row: int) -> tuple[tuple[int, int], tuple[int, int]]:
        return code_shape(self.kind, n, row), bound_shape(self.kind, n, row)


@dataclass(frozen=True)
class Format:
    """The format in which both moments are held."""

    first: Moment
    second: Moment


NOTHING = Moment("none")
FP32 = Format(Moment("fp32"), Moment("fp32"))
STATES = {
    "fp32": FP32,
    "coat": Format(Moment("expanded8"), Moment("expanded8")),
    "int8": Format(Moment("softsign8"), Moment("log8")),
    "int4": Format(Moment("softsign8"), Moment("log4")),
    "int4x2": Format(Moment("softsign4"), Moment("log4")),
}


RANK = {state: rank for rank, state in enumerate(STATES)}  # the milder, the lower


def resolve(groups: list[Group]) -> None:
    """Gives the last group, if its state is "auto", that of the others of its kind, or fp32."""
    group = groups[-1]
    if group["state"] == AUTO:
        others = [other["state"] for other in groups[:-1] if "auto" in other]
        group |= {"state": max(others, key=RANK.__getitem__, default=MILDEST), "auto": MILDEST}


def taken(theirs: Group) -> Group:
    """Returns what an auto group takes over from one of a file."""
    state = theirs.get("state", MILDEST)
    return {"state": state, "auto": state}


def row_of(shape: torch.Size) -> int:
    """Elements of a row: all dimensions but the first."""
    return max(1, shape[1:].numel()) if len(shape) else 1


def format_of(shape: torch.Size, state: str, *, second: bool) -> Format:
    """The format of a parameter; `second`: whether the rule has a second moment."""
    small = shape.numel() < MIN_ELEMENTS or row_of(shape) < MIN_ROW or len(shape) < 2
    found = FP32 if small else STATES[state]
    return found if second else replace(found, second=NOTHING)


def offered(*, second: bool) -> tuple[str, ...]:
    """Returns the formats in which a rule can hold its states, the largest first."""
    return tuple(name for name in STATES if second or name != "int4")


def check_state(state: object, *, second: bool) -> None:
    """Raises InvalidSetting for what is not offered."""
    known = offered(second=second)
    if state not in known:
        why = "; int4 is int8 with a second moment of 4 bits" if state == "int4" else ""
        there = ", ".join((*known, AUTO))
        raise InvalidSetting(f"no state={state!r} here; there are {there}{why}")


def state_nbytes(p: Tensor, state: str, *, second: bool = True, weights: str = "residual") -> int:
    """Returns the bytes of the states of p: step counter (4), codes, residual and memory order.

    For a DTensor, these are the bytes on this rank.
    """
    found, n, row = format_of(p.shape, state, second=second), local(p).numel(), row_of(p.shape)
    residual = n if p.dtype is torch.bfloat16 and weights == "residual" else 0
    order = 0 if found.first.kind == "fp32" else len(order_of(local(p)))
    return 4 + order + residual + found.first.nbytes(n, row) + found.second.nbytes(n, row)


class StateNames(NamedTuple):
    """The names of a moment's tensors in `optimizer.state[p]`."""

    codes: str
    bounds: str


def names(moment: str, kind: str) -> StateNames:
    """Returns the keys of a moment in a state; those of fp32 are the keys of torch.optim."""
    return StateNames(moment if kind == "fp32" else f"{moment}_codes", f"{moment}_bounds")


def seed_of(seed: int, step: int, index: int, shard: int = 0) -> int:
    """64 bits: the step above, seed and place below, step below 2^31."""
    low = (seed * 0x85EBCA6B + index * 0x9E3779B9 + shard * 0xC2B2AE35) & 0xFFFFFFFF
    return ((step & 0x7FFFFFFF) << 32) | low


def flat(x: Tensor) -> Tensor:
    """A dense tensor in memory order, not copied."""
    if x.is_contiguous():
        return x.view(-1)
    return x.as_strided((x.numel(),), (1,))
