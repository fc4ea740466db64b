"""Which classes of tensors are plain memory, ours to touch: torch's own two.

And, while a dry run pretends, the class that stands in for them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

PLAIN: set[type] = {Tensor, nn.Parameter}
_one_at_a_time = threading.Lock()


@contextmanager
def standing_in(kind: type[Tensor]) -> Iterator[None]:
    """Inside, tensors of this class are taken for plain ones; one thread at a time."""
    with _one_at_a_time:
        PLAIN.add(kind)
        try:
            yield
        finally:
            PLAIN.discard(kind)
