"""The memory that a codec takes while it encodes and decodes, beside its code and the tensor.

A kernel that is written for a code needs next to none. One that is written in tensor operations has
a temporary for each of these, so that a step which holds 70 KiB in place of 256 may take 704 KiB
more at the moment at which they are encoded. Plans count that. A codec whose kernels do not
normalize what they encode takes a normalized copy of the tensor besides (`Codec._encode_mapped`).
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from elbowroom.codecs.base import Codec
from elbowroom.codecs.quality import ROWS, dtypes_of, is_own, normal


class Workspace(NamedTuple):
    """Bytes that encoding and decoding take at their peak, as shares of those of the tensor."""

    encode: float
    decode: float


# Of this package's own, whose kernels are no tensor operations (tests/unit/test_workspace.py).
_NONE = Workspace(0.0, 0.0)
_OWN = {"division": Workspace(0.04, 0.0), "sided": Workspace(0.2, 0.0)}


def workspace_of(codec: Codec) -> Workspace:
    """Returns the memory that a codec takes; that of another package is measured, once a process.

    Raises what the codec raises.
    """
    return _OWN.get(codec.id, _NONE) if is_own(type(codec)) else _measured(codec)


def normalizes_a_copy(codec: Codec) -> bool:
    """Returns whether a tensor is copied to encode it in normalized form."""
    return type(codec)._encode_mapped is Codec._encode_mapped


@cache
def _measured(codec: Codec) -> Workspace:
    dtypes = dtypes_of(codec)
    if not dtypes:  # no plan weighs a code of integers by its error
        return _NONE
    with unset_fake_temporarily(), torch.no_grad():
        x = normal(ROWS).to(dtypes[0])
        with _WorkspaceCounter() as encoding:
            code = codec.encode(x, 1)
        with _WorkspaceCounter() as decoding:
            code.decode()
        more = encoding.peak - code.nbytes, decoding.peak - x.nbytes
        return Workspace(*(max(nbytes, 0) / x.nbytes for nbytes in more))


class _WorkspaceCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that operations inside of it make.

    peak: the most that were alive after one of them
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._born: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_address(x) for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        self._before |= given - self._born.keys()
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor) and _address(x) not in self._before:
                storage = x.untyped_storage()
                self._born[_address(x)] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self._born = {at: known for at, known in self._born.items() if not known[0].expired()}  # type: ignore[no-untyped-call]
        alive = sum(nbytes for _, nbytes in self._born.values())
        self.peak = max(self.peak, alive + _converted_nbytes(args, out))
        return out


def _converted_nbytes(args: Any, out: Any) -> int:
    """Returns the bytes of the arguments that an operation on several types converts first."""
    given = [x for x in tree_iter(args) if isinstance(x, torch.Tensor)]
    if len(given) < 2 or not isinstance(out, torch.Tensor):
        return 0
    return sum(x.numel() * out.itemsize for x in given if x.dtype is not out.dtype)


def _address(x: torch.Tensor) -> int:
    address: int = x.untyped_storage()._cdata
    return address
