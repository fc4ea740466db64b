"""Which tensors have values that the host can look at, and where it would wait for them."""

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_values(x: Tensor) -> bool:
    """Whether x has elements that may be looked at."""
    return x.device.type != "meta" and not isinstance(x, FakeTensor)


READ_AT_ONCE = {"cpu"}  # kinds of devices whose values the host can read without waiting


def would_wait(x: Tensor) -> bool:
    """Whether the host would wait for the device to read a value of x."""
    return x.device.type not in READ_AT_ONCE
