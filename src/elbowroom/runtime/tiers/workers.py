"""Threads that read and write, while others compute.

A queue that may be filled from `__del__` (SimpleQueue), which the pools of the standard library may
not. The threads wait in system calls, without Python's lock.
"""

import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

_THREADS = 2
Job = Callable[[], None]


class Workers:
    """Threads that run jobs in order of arrival; they start with the first."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Starts without threads.

        A forked child has none of its parent's, and must not wait for them.
        """
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Job) -> None:
        """Runs a job soon. It must not raise."""
        self._jobs.put(job)

    def start(self) -> None:
        """Starts the threads that do not run yet. Not for `__del__`."""
        while len(self._threads) < _THREADS:
            name = f"elbowroom-offload-{len(self._threads)}"
            thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()


def _work(jobs: SimpleQueue[Job]) -> None:
    while True:
        job = jobs.get()
        try:
            job()
        except Exception:  # a thread that dies would let others wait for ever
            logging.getLogger("elbowroom").exception("offload: please report this")
        del job  # it may hold a tensor


WORKERS = Workers()


os.register_at_fork(after_in_child=WORKERS.begin_anew)
