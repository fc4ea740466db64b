"""Layout of optimizer states in memory, and the constants of their formulas, for all backends.

A parameter of shape [D, ...] is D rows of R elements. A row is cut into groups of 128, the last one
shorter; no group crosses a row, so that a shard of whole rows is encoded as the whole would be.

    kind        codes, a row               bounds, a group     held by
    fp32        R float32                  none                itself
    softsign8   R int8                     1 (bf16 bits)       abs maximum
    softsign4   ceil(R / 2) uint8          1 (bf16 bits)       abs maximum
    expanded8   R uint8                    2 (int16)           log2 of the least and the largest
    log8        R uint8                    2 (bf16 bits)       roots of the least and the largest
    log4        ceil(R / 2) uint8          2 (bf16 bits)       roots of the least and the largest
    none        0                          none                there is no such state

Bounds in log2 are integers in units of 1/256, rounded outward: least [-32256, 32767].
"""

from math import log2
from typing import Any, NamedTuple

import torch

GROUP = 128
KINDS = ("none", "fp32", "softsign8", "expanded8", "log8", "log4", "softsign4")
RULES = ("adamw", "lion", "sgd")
WEIGHTS = ("nearest", "sr", "residual")
STEPS = {"log8": 254, "log4": 14}  # between the least and the largest; code 0 is for 0
SLOW = 2.0  # what moves by fewer codes in a step is rounded stochastically in the 8-bit kinds
CODES = {
    "fp32": torch.float32,
    "softsign8": torch.int8,
    "expanded8": torch.uint8,
    "log8": torch.uint8,
    "log4": torch.uint8,
    "softsign4": torch.uint8,
}
HALVES = ("log4", "softsign4")  # two codes a byte
BOUNDS = {
    "none": 0,
    "fp32": 0,
    "softsign8": 1,
    "expanded8": 2,
    "log8": 2,
    "log4": 2,
    "softsign4": 1,
}

# For f in [0, 1), of least maximal error: log2(1 + f) / f to 1.6e-6, (2^f - 1) / f to 3.4e-6.
LOG2 = (
    1.4426934719085693,
    -0.7211798429489136,
    0.47790515422821045,
    -0.34009748697280884,
    0.21722687780857086,
    -0.09752227365970612,
    0.020975612103939056,
)
EXP2 = (0.6930317282676697, 0.2413807362318039, 0.052031856030225754, 0.013555659912526608)
LEAST = 2.0**-126  # what is smaller, but not 0, is held as this: the least normal float32
MOST = 2.0**127.99  # what is larger (a square may be Inf) is held as this
FLOOR, CEILING = -126 * 256, 32767

# E4M3: 126 magnitudes from 2^-9 to 448, in octaves above 2^-9; code 0 is for 0.
OCTAVES = log2(448) + 9
# (log2(1 + f) - f) / f at the f = 1/8 ... 7/8 that E4M3 has, to 4.8e-5 of an octave.
BEND = (0.4396803379058838, -0.6864264011383057, 0.3410623073577881, -0.09522146731615067)
MOST_RANGE = 32 * 256  # of a group, in 1/256 octaves: what is smaller is held as the least
LEAST_RANGE = 9 / 256  # of a group, in octaves: beyond it the exponent k would exceed 507


class StateRows(NamedTuple):
    """D rows of R elements, each of G groups."""

    D: int
    R: int
    G: int


def rows_of(n: int, row: int) -> StateRows:
    """n elements in rows of `row`."""
    return StateRows(n // row if row else 0, row, -(-row // GROUP))


def code_width(kind: str, row: Any) -> Any:
    """Codes of a row of so many elements; of an array of rows, an array."""
    if kind in HALVES:
        return -(-row // 2)
    return 0 if kind == "none" else row


def code_shape(kind: str, n: int, row: int) -> tuple[int, int]:
    """[D, codes a row]."""
    return rows_of(n, row).D, int(code_width(kind, row))


def bound_shape(kind: str, n: int, row: int) -> tuple[int, int]:
    """[D, bounds a row]."""
    D, _, G = rows_of(n, row)
    return D, G * BOUNDS[kind]


# Of a fingerprint (reference/fingerprint.py): the step between words, both factors of the mixing,
# and the step between places.
FINGERPRINT = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 40503
