"""Recognition of out-of-memory errors."""

import torch

_MESSAGES = (
    "can't allocate memory",  # PyTorch's CPU allocator
    "bad_alloc",  # C++
    "Cannot allocate memory",  # the system
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether this error, or one that it was raised from, is an allocator's."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError | OSError) and _says_so(str(error)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _says_so(message: str) -> bool:
    return any(part in message for part in _MESSAGES)
