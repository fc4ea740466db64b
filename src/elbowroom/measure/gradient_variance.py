"""Measures how much a gradient varies between mini-batches: the noise that training has anyway.

    share  =  sum over entries of Var(g) / E|g|^2
           ~  |g - 2 g' + g''|^2 / (|g|^2 + 4 |g'|^2 + |g''|^2)  -  what codes add, as such a share

of three steps in a row, averaged over many, on a fixed random sample of entries of each parameter,
scaled up. A share is what can be averaged: |g|^2 falls a hundredfold in the first steps of many a
training, and differs tenfold from batch to batch (ResNet-50, docs/log.md), and so does the variance
with it. It is multiplied with |g|^2 of the very step in which the noise of codes is known.

The second difference takes off what moves steadily with the weights; what else moves makes the
share too large, up to 1.4 times where steps are large for their noise (benchmarks/noise.py; first
differences are worse). A gradient is read as backward delivers it, before it is accumulated or
clipped.

Of batches that are all the same nothing varies but by codes, and a share of that is none. So it is
found whether the inputs of the first ops are the same in all steps (`is_one_batch`).

Not done: the difference of the gradients of two halves of one batch, which no weight's move
disturbs. BatchNorm ties the halves to each other, and it came out 2 to 7 times too large.
"""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from elbowroom.runtime.consumers import Call, is_buffer
from elbowroom.runtime.second_pass import second_pass

_ENTRIES = 512  # of each parameter, or all that it has
_INPUTS, _ELEMENTS = 16, 64  # by which batches are told apart
_MAX_STEPS = 8  # that wait until it is known what codes added
Key = tuple[int, int]  # which parameter of the step, and its size
_Step = tuple[dict[Key, Tensor], float | None]  # its gradient, and the share of it that codes add


class GradientVariance:
    """Variance of gradients, fed by hooks on parameters in runs of consecutive steps.

    share   of E|g|^2 that is variance from batch to batch; below 0 where codes drown it
    draws   how many triples of steps it is the average of
    size    |g|^2 of the last step of which it is known what codes added
    """

    def __init__(self, smoothing: float = 0.95, *, entries: int = _ENTRIES) -> None:
        """entries: of each parameter, at most."""
        self._smoothing, self._entries = smoothing, entries
        self._steps: list[_Step] = []  # of this run, from the last two on that are settled
        self._added = 0.0  # by codes, as a share of |g|^2, when it was known last
        self._now: dict[Key, Tensor] = {}
        self._places: dict[Key, Tensor] = {}
        self._hooks: dict[int, tuple[Key, Any]] = {}  # by id
        # A run may be left before its step ends, as by `er.release`: no hook stays then.
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self.share = self.size = 0.0
        self.draws = 0
        self._inputs: list[int] = []  # hashes of a few elements each
        self._batches: set[int] = set()
        self._batched = 0  # steps

    def reads(self, x: Any, call: Call | None = None) -> None:
        """Notes what an op reads, if that is an input of the step, and no running statistic."""
        is_input = isinstance(x, Tensor) and x.is_leaf and not x.requires_grad and x.numel() > 0
        if not is_input or len(self._inputs) >= _INPUTS or is_buffer(x, call):
            return
        if x.layout is torch.strided:
            few = x.detach().reshape(-1)[:: max(x.numel() // _ELEMENTS, 1)]
            self._inputs.append(hash(tuple(few.tolist())))

    @property
    def is_one_batch(self) -> bool:
        """True if several steps have had the same inputs."""
        return self._batched > 1 and len(self._batches) == 1

    def listen(self, weight: Tensor) -> Key:
        """Reads the gradient of this parameter in the backward to come; returns its key."""
        if id(weight) not in self._hooks:
            key = len(self._hooks), weight.numel()
            hook = weight.register_hook(self._reader(key))  # type: ignore[no-untyped-call]
            self._hooks[id(weight)] = key, hook
        return self._hooks[id(weight)][0]

    def _reader(self, key: Key) -> Callable[[Tensor], None]:
        ours = weakref.ref(self)  # a parameter has the hook, and must not keep this alive

        def read(grad: Tensor) -> None:
            variance = ours()
            if variance is not None and grad.layout is torch.strided and not second_pass.runs:
                variance._read(key, grad)

        return read

    def _read(self, key: Key, grad: Tensor) -> None:
        flat = (torch.view_as_real(grad) if grad.is_complex() else grad).detach().reshape(-1)
        if key not in self._places:
            self._places[key] = _sample(flat.numel(), self._entries).to(grad.device)
        places = self._places[key]
        part = flat[places].float() * (flat.numel() / len(places)) ** 0.5
        self._now[key] = part if key not in self._now else self._now[key] + part

    @property
    def size_now(self) -> float:
        """Squared norm of the gradients seen in the backward that runs; 0: none runs."""
        return float(_squares(self._now, self._now.keys())) if self._now else 0.0

    @property
    def sizes_now(self) -> dict[Key, float]:
        """Squared norm of the gradient of each parameter in the backward that runs."""
        keys = list(self._now)
        parts = [self._now[key].square().sum().double().cpu() for key in keys]
        return dict(zip(keys, torch.stack(parts).tolist(), strict=True)) if parts else {}

    def end_step(self, *, last: bool, added: float | None = 0.0) -> None:
        """Ends a step, whose backward is over.

        last   of this run of steps
        added  to the gradient's variance by codes; None: as large a share as in the next step of
               the run of which it is known, or else in the last one before
        """
        if self._inputs:
            self._batches.add(hash(tuple(self._inputs)))
            self._batched += 1
            self._inputs = []
        _remove(self._hooks)
        size = self.size_now
        if added is not None and isfinite(size) and size > 0:
            self.size, self._added = size, added / size
        self._steps.append((self._now, None))
        self._now = {}
        if added is not None or last or len(self._steps) >= _MAX_STEPS:
            self._settle()
        if last:
            self._steps.clear()

    def _settle(self) -> None:
        """Processes all triples once it is known what codes added."""
        self._steps = [
            (grads, self._added if share is None else share) for grads, share in self._steps
        ]
        while len(self._steps) > 2:
            self._take(*_triple(self._steps[:3]))
            del self._steps[0]

    def _take(self, varies: float, size: float) -> None:
        """Averages shares, weighing all alike at first, and forgets slowly later."""
        if not (isfinite(varies) and isfinite(size) and size > 0):
            return  # a step that overflowed, which GradScaler skips too; or none had a gradient
        self.draws += 1
        weight = max(1 / self.draws, 1 - self._smoothing)
        self.share += weight * (varies / size - self.share)

    def state_dict(self) -> dict[str, Any]:
        return {
            "share": self.share,
            "draws": self.draws,
            "size": self.size,
            "added": self._added,
            "steps": list(self._steps),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.share, self.draws, self.size = state["share"], state["draws"], state["size"]
        self._added, self._steps = state["added"], list(state["steps"])


def _remove(hooks: dict[int, tuple[Key, Any]]) -> None:
    for _, hook in hooks.values():
        hook.remove()
    hooks.clear()


def _sample(numel: int, entries: int) -> Tensor:
    if numel <= entries:
        return torch.arange(numel)
    own = torch.Generator().manual_seed(numel)  # the user's random numbers are untouched
    return torch.randint(numel, (entries,), generator=own)


def _triple(steps: Sequence[_Step]) -> tuple[float, float]:
    """Returns, of three steps, the squared second difference less the codes' part, and sizes."""
    first, second, third = (grads for grads, _ in steps)
    keys = [key for key in third if key in first and key in second]
    if not keys:
        return 0.0, 0.0
    change = {key: third[key] - 2 * second[key] + first[key] for key in keys}
    sizes = [_squares(one, keys) for one in (first, second, third)]
    moved, *each = torch.stack([_squares(change, keys), *sizes]).tolist()
    weighted = [weight * size for weight, size in zip((1, 4, 1), each, strict=True)]
    codes = sum(size * (share or 0.0) for size, (_, share) in zip(weighted, steps, strict=True))
    return moved - codes, sum(weighted)


def _squares(parts: Mapping[Key, Tensor], keys: Collection[Key]) -> Tensor:
    return torch.stack([parts[key].square().sum().cpu() for key in keys]).double().sum()
