"""Arguments of a module that no op of it reads: a second run does without them.

A cache that a decoder's blocks share has the keys and values of all earlier blocks. If a block that
runs again held them, no earlier block could run again, because what it has made would be held.

    reads    a function mode notes which tensors ops of a call are given; those that it is given
             directly, or gives back, count as read
    key      structure of the arguments, and metadata of their tensors: what is noted of one call
             holds for others like it
    StandIn  takes the place of an unread tensor: its metadata without memory, the same one for
             each call with this key. An op that is given one after all raises RestoreError, and
             modules of the class hold all from then on
"""

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from elbowroom.errors import RestoreError
from elbowroom.runtime.arguments import Arguments, copied
from elbowroom.runtime.nested import tensors_in
from elbowroom.runtime.storage import version_of
from elbowroom.runtime.tensor_values import is_same

_QUESTIONS = frozenset(  # which a stand-in can answer
    (
        *(Tensor.dim, Tensor.size, Tensor.numel),
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda")
        ),
    )
)
_MAX_KEYS = 64  # of one module: lengths of sequences, say
_Unread = dict[Any, dict[int, Tensor]]  # stand-ins, by the indices of unread tensors
_kept: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_known: "weakref.WeakKeyDictionary[nn.Module, _Unread]" = weakref.WeakKeyDictionary()


class StandIn(Tensor):
    """A tensor's metadata; no op can read it.

    reader: the module whose second run it is for
    """

    reader: "weakref.ref[nn.Module]"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(x: Tensor, reader: nn.Module) -> Tensor:
        """Returns the stand-in of a tensor."""
        made: StandIn = Tensor._make_wrapper_subclass(
            StandIn,
            x.size(),
            x.stride(),
            dtype=x.dtype,
            device=x.device,
            requires_grad=x.requires_grad,
        )
        made.reader = weakref.ref(reader)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        for x in tensors_in((args, kwargs or {})):
            if isinstance(x, StandIn):
                alike = [one for one in _known if type(one) is type(x.reader())]
                for module in alike:  # all blocks of a network at once
                    never_leave_out(module)
        raise RestoreError(
            f"'{func}' reads a tensor of a module that runs again in backward, which forward has "
            "not read. Run this step again: from now on modules of this class hold all tensors of "
            "the lists and objects that they are given"
        )


class NoteReads(TorchFunctionMode):
    """Function mode that notes which tensors ops are given, to find those that are not.

    tensors: those of the arguments, or copies of them. late: those of them that are stand-ins, and
    are copied once an op is given one, by index
    """

    def __init__(
        self, arguments: Arguments, tensors: list[Tensor], late: Collection[int] = ()
    ) -> None:
        super().__init__()
        self._direct, self.tensors = arguments.direct, tensors
        self._given = arguments.tensors
        self._found = set[int]()
        self._late = {id(tensors[i]): arguments.tensors[i] for i in late}
        self._copies: dict[int, Tensor] = {}
        self._versions = list(map(version_of, tensors))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(x) for x in tensors_in((args, kwargs or {}))}
        self._found |= given
        if func not in _QUESTIONS and not given.isdisjoint(self._late):
            args, kwargs = tree_map(self._copied, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _copied(self, x: Any) -> Any:
        """Returns the copy of a tensor of the arguments for its stand-in, and other values."""
        at = id(x)
        if at in self._late and at not in self._copies:
            self._copies[at] = copied(self._late[at])
        return self._copies.get(at, x)

    def real(self, x: Any) -> Any:
        """Returns the tensor that a stand-in stands for, copied or not, and other values."""
        at = id(x)
        return self._copies.get(at, self._late.get(at, x))

    @property
    def has_changed(self) -> bool:
        """True if an op has changed one of the tensors, or a late copy, in place."""
        if self._versions != list(map(version_of, self.tensors)):
            return True
        if any(map(version_of, self._copies.values())):
            return True
        pairs = [*zip(self.tensors, self._given, strict=True)]
        pairs += [(copy, self._late[at]) for at, copy in self._copies.items()]
        copies = (one for one in pairs if not isinstance(one[0], StandIn) and one[0] is not one[1])
        return not all(is_same(x, copy) for copy, x in copies)

    def unread(self, out: Any) -> frozenset[int]:
        """Returns the indices of tensors that no op was given, as the call has given `out`."""
        found = _unread(self.tensors, self._direct, lambda x: id(x) in self._found, out)
        given = set(map(id, Arguments((out,), {}).tensors)) if self._late else set()
        late = (i for i, x in enumerate(self.tensors) if id(x) in self._late)
        return found | {i for i in late if id(self.tensors[i]) not in self._found | given}


def unread(arguments: Arguments, is_read: Callable[[Tensor], bool], out: Any) -> frozenset[int]:
    """Returns the indices of tensors that a call that has given `out` has not read."""
    return _unread(arguments.tensors, arguments.direct, is_read, out)


def _unread(
    tensors: list[Tensor], direct: list[int], is_read: Callable[[Tensor], bool], out: Any
) -> frozenset[int]:
    left = [
        i for i, x in enumerate(tensors) if i not in direct and _may_be_left(x) and not is_read(x)
    ]
    given = set(map(id, Arguments((out,), {}).tensors)) if left else set()
    return frozenset(i for i in left if id(tensors[i]) not in given)


def _may_be_left(x: Tensor) -> bool:
    return type(x) is Tensor and x.layout is torch.strided and not x.is_quantized


def may_be_unread(arguments: Arguments) -> frozenset[int]:
    """Returns the indices of tensors that lie in objects, of which a call may read none."""
    given = enumerate(arguments.tensors)
    return frozenset(i for i, x in given if i not in arguments.direct and _may_be_left(x))


def leave_out_unread(module: nn.Module, arguments: Arguments) -> bool:
    """Leaves out the tensors that calls like this one do not read; returns whether it is known."""
    if len(arguments.direct) == len(arguments.tensors) or module in _kept:
        return True
    found = _known.get(module, {}).get(_key(arguments))
    if found:
        arguments.leave_out(found)
    return found is not None


def noting_unread(
    module: nn.Module, arguments: Arguments, call: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns the call, for one time, which notes what tensors it does not read."""
    reads = [NoteReads(arguments, arguments.tensors)]
    key = _key(arguments)

    def noting(*args: Any, **kwargs: Any) -> Any:
        with reads.pop() as noted:  # what is held until backward must not hold the tensors
            out = call(*args, **kwargs)
        _note(module, key, noted.tensors, noted.unread(out))
        return out

    return noting


def with_stand_ins(
    tensors: list[Tensor], places: Collection[int], reader: nn.Module
) -> list[Tensor]:
    """Returns copies of the tensors, with stand-ins at some places for a run of `reader`."""
    with torch._C.DisableTorchFunction():
        return [StandIn.of(x, reader) if i in places else copied(x) for i, x in enumerate(tensors)]


def never_leave_out(module: nn.Module) -> None:
    """Keeps all arguments of a module: it reads some in a way that is not noticed."""
    _kept.add(module)


def note_unread(module: nn.Module, arguments: Arguments, found: frozenset[int]) -> None:
    """Notes which tensors a call with these arguments has not read."""
    _note(module, _key(arguments), arguments.tensors, found)


def _note(module: nn.Module, key: Any, tensors: list[Tensor], found: frozenset[int]) -> None:
    known = _known.setdefault(module, {})
    if len(known) < _MAX_KEYS:
        with torch._C.DisableTorchFunction():
            known[key] = {i: StandIn.of(tensors[i], module) for i in sorted(found)}


def _key(arguments: Arguments) -> Any:
    copy, why_not, kinds = arguments.structure
    with torch._C.DisableTorchFunction():
        tensors = [
            (x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in arguments.tensors
        ]
    return copy, why_not, tuple(kinds), tuple(tensors)
