"""Thread-local flag: a probe's backward runs, whose gradients are errors (`measure/probe.py`)."""

import threading


class SecondPass(threading.local):
    """Thread-local flag: the pass of a probe runs, and what its backward carries is no gradient."""

    runs = False

    def __enter__(self) -> None:
        self.runs = True

    def __exit__(self, *_: object) -> None:
        self.runs = False


second_pass = SecondPass()
