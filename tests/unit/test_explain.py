"""er.explain_oom says what holds the memory and changes nothing; er.assert_peak checks a step."""

import gc
import re
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import elbowroom as er
from elbowroom.errors import DataError
from elbowroom.runtime.attach import opener_of
from elbowroom.tools.explain import explanation
from elbowroom.tools.holders import find_holders
from elbowroom.units import parse_nbytes

MIB = 1 << 20


def model_of(*widths):
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*(one for layer in layers for one in (layer, nn.GELU())))


def run_out():
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")


def test_the_error_goes_on_and_the_report_names_modules_lines_and_tensors(capsys):
    model = model_of(256, 512, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 256)).sum().backward()
    optimizer.step()

    def train():
        batch = torch.randn(2048, 256)
        hidden = model(batch)
        assert hidden.requires_grad
        run_out()

    with pytest.raises(RuntimeError, match="can't allocate") as caught, er.explain_oom():
        train()
    assert type(caught.value) is RuntimeError
    told = capsys.readouterr().err
    assert "memory ran out on cpu" in told
    assert "test_explain.py" in told
    for kind in ("weights", "gradients", "optimizer states", "saved for backward"):
        assert kind in told, told
    assert "(Addmm)" in told
    assert "Gelu after" in told


def saved_nbytes(begin=""):
    """Bytes saved for backward; other tests may have left some."""
    gc.collect()
    found = [one for one in find_holders("cpu") if one.kind == "saved for backward"]
    return sum(one.nbytes for one in found if one.where.startswith(begin))


def test_what_a_graph_saves_is_found_with_its_bytes():
    model = model_of(256, 512)
    x = torch.randn(2048, 256)
    before = saved_nbytes("Gelu")
    y = model(x)
    assert saved_nbytes("Gelu") - before == 2048 * 512 * 4
    del y


def test_what_elbowroom_holds_is_counted_as_held_and_not_unpacked():
    model = model_of(256, 512)
    x = torch.randn(2048, 256)
    before = saved_nbytes()
    with er.saving("dither", bits=4):
        y = model(x)
    assert 0 < saved_nbytes() - before < 0.5 * (x.nbytes + y.nbytes)
    y.sum().backward()


def test_other_errors_say_nothing(capsys):
    with pytest.raises(ValueError, match="mine"), er.explain_oom():
        raise ValueError("mine")
    assert capsys.readouterr().err == ""


def test_a_training_inside_has_the_same_bits():
    def train():
        model = model_of(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 64)).square().sum().backward()
            optimizer.step()
        return model[0].weight

    plain = train()
    with er.explain_oom():
        assert torch.equal(train(), plain)


def test_a_report_that_fails_hides_no_error(capsys, monkeypatch):
    monkeypatch.setattr("elbowroom.tools.explain.find_holders", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="can't allocate"), er.explain_oom():
        run_out()
    assert "not enough left to say why" in capsys.readouterr().err


class Refusing(torch.Tensor):
    """A subclass that lets nobody call a function of torch on it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("no touching")


EXHAUSTED = """
import resource, torch
import elbowroom as er
layers = [torch.nn.Linear(64, 64) for _ in range(4)]
model = torch.nn.Sequential(*layers)
def fill():
    mine, left = model(torch.randn(512, 64)), []
    try:
        for size in (64 << 20, 1 << 20, 1 << 14, 1 << 10):  # to the last byte
            try:
                while True: left.append(bytearray(size))
            except MemoryError: pass
        while True: left.append([None] * 64)
    except MemoryError as error:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")
try:
    with er.explain_oom():
        now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (200 << 20),) * 2)
        fill()
except RuntimeError: pass
"""


def test_there_is_room_to_explain_where_none_is_left():
    ran = subprocess.run([sys.executable, "-c", EXHAUSTED], capture_output=True, text=True)
    assert "memory ran out on cpu; tensors hold" in ran.stderr, ran.stderr
    assert "not enough left" not in ran.stderr


def test_tensors_of_others_neither_stop_the_report_nor_count_where_they_have_no_memory(capsys):
    refusing = torch.zeros(1024).as_subclass(Refusing)
    with FakeTensorMode():
        fake = torch.empty(1 << 34)
    with pytest.raises(RuntimeError, match="can't allocate"), er.explain_oom():
        run_out()
    told = capsys.readouterr().err
    assert "tensors hold" in told
    assert "GiB" not in told
    del refusing, fake


def test_a_report_is_written_once(capsys):
    with pytest.raises(RuntimeError, match="can't allocate"), er.explain_oom(), er.explain_oom():
        run_out()
    assert capsys.readouterr().err.count("memory ran out") == 1


def test_without_a_stderr_the_error_goes_on(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(RuntimeError, match="can't allocate"), er.explain_oom():
        run_out()


def test_a_known_profile_names_the_plan_that_fits():
    model = model_of(256, 512, 256)
    x = torch.randn(2048, 256)
    profile = er.measure(lambda: model(x).sum().backward(), model=model)
    try:
        run_out()
    except RuntimeError as error:
        told = explanation(error, profile)
    assert "plan of the known profile" in told


class RunsOut(nn.Module):
    """Memory runs out here as soon as it is told to."""

    now = True

    def forward(self, x):
        if self.now:
            run_out()
        return x


def explained(step):
    with pytest.raises(RuntimeError, match="can't allocate") as caught:
        step()
    return explanation(caught.value)


@pytest.mark.parametrize("exact", [True, None])
def test_before_any_step_was_measured_a_setting_is_named_as_an_estimate(exact):
    x = torch.randn(1024, 256)
    plain = model_of(256, 512, 256)
    needs = er.peak(lambda: plain(x).square().sum().backward())
    model = er.fit(plain, budget="1 GiB", exact=exact)

    def step():
        model(x).square().sum()
        run_out()

    found = re.search(r"estimated by its first forward, a step takes (.*?) at", explained(step))
    assert found is not None
    assert parse_nbytes(found[1]) > needs / 4
    keep, *others = opener_of(model).foreseen()
    assert keep.nbytes >= needs
    assert len(others) == (1 if exact else 5)
    assert all(one.nbytes < keep.nbytes for one in others)


def test_a_forward_that_did_not_end_tells_of_its_part():
    model = er.fit(model_of(256, 512, 256).append(RunsOut()), budget="1 GiB")
    told = explained(lambda: model(torch.randn(1024, 256)))
    assert "estimated by the part of its first forward that had run" in told
    assert re.search(r'give budget="\d', told)


def test_without_er_fit_a_budget_is_named_for_it(monkeypatch):
    monkeypatch.setattr("elbowroom.tools.explain.attached", list)  # those of other tests
    model = model_of(256, 512)

    def step():
        out = model(torch.randn(1024, 256))
        assert out.requires_grad
        run_out()

    found = re.search(
        r"([\d.]+ [MG]iB) are saved for backward.*er\.fit\(model, budget=(\d+)\)", explained(step)
    )
    assert found is not None
    assert 1024 * 512 * 4 <= parse_nbytes(found[1]) < int(found[2])


def test_no_plan_is_named_for_a_tensor_larger_than_all_others():
    told = explained(lambda: torch.empty(1 << 55))
    assert "were asked for at once, more than all tensors together" in told
    assert "budget=" not in told


def test_a_profile_that_is_not_there_is_refused_at_once(tmp_path):
    with pytest.raises(DataError):
        er.explain_oom(tmp_path / "none.json")


def test_a_peak_within_what_is_allowed_is_returned():
    assert er.assert_peak(lambda: torch.empty(MIB, dtype=torch.uint8), "1 MiB") == MIB


def test_a_peak_above_it_names_both_figures_and_the_largest_holders():
    model = model_of(256, 1024)
    x = torch.randn(2048, 256)

    def step():
        model.zero_grad()
        model(x).sum().backward()

    step()
    with pytest.raises(AssertionError) as caught:
        er.assert_peak(step, "2 MiB")
    told = str(caught.value)
    assert "(measured); 2.00 MiB are allowed" in told
    assert "8.00 MiB saved for backward" in told


def test_a_size_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="size"):
        er.assert_peak(lambda: None, "much")


SCRIPT = """
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.ones(64, 64)).sum()
torch.empty(1 << 55)
"""


def test_run_shows_the_scripts_own_traceback_first_and_then_explains(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "elbowroom", "run", "--budget", "1GiB", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    first, then = done.stderr.index("can't allocate"), done.stderr.index("memory ran out on cpu")
    assert first < then
    assert "train.py:6: torch.empty(1 << 55)" in done.stderr
