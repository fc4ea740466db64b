"""The command line: results on stdout, one line for a mistake, never a traceback."""

import gc
import json
import platform
import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import elbowroom as er
from elbowroom.__main__ import main
from elbowroom.cli import app, precompile

doctor = import_module("elbowroom.cli.doctor")  # a function has its name
SMALL = ["demo", "--steps", "2", "--width", "4", "--batch", "16"]


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_help_names_every_command():
    result = run("--help")
    assert result.exit_code == 0
    for command in ("demo", "run", "profile", "plan", "codecs", "doctor"):
        assert command in result.stdout


def test_the_version_is_that_of_the_package():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"elbowroom {er.__version__}\n")


def test_demo_shows_the_four_figures_and_writes_its_page(tmp_path):
    out = tmp_path / "page.html"
    result = run(*SMALL, "--out", out)
    assert result.exit_code == 0, result.output
    for figure in ("saved bytes", "peak bytes", "seconds per step", "test accuracy"):
        assert figure in result.stdout
    assert str(out) in result.stderr.replace("\n", "")
    assert '<figure class="plot">' in out.read_text()
    assert list(tmp_path.iterdir()) == [out]


def test_demo_tells_how_far_it_is_off_a_terminal_too(tmp_path):
    result = run(*SMALL, "--steps", 5, "--out", tmp_path / "demo.html")
    said = [line.split("  ")[0] for line in result.stderr.splitlines()]
    assert [line for line in said if line.startswith("plain: ")] == [
        *("plain: 1/5", "plain: 2/5", "plain: 3/5", "plain: 4/5", "plain: 5/5"),
        "plain: 5/5",  # and the score
    ]


def test_demo_json_is_all_there_is_on_stdout(tmp_path):
    result = run(*SMALL, "--json", "--codec", "exact", "--out", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["saving"] == 'er.saving("exact")'
    assert told["elbowroom"]["final_loss"] == told["plain"]["final_loss"]  # exact means exact
    assert 0 < told["elbowroom"]["saved_nbytes"] <= told["plain"]["saved_nbytes"]
    assert told["versions"]["torch"]


def test_demo_trains_the_gpt_on_text(tmp_path):
    arguments = ["--text", "--steps", "1", "--width", "32", "--batch", "4", "--json"]
    result = run("demo", *arguments, "--out", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["task"] == "gpt"
    assert "standard library" in told["data"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--codec", "dithr"], "dither"),
        (["--codec", "exact", "--bits", "2"], "go with a codec id"),
        (["--data", "/nowhere"], "no folder /nowhere"),
        (["--text", "--data", "/nowhere"], "choose one"),
        (["--text", "--width", "33"], "divides by 32"),
        (["--batch", "0"], "batch is at least 1"),
        (["--out", "/nowhere/page.html"], "cannot write --out"),
        (["--out", "/proc/page.html"], "cannot write --out"),
        (["--codec", "bitmask", "--width", "4", "--batch", "8"], "one value besides 0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = run("demo", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("elbowroom: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_page(tmp_path):
    result = run("demo", "--out", tmp_path)
    assert result.exit_code == 2
    assert "is a folder; name a file in it" in result.stderr


def test_a_folder_is_no_snapshot(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("snapshot", ".")  # of which pathlib makes no name of a page
    assert result.exit_code == 2
    assert "Is a directory" in result.stderr


def test_being_stopped_is_no_traceback(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("elbowroom.cli.demo"), "compare", stop)
    result = run(*SMALL, "--out", tmp_path / "page.html")
    assert result.exit_code == 130
    assert result.stderr.endswith("elbowroom: stopped\n")


def test_a_picture_of_one_step_is_there_before_the_trainings(tmp_path, monkeypatch):
    out = tmp_path / "page.html"

    def stop(*_, **__):
        found = out.read_text()
        assert "One step of the untrained network" in found
        assert "peak bytes" in found
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("elbowroom.cli.demo"), "compare", stop)
    result = run(*SMALL, "--out", out)
    assert result.exit_code == 130, result.output
    assert re.search(r"One step takes .+ through elbowroom, and .+ without\.", result.stderr)


@pytest.mark.parametrize("columns", ["80", "200"])
def test_codecs_lists_the_registry(columns):
    result = CliRunner(env={"COLUMNS": columns}).invoke(app, ["codecs"])
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout  # ids and values of fields are there to be typed
    for name in er.codecs():
        assert name in result.stdout
        codec = er.codec(name)
        for field in (one.name for one in fields(codec) if one.init):
            assert f"{field}={getattr(codec, field)!r}" in result.stdout


def test_help_fills_the_lines_of_the_terminal():
    text = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["run", "--help"]).stdout
    paragraph = text.split("Exit code:")[1].split("╭")[0].strip().splitlines()
    assert all(len(line.rstrip()) > 60 for line in paragraph[:-1])


def test_compiling_ahead_calls_every_codec_that_takes_floats():
    named = {id for id, dtype, _ in precompile._jobs() if id.strip() and dtype.is_floating_point}
    assert named == {id for id in er.codecs() if torch.float32 in er.codec(id).dtypes}
    for job in precompile._jobs(threaded=(torch.float32,)):
        precompile._call(job)


class Called(TorchDispatchMode):
    """Notes the names of elbowroom's ops that are called inside."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "elbowroom":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def test_compiling_ahead_calls_what_a_training_step_calls():
    with Called() as called:
        precompile._train(300, torch.float32)
    assert {"layer_norm_backward", "batch_norm_backward", "affine"} <= called.names


def test_compiling_ahead_takes_each_setting_of_a_plan_where_there_is_a_gpu(monkeypatch):
    assert torch.cuda.is_available() or not precompile._jobs_on_gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    jobs = precompile._jobs_on_gpu()
    assert {"bitmask", "narrow", "dither, 4 levels"} <= {name for name, _ in jobs}
    encode, devices = precompile._encode, set()

    def on_cpu(coder, size, dtype, device):
        devices.add(device)
        encode(coder, 400, dtype)

    monkeypatch.setattr(precompile, "_encode", on_cpu)
    for job in jobs:
        precompile._call_on_gpu(job)
    assert devices == {"cuda"}


def test_two_processes_do_not_compile_one_codec_at_the_same_time():
    ids = [id for id, *_ in precompile._jobs()]
    assert all(one != other for one, other in pairwise(ids))
    assert ids[0] == "fdsr", "the longest first"


def test_doctor_names_what_it_found():
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for name in ("torch", "numba", "triton", "GPU", "threads", "memory", "CPU peaks"):
        assert name in result.stdout


GLIBC = pytest.mark.skipif("glibc" not in platform.libc_ver()[0], reason="speaks of glibc")


@GLIBC
@pytest.mark.parametrize(("fresh_s", "used_s", "is_dear"), [(3.0, 1.0, True), (1.5, 1.0, False)])
def test_doctor_names_the_settings_only_where_fresh_memory_is_dear(
    monkeypatch, fresh_s, used_s, is_dear
):
    times = iter([fresh_s] * 3 + [used_s] * 3)
    monkeypatch.setattr(doctor, "_clocked", lambda run: next(times))
    ((name, found, meaning),) = doctor._pages()
    assert name == "fresh memory"
    assert f"{fresh_s:.1f} times" in found
    assert all((f"{key}={value}" in meaning) == is_dear for key, value in doctor.WARM.items())


@GLIBC
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "its defaults"),
        ({"MALLOC_MMAP_THRESHOLD_": "131072"}, "mmap threshold 131072"),
        ({"MALLOC_MMAP_MAX_": "0", "MALLOC_MMAP_THRESHOLD_": "131072"}, "MALLOC_MMAP_MAX_=0"),
    ],
)
def test_doctor_says_how_malloc_is_set(monkeypatch, settings, says):
    for key in ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(key, raising=False)
    for key, value in settings.items():
        monkeypatch.setenv(key, value)
    assert says in doctor._memory()[1]


def test_python_dash_m_works():
    told = subprocess.run(
        [sys.executable, "-m", "elbowroom", "--help"], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0
    assert "demo" in told.stdout


def test_the_collector_is_paused_while_the_command_is_imported(monkeypatch):
    enabled = []
    monkeypatch.setattr("elbowroom.__main__.gc.freeze", lambda: enabled.append(gc.isenabled()))
    monkeypatch.setattr("elbowroom.cli.main", lambda: enabled.append(gc.isenabled()))
    main()
    assert enabled == [False, True]
