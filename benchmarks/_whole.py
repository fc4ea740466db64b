"""Every byte of a training step: what stands before it, and what it takes at its worst.

    standing   weights, masters, states, and what the arena of elbowroom keeps between steps
    gradients  the most bytes of them that exist at a time inside backward
    whole      standing + the allocator's peak above it (`er.measure.memory_curve`)

Bytes of weights, masters, states and gradients are counted from the tensors; the whole is measured,
with activations, workspaces and whatever an optimizer needs inside its step.
"""

import gc
from typing import NamedTuple

import torch
from torch import Tensor

from elbowroom.demo.tasks import Batch
from elbowroom.demo.train import Run
from elbowroom.measure import memory_curve
from elbowroom.runtime.arena import ARENA


class Parts(NamedTuple):
    """Bytes outside activations, by what they are. A residual counts as a state."""

    weights: int
    masters: int
    states: int
    gradients: int


def parts(run: Run, batch: Batch) -> Parts:
    """Counted in one step of a run that has made its states."""
    params = list(run.model.parameters())
    own = set(map(id, params))
    optimized = [p for group in run.optimizer.param_groups for p in group["params"]]
    states = [x for state in run.optimizer.state.values() for x in state.values()]
    return Parts(
        _nbytes(params),
        _nbytes([p for p in optimized if id(p) not in own]),
        _nbytes([x for x in states if isinstance(x, Tensor)]),
        _most_gradients(run, batch),
    )


def whole_nbytes(run: Run, batch: Batch) -> int:
    """Peak of a step, standing bytes included, after one that makes states and warms up."""
    ARENA.clear()
    run.step(batch)
    run.step(batch)
    gc.collect()
    held = parts(run, batch)
    standing = held.weights + held.masters + held.states + ARENA.nbytes
    return standing + memory_curve(lambda: run.step(batch)).peak_nbytes


def same_bits(a: Run, b: Run, steps: int) -> bool:
    """Whether two runs have equal weights after a few steps on the same batches."""
    for run in (a, b):
        batches = run.task.batches(run.seed)
        for _ in range(steps):
            run.step(next(batches))
    pairs = zip(a.model.parameters(), b.model.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def _nbytes(tensors: list[Tensor]) -> int:
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def _most_gradients(run: Run, batch: Batch) -> int:
    params, most = list(run.model.parameters()), [0]

    def count(p: Tensor, grad: Tensor) -> None:
        """Grad is about to become p's; a released one is gone right after."""
        others = (q.grad for q in params if q is not p and q.grad is not None)
        most[0] = max(most[0], grad.nbytes + sum(g.nbytes for g in others))

    hooks = [p.register_hook(lambda grad, p=p: count(p, grad)) for p in params]  # type: ignore[misc]
    run.step(batch)
    for hook in hooks:
        hook.remove()
    return most[0]
