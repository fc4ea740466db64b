"""Stand-ins without memory: a model, its optimizer and a batch, as fake tensors on some device.

A real or meta storage becomes one fake storage of the same size, so tied weights and views stay
so. Of the originals only shapes are read, except for single numbers in host memory, such as an
optimizer's count of steps.
"""

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from elbowroom.errors import PlanError

T = TypeVar("T")
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class Fakes:
    """Makes stand-ins on `device`; to be used under a FakeTensorMode."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By the address of the original, which is held: nobody else may get it meanwhile.
        self._storages: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def copy(self, value: T) -> T:
        """A deep copy, in which every tensor is a stand-in. Raises PlanError if there is none."""
        try:
            with _Copying(self):
                return copy.deepcopy(value)
        except Exception as error:
            raise PlanError(
                f"a dry run works on a copy of the model and its optimizer, and deepcopy fails: "
                f"{error}. Use a model that can be copied, or measure a real step with er.measure"
            ) from error

    def batch(self, values: Any) -> Any:
        """Returns the same structure with stand-ins."""
        return tree_map(self._stand_in_for, values)

    def _stand_in_for(self, value: Any) -> Any:
        is_one = isinstance(value, FakeTensor) and value.device == self._device
        return value if is_one or not isinstance(value, Tensor) else self.of(value)

    def of(self, x: Tensor) -> Tensor:
        """The stand-in for one tensor, without its history."""
        if x.layout is not torch.strided:
            raise PlanError(
                f"a dry run supports dense tensors only; got a tensor of layout {x.layout}"
            )
        if x.dim() == 0 and x.device.type == "cpu" and not x.requires_grad:
            with unset_fake_temporarily():
                number = x.item()
            return torch.tensor(number, dtype=x.dtype)
        storage = x.untyped_storage()
        if storage._cdata not in self._storages:
            n = storage.nbytes() // x.element_size()
            blank = torch.empty(n, dtype=x.dtype, device=self._device)
            self._storages[storage._cdata] = storage, blank
        flat = self._storages[storage._cdata][1].view(x.dtype)
        fake = flat.as_strided(x.shape, x.stride(), x.storage_offset()).detach()
        return fake.requires_grad_(x.requires_grad)


class _Copying(TorchFunctionMode):
    """Function mode in which `copy.deepcopy` gives stand-ins for tensors."""

    def __init__(self, fakes: Fakes) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            x, memo = args
            with torch._C.DisableTorchFunction():
                return memo.setdefault(id(x), self._fakes.of(x))
        if func == _DATA:  # a parameter is copied as parameter.data.clone()
            with torch._C.DisableTorchFunction():
                return self._fakes.of(args[0])
        if func is torch.Tensor.clone and isinstance(args[0], FakeTensor):
            return args[0]
        return func(*args, **(kwargs or {}))
