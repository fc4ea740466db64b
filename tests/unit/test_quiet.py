"""What a C library prints while a plan is made is no part of a program's results."""

import ctypes
import os
import threading

from elbowroom.plan.solve.quiet import stdout_to_stderr


def test_what_c_prints_goes_to_stderr_and_stdout_is_the_programs_again(capfd):
    os.write(1, b"before ")
    with stdout_to_stderr():
        ctypes.CDLL(None).printf(b"noise")
    os.write(1, b"after")
    out, err = capfd.readouterr()
    assert out == "before after"
    assert err == "noise"


def test_what_c_has_buffered_before_stays_in_stdout(capfd):
    ctypes.CDLL(None).printf(b"result")  # stdout is a file here: C writes when its buffer is full
    with stdout_to_stderr():
        pass
    assert capfd.readouterr() == ("result", "")


def test_a_stdout_of_somebodys_own_is_no_obstacle(monkeypatch):
    monkeypatch.setattr("sys.stdout", object())
    with stdout_to_stderr():
        pass


def test_many_threads_leave_stdout_where_it_was(capfd):
    def work():
        for _ in range(50):
            with stdout_to_stderr():
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(1, b"result")
    assert capfd.readouterr() == ("result", "")
