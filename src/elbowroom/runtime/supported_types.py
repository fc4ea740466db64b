"""Classes of tensors that are plain memory, ours to touch: torch's own two.

While a dry run pretends, the class that stands in for them is one, too.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

PLAIN: set[type] = {Tensor, nn.Parameter}
_one_at_a_time = threading.Lock()


@contextmanager
def standing_in(kind: type[Tensor]) -> Iterator[None]:
    """Treats tensors of this class as plain ones inside this context; one thread at a time."""
    with _one_at_a_time:
        PLAIN.add(kind)
        try:
            yield
        finally:
            PLAIN.discard(kind)
