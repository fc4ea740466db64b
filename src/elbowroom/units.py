"""Bytes and seconds, for people: "6 GiB" becomes an int, an int becomes "6.00 GiB".

"GB" is 10**9 and "GiB" is 2**30: the smaller reading is the safe one for a budget. Output is always
in powers of 1024, with the unit that says so.
"""

import math
import re
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TypeGuard

from elbowroom.errors import UnknownField

_POWERS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}
_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*"
_NBYTES = re.compile(_NUMBER + r"([kmgt]i?)?(?:b|bytes?)?\s*", re.IGNORECASE)
_FRACTION = re.compile(_NUMBER + r"(%?)\s*", re.IGNORECASE)
_WAYS = 'write bytes, as 6 * 2**30 or 6e9, or a string such as "6 GiB"'
_FEW = 1000  # bytes: nobody's budget
_BUDGETS = f'{_WAYS}; or a share of the device\'s memory, as 0.8 or "80%"'


@dataclass(frozen=True)
class Share:
    """A budget as a share of a device's memory: 0 < fraction <= 1."""

    fraction: float


def parse_nbytes(size: float | str) -> int:
    """Bytes as an int: 6442450944, 6e9, "6GiB", "6 GiB", "512 MB" (10**6), "1.5g".

    Parts of a byte are dropped. Raises UnknownField for anything else, also for less than one byte.
    """
    return _nbytes(size, _WAYS)


def parse_budget(budget: float | str) -> int | Share:
    """Bytes, as `parse_nbytes` reads them; or a share of a device: 0.8, "0.8", "80%".

    A number below 1 without a unit is a share. All of the device is "100%". A float below 1000,
    or a string of one without a unit ("80"), could as well be meant as a share. Raises UnknownField
    for those, and for what is neither bytes nor a share.
    """
    match = _FRACTION.fullmatch(budget) if isinstance(budget, str) else None
    number = budget if match is None else float(match[1])
    if match is not None and match[2]:
        if not 0 < float(match[1]) <= 100:
            raise UnknownField(
                f'{budget!r} is no share of a device; it is above 0 and up to "100%"'
            )
        return Share(float(match[1]) / 100)
    if _is_number(number) and 0 < number < 1:
        return Share(float(number))
    if _is_number(number) and 1 <= number < _FEW and not isinstance(budget, Integral):
        share = "100%" if number == 1 else f"{min(number, 100):g}%"
        raise UnknownField(
            f'{budget!r} could be bytes or a share of the device; write "{share}" for the share, '
            'or a size such as "6 GiB"'
        )
    return _nbytes(budget, _BUDGETS)


def _nbytes(size: float | str, ways: str) -> int:
    """Converts a size to bytes, as `parse_nbytes` does. ways: what is possible, in words."""
    text = size.strip() if isinstance(size, str) else ""
    is_negative = text[:1] == "-" and _NBYTES.fullmatch(text[1:]) is not None
    if is_negative or (_is_number(size) and not size > 0):
        raise UnknownField(f"a size in bytes is positive; got {size}. {ways[0].upper()}{ways[1:]}")
    match = _NBYTES.fullmatch(size) if isinstance(size, str) else None
    if match is not None:
        unit = (match[2] or "").lower()
        nbytes = float(match[1]) * (_BINARY[unit] if unit in _BINARY else _POWERS[unit])
    elif _is_number(size):
        nbytes = size
    else:
        raise UnknownField(f"cannot read {size!r} as a size; {ways}")
    if not math.isfinite(nbytes) or nbytes < 1:
        raise UnknownField(f"{size!r} is no usable size; {ways}")
    return int(nbytes)


def _is_number(given: object) -> TypeGuard[float]:
    return isinstance(given, Real) and not isinstance(given, bool)


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


def show_at_least(nbytes: int) -> str:
    """Bytes as a budget that can be typed: at least as many, and less than 0.1 % above.

    9_469_000 -> "9.031 MiB"; so many digits, since a smaller budget is a smaller batch.
    """
    name, unit = "KiB", 2**10
    for larger, size in (("MiB", 2**20), ("GiB", 2**30)):
        if nbytes >= size:
            name, unit = larger, size
    places = max(4 - len(str(nbytes // unit)), 0)
    scaled = -(-nbytes * 10**places // unit)
    while parse_nbytes(shown := f"{scaled / 10**places:.{places}f} {name}") < nbytes:
        scaled += 1  # a decimal's float may be a byte too small
    number, _, _ = shown.partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {name}"


def budget_argument(nbytes: int) -> str:
    """Returns a budget of at least so many bytes, as `fit` takes it: 'budget="9.031 MiB"'."""
    return f'budget="{show_at_least(nbytes)}"'


def show_percent(share: float) -> str:
    """0.0123 -> "1.2 %"; 0.27 -> "27 %"; 4e-11 -> "less than 0.01 %"; 0 -> "0 %"."""
    percent = 100 * share
    if not percent:
        return "0 %"
    if abs(percent) < 0.01:
        return "less than 0.01 %"
    digits = 2 if abs(percent) < 0.1 else 1 if abs(percent) < 10 else 0
    return f"{percent:.{digits}f} %"


def show_seconds(seconds: float) -> str:
    """0.00342 -> "3.4 ms"; 95 -> "1 min 35 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"
