"""The backward that is made up for a forward alone."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import elbowroom as er
from elbowroom.errors import BudgetTooSmall
from elbowroom.plan.backward import BackwardOp, Graph
from elbowroom.plan.build_problem import build_problem
from elbowroom.plan.make import make_plan
from elbowroom.plan.profile import Profile, Save, Storage
from elbowroom.plan.rehearsal import (
    CAREFUL,
    LEAST,
    LIKELY,
    ForwardProfile,
    Unallocated,
    with_backward,
)
from elbowroom.plan.restored import spared, workspace
from elbowroom.plan.site import Need, Reads, Site

STATIC = 1000


def saved(nbytes: int, at: int, left: str = "", dtype: torch.dtype = torch.float32) -> Storage:
    site = Site(f"net.{at}", "linear", "", (nbytes,), dtype, nbytes, Need.EXACT)
    save = Save(site, left, (site.module,), at)
    return Storage(nbytes, 0, True, at, at, (), at, 0.0, (), (save,))


def of(*storages: Storage) -> Profile:
    moments = len(storages)
    level = (STATIC,) * moments
    return Profile(level, level, (0.0,) * moments, moments - 1, 1.0, STATIC, storages, ())


def levels(
    forward_profile: ForwardProfile, care: float = LIKELY, *gradients: Unallocated
) -> list[int]:
    """Of backward, without what is restored for a moment, above what stood before."""
    step = with_backward(forward_profile, gradients, 0, care)
    found = [level - STATIC for level in step.level[step.backward :]]
    for storage in step.storages:
        if not storage.saves[0].left:
            for need in storage.needs:
                found[need - step.backward] -= storage.nbytes
    return found


def test_the_last_op_of_forward_asks_first():
    step = with_backward(
        ForwardProfile(of(saved(10, 0), saved(20, 1), saved(30, 2))), [], 0, LIKELY
    )
    assert [storage.needs for storage in step.storages] == [(5,), (4,), (3,)]


def test_without_a_graph_ops_are_taken_for_a_chain():
    assert levels(ForwardProfile(of(saved(10, 0), saved(20, 1), saved(30, 2)))) == [50, 30, 10]


def test_a_mask_or_an_index_has_no_gradient():
    masks = of(saved(10, 0), saved(20, 1, dtype=torch.int64), saved(20, 2, dtype=torch.bool))
    assert levels(ForwardProfile(masks)) == [0, 10, 10]


def test_an_op_with_a_workspace_takes_another_for_its_backward():
    forward_profile = ForwardProfile(of(saved(10, 0), saved(100, 1, dtype=torch.uint8)))
    assert levels(forward_profile, LIKELY) == [10 + 50, 10]
    assert levels(forward_profile, CAREFUL) == [12 + 75, 12]


def test_a_loss_outside_of_forward_takes_its_input_three_times_before_backward_begins():
    profile = of(saved(10, 0), saved(20, 1))
    assert levels(ForwardProfile(profile, loss_nbytes=(50, 50)), CAREFUL) == [150, 12]
    assert levels(ForwardProfile(profile, loss_nbytes=(5, 5)), CAREFUL) == [37, 12]
    assert levels(ForwardProfile(profile, loss_nbytes=(50, 50)), LIKELY) == [150, 10]
    assert levels(ForwardProfile(profile, loss_nbytes=(50, 50)), LEAST) == [100, 10]


def test_what_forward_gives_is_held_through_backward_by_the_program():
    forward_profile = ForwardProfile(of(saved(10, 0), saved(20, 1)), out_nbytes=7)
    bare = ForwardProfile(forward_profile.profile)
    held = [nbytes + 7 for nbytes in levels(bare, CAREFUL)]
    assert levels(forward_profile, CAREFUL) == held
    assert levels(forward_profile, LIKELY) == levels(bare, LIKELY)


def test_what_is_too_small_to_be_planned_is_there_until_it_was_asked_for():
    masks = [saved(n, k, "small", torch.bool) for k, n in enumerate((1, 2, 4))]
    assert levels(ForwardProfile(of(*masks))) == [7, 3, 1]


def test_what_forward_has_left_behind_is_there_all_the_while():
    profile = replace(of(saved(10, 0)), floor=(STATIC + 70,))
    assert levels(ForwardProfile(profile, out_nbytes=20)) == [10 + 50]


GRAPH = Graph(
    (
        BackwardOp(9, "AccumulateGrad", (100,), stays=True),
        BackwardOp(0, "Mul", (10,), ((-1, 0),)),
        BackwardOp(1, "Mul", (20,), ((1, 0), (0, 0))),
    ),
    roots=((2, 0),),
    asks=((0,), (1,)),
)


def test_a_gradient_of_a_parameter_stays_from_the_op_that_makes_it():
    profile = of(saved(1, 0), saved(2, 1))
    assert levels(ForwardProfile(profile, GRAPH), LIKELY, Unallocated(100, ())) == [130, 110]


def test_of_gradients_that_are_released_the_largest_stays():
    assert levels(
        ForwardProfile(of(saved(1, 0), saved(2, 1)), GRAPH), LIKELY, Unallocated(7, ())
    ) == [130, 17]


def test_the_input_of_a_checkpoint_is_asked_for_by_the_op_that_runs_first_of_those_inside():
    # The checkpoint's own save has number 1; the ops inside have 2 to 4, of which none is seen.
    numbers = (0, 2, 3, 4, 5)
    nodes = tuple(BackwardOp(n, "Mul", (n,), ((k - 1, 0),)) for k, n in enumerate(numbers))
    graph = Graph(nodes, ((4, 0),), asks=((1,), (5,)))
    step = with_backward(ForwardProfile(of(saved(1, 0), saved(2, 1)), graph), [], 0, LIKELY)
    assert [storage.needs[0] - step.backward for storage in step.storages] == [1, 0]


def test_what_a_convolution_copies_is_known_as_what_its_turns_spare():
    nodes = (
        BackwardOp(0, "Mul", (100,), ((-1, 0),)),
        BackwardOp(1, "Conv", (40,), ((0, 0),), workspace=70),
    )
    (one,) = of(saved(100, 0)).storages
    site = replace(one.saves[0].site, shape=(4, 25), reads=Reads.SAMPLES, samples=1)
    conv = replace(one, saves=(replace(one.saves[0], site=site),))
    graph = Graph(nodes, ((1, 0),), asks=((1,),))
    step = with_backward(ForwardProfile(of(conv), graph), [], 0, LIKELY, turns=True)
    (conv,) = step.storages
    (need,) = conv.needs
    assert step.level[need] - step.floor[need] == 100 + 100 + 70  # restored, made and copied
    assert workspace(step, conv, need) == 70
    assert spared(step, conv) == {need: round(3 / 4 * 70 - 1 / 4 * 100)}


def test_a_step_that_follows_its_plan_reads_bits_that_a_profiled_one_restores():
    (one,) = of(saved(50, 0)).storages
    site = replace(one.saves[0].site, need=Need.MASK, reads=Reads.BITS)
    save = replace(one.saves[0], site=site, asked=1)
    relu = replace(one, held=2, kept=False, needs=(1,), saves=(save,))
    step = replace(of(relu), level=(STATIC, STATIC + 60), floor=(STATIC, STATIC))
    assert (step.peak, step.followed_peak) == (STATIC + 60, STATIC + 10)
    kept = replace(step, storages=(replace(relu, kept=True),))
    assert kept.followed_peak == kept.peak


def test_a_tensor_of_which_only_sizes_are_read_takes_no_memory():
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    with er.saving(min_nbytes=0):
        y = F.max_pool2d(torch.relu(x), 2)
    assert y.grad_fn._saved_self.untyped_storage().nbytes() <= x.itemsize

    profile = er.measure(lambda: F.max_pool2d(torch.relu(x), 2).sum().backward(), min_nbytes=0)
    (relu,) = (one for one in profile.storages if one.saves[0].site.consumer == "relu")
    reads = {save.site.reads: save.asked for save in relu.saves}
    assert set(reads) == {Reads.BITS, Reads.SIZES}
    assert relu.restored == (reads[Reads.BITS],)
    problem = build_problem(profile, exact=True)
    options = problem.problem.items[problem.storages.index(profile.storages.index(relu))].options
    assert all((reads[Reads.SIZES], 0) in option.direct for option in options[1:])


def least(turns: bool, reads: Reads = Reads.SAMPLES) -> tuple[int, ...]:
    """Returns the levels of a step of one convolution, and the least budget of lossy plans."""
    shape, nbytes = (16, 1 << 18), 16 << 20
    site = Site("conv", "conv2d", "", shape, torch.float32, nbytes, Need.LOSSY)
    site = replace(site, reads=reads, samples=4)
    storage = Storage(
        nbytes, 0, True, 0, 0, (), 0, 0.0, (), (Save(site, "", ("conv",), 0), Save(site, "", (), 0))
    )
    before = BackwardOp(0, "MulBackward0", (nbytes,), ((-1, 0),))
    conv = BackwardOp(1, "ConvolutionBackward0", (nbytes,), ((0, 0), (-1, 0)), workspace=2 * nbytes)
    graph = Graph((before, conv), roots=((1, 0),), asks=((1, 0),))
    forward_profile = ForwardProfile(of(storage), graph)
    step = with_backward(forward_profile, [], 0, LIKELY, turns=turns)
    with pytest.raises(BudgetTooSmall) as refused:
        make_plan(step, 1, exact=False)
    return refused.value.least_nbytes, *step.level


def test_plans_of_an_estimate_know_what_a_convolution_spares_by_taking_turns():
    (whole, *levels_whole), (turns, *levels_turns) = least(False), least(True)
    assert levels_whole == levels_turns  # the first step is profiled, and takes none
    # Of the copies of two maps that it makes, three quarters.
    assert whole - turns == 3 * (2 * 16 << 20) // 4


def test_an_op_that_takes_no_turns_spares_nothing_in_an_estimate():
    assert least(True, Reads.RESTORED) == least(False, Reads.RESTORED)
