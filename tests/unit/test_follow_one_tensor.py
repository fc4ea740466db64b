"""The page that follows one tensor is true: files, functions and lines; and no way gets longer."""

import sys
from importlib.util import find_spec

import pytest

import following
from elbowroom.runtime.context import PROCESS
from following import Entered, Tracer, total

# The most files and lines of each way so far. Goals: 12 and 600; in a settled step 4 and 200.
CEILINGS = {
    "`er.saving()`, the first step: rebuilt": (13, 650),
    "`er.saving()`, later steps: rebuilt": (4, 115),
    '`er.saving("dither", levels=16, rebuild=False)`, the first step: encoded': (14, 600),
    '`er.saving("dither", levels=16, rebuild=False)`, later steps: encoded': (4, 136),
    "`er.fit`, a step that learns: rebuilt": (13, 595),
    "`er.fit`, a settled step: rebuilt": (4, 115),
}


@pytest.fixture(scope="module")
def ways():
    """As in a process that compiles nothing: beside Dynamo calls of modules are examined, too.

    PyTorch's functions that Dynamo leaves alone import it when they are called for the first time.
    A second Dynamo would fail later tests, so those functions are called before it is hidden.
    """
    following.by_hand()
    PROCESS.exact.clear()  # what earlier tests have taught is looked up in one file more
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "torch._dynamo", raising=False)
        found = following.ways()
        assert "torch._dynamo" not in sys.modules
    return found


@pytest.fixture(scope="module")
def page():
    return following.read(following.PAGE.read_text())


def test_the_page_shows_every_way(page):
    assert list(page) == list(CEILINGS)


@pytest.mark.parametrize("heading", CEILINGS)
def test_a_table_names_what_is_entered(heading, ways, page):
    if "dither" in heading and not find_spec("numba"):
        pytest.skip("the page shows the way to numba's kernels")
    ran, shown = ways[heading], page[heading]
    assert list(ran) == list(shown), "run `python tests/following.py --write`"
    for file, entered in ran.items():
        assert entered.functions == shown[file].functions, file
        # Versions of Python divide a few statements into lines in another way.
        assert entered.lines == pytest.approx(shown[file].lines, rel=0.05, abs=2), file
    files, functions, lines = total(shown)
    said = f"## {heading}\n\n{files} files, {functions} functions, {lines} lines.\n"
    assert said in following.PAGE.read_text()


@pytest.mark.parametrize("heading", CEILINGS)
def test_no_way_gets_longer(heading, ways):
    files, _, lines = total(ways[heading])
    most_files, most_lines = CEILINGS[heading]
    assert files <= most_files
    assert lines <= most_lines * 1.02


def test_every_file_of_a_way_has_a_purpose(page):
    assert {file for way in page.values() for file in way} <= following.PURPOSE.keys()


def test_a_tracer_sees_what_is_entered_between_start_and_stop_alone():
    from elbowroom.units import parse_nbytes

    tracer = Tracer()
    parse_nbytes("1 KiB")
    tracer.start()
    tracer.stop()
    assert tracer.way() == {}
    tracer.start()
    parse_nbytes("1 KiB")
    tracer.stop()
    parse_nbytes("1 KiB")
    entered = tracer.way()["units.py"]
    assert isinstance(entered, Entered)
    assert entered.functions[0] == "parse_nbytes"
    assert entered.lines > 1
