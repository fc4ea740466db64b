"""Bytes and seconds, for people: "6 GiB" becomes an int, an int becomes "6.00 GiB".

"GB" is 10**9 and "GiB" is 2**30: the smaller reading is the safe one for a budget. Output is always
in powers of 1024, with the unit that says so.
"""

import math
import re

_POWERS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}
_NBYTES = re.compile(
    r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([kmgt]i?)?(?:b|bytes?)?\s*", re.IGNORECASE
)


def parse_nbytes(size: int | str) -> int:
    """Bytes as an int: 6442450944, "6GiB", "6 GiB", "512 MB" (10**6), "1.5g".

    Raises ValueError for anything else, a fraction of the device ("0.9") and a bare float included.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size <= 0:
            raise ValueError(
                f'a size in bytes is positive; got {size}. Write 6 * 2**30, or "6 GiB"'
            )
        return size
    match = _NBYTES.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise ValueError(
            f'cannot read {size!r} as a size; write an int of bytes, or a string such as "6 GiB"'
        )
    unit = (match[2] or "").lower()
    nbytes = float(match[1]) * (_BINARY[unit] if unit in _BINARY else _POWERS[unit])
    if not math.isfinite(nbytes) or nbytes < 1:
        raise ValueError(
            f'{size!r} is no usable size; write an int of bytes, or a string such as "6 GiB"'
        )
    return int(nbytes)


def show_nbytes(nbytes: float) -> str:
    """1536 -> "1.50 KiB"; sizes below 1 KiB are exact ("17 B"); negative sizes keep their sign."""
    size = abs(float(nbytes))
    if size < 1024:
        return f"{int(nbytes)} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024 or unit == "GiB":
            break
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return f"{'-' if nbytes < 0 else ''}{size:.{digits}f} {unit}"


def show_seconds(seconds: float) -> str:
    """0.00342 -> "3.4 ms"; 95 -> "1 min 35 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"
