"""run, profile and plan: scripts that have never heard of elbowroom.

They run in a process of their own where it is the point: to start one takes longer than they do.
Figures of the runs are compared with those that Python gives for the same script.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import elbowroom as er
from elbowroom.cli import app
from elbowroom.cli.warm import WARM, start_warm
from elbowroom.measure.memory import budget_nbytes
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile

TRAIN = """
import argparse
import helper
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--exit", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(0)
blocks = [m for _ in range(3) for m in (nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.GELU())]
model = nn.Sequential(nn.Conv2d(3, 16, 3), *blocks, nn.Flatten(), nn.LazyLinear(10))
model(torch.randn(2, 3, 32, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
for step in range(args.steps):
    x, y = helper.batch(step)
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    print(step, loss.item(), __name__)
raise SystemExit(args.exit)
"""
HELPER = """
import torch

def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 3, 32, 32, generator=generator), torch.arange(16) % 10
"""
GAN = """
import hashlib
import torch
from torch import nn

class Generator(nn.Sequential):
    pass

class Discriminator(nn.Sequential):
    pass

def layers(i, o):
    norms = [(nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU()) for _ in range(2)]
    return nn.Linear(i, 128), *(m for block in norms for m in block), nn.Linear(128, o)

torch.manual_seed(0)
one, two = Generator(*layers(16, 32)), Discriminator(*layers(32, 1))
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two)]
for _ in range(8):
    fake = one(torch.randn(1024, 16))
    optimizers[1].zero_grad()
    (two(torch.randn(1024, 32)).sigmoid().mean() - two(fake.detach()).sigmoid().mean()).backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    two(one(torch.randn(1024, 16))).sigmoid().mean().backward()
    optimizers[0].step()
weights = [p.detach().numpy().tobytes() for model in (one, two) for p in model.parameters()]
print(hashlib.sha256(b"".join(weights)).hexdigest())
"""
UNSEEN = """
import sys
import torch
from torch import nn
from torch.func import functional_call, grad

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 1)

    def forward(this, x):
        return this.down(this.norm(this.up(x)))

net, x = Net(), torch.randn(4, 8)
if sys.argv[1] == "forward":
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.forward(x).sum().backward()
    optimizer.step()
elif sys.argv[1] == "functions":
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    nn.functional.linear(x, net.up.weight).sum().backward()
    optimizer.step()
else:
    params = dict(net.named_parameters())
    if sys.argv[1] == "stepped":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = grad(lambda params: functional_call(net, params, (x,)).sum())(params)
    if sys.argv[1] == "stepped":
        for name, p in net.named_parameters():
            p.grad = found[name]
        optimizer.step()
print("trained")
"""
ADDS_UP = """
import torch
from torch import nn

torch.manual_seed(0)
layers = [m for _ in range(3) for m in (nn.Linear(256, 256), nn.GELU())]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    model(torch.randn(256, 256)).square().mean().backward()
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()
    print(step)
"""
OUTSIDE = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(1000, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1000))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randint(0, 1000, (2, 512))
for _ in range(8):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
BY_HAND = """
import torch
from torch import nn

model, frozen = nn.Linear(256, 256), nn.Linear(256, 256).requires_grad_(False)
average = nn.Linear(256, 256).eval()
for _ in range(4):
    loss = frozen(model(torch.randn(512, 256))).relu().sum() + average(torch.randn(4, 256)).sum()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
"""

# Each fold trains a model of its own; the first ones for so long that their steps are settled.
FOLDS = """
import gc, weakref, torch, torch.nn as nn
weights = []
for fold in range(10):
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(8 if fold < 2 else 1):
        model(torch.randn(1024, 64)).square().mean().backward()
        optimizer.step()
    gc.collect()
    print(sum(p() is not None for p in weights))
    weights += [weakref.ref(p) for p in model.parameters()]
    del layers, model, optimizer
"""


@pytest.fixture
def folder(tmp_path):
    return with_scripts(tmp_path)


def with_scripts(folder):
    (folder / "sub").mkdir()
    for name, text in {
        "train": TRAIN,
        "helper": HELPER,
        "gan": GAN,
        "by_hand": BY_HAND,
        "unseen": UNSEEN,
        "adds_up": ADDS_UP,
        "outside": OUTSIDE,
    }.items():
        (folder / "sub" / f"{name}.py").write_text(text)
    return folder


def python(folder, *arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_WAIT_POLICY": "passive", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def elbowroom(folder, *arguments):
    return python(folder, "-m", "elbowroom", *arguments)


def in_process(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """What the command that profiles the script says, and the profile that it writes."""
    folder = with_scripts(tmp_path_factory.mktemp("profiled"))
    done = elbowroom(folder, "profile", "--out", "p.json", "sub/train.py", "--", "--steps", "5")
    assert done.returncode == 0, done.stderr
    return done, folder / "p.json"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What the script prints by itself: a line for each of its six steps."""
    folder = with_scripts(tmp_path_factory.mktemp("plain"))
    return python(folder, "sub/train.py").stdout


def test_a_profile_a_plan_and_a_run_agree_and_an_exact_run_changes_no_bit(folder, profiled, plain):
    done, path = profiled
    assert len(done.stdout.split("__main__")) - 1 == 2, "the script ends at its third step"
    assert "saved for backward" in done.stdout
    page = path.with_suffix(".html").read_text()
    assert '<figure class="plot">' in page
    assert not re.search(r"<link|<img|src=|href=|@import|url\(", page)
    profile = Profile.load(path)
    keeping = in_process("plan", path, "--budget", profile.peak)
    assert keeping.exit_code == 0, keeping.output
    assert "+0.0 % time" in keeping.stdout
    budget = profile.static + (profile.peak - profile.static) * 9 // 10
    out = folder / "plan.json"
    beside = folder / "plan.html"
    options = ("--exact", "--out", out, "--html", beside, "--explain")
    planned = in_process("plan", path, "--budget", budget, *options)
    assert planned.exit_code == 0, planned.output
    assert beside.read_text().count('<figure class="plot">') == 2
    assert "rebuild" in planned.stdout
    plan = Plan.load(out)
    assert plan.exact
    assert plan.peak <= budget < plan.plain_peak

    report = folder / "report.json"
    options = ["--budget", budget, "--exact", "--report", report]
    ran = elbowroom(folder, "run", *options, "sub/train.py", "--", "--exit", "7")
    assert ran.returncode == 7, ran.stderr
    assert ran.stdout == plain
    told = json.loads(report.read_text())
    assert told["exact"]
    assert told["exit_code"] == 7
    assert told["setting"] == told["last_setting"] == "plan"
    assert told["last_nbytes"] <= told["highest_nbytes"] <= budget
    assert told["plain_nbytes"] == pytest.approx(profile.peak, rel=0.02)
    assert told["predicted_nbytes"] == pytest.approx(told["last_nbytes"], rel=0.1)
    for word in ("within the budget", "no bit of a gradient changed", "rebuild"):
        assert word in ran.stderr


def test_a_run_begins_with_the_plan_that_it_is_given(folder, profiled, plain):
    _, path = profiled
    profile, out = Profile.load(path), folder / "plan.json"
    budget = profile.static + (profile.peak - profile.static) * 9 // 10
    assert in_process("plan", path, "--budget", budget, "--exact", "--out", out).exit_code == 0
    report = folder / "report.json"
    options = ["--budget", budget, "--exact", "--plan", out, "--report", report]
    ran = elbowroom(folder, "run", *options, "sub/train.py", "--", "--steps", "4")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "".join(plain.splitlines(keepends=True)[:4])
    told, plan = json.loads(report.read_text()), Plan.load(out)
    assert told["setting"] == told["last_setting"] == "plan"
    assert told["predicted_nbytes"] == plan.peak
    assert told["plain_nbytes"] == plan.plain_peak
    assert told["highest_nbytes"] <= budget

    script = folder / "sub" / "train.py"
    short = [script, "--", "--steps", "2"]
    alone = in_process("run", "--exact", "--plan", out, *short)  # the plan has a budget
    assert alone.exit_code == 0, alone.stderr
    refused = in_process("run", "--budget", "1MiB", "--plan", out, script)
    assert refused.exit_code == 2
    assert "more than the budget of 1.00 MiB" in refused.stderr
    assert "Traceback" not in refused.stderr
    small = in_process("run", "--budget", "0.0001%", "--plan", out, script)
    assert small.exit_code == 2
    assert "more than the budget of" in small.stderr
    missing = in_process("run", "--budget", "1MiB", "--plan", "no.json", script)
    assert missing.exit_code == 2
    assert "no.json cannot be read" in missing.stderr


def test_a_budget_that_nothing_meets_ends_with_3_and_says_what_to_type(folder):
    ran = elbowroom(folder, "run", "--budget", "1MiB", "sub/train.py")
    assert ran.returncode == 3
    assert "Traceback" not in ran.stderr
    assert re.search(
        r"elbowroom: budget 1.00 MiB is below the .* [Gg]ive --budget [\d.]+MiB", ran.stderr
    )


def test_a_script_that_fits_its_model_itself_is_told_so_before_its_first_update(folder):
    script = folder / "fits.py"
    script.write_text(
        "import torch\n"
        "import elbowroom as er\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "er.fit(model, budget='1 GiB', optimizer=optimizer)\n"
        "model(torch.randn(4, 8)).sum().backward()\n"
        "optimizer.step()\n"
        "print('updated')\n"
    )
    ran = elbowroom(folder, "run", "--budget", "1MiB", script)
    assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
    assert "the script itself calls er.fit" in ran.stderr


def test_a_refusal_that_the_script_handles_is_repeated_at_its_end(folder):
    script = folder / "handles.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    try:\n"
        "        model(torch.randn(1024, 128)).square().mean().backward()\n"
        "        optimizer.step()\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__)\n"
    )
    ran = elbowroom(folder, "run", "--budget", "1MiB", "--exact", script)
    assert ran.stdout.split() == ["BudgetTooSmall"] * 3
    assert ran.returncode == 3, ran.stderr
    assert "elbowroom: budget 1.00 MiB is below" in ran.stderr.splitlines()[-1]


def test_a_warm_run_has_the_settings_of_malloc_and_its_own_arguments(folder):
    script = folder / "sub" / "by_hand.py"
    asks = "import os, sys; print(os.environ['MALLOC_TRIM_THRESHOLD_'], sys.argv)"
    script.write_text(f"{BY_HAND}\n{asks}")
    ran = elbowroom(folder, "run", "--warm", "--budget", "1GiB", script, "--", "--warm", "a b")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"-1 {[str(script), '--warm', 'a b']}\n"
    assert "inside 1.00 GiB" in ran.stderr


def test_a_warm_run_leaves_settings_of_the_user(monkeypatch):
    begun = []
    monkeypatch.setattr("os.execve", lambda *given: begun.append(given[2]))
    for name in WARM:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "5")
    start_warm()
    monkeypatch.setattr("os.environ", begun[0])
    start_warm()  # runs under them now
    assert len(begun) == 1
    assert {name: begun[0][name] for name in WARM} == WARM | {"MALLOC_TRIM_THRESHOLD_": "5"}


def test_no_run_is_warm_without_glibc(folder, monkeypatch):
    monkeypatch.setattr("elbowroom.cli.warm.has_glibc", lambda: False)
    ran = in_process("run", "--warm", "--budget", "1GiB", folder / "sub" / "by_hand.py")
    assert ran.exit_code == 2
    assert "--warm sets glibc's malloc" in ran.stderr


def test_a_run_inside_a_share_of_the_memory(folder):
    report = folder / "r.json"
    script = folder / "sub" / "by_hand.py"
    ran = in_process("run", "--budget", "50%", "--report", report, script)
    assert ran.exit_code == 0, ran.stderr
    assert json.loads(report.read_text())["budget_nbytes"] == budget_nbytes(0.5, "cpu")


def test_models_that_share_steps_are_told_as_one_and_keep_their_bits(folder):
    plain = python(folder, "sub/gan.py")
    assert plain.returncode == 0, plain.stderr
    report = folder / "r.json"
    options = ["--budget", "13MiB", "--exact", "--report", report]
    ran = in_process("run", *options, folder / "sub" / "gan.py")
    assert ran.exit_code == 0, ran.stderr
    assert ran.stdout == plain.stdout
    assert "Generator with Discriminator inside 13.0 MiB" in ran.stderr
    told = json.loads(report.read_text())
    assert told["model"] == "Generator with Discriminator"
    assert told["last_nbytes"] <= 13 * 2**20
    assert told["last_setting"] != "keep", "there was room for all"


def test_a_script_may_train_one_model_after_another(folder):
    """Models of earlier folds are not counted, and their weights and gradients are freed."""
    (folder / "folds.py").write_text(FOLDS)
    ran = in_process("run", "--budget", "2MiB", "--exact", folder / "folds.py")
    assert ran.exit_code == 0, ran.stderr
    assert ran.stdout.split() == ["0"] * 10, "weights of earlier folds that still exist"


def test_a_loss_outside_of_the_model_is_found_and_planned(folder):
    """The logits are nearly all that the step holds: 6.3 MiB in plain training."""
    plain = python(folder, "sub/outside.py")
    assert plain.returncode == 0, plain.stderr
    report = folder / "r.json"
    options = ["--budget", "5MiB", "--exact", "--report", report]
    ran = elbowroom(folder, "run", *options, "sub/outside.py")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == plain.stdout
    assert json.loads(report.read_text())["last_nbytes"] <= 5 * 2**20


def test_a_plan_is_for_one_model(folder, profiled):
    _, path = profiled
    out = folder / "plan.json"
    assert in_process("plan", path, "--budget", "1GiB", "--out", out).exit_code == 0
    ran = in_process("run", "--plan", out, folder / "sub" / "gan.py")
    assert ran.exit_code == 2
    assert "Generator and Discriminator, and a plan is for one" in ran.stderr
    assert ran.stdout == ""


def test_where_gradients_are_added_up_the_profile_has_gradients_and_states(folder):
    out = folder / "p.json"
    done = in_process("profile", "--out", out, folder / "sub" / "adds_up.py")
    assert done.exit_code == 0, done.output
    weights = 3 * (256 * 256 + 256) * 4
    profile = Profile.load(out)
    assert profile.static == pytest.approx(4 * weights, rel=0.01)  # gradients, and two states
    report = folder / "r.json"
    options = ["--budget", profile.peak - 2**19, "--exact", "--report", report]
    ran = in_process("run", *options, folder / "sub" / "adds_up.py")
    assert ran.exit_code == 0, ran.output
    told = json.loads(report.read_text())
    assert told["last_nbytes"] <= profile.peak - 2**19
    assert told["highest_nbytes"] <= 1.1 * (profile.peak - 2**19)  # while it learns


def test_of_two_models_the_first_is_profiled_and_the_other_named(folder, monkeypatch):
    monkeypatch.chdir(folder)
    done = in_process("profile", "sub/gan.py")
    assert done.exit_code == 0, done.stderr
    assert "The script trains Discriminator as well" in done.stdout
    assert {"profile.json", "profile.html"} <= {path.name for path in folder.iterdir()}


def test_weights_that_are_updated_by_hand_are_a_model_too(folder):
    report = folder / "r.json"
    script = folder / "sub" / "by_hand.py"
    ran = in_process("run", "--budget", "1GiB", "--report", report, script)
    assert ran.exit_code == 0, ran.stderr
    assert json.loads(report.read_text())["steps"] == 3  # of four: the first had no gradient yet


def test_a_script_without_a_backward_is_told_of_no_budget(folder):
    script = folder / "forward.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(64, 64)\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "for _ in range(5): model(torch.randn(256, 64))\n"
    )
    ran = in_process("run", "--budget", "1GiB", script)
    assert ran.exit_code == 0
    assert "no training step was seen" in ran.stderr
    assert "5 forwards of Linear" in ran.stderr.replace("\n", "")
    assert "within the budget" not in ran.stderr


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("raise ValueError('of its own')", 1, "ValueError: of its own"),
        ("import sys; sys.exit('in words')", 1, "in words"),
        ("print('no training')", 0, "trained nothing"),
        (
            "import torch\nw = torch.nn.Linear(2, 2)\n"
            "torch.optim.SGD(w.parameters(), lr=1)\n(w.weight * 2).sum().backward()",
            2,
            "so the budget is not kept",
        ),
    ],
)
def test_a_script_ends_as_it_would(folder, text, code, message):
    (folder / "other.py").write_text(text)
    ran = in_process("run", "--budget", "1GiB", folder / "other.py")
    assert ran.exit_code == code
    assert message in ran.stderr
    assert "runpy" not in ran.stderr, "frames that are not the script's"


def test_an_interrupt_says_where_the_script_was(folder):
    (folder / "other.py").write_text("def work():\n    raise KeyboardInterrupt\nwork()")
    ran = in_process("run", "--budget", "1GiB", folder / "other.py")
    assert ran.exit_code == 130
    assert "in work\n" in ran.stderr
    assert "runpy" not in ran.stderr


def test_the_hook_for_exceptions_that_a_script_sets_is_called(folder, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    (folder / "other.py").write_text(
        "import sys, traceback\nbefore = sys.excepthook\n"
        "def mine(kind, error, frames):\n"
        "    print('mine', [f.name for f in traceback.extract_tb(frames)])\n"
        "    before(kind, error, frames)\n"
        "sys.excepthook = mine\n"
        "raise ValueError('of its own')"
    )
    ran = in_process("run", "--budget", "1GiB", folder / "other.py")
    assert ran.exit_code == 1
    assert "mine ['<module>']" in ran.stdout
    assert ran.stderr.startswith("Traceback (most recent call last):")
    assert ran.stderr.count("ValueError: of its own") == 1
    assert "runpy" not in ran.stderr


MODULE = """
import sys
import torch
from . import helper

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.ones(64, 64)).sum().backward()
    optimizer.step()
    if "--bad" in sys.argv and step == 3:
        helper.fail()
print(__name__, __package__, sys.argv[1:])
"""


@pytest.fixture
def package(folder, monkeypatch):
    (folder / "pack" / "part").mkdir(parents=True)
    for name in ("__init__.py", "part/__init__.py"):
        (folder / "pack" / name).touch()
    (folder / "pack" / "part" / "train.py").write_text(MODULE)
    (folder / "pack" / "part" / "helper.py").write_text("def fail():\n    raise ValueError('mine')")
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "pack", raising=False)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "pack"]:
        del sys.modules[name]


def test_a_module_runs_as_python_m_would_run_it(package):
    ran = in_process("run", "--budget", "1GiB", "-m", "pack.part.train", "--lr", "3")
    assert ran.exit_code == 0, ran.output
    assert "__main__ pack.part ['--lr', '3']" in ran.stdout
    profiled = in_process("profile", "--module", "pack.part.train")
    assert profiled.exit_code == 0, profiled.output
    assert (package / "profile.json").exists()
    failed = in_process("run", "--budget", "1GiB", "-m", "pack.part.train", "--", "--bad")
    assert failed.exit_code == 1
    frames = re.findall(r'File "(.+?)"', failed.stderr)
    assert [Path(frame).name for frame in frames] == ["train.py", "helper.py"]
    assert failed.stderr.startswith("Traceback")
    assert "ValueError: mine" in failed.stderr


@pytest.mark.parametrize("name", ["nothing", "pack.part.nothing", "pack", "sub/train.py"])
def test_what_is_no_module_is_a_line(package, name):
    ran = in_process("run", "--budget", "1GiB", "-m", name)
    assert ran.exit_code == 2
    (line,) = ran.stderr.splitlines()
    assert f"no module '{name}' that can be run" in line
    assert ("leave out -m" in line) == name.endswith(".py")


def test_an_error_of_syntax_is_shown_without_frames_of_ours(folder):
    (folder / "other.py").write_text("x = 1\nif x\n    x = 2\n")
    ran = in_process("run", "--budget", "1GiB", folder / "other.py")
    assert ran.exit_code == 1
    assert "SyntaxError" in ran.stderr
    assert len(re.findall(r'File "', ran.stderr)) == 1


@pytest.fixture
def bystander():
    """A model of this process that is fitted, but not by the script."""
    model = er.fit(torch.nn.Linear(2, 2), budget="1 GiB")
    yield model
    er.release(model)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("forward", "calls the forward method of Net by itself"),
        ("functions", "call the model itself, model(x), rather than functions of its weights"),
        ("gradients", "takes gradients of Net by torch.func"),
        ("stepped", "takes gradients of Net by torch.func"),
    ],
)
def test_what_cannot_be_seen_is_said_before_the_first_update(folder, bystander, way, message):
    """In this process: such a script is refused before it has changed anything.

    A model that is attached here, but that the script does not train, changes no message.
    """
    script = folder / "sub" / "unseen.py"
    ran = in_process("run", "--budget", "1GiB", script, "--", way)
    assert ran.exit_code == 2, ran.output
    assert message in ran.stderr
    assert "trained" not in ran.stdout
    assert len(ran.stderr.splitlines()) == 1
    if way in ("forward", "gradients"):
        profiled = in_process("profile", "--out", folder / "p.json", script, "--", way)
        assert profiled.exit_code == 2
        assert message in profiled.stderr


def test_too_few_steps_are_no_profile(folder, monkeypatch):
    monkeypatch.chdir(folder)
    done = in_process("profile", "sub/train.py", "--steps", "1")
    assert done.exit_code == 2
    assert "(calls of Sequential with gradients on: 1)" in done.stderr
    assert not (folder / "profile.json").exists()


def test_tensors_may_be_moved_where_it_is_allowed(folder, profiled, plain):
    _, path = profiled
    stays, moves = (
        float(re.search(r"--budget ([\d.]+)MiB", in_process(*small).stderr)[1])
        for small in (
            ["plan", path, "--budget", "1MiB", "--exact"],
            ["plan", path, "--budget", "1MiB", "--exact", "--offload", "file"],
        )
    )
    assert moves <= stays
    script = folder / "sub" / "train.py"
    ran = in_process("run", "--budget", "1GiB", "--offload", "file", script)
    assert ran.stdout == plain
    refused = in_process("run", "--budget", "1GiB", "--offload", "host", script)
    assert refused.exit_code == 2
    assert "this model is in host memory already" in refused.stderr
    assert in_process("plan", path, "--budget", "8MiB", "--offload", "moon").exit_code == 2


def test_a_sweep_goes_from_plain_to_the_least(profiled):
    _, path = profiled
    told = in_process("plan", path, "--sweep")
    assert told.exit_code == 0, told.output
    assert "100%" in told.stdout
    assert "the least" in told.stdout
    small = in_process("plan", path, "--budget", "2MiB", "--exact")
    assert small.exit_code == 3
    assert "by leaving out --exact" in small.stderr
    bad = in_process("plan", path, "--budget", "8MiB", "--solver", "gredy")
    assert bad.exit_code == 2
    assert "Did you mean 'greedy'?" in bad.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--budget", "1GiB", "nowhere.py"], "there is no script nowhere.py"),
        (["run", "--budget", "1GiB", "."], "is a folder; name the script in it"),
        (["run", "--budget", "much", "nowhere.py"], "cannot read 'much' as a size"),
        (["run", "nowhere.py"], 'run needs --budget, as in --budget "6GiB", or --plan'),
        (
            ["run", "nowhere.py", "--budget=1GiB", "--steps", "3"],
            "stand before the script, as in elbowroom run --budget 6GiB nowhere.py; what follows",
        ),
        (["profile", "nowhere.py"], "there is no script nowhere.py"),
        (["plan", "nowhere.json", "--budget", "1GiB"], "there is no profile nowhere.json"),
        (["plan", "nowhere.json"], "a plan needs --budget"),
        (["plan", "nowhere.json", "--sweep", "--explain"], "give its --budget"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = in_process(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.startswith("elbowroom: ")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["run", "--budget", "1GiB"], ["profile"]])
def test_a_notebook_is_no_script(tmp_path, monkeypatch, command):
    """Its JSON may be an expression of Python's: then it would run, and train nothing."""
    monkeypatch.chdir(tmp_path)
    Path("train.ipynb").write_text('{"cells": []}')
    result = in_process(*command, "train.ipynb")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("elbowroom: train.ipynb is a notebook; make a script of it")


@pytest.mark.parametrize(
    "arguments",
    [
        ["profile", "--out", "./train.py", "train.py"],
        ["profile", "--html", "train.py", "train.py"],
        ["profile", "--out", "p.json", "--html", "p.json", "train.py"],
        ["run", "--budget", "1GiB", "--report", "train.py", "train.py"],
        ["profile", "--out", "p.html", "train.py"],
        ["plan", "profile.json", "--budget", "1GiB", "--out", "profile.json"],
    ],
)
def test_no_command_replaces_what_it_reads(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "profile.json"):
        Path(name).write_text("raise SystemExit('it ran')")
    result = in_process(*arguments)
    assert result.exit_code == 2
    assert "name a" in result.stderr
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == dict.fromkeys(
        ("train.py", "profile.json"), "raise SystemExit('it ran')"
    )


def test_all_may_go_to_one_device_and_a_link_to_itself_is_a_line(folder):
    sent = ["--out", os.devnull, "--html", os.devnull]
    assert in_process("profile", *sent, folder / "sub" / "train.py").exit_code == 0
    loop = folder / "loop.json"
    loop.symlink_to(loop)
    result = in_process("profile", "--out", loop, folder / "sub" / "train.py")
    assert result.exit_code == 2
    assert result.stderr.count("elbowroom: ") == 1


@pytest.mark.parametrize("option", ["--out", "--html"])
def test_a_page_that_cannot_be_written_is_said_before_the_training(tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit('it ran')")
    result = in_process("profile", option, "/nowhere/p", "train.py")
    assert result.exit_code == 2
    assert f"cannot write {option} /nowhere/p" in result.stderr


MOVES = """
import os, pathlib
os.chdir("/")
print(pathlib.Path(__file__).with_name("beside.txt").read_text())
"""


def test_a_script_that_changes_the_folder_finds_its_file(folder, monkeypatch):
    (folder / "moves.py").write_text(MOVES)
    (folder / "beside.txt").write_text("found")
    monkeypatch.chdir(folder)
    ran = in_process("run", "--budget", "1GiB", "moves.py")
    assert ran.exit_code == 0, ran.output
    assert "found" in ran.stdout
