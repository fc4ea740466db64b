"""The backward that is made up for a forward alone."""

import torch

from elbowroom.plan.profile import Profile, Save, Storage
from elbowroom.plan.rehearsal import Unborn, with_backward
from elbowroom.plan.site import Need, Site

STATIC = 1000


def saved(nbytes: int, at: int, left: str = "", dtype: torch.dtype = torch.float32) -> Storage:
    site = Site(f"net.{at}", "linear", "", (nbytes,), dtype, nbytes, Need.EXACT)
    save = Save(site, left, (site.module,), at)
    return Storage(nbytes, 0, True, at, at, (), at, 0.0, (), (save,))


def of(*storages: Storage) -> Profile:
    moments = len(storages)
    level = (STATIC,) * moments
    return Profile(level, level, (0.0,) * moments, moments - 1, 1.0, STATIC, storages, ())


def backward(profile: Profile, transients: int, *gradients: Unborn) -> list[int]:
    """The levels, without what is restored for a moment."""
    step = with_backward(profile, gradients, 0, transients)
    levels = list(step.level[step.backward :])
    for storage in step.storages:
        if not storage.saves[0].left:
            for need in storage.needs:
                levels[need - step.backward] -= storage.nbytes
    return levels


def test_the_last_op_of_forward_asks_first():
    step = with_backward(of(saved(10, 0), saved(20, 1), saved(30, 2)), [], 0, 0)
    assert [storage.needs for storage in step.storages] == [(5,), (4,), (3,)]
    assert step.level[step.backward :] == (STATIC + 30, STATIC + 20, STATIC + 10)


def test_a_mask_or_an_index_has_no_gradient():
    floats = of(saved(10, 0), saved(20, 1))
    assert backward(floats, 3) == [STATIC + 3 * 20] * 2
    masks = of(saved(10, 0), saved(20, 1, dtype=torch.int64), saved(20, 2, dtype=torch.bool))
    assert backward(masks, 3) == [STATIC + 3 * 10] * 3


def test_an_op_with_a_workspace_takes_another_for_its_backward():
    workspace = of(saved(10, 0), saved(100, 1, dtype=torch.uint8))
    assert backward(workspace, 3) == [STATIC + 3 * 10 + 2 * 100] * 2
    assert backward(workspace, 1) == [STATIC + 10] * 2  # who hopes, hopes that it does not


def test_the_loss_takes_its_input_three_times_before_backward_begins():
    profile = of(saved(10, 0), saved(20, 1))

    def levels(transients: int, loss_nbytes: int) -> tuple[int, ...]:
        step = with_backward(profile, [], 0, transients, loss_nbytes)
        return step.level[step.backward :]

    assert levels(3, 50) == (STATIC + 150 + 20, STATIC + 60 + 10)
    assert levels(3, 5) == (STATIC + 60 + 20, STATIC + 60 + 10)
    assert levels(1, 50) == (STATIC + 100 + 20, STATIC + 20 + 10)  # who hopes: it is let go of


def test_what_is_too_small_to_be_planned_is_there_until_it_was_asked_for():
    profile = of(saved(1, 0, "small"), saved(100, 1), saved(2, 2, "small"), saved(4, 3, "small"))
    assert backward(profile, 0) == [STATIC + 7, STATIC + 3, STATIC + 1, STATIC + 1]


def test_gradients_are_born_as_their_modules_are_asked():
    profile = of(saved(10, 0), saved(10, 1), saved(10, 2), saved(10, 3))
    first, last = Unborn(100, ("net.3",)), Unborn(1000, ("net.0",))
    assert backward(profile, 0, first, last) == [
        STATIC + 100 + 100,  # net.3's, and a workspace of its size
        STATIC + 1100,  # net.0's comes in two ops: all that is born, and no more
        STATIC + 1100,
        STATIC + 1100,
    ]
