"""The line for what takes longer than two seconds."""

import io
import time

from elbowroom import waiting as module
from elbowroom.waiting import waiting


class Terminal(io.StringIO):
    """What looks like one."""

    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch):
    """Called by the test itself: between a fixture and its test pytest sets stderr anew."""
    monkeypatch.setenv("TERM", "xterm")
    found = Terminal()
    monkeypatch.setattr("sys.stderr", found)
    return found


def test_who_waits_sees_what_is_done_and_it_is_gone_at_the_end(monkeypatch):
    terminal = terminal_of(monkeypatch)
    monkeypatch.setattr(module, "AFTER_S", 0.0)
    with waiting("the largest batch") as tell:
        tell("batch 8 is measured")
        until = time.monotonic() + 5
        while "batch 8 is measured" not in terminal.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
        with waiting("another") as inner:
            inner("nothing")
    assert "the largest batch: batch 8 is measured" in terminal.getvalue()
    assert "another" not in terminal.getvalue()
    before = terminal.getvalue()
    assert before.endswith("\x1b[2K"), "the line is erased"
    assert not module._one.locked()


def test_what_is_quick_says_nothing(monkeypatch):
    terminal = terminal_of(monkeypatch)
    with waiting("quick") as tell:
        tell("more")
    assert terminal.getvalue() == ""


def test_no_terminal_is_told_nothing(capsys, monkeypatch):
    monkeypatch.setattr(module, "AFTER_S", 0.0)
    with waiting("the plan") as tell:
        tell("more")
        time.sleep(0.05)
    assert capsys.readouterr() == ("", "")
