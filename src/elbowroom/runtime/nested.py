"""The tensors among nested arguments, as torch's pytrees find them, but faster.

An op's arguments are mostly tensors, numbers and lists of these; pytrees take ten times as long to
find them, and each op of an examined step needs them several times.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

_SINGLE = frozenset((type(None), bool, int, float, complex, str))  # what holds no tensor


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yields all tensors in nested containers, in order."""
    if isinstance(values, Tensor):
        yield values
        return
    kind = type(values)
    if kind is tuple or kind is list:
        for value in values:
            if isinstance(value, Tensor):
                yield value
            elif type(value) not in _SINGLE:
                yield from tensors_in(value)
    elif kind is dict:
        for value in values.values():
            yield from tensors_in(value)
    elif kind not in _SINGLE:
        yield from (x for x in tree_leaves(values) if isinstance(x, Tensor))
