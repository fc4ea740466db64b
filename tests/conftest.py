"""What all tests share.

Tests marked `gpu` are skipped where there is no CUDA device. There, Triton's kernels run in its
interpreter, on CPU tensors: that must be chosen before anything imports them. It takes up to a
second for a call, so a sample of its cases runs (`sampling.py`), and all of them with `--all`.
Tests that take seconds run in turns (`turns.py`). The last lines of a run say what it left out, and
when all tests of each folder passed last: a run with `--all`, of everything or of folders that are
named, writes it down in `whole-matrix.json`.
"""

import gc
import json
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from elbowroom.measure.allocations import Allocations, is_busy
from elbowroom.measure.background import Background
from sampling import Case, Some, sample
from turns import COSTS, MIN_S, TURNS, by_file, costs, cpu_s, current, renewed, turn_of_each, write

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# On a machine with other work any example may take long, which is no failure.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

collect_ignore = ["contract/sharding.py", "golden/make.py", "memory/capped.py"]  # no tests
MANY = 100_000  # objects, of which each full collection takes 10 ms
TESTS = Path(__file__).parent
WHOLE = TESTS / "whole-matrix.json"
_left_out = pytest.StashKey[tuple[int, int]]()  # cases, and of how many
_turn = pytest.StashKey[int | None]()  # of this run; None where tests take no turns
_waiting = pytest.StashKey[tuple[int, int]]()  # tests that wait for another turn, and of how many
_taken = pytest.StashKey[Counter[str]]()  # CPU seconds of tests, by their ids


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--all` runs every case; see `sampling.py`."""
    parser.addoption(
        "--all",
        action="store_true",
        help="run all cases of large matrices (Triton's kernels, above all), not a sample of them",
    )
    parser.addoption(
        "--turn",
        type=int,
        choices=range(TURNS),
        help="which of the tests that take seconds run; by the date if not given",
    )
    parser.addoption(
        "--costs",
        action="store_true",
        help="measure CPU seconds, show them by file, and write costs.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_taken] = Counter()
    if hasattr(config, "workerinput"):
        config.stash[_turn] = config.workerinput["turn"]
    else:
        config.stash[_turn] = _turn_of(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All processes of `pytest -n` take the same turn, when another one begins, too."""
    node.workerinput["turn"] = node.config.stash[_turn]


def _turn_of(config: pytest.Config) -> int | None:
    """The turn that is asked for; else the hour's, in a run of everything. `--all` has all."""
    if (given := config.getoption("--turn")) is not None:
        return given
    chosen = config.option.keyword or config.option.markexpr
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not chosen
    return current() if everything else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return  # Triton compiles there, and is fast
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    cases = [_case(item) for item in items if item.get_closest_marker("sampled")]
    whole = [item.nodeid for item in items if item.get_closest_marker("whole")]
    if _all_wanted(config):
        return
    left_out = ({case.id for case in cases} - sample(cases)) | set(whole)
    _leave_out(config, items, left_out)
    config.stash[_left_out] = len(left_out), len(cases) + len(whole)
    if config.stash[_turn] is not None:
        turn_of = turn_of_each(item.nodeid for item in items)
        waiting = {id for id, turn in turn_of.items() if turn != config.stash[_turn]}
        _leave_out(config, items, waiting)
        config.stash[_waiting] = len(waiting), len(turn_of)
    if hasattr(
        config, "workeroutput"
    ):  # a process of `pytest -n`, which tells the one that sums up
        config.workeroutput["left_out"] = config.stash[_left_out]
        config.workeroutput["waiting"] = config.stash.get(_waiting, (0, 0))


def _leave_out(config: pytest.Config, items: list[pytest.Item], ids: Collection[str]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in ids])
    items[:] = [item for item in items if item.nodeid not in ids]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Counts the CPU seconds of a test."""
    began = cpu_s()
    taken = yield
    item.config.stash[_taken][item.nodeid] += cpu_s() - began
    return taken


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["taken"] = dict(session.config.stash[_taken])


@pytest.fixture(autouse=True)
def measurements_end() -> Iterator[None]:
    """Fails the test that leaves a measurement running, in place of all that measure after it."""
    yield
    if Background.running is None and is_busy():
        Allocations.give_way()
        pytest.fail("a measurement, or a profiler, still runs after this test")


def pytest_sessionstart() -> None:
    """Pause the garbage collector until all tests are found: 6 of 16 s of each process were its."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was collected here."""
    _spare_the_collector()
    gc.enable()


def _spare_the_collector() -> None:
    """Let it look no more at what is there now.

    It is nearly a million objects after collection, and as many again as compilers are loaded. None
    of them is garbage, and `er.measure` and a good part of the tests look through all objects that
    the collector knows: 0.4 s each time.
    """
    gc.collect()
    gc.freeze()


def _case(item: pytest.Item) -> Case:
    assert isinstance(item, pytest.Function)
    values = dict(_values(item.callspec.params))
    marks = [mark.args[0] for mark in item.iter_markers("sampled") if mark.args]
    return Case(item.nodeid, item.nodeid.partition("[")[0], values, *marks[:1])


def _all_wanted(config: pytest.Config) -> bool:
    """Whether no case is left out: so it was asked, or a test was named."""
    return config.getoption("--all") or any("::" in argument for argument in config.args)


@pytest.fixture
def some(request: pytest.FixtureRequest) -> Some:
    """Of the values of a loop in a test, one in `share`; all of them with `--all`."""
    wanted = _all_wanted(request.config)
    return lambda values, share=2: values if wanted else values[::share]


def _values(params: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """The names and values of parameters; of a dataclass, those of each field."""
    for name, value in params.items():
        if is_dataclass(value) and not isinstance(value, type):
            fields = {f"{name}.{field}": each for field, each in vars(value).items()}
            yield from ((field, repr(each)) for field, each in fields.items())
        else:
            yield name, repr(value)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    output = getattr(node, "workeroutput", {})
    if "left_out" in output:
        node.config.stash[_left_out] = tuple(output["left_out"])
        node.config.stash[_waiting] = tuple(output["waiting"])
    node.config.stash[_taken].update(output.get("taken", {}))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Which PyTorch was tested, and what was not: lines of every run, of the quiet ones of CI, too.

    Those show no header (`pytest_report_header`).
    """
    if hasattr(config, "workeroutput"):  # a process of pytest -n, whose own tests alone it knows
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    terminalreporter.write_line(f"torch {torch.__version__}, {device}")
    if config.getoption("--costs"):
        whole = config.getoption("--all") and exitstatus == 0 and not _is_a_part(config)
        _tell_costs(terminalreporter, config.stash[_taken], whole=whole)
    if exitstatus == 0 and (folders := _whole_folders(config)):
        _write_whole(folders)
    left_out, cases = config.stash.get(_left_out, (0, 0))
    waiting, dear = config.stash.get(_waiting, (0, 0))
    if waiting:
        turn = config.stash[_turn]
        terminalreporter.write_line(
            f"{dear - waiting} of {dear} tests of {MIN_S} s or more: turn {turn} of {TURNS}, "
            f"which the hour gives, or ./scripts/test --turn {turn}"
        )
    if left_out:
        terminalreporter.write_line(
            f"{cases - left_out} of {cases} cases of large matrices, a sample; {_last_whole()}"
        )


def _tell_costs(
    terminalreporter: pytest.TerminalReporter, taken: Counter[str], *, whole: bool
) -> None:
    """CPU seconds of each file that took one or more; what tests took goes into the list."""
    for file, cost_s in by_file(taken).most_common():
        if cost_s >= 1:
            terminalreporter.write_line(f"{cost_s:8.1f} CPU s  {file}")
    terminalreporter.write_line(f"{taken.total():8.1f} CPU s in {len(taken)} tests")
    write(renewed(costs(), taken, whole=whole))


def _whole_folders(config: pytest.Config) -> list[str]:
    """The folders of `tests` of which all tests ran: all, or those that are named.

    Of "." that is so, too, where each of its own files is named.
    """
    if not config.getoption("--all") or _is_a_part(config):
        return []
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        return _folders()
    asked = {(config.invocation_params.dir / argument).resolve() for argument in config.args}
    of_root = set(TESTS.glob("test_*.py")) <= asked
    folders = [name for name in _folders() if TESTS / name in asked or TESTS in asked]
    return [".", *folders] if of_root and "." not in folders else folders


def _folders() -> list[str]:
    """The folders with tests; "." has files of its own. Those of frameworks are a run by itself."""
    found = {file.relative_to(TESTS).parent.as_posix() for file in TESTS.rglob("test_*.py")}
    return sorted(found - {"frameworks"})


def _is_a_part(config: pytest.Config) -> bool:
    """Whether some tests of the files are left out by name, or by an option; or none runs."""
    option = config.option
    named = any("::" in argument for argument in config.args)
    chosen = option.keyword or option.markexpr or option.deselect or named
    return bool(chosen) or option.collectonly


def _write_whole(folders: Iterable[str]) -> None:
    """Writes down that all tests of these folders have passed."""
    now = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    found = _known_whole() | dict.fromkeys(folders, now)
    WHOLE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def _known_whole() -> dict[str, dict[str, Any]]:
    return json.loads(WHOLE.read_text()) if WHOLE.exists() else {}


def _last_whole() -> str:
    """When all tests of each folder passed, in words."""
    known = _known_whole()
    when = defaultdict(list)
    for name in _folders():
        one = known.get(name)
        when[f"on {one['date']} at {one['commit']}" if one else "never yet"].append(name)
    parts = (f"{', '.join(names)} {time}" for time, names in when.items())
    return f"all cases passed last (./scripts/test --all): {'; '.join(parts)}"


def _commit() -> str:
    """The commit that is checked out, with "+" if files differ from it that runs do not write."""
    git = ["git", "-C", str(TESTS)]
    written = (f":(exclude){file.name}" for file in (WHOLE, COSTS))
    try:
        commit, changes = (
            subprocess.run([*git, *verb], capture_output=True, text=True, check=True).stdout.strip()
            for verb in (
                ("rev-parse", "--short", "HEAD"),
                ("status", "--porcelain", "-uno", "--", "..", *written),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changes else "")


@pytest.fixture(autouse=True)
def nothing_learned() -> None:
    """No test follows what another one has learned."""
    from elbowroom.runtime.context import PROCESS  # once Triton's way is chosen
    from elbowroom.runtime.replay.saving_context import forget_all

    forget_all()
    PROCESS.exact.clear()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """So that no bit depends on how work is divided; and small tensors are faster so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As many as our kernels need to run their threaded loops; `scripts/test` gives one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is filled with byte 0xFF, so that an output left partly unwritten cannot pass.

    That is NaN in all floats, -1 or 255 in integers.
    """
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, _poisoning(getattr(owner, name)))
    assert torch.empty(3).isnan().all()


def _poisoning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = make(*args, **kwargs)
        if type(x) is torch.Tensor and not x.is_meta:
            x.untyped_storage().fill_(0xFF)
        return x

    return poisoned


@pytest.fixture
def nothing_stays_attached() -> Iterator[None]:
    """What one test has left fitted, as after a failure, is not examined by the next."""
    yield
    _release_all()


def _release_all() -> None:
    import elbowroom as er
    from elbowroom.runtime.attach import attached

    for model, _ in attached():
        er.release(model)


@pytest.fixture(autouse=True, scope="module")
def nothing_stays_fitted() -> Iterator[None]:
    """The same of one file of tests and the next."""
    yield
    _release_all()
    if len(gc.get_objects()) > MANY:
        _spare_the_collector()
