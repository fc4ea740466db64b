"""The sample of a matrix of cases: the same every time, of every kernel, and never of all."""

import json
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import pytest
import torch

from sampling import FEW, SHARE, Case, sample

KINDS, VALUES = ("group", "dither", "nonzero"), tuple(range(14))
MATRIX = [
    Case(f"test_it[{kind}-{value}]", "test_it", {"kind": kind, "value": str(value)})
    for kind, value in product(KINDS, VALUES)
]


def values_of(cases, name):
    return {case.values[name] for case in MATRIX if case.id in cases}


def test_a_fifth_runs_and_the_same_whatever_came_before():
    chosen = sample(MATRIX)
    assert len(chosen) == -(-len(MATRIX) // SHARE)
    assert sample(reversed(MATRIX)) == chosen


def test_values_are_spread():
    chosen = sample(MATRIX)
    assert values_of(chosen, "kind") == set(KINDS)
    assert len(values_of(chosen, "value")) == len(chosen)


def test_a_mark_may_ask_for_more_than_a_fifth():
    kinds, shares = tuple(range(10)), (0.9, 0.7)
    cases = [
        Case(f"test_it[{kind}-{share}]", "test_it", {"kind": str(kind), "share": str(share)}, 2)
        for kind, share in product(kinds, shares)
    ]
    chosen = [case.values for case in cases if case.id in sample(cases)]
    assert {values["kind"] for values in chosen} == {str(kind) for kind in kinds}, "each once"
    assert len(chosen) == len(kinds)
    assert {values["share"] for values in chosen} == {str(share) for share in shares}


def test_the_next_case_is_always_one_with_most_values_and_pairs_that_are_new():
    """By a search through all that are left, for each."""
    chosen, left = [], sorted(MATRIX, key=lambda case: crc32(case.id.encode()))

    def news(case):
        values = {item for one in chosen for item in one.values.items()}
        pairs = {tuple(one.values.items()) for one in chosen}
        return len(case.values.items() - values), tuple(case.values.items()) not in pairs

    for _ in range(-(-len(MATRIX) // SHARE)):
        chosen.append(max(left, key=news))
        left.remove(chosen[-1])
    assert sample(MATRIX) == {case.id for case in chosen}


def test_each_function_has_a_sample_and_of_few_cases_all_run():
    few = [Case(f"test_few[{i}]", "test_few", {"i": str(i)}) for i in range(FEW)]
    assert sample([*MATRIX, *few]) == sample(MATRIX) | {case.id for case in few}
    assert sample([]) == set()


# --- what conftest.py makes of it ---


@pytest.fixture
def conftest(request):
    """Our conftest.py, as pytest itself has loaded it."""
    return request.config.pluginmanager.get_plugin(str(request.path.parents[1] / "conftest.py"))


class Config(SimpleNamespace):
    def __init__(self, *arguments, **options):
        self.deselected = []
        hook = SimpleNamespace(pytest_deselected=lambda items: self.deselected.extend(items))
        option = {"keyword": "", "markexpr": "", "deselect": None, "collectonly": False}
        option |= {"turn": None} | options
        source = pytest.Config.ArgsSource.ARGS if arguments else pytest.Config.ArgsSource.TESTPATHS
        super().__init__(
            args=arguments or ("tests",),
            invocation_params=SimpleNamespace(dir=Path(__file__).parents[2]),
            args_source=source,
            option=SimpleNamespace(**option),
            hook=hook,
            stash=pytest.Stash(),
        )

    def getoption(self, name):
        return getattr(self.option, name.strip("-"), False)


@pytest.fixture
def collected(request):
    """Forty cases on two backends, of which Triton's are marked, and one more test."""
    made = [
        SimpleNamespace(nodeid=f"test_it[{n}-{backend}]", marked=backend == "triton")
        for n, backend in product(range(20), ("numba", "triton"))
    ]
    for item in made:
        item.callspec = SimpleNamespace(params={"n": item.nodeid, "backend": item.marked})
        item.get_closest_marker = lambda name, item=item: item.marked and name == "sampled"
        item.iter_markers = lambda name: ()
    return made


@pytest.fixture
def left(conftest, collected, monkeypatch):
    """How many tests are left of those collected, after pytest was started so."""
    monkeypatch.setattr(conftest.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(conftest.pytest, "Function", SimpleNamespace)

    def started(*arguments, **options):
        config, items = Config(*arguments, **options), list(collected)
        conftest.pytest_configure(config)
        conftest.pytest_collection_modifyitems(config, items)
        assert len(items) + len(config.deselected) == len(collected)
        assert all(item.marked for item in config.deselected)
        return len(items)

    return started


def test_a_run_leaves_out_most_marked_cases_and_says_how_to_run_all(left):
    assert left() == left("tests/unit") == left(keyword="it") == 20 + 4
    assert left(all=True) == 40
    assert left("tests/unit/test_it.py::test_it[1-triton]") == 40, "asked for by their ids"


def test_on_a_gpu_all_run(left, conftest, monkeypatch):
    monkeypatch.setattr(conftest.torch.cuda, "is_available", lambda: True)
    assert left() == 40


class Reporter:
    def __init__(self):
        self.stats, self.lines = {}, []

    def write_line(self, line):
        self.lines.append(line)


@pytest.fixture
def said(conftest, monkeypatch, tmp_path):
    """The last line of a run of everything that was left out in part, after this one has ended."""
    monkeypatch.setattr(conftest, "WHOLE", tmp_path / "whole-matrix.json")
    monkeypatch.setattr(conftest, "_commit", lambda: "abc1234")
    monkeypatch.setattr(conftest, "_folders", lambda: [".", "memory", "unit"])

    def ended(config, exitstatus=0):
        sampled, reporter = Config(), Reporter()
        sampled.stash[conftest._left_out] = 16, 20
        conftest.pytest_terminal_summary(Reporter(), exitstatus, config)
        conftest.pytest_terminal_summary(reporter, 1, sampled)
        return reporter.lines[-1].removeprefix("4 of 20 cases of large matrices, a sample; ")

    return ended


ALL_PASSED = "all cases passed last (./scripts/test --all): "


def test_a_run_that_is_none_of_all_tests_or_fails_is_not_written_down(said, conftest):
    for part in (
        Config(),
        Config("tests/unit"),
        Config("tests/unit/test_sampling.py", all=True),
        Config(all=True, keyword="it"),
        Config(all=True, markexpr="gpu"),
        Config(all=True, collectonly=True),
        Config("tests/unit", all=True, keyword="it"),
    ):
        assert said(part) == ALL_PASSED + "., memory, unit never yet"
    assert "never" in said(Config(all=True), exitstatus=1)
    of_xdist = Config("tests/unit", all=True)  # one whose own tests have passed
    of_xdist.workeroutput = {}
    assert "never" in said(of_xdist)
    assert not conftest.WHOLE.exists()


def test_a_run_of_all_tests_or_of_those_of_folders_is_written_down(said, conftest, monkeypatch):
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    assert said(Config("tests/unit", all=True)) == (
        f"{ALL_PASSED}., memory never yet; unit on {today} at abc1234"
    )
    monkeypatch.setattr(conftest, "_commit", lambda: "def5678")
    said(Config("tests/memory", "tests/unit/test_sampling.py", all=True))
    assert said(Config()) == (
        f"{ALL_PASSED}. never yet; memory on {today} at def5678; unit on {today} at abc1234"
    )
    for whole in (Config(all=True), Config("tests", all=True)):
        assert said(whole) == f"{ALL_PASSED}., memory, unit on {today} at def5678"
    found = json.loads(conftest.WHOLE.read_text())
    assert {one["torch"] for one in found.values()} == {torch.__version__}
    assert {one["threads"] for one in found.values()} == {torch.get_num_threads()}


def test_all_files_beside_the_folders_are_one_of_them(said, conftest):
    """A run of all tests takes over an hour, and nobody names "." itself."""
    files = sorted(f"tests/{file.name}" for file in conftest.TESTS.glob("test_*.py"))
    assert len(files) > 1
    assert said(Config(files[0], all=True)) == f"{ALL_PASSED}., memory, unit never yet"
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    after = said(Config(*files, all=True))
    assert after == f"{ALL_PASSED}. on {today} at abc1234; memory, unit never yet"


def test_all_folders_with_tests_are_named_but_that_of_frameworks(conftest):
    assert {".", "contract", "golden", "hostile", "memory", "numerics", "unit"} == set(
        conftest._folders()
    )


def test_a_process_of_xdist_tells_what_it_left_out(conftest):
    config = Config()
    conftest.pytest_configure(config)
    node = SimpleNamespace(config=config, workeroutput={"left_out": [16, 20], "waiting": [0, 0]})
    conftest.pytest_testnodedown(node, None)
    assert config.stash[conftest._left_out] == (16, 20)
    conftest.pytest_testnodedown(SimpleNamespace(config=config), "killed")
