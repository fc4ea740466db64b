"""Paired timing, with a clock that we turn by hand."""

import pytest

from elbowroom.measure import Paired, paired
from elbowroom.measure.clocks import Undisturbed


class Clock:
    """Seconds that pass only when a step says so."""

    def __init__(self):
        self.now_s = 0.0
        self.ran = []

    def step(self, name, seconds):
        def run():
            self.ran.append(name)
            self.now_s += seconds

        return run


def test_ratio_and_order():
    clock = Clock()
    timing = paired(
        clock.step("a", 2.0), clock.step("b", 3.0), pairs=4, warmup=1, clock=lambda: clock.now_s
    )
    assert (timing.n, timing.ratio, timing.ratio_iqr) == (4, 1.5, (1.5, 1.5))
    assert (timing.median_a_s, timing.median_b_s) == (2.0, 3.0)
    assert "".join(clock.ran) == "ab" + "abba" * 2  # one warm-up, then the order swaps


def test_the_median_shrugs_off_one_disturbed_pair():
    timing = Paired(a_s=(1.0,) * 5, b_s=(1.1, 1.1, 9.0, 1.1, 1.1))
    assert timing.ratio == pytest.approx(1.1)
    assert timing.ratio_iqr == (pytest.approx(1.1), pytest.approx(1.1))


def test_one_pair_has_no_spread():
    assert Paired((2.0,), (1.0,)).ratio_iqr == (0.5, 0.5)


def test_progress_is_told():
    told = []
    paired(lambda: None, lambda: None, pairs=3, warmup=0, on_pair=told.append)
    assert told == [1, 2, 3]


@pytest.mark.parametrize("wrong", [{"pairs": 0}, {"warmup": -1}])
def test_senseless_counts_are_refused(wrong):
    with pytest.raises(ValueError, match="pairs >= 1 and warmup >= 0"):
        paired(lambda: None, lambda: None, **wrong)


def test_what_other_processes_take_does_not_count():
    """The processor's clock, a system call, is asked only where another process may have run."""
    wall = iter((5.0, 5.00004, 5.00008, 6.00008, 6.00012, 6.2, 7.2))
    process = iter((1.0, 1.30008, 1.5, 2.7))
    clock = Undisturbed(lambda: next(wall), lambda: next(process))
    read_s = [clock.now_s() for _ in range(6)]
    # Two short stretches; 0.3 of a second out of 1; a short one; what a second thread did, too.
    assert read_s == pytest.approx([4e-5, 8e-5, 0.30008, 0.30012, 0.5, 1.5])
    assert next(process, None) is None
