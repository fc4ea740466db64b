"""What HiGHS prints while a plan is made is no part of a program's output; all else is."""

import ctypes
import os
import subprocess
import sys
import threading

from elbowroom.plan.solve.program import silent_stdout

LIBC = ctypes.CDLL(None)


def flush() -> None:
    """C writes when its buffer is full, or is told to."""
    LIBC.fflush(None)


def test_what_highs_prints_is_printed_nowhere(capfd):
    os.write(1, b"before ")
    with silent_stdout():
        LIBC.printf(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();\n")
    os.write(1, b"after")
    flush()
    assert capfd.readouterr() == ("before after", "")


def test_what_anybody_else_prints_meanwhile_is_printed(capfd):
    with silent_stdout():
        LIBC.printf(b"HighsMipSolverData::noise\n")
        LIBC.printf(b"of another library\n")
        os.write(1, b"of another thread\n")
        sys.stdout.write("of Python\n")
        sys.stdout.flush()
        subprocess.run([sys.executable, "-c", "print('of a child')"], check=True)
        os.write(2, b"an error")
    flush()
    out, err = capfd.readouterr()
    assert out.splitlines() == [
        "of another thread",
        "of Python",
        "of a child",
        "of another library",
    ]
    assert err == "an error"


def test_each_time_only_what_was_printed_then(capfd):
    for text in (b"a long line\n", b"short\n", b""):
        with silent_stdout():
            LIBC.printf(text)
    flush()
    assert capfd.readouterr() == ("a long line\nshort\n", "")


def test_what_c_has_buffered_before_stays_in_stdout(capfd):
    LIBC.printf(b"result")
    with silent_stdout():
        pass
    flush()
    assert capfd.readouterr() == ("result", "")


def test_many_threads_leave_stdout_where_it_was(capfd):
    def work():
        for _ in range(50):
            with silent_stdout():
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(1, b"result")
    assert capfd.readouterr() == ("result", "")
