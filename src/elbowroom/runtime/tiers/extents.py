"""Free and taken parts of a file or a slab.

    taken:  [0 ......)      [ ......)                     offsets and sizes are whole pages
    free:            [ ....)         [ .. end)

First fit; neighbors that are both free become one; the free part at the end is cut off.
"""

from bisect import bisect_left, insort

PAGE = 4096


class Extents:
    """Free and taken parts of [0, end). limit: `end` never exceeds it."""

    def __init__(self, limit: int | None = None) -> None:
        self._free: list[tuple[int, int]] = []  # (offset, nbytes), sorted, none touching another
        self._limit = limit
        self.end = 0

    def take(self, nbytes: int) -> int | None:
        """The offset of a free part of this size; None if the limit leaves no room."""
        nbytes = _pages(nbytes)
        for i, (offset, size) in enumerate(self._free):
            if size >= nbytes:
                rest = (offset + nbytes, size - nbytes)
                self._free[i : i + 1] = [rest] if rest[1] else []
                return offset
        if self._limit is not None and self.end + nbytes > self._limit:
            return None
        self.end += nbytes
        return self.end - nbytes

    def give_back(self, offset: int, nbytes: int) -> None:
        """Frees what `take(nbytes)` gave."""
        nbytes = _pages(nbytes)
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and self._free[at][0] == offset + nbytes:
            nbytes += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            at -= 1
            offset, before = self._free.pop(at)
            nbytes += before
        if offset + nbytes == self.end:
            self.end = offset
        else:
            insort(self._free, (offset, nbytes))


def _pages(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE)) * PAGE
