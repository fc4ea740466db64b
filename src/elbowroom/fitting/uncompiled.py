"""Bytes that code between compiled regions, as at graph breaks, holds for backward."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from elbowroom.runtime.readers import held_by

UNCOMPILED = "held by uncompiled code"  # name of these bytes in messages


def uncompiled_nbytes(results: Sequence[Tensor], beside: Iterable[Tensor]) -> int:
    """Returns the bytes that nodes of autograd which no compiler has made hold for backward.

    Of what hooks of the program have packed, tensors count: a checkpoint's regions hold none.

    results: of a forward; beside: tensors that stand anyway
    """
    storages: dict[int, int] = {}
    pending = [x.grad_fn for x in results if x.grad_fn is not None]
    seen: set[Any] = set(pending)
    while pending:
        node: Any = pending.pop()
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                pending.append(below)
        if type(node).__name__ == "CompiledFunctionBackward":
            continue
        for x in tensors_in(list(held_by(node))):
            if x.layout is torch.strided:
                storages[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
    for x in beside:
        if x.layout is torch.strided:
            storages.pop(x.untyped_storage()._cdata, None)
    return sum(storages.values())


def tensors_in(out: Any) -> list[Tensor]:
    """Returns all tensors in a nested structure, such as the results of a model."""
    return [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]
