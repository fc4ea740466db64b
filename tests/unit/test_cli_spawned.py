"""`elbowroom run` of scripts that train in processes which they start."""

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

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
PROCESSES = """
    context = mp.get_context("METHOD")
    both = [context.Process(target=work, args=(rank, int(sys.argv[1]))) for rank in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
"""


@pytest.fixture
def temporary():
    """A folder of a short name: the sockets of multiprocessing lie in it, at most 107 letters."""
    with tempfile.TemporaryDirectory(prefix="er-") as folder:
        yield Path(folder)


@pytest.fixture
def python(tmp_path, temporary):
    environment = os.environ | {"TMPDIR": str(temporary)}

    def python(*arguments, start=SPAWN, text=TRAIN):
        (tmp_path / "train.py").write_text(text.replace("START", start))
        command = [sys.executable, "-W", "ignore", *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

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


COPIES = "mp.start_processes(work, (int(sys.argv[1]),), 2, start_method='fork')"
USUAL = PROCESSES.replace('mp.get_context("METHOD")', "mp")
SPAWNED, SERVED = (PROCESSES.replace("METHOD", name) for name in ("spawn", "forkserver"))


@pytest.mark.parametrize("start", [SPAWN, SPAWNED, USUAL], ids=["mp.spawn", "spawn", "usual"])
def test_each_process_keeps_to_the_budget_with_the_bits_of_python(python, plain, tmp_path, start):
    budget = 3_540_000  # of 4.23 MiB
    tight = python(*run("--budget", str(budget), "--report", "tight.json"), "6", start=start)
    assert tight.returncode == 0, tight.stderr
    assert sorted(tight.stdout.split("\n")) == sorted(plain.split("\n"))
    assert "Sequential inside 3.38 MiB (in one of 2 processes)" in tight.stderr
    models = json.loads((tmp_path / "tight.json").read_text())["models"]
    assert len(models) == 2
    assert all(one["last_nbytes"] <= budget < one["plain_nbytes"] for one in models)


@pytest.mark.parametrize("start", [SPAWN, COPIES, SERVED], ids=["mp.spawn", "copies", "served"])
def test_a_refusal_in_a_process_is_the_scripts(python, start):
    done = python(*run("--budget", "1MiB"), "6", start=start)
    assert done.returncode == 3
    assert "elbowroom: budget 1.00 MiB is below" in done.stderr
    assert "--budget" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_in_a_process_is_shown_as_torch_shows_it(python):
    done = python(*run("--budget", "1GiB"), "10")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") or "\nTraceback" in done.stderr
    assert "ValueError: bad batch" in done.stderr


IMPORTED = """
import torch
import torch.multiprocessing as mp
from torch import nn

model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def work(rank):
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(64, 64)).square().mean().backward()
        optimizer.step()
    print("trained", flush=True)

if __name__ == "__main__":
    START
"""


def test_a_model_that_is_made_as_a_process_imports_the_script_is_found(python):
    done = python(*run("--budget", "1GiB"), start="mp.spawn(work, nprocs=1)", text=IMPORTED)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"
    assert "Sequential inside 1.00 GiB" in done.stderr


SUBCLASS = """
class Training(mp.get_context("spawn").Process):
    def run(self):
        work(0, 6)
"""


def test_a_process_may_be_a_class_with_a_run_of_its_own(python):
    text = TRAIN.replace("\nif __name__", f"{SUBCLASS}\nif __name__")
    start = "one = Training(); one.start(); one.join()"
    done = python(*run("--budget", "1GiB"), text=text, start=start)
    assert done.returncode == 0, done.stderr
    assert "Sequential inside 1.00 GiB" in done.stderr


FIRST_ITSELF = """
    work(0, 6)
    one = mp.get_context("fork").Process(target=print, args=("helped",))
    one.start()
    one.join()
"""


def test_a_copy_does_not_tell_again_what_the_script_has_trained(python, tmp_path):
    done = python(*run("--budget", "1GiB", "--report", "figures.json"), start=FIRST_ITSELF)
    assert done.returncode == 0, done.stderr
    assert "helped" in done.stdout
    assert done.stderr.count("Sequential inside") == 1
    assert "models" not in json.loads((tmp_path / "figures.json").read_text())


POOL = """
    with mp.get_context("spawn").Pool(1) as pool:
        pool.apply(work, (0, 3))
"""
EXECUTOR = """
    from concurrent.futures import ProcessPoolExecutor
    with ProcessPoolExecutor(1, mp.get_context("fork")) as pool:
        pool.submit(work, 0, 3).result()
"""


@pytest.mark.parametrize("start", [POOL, EXECUTOR], ids=["Pool", "ProcessPoolExecutor"])
def test_of_a_pool_nothing_is_seen_and_that_is_said(python, start):
    done = python(*run("--budget", "1GiB"), start=start)
    assert done.returncode == 2
    assert "nothing is seen of the processes of a pool" in done.stderr


LOADER = """
    data = torch.utils.data.DataLoader(range(4), num_workers=1, multiprocessing_context="spawn")
    print("sum", sum(int(one) for one in data))
"""


def test_workers_that_load_data_are_left_alone(python):
    done = python(*run("--budget", "1GiB"), start=LOADER)
    assert done.returncode == 0, done.stderr
    assert "sum 6" in done.stdout
    assert "the script trained nothing" in done.stderr


NOT_JOINED = """
    mp.get_context("spawn").Process(target=work, args=(0, 6)).start()
"""


def test_of_a_process_that_outlives_the_script_that_is_said(python, temporary):
    done = python(*run("--budget", "1GiB"), start=NOT_JOINED)
    assert done.returncode == 2
    assert "processes that the script started still run" in done.stderr
    assert done.stdout.startswith("0 ")
    assert "Traceback" not in done.stderr
    assert list(temporary.glob("elbowroom*")) == []


HARD = TRAIN.replace("flush=True)", "flush=True)\n    import os; os._exit(0)")


@pytest.mark.parametrize("start", [SPAWN, SPAWNED, COPIES], ids=["mp.spawn", "spawn", "copies"])
def test_a_process_that_ends_by_os_exit_tells_before(python, temporary, start):
    done = python(*run("--budget", "1GiB"), "6", text=HARD, start=start)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    assert "Sequential inside 1.00 GiB (in one of 2 processes)" in done.stderr
    assert list(temporary.glob("elbowroom*")) == []


def test_a_script_that_ends_by_os_exit_is_told_of_and_keeps_its_code(python, tmp_path, temporary):
    start = "work(0, 6); import os; os._exit(7)"
    done = python(*run("--budget", "1GiB", "--report", "figures.json"), start=start)
    assert done.returncode == 7
    assert done.stdout.startswith("0 ")
    assert "Sequential inside 1.00 GiB" in done.stderr
    assert json.loads((tmp_path / "figures.json").read_text())["exit_code"] == 7
    assert list(temporary.glob("elbowroom*")) == []


def test_a_copy_that_the_script_makes_by_itself_ends_by_os_exit_unseen(python):
    start = "import os; os.fork() or os._exit(0); os.wait(); work(0, 6)"
    done = python(*run("--budget", "1GiB"), start=start)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Sequential inside 1.00 GiB") == 1


KILLED = """
    import os, signal
    one = mp.get_context("spawn").Process(target=work, args=(0, 6))
    one.start()
    one.join()
    os.kill(os.getpid(), signal.NAME)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_script_that_is_killed_leaves_nothing_and_ends_as_under_python(python, temporary, name):
    done = python(*run("--budget", "1GiB"), start=KILLED.replace("NAME", name))
    assert done.returncode == -signal.Signals[name]
    assert done.stdout.startswith("0 ")
    assert list(temporary.glob("elbowroom*")) == []


def test_of_a_process_that_is_killed_it_is_said_that_nothing_is_known(python, temporary):
    text = TRAIN.replace("flush=True)", "flush=True)\n    import os; os.kill(os.getpid(), 9)")
    done = python(*run("--budget", "1GiB"), "6", start=SPAWNED, text=text)
    assert done.returncode == 0
    said = " ".join(done.stderr.split())
    assert "ended before they could tell what they had trained" in said
    assert list(temporary.glob("elbowroom*")) == []


MANY = """
    for turn in range(40):
        one = mp.get_context("fork").Process(target=print, args=(turn,))
        one.start()
        one.join()
    import os
    print("open", len(os.listdir("/proc/self/fd")) - before < 20)
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux does")
def test_processes_one_after_another_do_not_add_up(python):
    text = TRAIN.replace("START", 'import os; before = len(os.listdir("/proc/self/fd"))\n    START')
    done = python(*run("--budget", "1GiB"), start=MANY, text=text)
    assert done.returncode == 0, done.stderr
    assert "open True" in done.stdout


def test_a_process_that_a_copy_starts_is_told_of_by_the_copy(python):
    text = TRAIN.replace("\nif __name__", f"{OUTER}\nif __name__")
    start = "one = mp.get_context('fork').Process(target=outer); one.start(); one.join()"
    done = python(*run("--budget", "1GiB"), start=start, text=text)
    assert done.returncode == 0, done.stderr
    assert "Sequential inside 1.00 GiB" in done.stderr


OUTER = """
def outer():
    one = mp.get_context("fork").Process(target=work, args=(0, 6))
    one.start()
    one.join()
"""
