"""Saved values of compiled graphs that leave memory: the same bits, and only where it pays."""

import gc
import logging
import pickle
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.compiled import away, elbowroom, ops
from elbowroom.compiled.partition import Decision, Partitioner, listening
from elbowroom.errors import BudgetTooSmall, PlanError
from elbowroom.measure import peak
from elbowroom.runtime.attach import opener_of
from uncompiled import uncompiled as uncompiled
from uncompiled import without_codegen

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
D = 64
ROOMY = 2**40
needs_maps = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="this system lists no mappings"
)
needs_a_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="Inductor needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    away._say.cache_clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def blocks(depth: int = 2) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(depth))), torch.randn(512, D)


def gradients(
    model: nn.Module, x: Tensor, partitioner: Partitioner
) -> tuple[list[Tensor], Decision]:
    torch._dynamo.reset()
    model.zero_grad()
    found: list[Decision] = []
    with listening(found.append):
        compiled = torch.compile(model, backend=without_codegen(partitioner))
        loss = compiled(x)
    (loss if loss.dim() == 0 else loss.square().mean()).backward()
    return [parameter.grad.clone() for parameter in model.parameters()], found[0]


def least_of(model: nn.Module, x: Tensor, **settings: bool) -> int:
    with pytest.raises(Exception, match="this compiled region needs at least") as caught:
        gradients(model, x, Partitioner(1000, **settings))
    return int(caught.value.inner_exception.least_nbytes)


def test_what_leaves_comes_back_with_its_bits_and_only_where_nothing_else_fits() -> None:
    model, x = blocks()
    plain, decided = gradients(model, x, Partitioner(ROOMY))
    least, lower = least_of(model, x), least_of(model, x, offloads=True)
    assert lower < 0.95 * least
    for exact in (True, None):
        got, moved = gradients(model, x, Partitioner(lower, exact=exact, offloads=True))
        assert moved.peak_nbytes <= lower
        assert moved.away_nbytes > 0
        assert moved.saved_nbytes > 0  # what need not leave stays
        assert not moved.is_lossy
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
    # Running again is faster than a file, so where that fits nothing leaves.
    room = int(0.9 * decided.peak_nbytes)
    stays = gradients(model, x, Partitioner(room))[1]
    assert gradients(model, x, Partitioner(room, offloads=True))[1] == stays
    assert stays.away_nbytes == 0


class Divided(nn.Module):
    """What a quotient reads may have no code."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x / (2 + x.square())
        return x


def test_values_that_may_have_no_code_leave_beside_codes() -> None:
    torch.manual_seed(0)
    model, x = Divided(), torch.randn(512, D)
    coded, both = (least_of(model, x, exact=None, offloads=moves) for moves in (False, True))
    assert both < 0.9 * coded
    got, decision = gradients(model, x, Partitioner(both, exact=None, offloads=True))
    assert decision.away_nbytes > 0
    assert decision.peak_nbytes <= both
    plain, _ = gradients(model, x, Partitioner(ROOMY))
    if not decision.is_lossy:
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


@needs_maps
def test_bytes_in_a_file_are_those_that_were_given_and_go_with_their_tensor(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    flat = torch.randint(0, 256, (100_001,), dtype=torch.uint8)
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    held = [away.in_file(flat) for _ in range(20)]
    assert mapped() == 20
    assert all(torch.equal(one, flat) for one in held)
    assert all(map(away.is_away, held))
    assert not away.is_away(flat)
    assert away.in_file(flat[:0]).numel() == 0
    if sys.version_info >= (3, 13):  # earlier ones keep a descriptor each
        assert len(list(Path("/proc/self/fd").iterdir())) == open_files
    assert not list(tmp_path.iterdir())
    del held
    gc.collect()
    assert mapped() == 0
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files


def test_bytes_in_a_file_take_no_memory_of_the_allocator() -> None:
    flat = torch.zeros(1 << 20, dtype=torch.uint8)
    assert peak(lambda: away.in_file(flat), device="cpu") < 1 << 16


def test_a_full_disk_keeps_tensors_in_memory_and_says_so_once(monkeypatch, caplog) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(away.os, "write", full)
    flat = torch.arange(64, dtype=torch.uint8)
    with caplog.at_level(logging.WARNING, logger="elbowroom"):
        for _ in range(2):
            kept = away.in_file(flat)
            assert torch.equal(kept, flat)
            assert not away.is_away(kept)
    (said,) = [r.getMessage() for r in caplog.records]
    assert "No space left" in said
    assert "TMPDIR" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_ops_that_move_have_true_fakes_and_give_back_the_layout_that_was_asked(dtype) -> None:
    x = (torch.randn(2, 8, 5, 7) > 0).to(dtype) if dtype is torch.bool else torch.randn(2, 8, 5, 7)
    x, order = x.to(dtype), [0, 2, 3, 1]
    torch.library.opcheck(ops.OFFLOAD, (x, order))
    given = (ops.OFFLOAD(x, order), list(x.shape), order, dtype, x.device)
    torch.library.opcheck(ops.FETCH, given)
    back = ops.FETCH(*given)
    assert back.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(back, x)


def test_where_values_cannot_go_is_said() -> None:
    model, x = blocks(1)
    compiled = torch.compile(model, backend=elbowroom, options={"offload": "host"})
    with pytest.raises(PlanError, match="offload='file' moves what a model on cpu saves"):
        compiled(x)


def test_the_setting_is_part_of_the_key_of_caches() -> None:
    one, other = Partitioner(1000), Partitioner(1000, offloads=True)
    assert one.uuid() != other.uuid()
    assert pickle.loads(pickle.dumps(other)) == other


def test_fit_hands_offload_to_the_graph(uncompiled) -> None:
    plain, x = blocks()
    standing = sum(p.nbytes for p in plain.parameters())
    torch.compile(plain)(x).square().mean().backward()

    def fitted(budget: int, offload: str | None) -> nn.Module:
        torch._dynamo.reset()
        return er.fit(torch.compile(blocks()[0]), budget=budget, exact=True, offload=offload)

    with pytest.raises(BudgetTooSmall) as caught:
        fitted(standing + 1000, None)(x)
    budget = int(0.97 * caught.value.least_nbytes)
    with pytest.raises(BudgetTooSmall):
        fitted(budget, None)(x)
    moved = fitted(budget, "file")
    moved(x).square().mean().backward()
    assert opener_of(moved).eager is None
    (decision,) = opener_of(moved).regions
    assert decision.away_nbytes > 0
    assert standing + decision.peak_nbytes <= budget
    # What is away does not count as held.
    (twin,) = opener_of(moved)._plans.twins
    assert sum(twin.ran) <= decision.saved_nbytes + 1000
    for p, q in zip(moved.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


def convolutions() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(3):
        layers += [nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(8, 3, 16, 16)


@needs_a_compiler
@pytest.mark.whole
@pytest.mark.parametrize("make", [blocks, convolutions])
def test_with_inductors_code_the_bits_are_those_of_plain_compile_and_the_peak_that_predicted(
    make, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def made() -> tuple[nn.Module, Tensor]:
        model, x = make()
        return WithLoss(model), x

    model, x = made()
    torch.compile(model)(x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    lower = least_of(*made(), offloads=True)
    room = lower + gradients(*made(), Partitioner(lower, offloads=True))[1].inputs_nbytes
    torch._dynamo.reset()
    model, x = made()
    options = {"budget": room, "offload": "file", "exact": True}
    found: list[Decision] = []
    with listening(found.append):
        compiled = torch.compile(model, backend=elbowroom, options=options)
        compiled(x).backward()
    assert found[0].away_nbytes > 0
    got = [p.grad.clone() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

    def step() -> None:
        model.zero_grad()
        compiled(x).backward()

    step()
    model.zero_grad()
    measured = peak(step, device="cpu")
    assert abs(measured - found[0].peak_nbytes) <= 0.05 * measured
