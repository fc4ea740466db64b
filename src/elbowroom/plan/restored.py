"""When and how often backward restores a storage, and the memory that its readers take then."""

from collections.abc import Collection, Sequence
from itertools import pairwise
from math import gcd, prod

from elbowroom.codecs import PART
from elbowroom.plan.composed import RELUS
from elbowroom.plan.profile import Profile, Storage
from elbowroom.plan.site import Reads

MAPS = (*RELUS, "batch_norm")  # what they make of a code has parts
# Of what waits for its next reader.
_WHOLE = (Reads.RESTORED, Reads.PLACE, Reads.GRADIENT, Reads.ROWS)


def times_restored(storage: Storage, made: Collection[int] = (), *, exact: bool) -> int:
    """Returns how often a storage is rebuilt or decoded for its readers.

    Consecutive readers that take it whole share one restored tensor; each other reader has its own.

    made   moments at which something is made of it
    exact  in a plan that changes no bit, in which all readers take it whole
    """
    whole = set(storage.needs) if exact else whole_needs(storage)
    apart = set(storage.needs) - whole - set(made)
    return runs_of(sorted(whole.union(made))) + len(apart)


def whole_needs(storage: Storage) -> set[int]:
    """Returns the moments at which its readers take the whole tensor, where it is a code."""
    parts = {save.asked for save in storage.saves if save.site.reads not in _WHOLE}
    return set(storage.needs) - parts


def is_mapped(storage: Storage) -> bool:
    """Returns whether it is made of a code in the pass that decodes that."""
    return storage.saves[0].site.producer in MAPS


def runs_of(moments: Sequence[int]) -> int:
    """Returns the number of runs of consecutive moments, among ascending ones."""
    return sum(before + 1 != moment for before, moment in pairwise((-2, *moments)))


def spared(profile: Profile, storage: Storage) -> dict[int, int]:
    """Returns, by moment, the bytes that convolutions spare by working on a few samples at a time.

    Their workspace is that of these samples alone (`Direct.exact`), and of the gradient only their
    part waits to be copied. Decoded samples are freed before that, and take no more.
    """
    found = {}
    for need, reads in storage.readings.items():
        if reads == [Reads.SAMPLES]:
            share = _share(storage, need)
            part = share * storage.nbytes
            found[need] = round((1 - share) * workspace(profile, storage, need) - part)
    return found


def workspace(profile: Profile, storage: Storage, moment: int) -> int:
    """Returns the bytes that backward took at this moment beside the tensor and the gradient."""
    restored = 0 if storage.kept else storage.nbytes
    taken = profile.level[moment] - profile.floor[moment] - restored - storage.nbytes
    return max(taken, 0)


def _share(storage: Storage, moment: int) -> float:
    """The part of its samples that a convolution takes at once, which asks for it then."""
    site = next(save.site for save in storage.saves if save.asked == moment)
    at_once = site.samples or samples_at_once(site.shape, site.dtype.itemsize)  # of an old profile
    return at_once / site.shape[0]


AT_ONCE = 6 << 20  # bytes of the larger map: less makes small products, more needs more room
LEAST = 2 << 20  # so many at the least, of a map of which more would be over a fourth


def samples_at_once(shape: tuple[int, ...], itemsize: int, made: int = 0) -> int:
    """Returns how many samples of such an input to take at once, in whole parts of a code.

    A convolution library copies whole tensors into layouts of its own. For a few samples at a time
    these copies are small, and stay in a cache; and only these samples of the input are decoded.

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
