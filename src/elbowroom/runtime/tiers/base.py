"""The interface of tiers: a tier takes bytes, and returns a ticket to fetch them with."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Arrival(Protocol):
    """Bytes on their way back."""

    def wait(self) -> None:
        """Waits until the bytes may be read by what runs next. OSError: they cannot be had."""
        ...

    def drop(self) -> None:
        """Releases memory that will not be read, which may be reused immediately.

        It may be called anywhere, and never waits.
        """
        ...


class Ticket(Protocol):
    """Stands for the bytes of one `put`.

    source  the tensor itself, for as long as the tier needs it; None once it is away
    """

    @property
    def source(self) -> Tensor | None: ...

    def fetch(self, into: Tensor) -> Arrival:
        """Begins to bring the bytes back, any number of times.

        `into`: flat bytes, as long as these.

        Only where `source` is None.
        """
        ...

    def when_away(self, call: Callable[[], None]) -> None:
        """Calls `call` once `source` is None, from any thread; at once, if it is."""
        ...

    def drop(self) -> None:
        """Frees the bytes, which will not be requested any more.

        It may be called anywhere, and never waits.
        """
        ...


class Tier(Protocol):
    """A place for bytes.

    refusal  why nothing can be put just now, or ""
    """

    @property
    def refusal(self) -> str: ...

    def put(self, flat: Tensor) -> Ticket:
        """Begins to take the bytes of `flat`, which must not change until they are away.

        It waits where too much is on its way already.
        """
        ...

    def say_trouble(self) -> None:
        """Warns of failures since the last call, if there were any."""
        ...
