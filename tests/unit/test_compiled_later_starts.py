"""A later start begins with the attempt that fitted, of those whose code took too much."""

from pathlib import Path

import pytest
import torch
from torch import fx

from elbowroom.compiled.attempts import fitting
from elbowroom.compiled.later_starts import LaterStarts
from elbowroom.compiled.options import Settings
from elbowroom.compiled.partition import Decision
from elbowroom.errors import BudgetTooSmall

ROOM = 1000


class Net(torch.nn.Module):
    def forward(self, x):
        return x + 1


def starts(settings: object = "settings", numel: int = 4, **options: object) -> LaterStarts:
    return LaterStarts(fx.symbolic_trace(Net()), [torch.zeros(numel)], settings, options)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "elbowroom"


class Region:
    """A region whose code takes 1.2 of what is predicted, in plans from 500 bytes up."""

    def __init__(self, more: float = 1.2, plain_nbytes: int = 3 * ROOM) -> None:
        self.tried: list[int | None] = []
        self._more, self._plain_nbytes = more, plain_nbytes

    def compile(self, tight, check, *, fills):
        self.tried.append(tight)
        if tight is not None and tight < 500:
            raise BudgetTooSmall("this region needs 500 bytes", least_nbytes=500, parts={})
        planned = self._plain_nbytes if tight is None else tight
        made = Decision(planned, 0, self._plain_nbytes, 0, recomputed=0, is_plain=tight is None)
        check.made.append(made)
        check.peak_nbytes = int(self._more * planned)
        if check.raises and check.peak_nbytes > ROOM:
            check.over_nbytes = check.peak_nbytes - ROOM
            raise RuntimeError("too many")
        return lambda: tight

    def fit(self, at: LaterStarts) -> int | None:
        self.tried.clear()
        compiled, _ = fitting(self.compile, Settings(ROOM, exact=True), ROOM, at)
        return compiled()


def test_a_later_start_begins_with_the_attempt_that_fitted(cache) -> None:
    region = Region()
    assert region.fit(starts()) == 800
    assert region.tried == [1000, 800]
    assert region.fit(starts()) == 800
    assert region.tried == [800]
    for other in (starts("other settings"), starts(numel=5), starts(max_autotune=True)):
        region.fit(other)
        assert region.tried == [1000, 800]


def test_a_first_attempt_that_fits_leaves_no_file(cache) -> None:
    region = Region(more=1.0)
    region.fit(starts())
    assert not cache.exists()


def test_an_attempt_that_does_not_fit_any_more_is_replaced(cache) -> None:
    Region().fit(starts())
    heavier = Region(more=1.5)
    assert heavier.fit(starts()) == 500
    assert heavier.tried == [800, 1000, 500]
    assert heavier.fit(starts()) == 500
    assert heavier.tried == [500]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"tight": 8, "a": 1}', '{"tight": "8"}', "\0"])
def test_a_damaged_file_is_none(cache, text) -> None:
    region = Region()
    region.fit(starts())
    (file,) = cache.iterdir()
    file.write_text(text)
    assert region.fit(starts()) == 800
    assert region.tried == [1000, 800]


def test_without_inductors_cache_nothing_is_found(cache) -> None:
    region = Region()
    for _ in range(2):
        region.fit(starts(force_disable_caches=True))
        assert region.tried == [1000, 800]
    assert not cache.exists()


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "elbowroom").write_text("no folder")
    region = Region()
    assert region.fit(starts()) == region.fit(starts()) == 800


@pytest.mark.parametrize(("plain_nbytes", "tried"), [(1600, [500]), (1400, [500, None])])
def test_plain_code_is_written_for_a_refusal_only_where_it_may_be_lower(
    cache, plain_nbytes, tried
) -> None:
    region = Region(2.4, plain_nbytes)  # the code of the lowest plan takes 1200 bytes
    with pytest.raises(BudgetTooSmall):
        region.fit(starts())
    assert region.tried[-len(tried) :] == tried


def test_a_least_that_is_refused_for_a_higher_one_is_not_replaced_by_plains(cache) -> None:
    """An MLP with exact=False was told to give plain's 7.6 MiB, where 2.7 do."""

    class Rising(Region):
        def compile(self, tight, check, *, fills):
            if tight is not None and tight < 1300:
                self.tried.append(tight)
                least = 1200 if tight < 1200 else 1300
                raise BudgetTooSmall("too little", least_nbytes=least, parts={"saved": least})
            return super().compile(tight, check, fills=fills)

    region = Rising(more=1.1)
    with pytest.raises(BudgetTooSmall) as refused:
        region.fit(starts())
    assert refused.value.least_nbytes == 1430
    assert sum(refused.value.parts.values()) == 1430
    assert 1300 in region.tried
