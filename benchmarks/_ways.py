"""Ways to run forward: plainly, by our contexts, and by what PyTorch itself offers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn
from torch._inductor.compile_fx import compile_fx
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import elbowroom as er


@dataclass(frozen=True)
class Way:
    """One way to run forward: `context(seed)` goes around it; its noise starts at `seed`.

    exact  gradients are bit-equal to plain ones
    base   the way that it is, but for what it does for memory
    fit    what a training does with its model and optimizer first; no context goes around forward
    """

    name: str
    context: Callable[[int], AbstractContextManager[Any]]
    exact: bool = True
    ours: bool = False
    base: str = "plain fp32"
    fit: Callable[[nn.Module, torch.optim.Optimizer], object] | None = None


@dataclass(frozen=True)
class Arm:
    """A way that may need the model it is for, to compile it; `name` is that of the way."""

    name: str
    of: Callable[[nn.Module], Way]


PLAIN = Way("plain fp32", lambda seed: nullcontext())
ON_CPU = Way("torch.autograd.graph.save_on_cpu()", lambda seed: save_on_cpu())


def saving(policy: str | None = None, **fields: Any) -> Way:
    """`er.saving(...)` as a way, named as one would type it."""
    given = [] if policy is None else [f'"{policy}"']
    given += [f"{name}={typed(value)}" for name, value in fields.items()]
    return Way(
        f"er.saving({', '.join(given)})",
        lambda seed: er.saving(policy, seed=seed, **fields),
        exact=policy in (None, "exact", "keep"),
        ours=True,
    )


def typed(value: Any) -> str:
    """A setting as one would type it."""
    return f'"{value}"' if isinstance(value, str) else f"{value}"


COMPILED = "torch.compile"


def compiled(model: nn.Module, budget: float | None = None) -> Way:
    """torch.compile; with a budget (0..1), what it saves is cut to that share of what it may save.

    The partitioner picks by a knapsack what backward makes again. Dropout draws from PyTorch's own
    RNG, so that gradients can be compared; they differ in rounding.
    """

    def backend(graph: Any, inputs: Any) -> Any:
        share = 1.0 if budget is None else budget
        with (
            torch._functorch.config.patch(activation_memory_budget=share),
            torch._inductor.config.patch(fallback_random=True),
        ):
            return compile_fx(graph, inputs)

    forward = torch.compile(model.forward, backend=backend)  # each its own: none takes another's

    @contextmanager
    def context(seed: int) -> Iterator[None]:
        model.forward = forward
        try:
            yield
        finally:
            del model.forward

    if budget is None:
        return Way(COMPILED, context, exact=False, base=COMPILED)
    name = f"{COMPILED}, activation_memory_budget={budget}"
    return Way(name, context, exact=False, base=COMPILED)


def checkpointed(blocks: Iterable[nn.Module]) -> Way:
    """Each block inside torch.utils.checkpoint, the way its documentation recommends."""
    blocks = list(blocks)

    @contextmanager
    def context(seed: int) -> Iterator[None]:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        try:
            yield
        finally:
            for block in blocks:
                del block.forward

    return Way("torch.utils.checkpoint, per block", context)
