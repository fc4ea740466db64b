"""Online eviction with addresses: what DTR and Coop throw out, and what that costs."""

import importlib.util
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

_PATH = Path(__file__).parents[2] / "benchmarks" / "_eviction.py"
_SPEC = importlib.util.spec_from_file_location(_PATH.stem, _PATH)
sys.modules[_PATH.stem] = simulator = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(simulator)
Trace, TracedOp = simulator.Trace, simulator.TracedOp
evict, plain_peak = simulator.evict, simulator.plain_peak


def chain(sizes, seconds=None):
    """A forward that makes each tensor of the one before, and a backward that reads them back."""
    n = len(sizes)
    seconds = seconds or [1.0] * n
    forward = [TracedOp((i - 1,) if i else (), (i,), seconds[i]) for i in range(n)]
    backward = [TracedOp((i,), (n + n - 1 - i,), 1.0) for i in reversed(range(n))]
    return Trace((*forward, *backward), (*sizes, *([1] * n)))


def test_with_room_for_all_nothing_is_evicted():
    trace = chain([10] * 8)
    for rule in ("dtr", "coop"):
        found = evict(trace, plain_peak(trace) + 10, rule)
        assert found.fits
        assert (found.reruns, found.evicted_nbytes) == (0, 0)
        assert found.seconds == sum(op.seconds for op in trace.ops)


def test_with_less_both_run_ops_again():
    trace = chain([10] * 8)
    for rule in ("dtr", "coop"):
        found = evict(trace, 45, rule)
        assert found.fits
        assert found.reruns > 0
        assert found.evicted_nbytes >= plain_peak(trace) - 45


def test_with_too_little_it_says_so():
    for rule in ("dtr", "coop"):
        assert not evict(chain([10] * 4), 15, rule).fits


def test_coop_evicts_neighbours_where_dtr_evicts_all_over_memory():
    """Small tensors alternate in price; one large one asks for the room of two neighbours.

    DTR takes the cheap ones, none beside another, until by luck two gaps meet; Coop takes a pair.
    """
    n = 10
    small = [TracedOp((), (i,), 0.01 if i % 2 else 1.0) for i in range(n)]
    large = TracedOp((), (n,), 1.0)
    end = [TracedOp((i,), (), 0.0) for i in range(n)]
    trace = Trace((*small, large, *end), (*([10] * n), 20))
    dtr, coop = (evict(trace, 105, rule) for rule in ("dtr", "coop"))
    assert dtr.fits
    assert coop.fits
    assert coop.wasted_nbytes < dtr.wasted_nbytes
    assert coop.seconds <= dtr.seconds


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    share=st.floats(0.3, 1.2),
)
def test_what_fits_is_never_over_the_budget_and_runs_every_op(sizes, share):
    trace = chain(sizes)
    plain_s = sum(op.seconds for op in trace.ops)
    for rule in ("dtr", "coop"):
        found = evict(trace, max(1, int(share * plain_peak(trace))), rule)
        if found.fits:
            assert found.seconds >= plain_s
            assert found.wasted_nbytes <= found.evicted_nbytes
            assert (found.reruns > 0) == (found.seconds > plain_s)
