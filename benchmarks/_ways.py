"""Ways to run forward: plainly, by our contexts, and by what PyTorch itself offers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import elbowroom as er


@dataclass(frozen=True)
class Way:
    """One way to run forward: `context(seed)` goes around it; its noise starts at `seed`."""

    name: str
    context: Callable[[int], AbstractContextManager[Any]]
    exact: bool = True
    ours: bool = False


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
