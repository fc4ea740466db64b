"""Tells whether the host can read the values of a tensor, and whether it would wait for them."""

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_values(x: Tensor) -> bool:
    """Returns whether x has values that can be read: it is neither a meta nor a fake tensor."""
    return x.device.type != "meta" and not isinstance(x, FakeTensor)


READ_AT_ONCE = {"cpu"}  # kinds of devices whose values the host can read without waiting


def would_wait(x: Tensor) -> bool:
    """Returns whether the host would wait for the device to read a value of x."""
    return x.device.type not in READ_AT_ONCE
