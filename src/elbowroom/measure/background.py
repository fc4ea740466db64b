"""The measurement that runs in the background, which ends if the user asks for another one."""

from typing import Protocol


class _Closes(Protocol):
    is_abandoned: bool  # nobody waits for its result, and it could not end where it was closed

    def close(self) -> bool: ...


class Background:
    """PyTorch has one profiler in a process: at most one measurement runs."""

    running: _Closes | None = None

    @classmethod
    def interrupt(cls) -> None:
        """Ends the measurement that runs; what it has seen is lost."""
        if cls.running is not None:
            cls.running.close()
