"""Tests for tensors whose values the host can look at, and for those it would wait for."""

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_values(x: Tensor) -> bool:
    """Returns whether x has elements that may be examined."""
    return x.device.type != "meta" and not isinstance(x, FakeTensor)


READ_AT_ONCE = {"cpu"}  # kinds of devices whose values the host can read without waiting


def would_wait(x: Tensor) -> bool:
    """Returns whether the host would wait for the device to read a value of x."""
    return x.device.type not in READ_AT_ONCE
