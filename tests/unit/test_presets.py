"""The ladder: what each preset would hold, and the mildest that fits."""

import torch

from elbowroom.codecs import Facts
from elbowroom.plan.presets import EXACT_PRESETS, LOSSY_PRESETS, SavedStorage, choose, held_nbytes
from elbowroom.plan.site import Need, Rebuildable, Site

PRESETS = EXACT_PRESETS + LOSSY_PRESETS
SHAPE = (64, 2048)
NBYTES = 4 * 64 * 2048


def site(need: Need, rebuildable: Rebuildable = Rebuildable.NO, facts: Facts | None = None) -> Site:
    return Site(
        "m", "conv2d", "", SHAPE, torch.float32, NBYTES, need, rebuildable, facts or Facts()
    )


DENSE = SavedStorage(NBYTES, (site(Need.LOSSY),))
MASK = SavedStorage(NBYTES, (site(Need.MASK),))
MADE_AGAIN = SavedStorage(NBYTES, (site(Need.LOSSY, Rebuildable.LOSSY),))
FIXED = SavedStorage(NBYTES, ())


def test_bytes_of_each_preset() -> None:
    keep, exact = EXACT_PRESETS
    step = [DENSE, MASK, MADE_AGAIN, FIXED]
    assert held_nbytes(keep, step) == 4 * NBYTES
    # Exact: the mask in bits, the output rebuilt (its source would be kept at this preset), and
    # the rest whole.
    assert held_nbytes(exact, step) == 2 * NBYTES + NBYTES // 32
    codes = 64 * 2048 // 4 + 2 * (64 * 2048 // 64) + 4 * 64  # 2 bits, 2 bytes a group, 4 a tile
    assert held_nbytes(PRESETS[-1], step) == codes + NBYTES // 32 + NBYTES


def test_a_storage_with_two_readers_counts_once() -> None:
    both = SavedStorage(NBYTES, (site(Need.MASK), site(Need.LOSSY)))
    assert held_nbytes(EXACT_PRESETS[0], [both]) == NBYTES
    assert held_nbytes(EXACT_PRESETS[1], [both]) == NBYTES
    assert held_nbytes(PRESETS[-1], [both]) < NBYTES // 9


def test_the_mildest_preset_that_fits_is_chosen() -> None:
    step = [DENSE] * 10
    sizes = [held_nbytes(preset, step) for preset in PRESETS]
    assert sizes == sorted(sizes, reverse=True)
    assert choose(PRESETS, step, sizes[0]) == 0
    assert choose(PRESETS, step, sizes[0] - 1) == 2  # "exact" gains nothing here
    assert choose(PRESETS, step, sizes[3]) == 3
    assert choose(PRESETS, step, sizes[-1] - 1) is None
