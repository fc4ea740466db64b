"""What a table of noise makes of the readings of watched steps, written out by hand."""

import pytest
import torch

from elbowroom.codecs import Dither
from elbowroom.measure.gradient_variance import GradientVariance
from elbowroom.measure.meter import NoiseMeter
from elbowroom.measure.noise import NoiseTable, OpReading
from elbowroom.measure.reach import ReachMeter
from elbowroom.plan import Lossy, SiteName
from elbowroom.runtime.saving import Saving

CONV, NORM = SiteName("c", "conv2d", 0), SiteName("n", "batch_norm", 0)
X = SiteName("c", "conv2d", 1)


class Steps:
    """Steps of one op, whose gradient has this square."""

    def __init__(self):
        self.table = NoiseTable()

    def take(self, op, size, *, unit=(0.0, 0.0), strength=(1.0, 0.0), closed=None, found=None):
        weight = torch.nn.Parameter(torch.zeros(1))
        self.table.gradient.listen(weight)
        (weight * size**0.5).sum().backward()
        self.table.take({}, {op: OpReading({X: 1.0}, unit, strength, closed, found)})
        self.table.gradient.end_step(last=True, added=self.table.added_last)
        return self.table.ops[op]


def test_a_closed_form_is_averaged_as_a_share_of_the_gradient():
    steps = Steps()
    assert steps.take(CONV, 100.0, closed=10.0).variance == pytest.approx(10.0)
    op = steps.take(CONV, 400.0, closed=120.0)  # 0.1 and 0.3 of |g|^2
    assert op.alone == pytest.approx(120.0)
    assert op.variance == pytest.approx(0.2 * 400)
    op = steps.take(CONV, 1.0, closed=0.2)
    assert op.variance == pytest.approx(0.2)


def test_another_code_is_told_at_once():
    """A quarter of the error: the average goes with what the codes are now."""
    steps = Steps()
    steps.take(CONV, 100.0, closed=10.0)
    op = steps.take(CONV, 100.0, strength=(0.25, 0.0), closed=5.0)  # twice as much a unit of error
    assert op.variance == pytest.approx(0.25 * (0.1 + 0.2) / 2 * 100)


def test_both_parts_of_a_norm_have_averages_of_their_own():
    steps = Steps()
    op = steps.take(NORM, 10.0, unit=(1.0, 2.0), strength=(1.0, 4.0), found=(3.0, 10.0))
    assert (op.variance, op.rough) == pytest.approx((13.0, 10.0))
    assert op.checked == (None, 13.0)  # nothing was known before this probe
    op = steps.take(NORM, 10.0, unit=(0.5, 4.0), strength=(0.25, 4.0))
    assert op.alone == pytest.approx(3 * 0.5 + 5 * 4)
    assert (op.variance, op.rough) == pytest.approx((3 * 0.25 * (1 + 2) / 2 + 15.0, 15.0))


def test_where_no_gradient_was_heard_a_step_stands_for_itself():
    table = NoiseTable()
    for closed in (10.0, 30.0):
        table.take({}, {CONV: OpReading({X: 1.0}, (0.0, 0.0), (1.0, 0.0), closed, None)})
        assert table.ops[CONV].variance == closed


@pytest.mark.parametrize("size", [float("inf"), float("nan")])
def test_a_step_of_which_a_weights_gradient_overflowed_teaches_nothing(size):
    steps = Steps()
    steps.take(CONV, 100.0, closed=10.0)
    op = steps.take(CONV, size, closed=10.0)
    assert (op.variance, op.shares[0].count) == (10.0, 1)


def test_averages_go_into_a_checkpoint():
    steps, restored = Steps(), Steps()
    steps.take(CONV, 100.0, closed=10.0)
    restored.table.load_state_dict(steps.table.state_dict())
    told = [one.take(CONV, 100.0, closed=30.0).variance for one in (steps, restored)]
    assert told == pytest.approx([20.0, 20.0])


@pytest.mark.parametrize("varies", [False, True])
def test_batches_that_are_all_the_same_are_known(varies):
    gradient = GradientVariance()
    weight = torch.ones(4, requires_grad=True)
    for step in range(3):
        gradient.reads(torch.full((8, 8), float(step) if varies else 1.0))
        gradient.reads(weight)
        gradient.reads(weight * step)  # what a step makes is no input of it
        gradient.end_step(last=False)
    assert gradient.is_one_batch is not varies


def test_running_statistics_and_counters_do_not_tell_batches_apart():
    """They change in each step, so a net with a batch norm seemed never to see a batch again."""
    norm, x = torch.nn.BatchNorm2d(4), torch.randn(8, 4, 5, 5)
    for observer in (NoiseMeter(probes=0), ReachMeter(3)):
        for _ in range(3):
            with Saving(Lossy(Dither(levels=16)), observer=observer, min_nbytes=0):
                loss = norm(x).square().sum()
            loss.backward()
        observer.harvest()
        found = observer.table.gradient if isinstance(observer, NoiseMeter) else observer._gradient
        assert found.is_one_batch


def test_no_hook_stays_where_a_step_is_left_before_it_ends():
    """As by `er.release` while steps are watched."""
    weight, variance = torch.nn.Parameter(torch.zeros(1)), GradientVariance()
    variance.listen(weight)
    assert weight._backward_hooks
    del variance
    assert not weight._backward_hooks
