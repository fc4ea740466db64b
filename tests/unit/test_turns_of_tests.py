"""Tests that take seconds: each has one turn, turns are alike, and the list is up to date."""

import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

import turns as turns_module
from turns import MIN_S, TURNS, by_file, costs, current, renewed, turn_of_each, turns

COSTS = {
    **{f"tests/a.py::test_cases[{n}]": 2.0 + n for n in range(7)},
    **{f"tests/b.py::test_{n}": 1.0 + n % 5 for n in range(40)},
    "tests/pair.py": 13.0,
}


def test_each_has_one_turn_and_each_function_a_case_in_each():
    found = turns(COSTS)
    assert set(found) == set(COSTS)
    assert set(found.values()) == set(range(TURNS))
    cases = [found[f"tests/a.py::test_cases[{n}]"] for n in range(7)]
    shares = [len(range(turn, 7, TURNS)) for turn in range(TURNS)]
    assert sorted(map(cases.count, range(TURNS))) == sorted(shares)
    assert turns(dict(reversed(COSTS.items()))) == found, "whatever the order of the list"


def test_turns_take_about_as_long():
    found = turns(COSTS)
    seconds = [sum(COSTS[name] for name in found if found[name] == turn) for turn in range(TURNS)]
    assert max(seconds) - min(seconds) <= min(COSTS.values()) * 2


def test_the_list_names_tests_that_there_are():
    """A few that were renamed do no harm: such a test runs each time. Many are due for --costs."""
    root, texts, gone = Path(__file__).parents[2], {}, []
    for name in costs():
        file, _, test = name.partition("::")
        if file not in texts:
            texts[file] = (root / file).read_text() if (root / file).exists() else ""
        function = test.partition("[")[0].rpartition("::")[2]
        if not texts[file] or (test and not re.search(rf"def {function}\(", texts[file])):
            gone.append(name)
    assert len(costs()) > 100
    assert len(gone) <= len(costs()) // 10, gone


def test_the_hour_says_which(monkeypatch):
    half_day = 12 * 3600
    clock = SimpleNamespace(time=lambda: 40_000 * half_day + 17.0)
    monkeypatch.setattr(turns_module, "time", clock)
    first = current()
    clock.time = lambda: 40_001 * half_day - 0.1
    assert current() == first, "until noon"
    seen = {first}
    for later in range(1, TURNS):
        clock.time = lambda later=later: (40_000 + later) * half_day + 5.0
        seen.add(current())
    assert seen == set(range(TURNS))


def test_a_file_that_takes_its_turn_as_one_is_given_to_all_of_its_tests(monkeypatch):
    monkeypatch.setattr(turns_module, "costs", lambda: COSTS)
    found = turn_of_each(["tests/pair.py::test_x[1]", "tests/pair.py::test_y", "tests/new.py::t"])
    turn = turns(COSTS)["tests/pair.py"]
    assert found == {"tests/pair.py::test_x[1]": turn, "tests/pair.py::test_y": turn}


def test_a_new_list_has_what_was_measured_and_keeps_what_was_not():
    found = renewed(
        {"a::was": 3.0, "a::fell": 2.0, "a::about": MIN_S, "b": 5.0},
        {"a::new": MIN_S, "a::cheap": MIN_S - 0.1, "a::fell": MIN_S / 2 - 0.1}
        | {"a::about": MIN_S - 0.1, "b::x": 2.25, "b::y": 4.0},
    )
    about = pytest.approx(MIN_S - 0.1)
    assert found == {"a::was": 3.0, "a::new": MIN_S, "a::about": about, "b": 6.2}
    assert by_file({"a::x": 1.0, "a::y": 2.0, "b::x": 4.0}) == {"a": 3.0, "b": 4.0}


def test_a_run_of_whole_files_drops_names_that_no_test_has():
    known = {"a::renamed": 3.0, "a::was": 2.0, "b::other": 5.0, "c": 4.0}
    measured = {"a::was": MIN_S - 0.1, "c::x": 1.0}
    about = pytest.approx(MIN_S - 0.1)
    assert renewed(known, measured, whole=True) == {"a::was": about, "b::other": 5.0, "c": 1.0}
    assert renewed(known, measured)["a::renamed"] == 3.0


# --- what conftest.py makes of it ---


@pytest.fixture
def conftest(request):
    return request.config.pluginmanager.get_plugin(str(request.path.parents[1] / "conftest.py"))


def started(conftest, items, *arguments, **options):
    """The ids that run, and the lines at the end, when pytest is started so."""
    source = pytest.Config.ArgsSource
    option = {"keyword": "", "markexpr": "", "turn": None} | options
    config = SimpleNamespace(
        args=arguments or ("tests",),
        args_source=source.ARGS if arguments else source.TESTPATHS,
        option=SimpleNamespace(**option),
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
        stash=pytest.Stash(),
        getoption=lambda name: option.get(name.strip("-"), False),
    )
    conftest.pytest_configure(config)
    items = list(items)
    conftest.pytest_collection_modifyitems(config, items)
    lines = []
    reporter = SimpleNamespace(write_line=lines.append, stats={})
    conftest.pytest_terminal_summary(reporter, 1, config)
    return {item.nodeid for item in items}, lines


def test_all_turns_are_all_tests_and_a_run_says_which_it_took(conftest, monkeypatch):
    monkeypatch.setattr(turns_module, "costs", lambda: COSTS)
    monkeypatch.setattr(conftest.torch.cuda, "is_available", lambda: False)
    ids = [name for name in COSTS if "::" in name]
    ids += [f"tests/pair.py::test_{n}" for n in range(3)] + ["tests/new.py::test_new"]
    items = [SimpleNamespace(nodeid=id, get_closest_marker=lambda name: None) for id in ids]
    taken = [started(conftest, items, turn=turn) for turn in range(TURNS)]
    for (one, _), (other, _) in product(taken, taken):
        assert one is other or one & other == {"tests/new.py::test_new"}
    assert set().union(*(one for one, _ in taken)) == set(ids)
    for turn, (one, lines) in enumerate(taken):
        assert lines[-1] == (
            f"{len(one) - 1} of {len(ids) - 1} tests of {MIN_S} s or more: turn {turn} of "
            f"{TURNS}, which the hour gives, or ./scripts/test --turn {turn}"
        )
    assert started(conftest, items)[0] == taken[current()][0], "by the hour"
    for given in ({"all": True}, {"keyword": "cases"}, {"markexpr": "slow"}):
        assert started(conftest, items, **given)[0] == set(ids)
    assert started(conftest, items, "tests/b.py")[0] == set(ids), "files that are named"


def test_processes_of_xdist_take_the_same_turn_and_their_seconds_are_told(conftest):
    config = SimpleNamespace(stash=pytest.Stash(), workerinput={"turn": 2})
    conftest.pytest_configure(config)
    node = SimpleNamespace(config=config, workerinput={})
    conftest.pytest_configure_node(node)
    assert node.workerinput == {"turn": 2}
    for id in ("a::x", "a::y"):
        node.workeroutput = {"left_out": [1, 2], "waiting": [3, 4], "taken": {id: 0.5}}
        conftest.pytest_testnodedown(node, None)
    assert config.stash[conftest._taken] == {"a::x": 0.5, "a::y": 0.5}
    assert config.stash[conftest._waiting] == (3, 4)


def test_no_example_fails_because_the_machine_is_busy():
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check
