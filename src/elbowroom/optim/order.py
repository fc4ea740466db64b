"""The order in which a parameter lies in memory, and the codes of its states with it.

    p [D, C, H, W] in channels_last -> (0, 2, 3, 1)          row after row -> ()

A step takes a parameter as a flat run of memory, whatever its order, so a tensor of codes does not
say which weight a code is of. `state["order"]` does, where it is not row after row: the dimensions
from the outermost to the innermost. A model that is brought into another memory format, or loads
the file of one, has its states encoded anew in its own order (`transcode.py`).
"""

import torch
from torch import Tensor

from elbowroom.errors import StateMismatch

Order = tuple[int, ...]


def order_of(x: Tensor) -> Order:
    """Dimensions that are longer than 1, as they lie in memory; () for a contiguous tensor."""
    if x.is_contiguous():
        return ()
    strides = x.stride()
    return tuple(sorted((d for d in range(x.dim()) if x.shape[d] > 1), key=lambda d: -strides[d]))


def noted(order: Order) -> dict[str, Tensor]:
    """Returns what a state says of the order of its codes: nothing, if it is row after row."""
    return {"order": torch.tensor(order, dtype=torch.int8)} if order else {}


def check_order(order: Order, p: Tensor) -> None:
    """Raises StateMismatch for one that is of another tensor."""
    if order and sorted(order) != [d for d in range(p.dim()) if p.shape[d] > 1]:
        raise StateMismatch(
            f"'order' of the state_dict is {order}, for a parameter of shape {tuple(p.shape)}"
        )


def in_order(values: Tensor, shape: torch.Size, order: Order) -> Tensor:
    """A flat run in this order -> a view of this shape."""
    dims = [*(d for d in range(len(shape)) if d not in order), *order]
    lying = values.view([shape[d] for d in dims])
    return lying.permute([dims.index(d) for d in range(len(shape))])


def reordered(values: Tensor, shape: torch.Size, before: Order, after: Order) -> Tensor:
    """A flat run in one order -> a flat run in another."""
    made = torch.empty_like(values)
    in_order(made, shape, after).copy_(in_order(values, shape, before))
    return made
