"""Limits how many tensors, and bytes, are in transit at a time; one tensor always may be."""

import threading

MAX_TENSORS = 2
MAX_NBYTES = 256 << 20


class RoomGate:
    """A gate that counts."""

    def __init__(self, max_tensors: int = MAX_TENSORS, max_nbytes: int = MAX_NBYTES) -> None:
        self.max_tensors, self.max_nbytes = max_tensors, max_nbytes
        self._changed = threading.Condition()
        self._tensors = self._nbytes = 0

    def enter(self, nbytes: int) -> None:
        """Waits until there is room, and takes it."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(nbytes))
            self._tensors += 1
            self._nbytes += nbytes

    def leave(self, nbytes: int) -> None:
        """Gives the room back."""
        with self._changed:
            self._tensors -= 1
            self._nbytes -= nbytes
            self._changed.notify_all()

    def wait_until_empty(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._tensors)

    def _has_room(self, nbytes: int) -> bool:
        return not self._tensors or (
            self._tensors < self.max_tensors and self._nbytes + nbytes <= self.max_nbytes
        )
