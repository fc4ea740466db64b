"""The number of samples that the backward of a convolution takes at once (`runtime/direct/`).

A convolution library copies whole tensors into layouts of its own. For a few samples at a time
these copies are small, and stay in a cache; and only these samples of the input are decoded.
"""

from math import gcd, prod

from elbowroom.codecs import PART

AT_ONCE = 6 << 20  # bytes of the larger map: less makes small products, more needs more room
LEAST = 2 << 20  # so many at the least, of a map of which more would be over a fourth


def samples_at_once(shape: tuple[int, ...], itemsize: int, made: int = 0) -> int:
    """Returns how many samples of such an input to take at once, in whole parts of a code.

    made: elements of each sample of the result

    Of about AT_ONCE bytes of the larger of the two; of one below four times that, a fourth of it,
    or LEAST. All of them, where that would not make at least two turns.
    """
    samples, each = shape[0], prod(shape[1:])
    if not each:
        return samples
    step = PART // gcd(PART, each)  # so many begin where a part of a code does
    larger = max(each, made) * itemsize
    at_once = min(AT_ONCE, max(samples * larger // 4, LEAST))
    found = max(at_once // larger // step, 1) * step
    return found if 2 * found <= samples else samples
