"""The allocator's truth, on steps whose memory can be worked out by hand."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import elbowroom as er
from elbowroom.measure import MemoryCurve, allocations, mark, memory_curve, peak
from elbowroom.measure.live_storages import LiveStorages, all_tensors
from elbowroom.runtime.attach import opener_of

MIB = 2**20


def conv_net(layers: int, width: int) -> nn.Module:
    return nn.Sequential(
        *(
            layer
            for _ in range(layers)
            for layer in (
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            )
        )
    )


def training_step(model: nn.Module, x: torch.Tensor) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    loss = model(x).mean()
    mark("backward")
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None


def test_one_tensor_counts_to_the_byte():
    assert peak(lambda: torch.zeros(12_345, dtype=torch.uint8)) == 12_345


def test_the_peak_is_not_the_sum():
    def step():
        for _ in range(5):
            torch.zeros(MIB, dtype=torch.uint8)

    assert peak(step) == MIB


def test_a_step_that_allocates_nothing_has_no_peak():
    curve = memory_curve(lambda: None)
    assert (curve.peak_nbytes, curve.end_nbytes, curve.times_s) == (0, 0, ())


def test_what_stood_before_the_step_is_not_counted():
    held = [torch.zeros(8 * MIB, dtype=torch.uint8)]

    def step():
        held.clear()  # unseen: the documented limit, which can only make the reading too high
        torch.zeros(MIB, dtype=torch.uint8)

    curve = memory_curve(step)
    assert (curve.peak_nbytes, curve.end_nbytes) == (MIB, 0)


def test_an_address_that_an_earlier_run_knew_is_not_freed_in_this_one():
    def take():  # mapped, never touched: the next one of this size stands at the same address
        return torch.empty(64 * MIB, dtype=torch.uint8)

    held = []
    memory_curve(lambda: held.append(take()))
    address = held.pop().data_ptr()  # released outside of any run
    held.append(take())
    if held[0].data_ptr() != address:
        pytest.skip("this allocator does not hand the address out again")
    curve = memory_curve(held.clear)
    assert (curve.peak_nbytes, curve.end_nbytes) == (0, 0)


def test_a_conv_net_peaks_where_arithmetic_says():
    # 4 layers save 2 tensors of 4 MiB each (BatchNorm's input, ReLU's output); two more are in use
    # in backward. At 16 x 64 x 32 x 32 that is 8 x 4 + 2 x 4 MiB; section 6.2's net of 10 layers is
    # 20 + 2 in the same way.
    model, x = conv_net(4, 64), torch.randn(16, 64, 32, 32)
    training_step(model, x)
    curve = memory_curve(lambda: training_step(model, x))
    expected = (8 + 2) * 4 * MIB
    assert expected * 0.99 <= curve.peak_nbytes <= expected * 1.06
    assert curve.end_nbytes == 0
    assert curve.nbytes[0] > 0
    assert list(curve.times_s) == sorted(curve.times_s)
    assert curve.peak_nbytes == peak(lambda: training_step(model, x))


def test_marks_fall_where_the_step_named_them():
    model, x = conv_net(2, 8), torch.randn(8, 8, 16, 16)
    training_step(model, x)
    curve = memory_curve(lambda: training_step(model, x))
    ((name, at_s),) = curve.marks
    assert name == "backward"
    assert 0 < at_s < curve.duration_s
    before = [nbytes for t, nbytes in zip(curve.times_s, curve.nbytes, strict=True) if t <= at_s]
    assert before[-1] >= 4 * 8 * 8 * 16 * 16 * 4  # forward has left its four saved tensors


def test_mark_outside_a_measurement_does_nothing():
    mark("nowhere")


def test_an_error_inside_the_step_comes_through():
    def step():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        peak(step)
    assert peak(lambda: torch.zeros(64, dtype=torch.uint8)) == 64


def test_a_changed_profiler_is_a_clear_error(monkeypatch):
    end = allocations._disable_profiler
    monkeypatch.setattr(allocations, "_disable_profiler", lambda: end() and object())
    with pytest.raises(RuntimeError, match="cannot measure a peak on this CPU"):
        peak(lambda: None)


def test_an_empty_curve_is_flat():
    curve = MemoryCurve((), ())
    assert (curve.peak_nbytes, curve.duration_s) == (0, 0.0)


def test_a_fake_tensor_that_a_compiler_left_behind_holds_nothing():
    gc.collect()  # garbage of other tests must not be collected in between
    before = LiveStorages(all_tensors("cpu")).nbytes()
    with FakeTensorMode(shape_env=ShapeEnv()):
        left = torch.zeros(1 << 20), torch.zeros(100).nonzero()  # the latter's size is a symbol
    assert LiveStorages(all_tensors("cpu")).nbytes() == before
    del left


def test_a_peak_inside_a_peak_is_an_error_and_not_0():
    with pytest.raises(RuntimeError, match="inside another peak"):
        peak(lambda: peak(lambda: torch.zeros(64, dtype=torch.uint8)))
    assert peak(lambda: torch.zeros(64, dtype=torch.uint8)) == 64
    with torch.profiler.profile(), pytest.raises(RuntimeError, match="while a profiler runs"):
        peak(lambda: torch.zeros(64, dtype=torch.uint8))


def test_a_peak_ends_the_measurement_that_a_fitted_model_has_running():
    model, x = conv_net(2, 8), torch.randn(8, 8, 16, 16)
    training_step(model, x)
    plain = peak(lambda: training_step(model, x))
    er.fit(model, budget="64 MiB", exact=True)
    training_step(model, x)  # measured until the next forward
    assert peak(lambda: training_step(model, x)) == pytest.approx(plain, rel=0.01)
    training_step(model, x)
    er.release(model)


@pytest.mark.parametrize("share", [0.8, 0.5])
def test_the_first_step_of_a_fitted_model_is_the_same_with_a_peak_around_it(share, caplog):
    """fit measures and rehearses inside of it: they share the profiler."""
    model, x = conv_net(6, 16), torch.randn(16, 16, 32, 32)
    training_step(model, x)
    plain = peak(lambda: training_step(model, x))
    weights = sum(p.nbytes for p in model.parameters())
    state = copy.deepcopy(model.state_dict())
    settled = []
    for around in (peak, lambda step: step()):
        model.load_state_dict(state)
        er.fit(model, budget=(budget := weights + int(share * plain)))
        first = around(lambda: training_step(model, x))
        for _ in range(3):
            around(lambda: training_step(model, x))
        settled.append(opener_of(model).planner.setting)
        if around is peak:
            assert first + weights <= 1.05 * budget
            assert peak(lambda: training_step(model, x)) + weights <= budget
        er.release(model)
    assert settled[0] == settled[1]
    assert "cannot be measured" not in caplog.text


def test_a_measurement_inside_another_is_given_its_own_part():
    outer = allocations.Allocations(shares=True)
    one = torch.zeros(1000, dtype=torch.uint8)
    inner = allocations.Allocations()
    assert not allocations.may_begin()
    allocations.Allocations.mark("between")
    two = torch.zeros(3000, dtype=torch.uint8)
    of_inner = inner.stop()
    del one
    of_outer = outer.stop()
    assert [change.nbytes for change in of_inner[0]] == [3000]
    assert [change.nbytes for change in of_outer[0]] == [1000, 3000, -1000]
    assert [mark.name for mark in of_inner[1]] == [mark.name for mark in of_outer[1]] == ["between"]
    assert not allocations.is_busy()
    del two


def test_a_profiler_inside_the_step_is_an_error_and_not_0(capfd):
    """The step's own profiler works as it does without us, and nothing is printed."""

    def step():
        with torch.profiler.profile() as profiler:
            torch.zeros(1 << 20).add(1).sum()
        seen.append(len(profiler.events()))

    seen: list[int] = []
    with pytest.raises(RuntimeError, match="started a profiler of its own"):
        peak(step)
    assert seen[0] > 2
    assert "disableProfiler" not in capfd.readouterr().err
    assert not allocations.is_busy()
    assert peak(lambda: torch.zeros(64, dtype=torch.uint8)) == 64


def test_a_mark_is_one_report_of_the_allocator(monkeypatch):
    """A block was made and freed at each: in a recorded step, most of what is read."""
    reports = []
    roots = allocations._roots
    monkeypatch.setattr(
        allocations, "_roots", lambda results: reports.append(roots(results)) or reports[-1]
    )
    running = allocations.Allocations()
    kept = []
    for nth in range(7):
        running.mark(f"moment {nth}")
        kept.append(torch.empty(100 + nth))
    changes, marks = running.stop()
    assert [mark.name for mark in marks] == [f"moment {nth}" for nth in range(7)]
    assert [change.nbytes for change in changes] == [4 * (100 + nth) for nth in range(7)]
    times_ns = [at_ns for pair in zip(marks, changes, strict=True) for at_ns, *_ in pair]
    assert times_ns == sorted(times_ns)
    assert len(reports[0]) == 7 + 7 + 1  # the last block is freed in the end
