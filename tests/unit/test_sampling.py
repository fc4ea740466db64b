"""The sample of a matrix of cases: the same every time, of every kernel, and never of all."""

from itertools import product
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
    def __init__(self, passed=0):
        self.stats, self.lines = {"passed": [None] * passed}, []

    def write_line(self, line):
        self.lines.append(line)


def test_a_whole_run_that_passes_is_written_down_and_later_runs_say_when(
    conftest, monkeypatch, tmp_path
):
    monkeypatch.setattr(conftest, "WHOLE", tmp_path / "whole-matrix.json")
    monkeypatch.setattr(conftest, "_commit", lambda: "abc1234")

    def said(config, exitstatus=0):
        reporter = Reporter(passed=50)
        conftest.pytest_terminal_summary(reporter, exitstatus, config)
        return reporter.lines[-1]

    sampled = Config()
    sampled.stash[conftest._left_out] = 16, 20
    assert said(sampled) == (
        "4 of 20 cases of large matrices, a sample; all of them have not run yet: "
        "./scripts/test --all"
    )
    for part in (
        Config(),
        Config("tests/unit", all=True),
        Config(all=True, keyword="it"),
        Config(all=True, markexpr="gpu"),
        Config(all=True, collectonly=True),
    ):
        said(part)
        assert not conftest.WHOLE.exists()
    said(Config(all=True), exitstatus=1)
    assert not conftest.WHOLE.exists()
    said(Config(all=True))
    assert "all of them, 50 tests in all, passed last on 20" in said(sampled)
    threads = torch.get_num_threads()
    assert (
        f"at commit abc1234 with torch {torch.__version__} (threads a process: {threads})"
        in said(sampled)
    )


def test_a_process_of_xdist_tells_what_it_left_out(conftest):
    config = Config()
    conftest.pytest_configure(config)
    node = SimpleNamespace(config=config, workeroutput={"left_out": [16, 20], "waiting": [0, 0]})
    conftest.pytest_testnodedown(node, None)
    assert config.stash[conftest._left_out] == (16, 20)
    conftest.pytest_testnodedown(SimpleNamespace(config=config), "killed")
