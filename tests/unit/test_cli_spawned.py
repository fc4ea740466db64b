"""`elbowroom run` of scripts that train in processes which they start."""

import json
import runpy
import subprocess
import sys

import pytest

TRAIN = """
import hashlib
import sys
import torch
import torch.multiprocessing as mp
from torch import nn

def work(rank, steps):
    torch.manual_seed(rank)
    parts = [m for _ in range(4) for m in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model = nn.Sequential(*parts)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        if step == 9:
            raise ValueError("bad batch")
        optimizer.zero_grad()
        model(torch.randn(1024, 64)).square().mean().backward()
        optimizer.step()
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(rank, hashlib.sha256(bits).hexdigest(), flush=True)

if __name__ == "__main__":
    START
"""
SPAWN = "mp.spawn(work, (int(sys.argv[1]),), 2)"
PROCESS = """
    one = mp.get_context("spawn").Process(target=work, args=(0, 6))
    one.start()
    one.join()
"""


@pytest.fixture
def python(tmp_path):
    def python(*arguments, start=SPAWN):
        (tmp_path / "train.py").write_text(TRAIN.replace("START", start))
        command = [sys.executable, "-W", "ignore", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return python


@pytest.fixture
def plain(tmp_path, capsys):
    """What plain Python prints: each process of the script trains by itself."""
    (tmp_path / "train.py").write_text(TRAIN.replace("START", SPAWN))
    work = runpy.run_path(str(tmp_path / "train.py"))["work"]
    for rank in range(2):
        work(rank, 6)
    return capsys.readouterr().out


def run(*options):
    return "-m", "elbowroom", "run", *options, "--exact", "train.py"


def test_each_process_keeps_to_the_budget_with_the_bits_of_python(python, plain, tmp_path):
    roomy = python(*run("--budget", "1GiB", "--report", "roomy.json"), "6")
    assert roomy.returncode == 0, roomy.stderr
    assert sorted(roomy.stdout.split("\n")) == sorted(plain.split("\n"))
    assert "Sequential inside 1.00 GiB (in one of 2 processes)" in roomy.stderr
    peak = json.loads((tmp_path / "roomy.json").read_text())["last_nbytes"]
    tight = python(*run("--budget", str(int(0.8 * peak)), "--report", "tight.json"), "6")
    assert tight.returncode == 0, tight.stderr
    assert sorted(tight.stdout.split("\n")) == sorted(plain.split("\n"))
    models = json.loads((tmp_path / "tight.json").read_text())["models"]
    assert len(models) == 2
    assert all(one["last_nbytes"] <= 0.8 * peak for one in models)


def test_a_refusal_in_a_process_is_the_scripts(python):
    done = python(*run("--budget", "1MiB"), "6")
    assert done.returncode == 3
    assert "elbowroom: budget 1.00 MiB is below" in done.stderr
    assert "--budget" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_in_a_process_is_shown_as_torch_shows_it(python):
    done = python(*run("--budget", "1GiB"), "10")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") or "\nTraceback" in done.stderr
    assert "ValueError: bad batch" in done.stderr


def test_of_other_processes_nothing_is_seen_and_that_is_said(python):
    done = python(*run("--budget", "1GiB"), start=PROCESS)
    assert done.returncode == 2
    assert "nothing is seen of processes that it starts" in done.stderr
