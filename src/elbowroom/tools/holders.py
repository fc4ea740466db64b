"""Finds what holds the memory of a device type now: weights, gradients, states, saved tensors.

Everything is found afterwards, from Python's objects and from autograd's graph, so a training that
does not run out of memory pays nothing. Autograd does not say which module a node belongs to. A
node that uses a parameter is named after the module of the parameter; any other node is named after
the last such node before it.

A saved tensor is examined without unpacking it, because that may need memory. What a saved-tensor
hook has packed is counted only if it is a tensor, or if the hook is elbowroom's.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from elbowroom.measure.live_storages import all_tensors, is_real
from elbowroom.runtime.readers import held_by
from elbowroom.runtime.slot import View
from elbowroom.runtime.storage import storage_nbytes
from elbowroom.runtime.undo import gradient_of, tensors_of

_VIEWS = ("TBackward", "TransposeBackward", "PermuteBackward", "ToCopyBackward", "ViewBackward")


@dataclass(frozen=True)
class Holder:
    """Something that holds memory.

    kind    "weights", "gradients", "optimizer states", "saved for backward" or "other tensors"
    where   a module, an operation or a variable
    """

    kind: str
    where: str
    nbytes: int


def find_holders(device_type: str, names: Mapping[int, str] | None = None) -> list[Holder]:
    """Returns what holds memory on this type of device, the largest first.

    names  of variables, by the address of the storage that they hold
    """
    found = _Found(device_type)
    modules = _outermost(_objects(nn.Module))
    parameters: dict[int, str] = {}
    for module in modules:
        prefix = "" if len(modules) == 1 else f"{type(module).__name__}:"
        for name, p in module.named_parameters():
            parameters.setdefault(id(p), prefix + name.rpartition(".")[0] or "(outermost)")
            found.add("weights", parameters[id(p)], p)
        for name, buffer in module.named_buffers():
            found.add("weights", prefix + name.rpartition(".")[0] or "(outermost)", buffer)
    for module in modules:
        for p in module.parameters():
            gradient = gradient_of(p)
            if gradient is not None:
                found.add("gradients", parameters[id(p)], gradient)
    for optimizer in _objects(Optimizer):
        for x in tensors_of([dict(optimizer.state)]):
            found.add("optimizer states", type(optimizer).__name__, x)
    tensors = all_tensors(device_type)
    for where, saved in _saved(tensors, parameters):
        if isinstance(saved, View):
            found.add_view(where, saved)
        else:
            found.add("saved for backward", where, saved)
    for x in tensors:
        label = "" if names is None else names.get(address_of(x), "")
        found.add("other tensors", label or f"{tuple(x.shape)} {str(x.dtype)[6:]}", x)
    return found.holders()


class _Found:
    """Bytes by kind and place. Each storage counts once, under the kind that was found first."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._seen: set[int] = set()
        self._sums: dict[tuple[str, str], int] = {}

    def add(self, kind: str, where: str, x: Tensor) -> None:
        if x.device.type != self._device_type or not is_real(x):
            return
        nbytes, address = storage_nbytes(x), address_of(x)
        if nbytes and address not in self._seen:
            self._seen.add(address)
            self._sums[kind, where] = self._sums.get((kind, where), 0) + nbytes

    def add_view(self, where: str, view: View) -> None:
        """Adds what elbowroom holds in the place of a tensor."""
        slot = view.slot
        nbytes = slot.value.nbytes if slot.value is not None else 0
        if nbytes and id(slot) not in self._seen and slot.device.type == self._device_type:
            self._seen.add(id(slot))
            for x in _tensors_in(slot.value):
                self._seen.add(address_of(x))
            key = "saved for backward", where
            self._sums[key] = self._sums.get(key, 0) + nbytes

    def holders(self) -> list[Holder]:
        found = [Holder(kind, where, nbytes) for (kind, where), nbytes in self._sums.items()]
        return sorted(found, key=lambda holder: -holder.nbytes)


def address_of(x: Tensor) -> int:
    """Address of the storage's own object, which no other living storage has."""
    try:
        return int(x.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(x)


def _tensors_in(handle: Any) -> Iterator[Tensor]:
    """Yields the tensors that a handle refers to, a few objects deep."""
    level = [handle]
    for _ in range(4):
        level = [one for one in gc.get_referents(*level) if not isinstance(one, type)]
        yield from (one for one in level if issubclass(type(one), Tensor))


def _objects(kind: type) -> list[Any]:
    # type(), not isinstance: a proxy would be asked for its class, and might do anything.
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def _saved(
    tensors: Iterable[Tensor], parameters: Mapping[int, str]
) -> Iterator[tuple[str, Tensor | View]]:
    """Yields what the graphs behind these tensors hold, as (where, tensor)."""
    owners: dict[Any, str] = {}
    for x in tensors:
        root = x.grad_fn
        if root is None:
            continue
        for node in _inputs_first(root, owners):
            owner, owns = _owner(node, owners, parameters)
            owners[node] = owner
            op = node.name().partition("Backward")[0]
            where = f"{owner} ({op})" if owns else f"{op} after {owner}" if owner else op
            for saved in held_by(node):
                if issubclass(type(saved), Tensor | View):
                    yield where, saved


def _inputs_first(root: Any, known: Mapping[Any, str]) -> Iterator[Any]:
    """The nodes below root, each after those that it reads from, without recursion."""
    stack, entered = [(root, False)], set()
    while stack:
        node, is_done = stack.pop()
        if is_done:
            yield node
        elif node not in known and node not in entered:
            entered.add(node)
            stack.append((node, True))
            stack.extend((inner, False) for inner, _ in node.next_functions if inner is not None)


def _owner(node: Any, owners: Mapping[Any, str], parameters: Mapping[int, str]) -> tuple[str, bool]:
    """The module that a node is named after, and whether it uses a parameter of it."""
    before = ""
    for inner, _ in node.next_functions:
        name = _parameter_of(inner, parameters)
        if name:
            return name, not node.name().startswith(_VIEWS)
        before = before or owners.get(inner, "")
    return before, False


def _parameter_of(node: Any, parameters: Mapping[int, str]) -> str:
    """The module of the parameter that a node passes on, perhaps as a view or in another dtype."""
    for _ in range(4):
        variable = getattr(node, "variable", None)
        if variable is not None:
            return parameters.get(id(variable), "")
        if node is None or not node.name().startswith(_VIEWS) or not node.next_functions:
            return ""
        node = node.next_functions[0][0]
    return ""
