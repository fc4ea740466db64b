"""A step in parts: what waits for a later backward is held beside the parts before that."""

import torch

from elbowroom.plan.backward import BackwardOp, Graph
from elbowroom.plan.parts import StepPart, step_of_parts
from elbowroom.plan.profile import Profile, Save, Storage
from elbowroom.plan.rehearsal import LIKELY, ForwardProfile, with_backward
from elbowroom.plan.site import Need, Site

STATIC = 1000


def forward(nbytes, nth, *older):
    """A forward of one op, which saves one storage; older: nodes that its backward goes on to."""
    site = Site(f"net.{nth}", "linear", "", (nbytes,), torch.float32, nbytes, Need.EXACT)
    saved = (Save(site, "", (site.module,), 0),)
    storage = Storage(nbytes, 0, False, 0, 0, (), 0, 0.0, (), saved)
    level = (STATIC + nbytes,)
    profile = Profile(level, (STATIC,), (0.0,), 0, 1.0, STATIC, (storage,), ())
    node = BackwardOp(nth, "Mul", (nbytes,), ((1, 0) if older else (-1, 0),))
    graph = Graph((node, *older), ((0, 0),), ((nth,),))
    return ForwardProfile(profile, graph, outs=frozenset({0}))


GENERATOR, FIRST = forward(10, 0), forward(20, 1)
AGAIN = forward(40, 2, BackwardOp(0, "Mul", (10,), ((-1, 0),), is_older=True))


def whole(forward_profile):
    return with_backward(forward_profile, [], 0, LIKELY)


def test_a_step_of_one_part_is_that():
    part = StepPart({0: GENERATOR, 1: FIRST}, frozenset())
    assert step_of_parts([part], whole) == whole(GENERATOR.followed_by(FIRST))


def test_what_waits_is_asked_for_in_the_last_part_alone():
    parts = [
        StepPart({0: GENERATOR, 1: FIRST}, frozenset({0})),
        StepPart({0: GENERATOR, 2: AGAIN}, ()),
    ]
    step = step_of_parts(parts, whole)
    # Forwards of G and D, D's backward, D's second forward, its backward, and G's.
    assert len(step.level) == len(step.floor) == len(step.starts_s) == 6
    assert step.backward == 2
    generator, first, again = step.storages
    assert (generator.born, generator.used, generator.needs, generator.freed) == (0, 3, (5,), 5)
    assert (first.born, first.needs, first.freed) == (1, (2,), 2)
    assert (again.born, again.needs, again.freed) == (3, (4,), 4)
    assert [one.saves[0].asked for one in step.storages] == [5, 2, 4]
    assert [one.saves[0].at for one in step.storages] == [0, 1, 3]
    assert list(step.starts_s) == sorted(step.starts_s)


def test_what_waits_to_the_end_is_never_asked_for():
    step = step_of_parts([StepPart({0: GENERATOR, 1: FIRST}, frozenset({0}))], whole)
    generator, first = step.storages
    assert (generator.needs, generator.freed) == ((), 2)
    assert (first.needs, first.freed) == ((2,), 2)
