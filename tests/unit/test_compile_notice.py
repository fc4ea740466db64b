"""A first run says that kernels are being compiled, no other does, and no clock counts it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import pytest

from elbowroom.kernels import ops
from elbowroom.kernels.numba import compile_notice
from elbowroom.kernels.numba.compile_notice import CompileNotice
from elbowroom.measure.clocks import Stopwatch

RUN = """
import torch
import elbowroom as er
from elbowroom.kernels.numba import compile_notice
compile_notice.UNNOTICED_S = 0.0
x = torch.randn(64)
er.codec("bitmask").encode(x > 0, 1, er.Facts())
"""


def compiled(module: str) -> Any:
    """An event of numba's for a loop of this module."""
    return SimpleNamespace(data={"dispatcher": SimpleNamespace(py_func=_of(module))})


def _of(module: str) -> Any:
    def loop() -> None: ...

    loop.__module__ = module
    return loop


def test_a_first_run_says_it_once_and_a_second_says_nothing(tmp_path: Path) -> None:
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", RUN],
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        said.append(done.stderr)
    assert said[0].count("compiling kernels for this CPU, each once for this installation") == 1
    assert said[1] == ""


def test_only_seconds_of_our_loops_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(compile_notice, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    listener = CompileNotice()
    ours, other = compiled("elbowroom.kernels.numba.dither"), compiled("somebody.elses")

    def compile_for(seconds: float, event: Any, inner: Any) -> None:
        listener.on_start(event)
        now[0] += seconds
        listener.on_start(inner)
        listener.on_end(inner)
        listener.on_end(event)

    compile_for(60, other, other)
    assert not caplog.records
    compile_for(2, ours, other)
    now[0] += 60  # what is between them is not compiling
    compile_for(0.5, ours, ours)
    assert not caplog.records
    compile_for(1, ours, other)
    compile_for(9, ours, ours)
    assert len(caplog.records) == 1


def test_a_step_is_not_charged_for_a_loop_that_is_compiled_in_it() -> None:
    now = [0.0]
    watch = Stopwatch(lambda: now[0])

    @numba.extending.overload(_taking)
    def _taken(x: Any) -> Any:
        now[0] += 60.0  # as long as numba infers types
        return _taking

    loop = numba.njit(lambda x: _taking(x))
    began = watch.read()
    loop(1)
    now[0] += 1.0
    loop(1)
    assert now[0] >= 61.0
    assert watch.seconds_at([began, watch.read()]) == [0.0, 1.0]


def _taking(x: Any) -> Any:
    return x


def test_a_step_is_not_charged_for_a_backend_that_is_imported_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    watch = Stopwatch(lambda: now[0])

    def importing(name: str) -> None:
        now[0] += 60.0

    monkeypatch.setattr(ops, "importlib", SimpleNamespace(import_module=importing))
    ops._backend.__wrapped__("numba")
    assert now[0] == 60.0
    assert watch.seconds_at([watch.read()]) == [0.0]
