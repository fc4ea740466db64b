"""Files of unknown origin: a profile or a plan with wrong fields, and names with brackets."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.errors import DataError
from elbowroom.plan.files import check_types

NAMES = ["[mask]", "[/red]", "<script>alert(1)</script>"]
DEEP = "[" * 100_000 + "]" * 100_000


class Named(nn.Module):
    """Modules with names that rich would take for markup."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(64, 64), nn.GELU()) for name in NAMES}
        )

    def forward(self, x):
        for part in self.parts.values():
            x = part(x)
        return x


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Named()


@pytest.fixture(scope="module")
def profile(model):
    x = torch.randn(512, 64)
    return er.measure(lambda: model(x).sum().backward(), model=model)


@pytest.fixture(scope="module")
def plan(profile):
    # Tensors of other tests may still be there, and count as held before the step.
    room = er.plan(profile, budget="1 GiB").plain_peak - profile.static
    return er.plan(profile, budget=profile.static + int(0.8 * room))


@pytest.fixture(scope="module")
def written(profile, plan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    profile.save(folder / "profile.json")
    plan.save(folder / "plan.json")
    return {
        "profile": (er.Profile.load, json.loads((folder / "profile.json").read_text())),
        "plan": (er.Plan.load, json.loads((folder / "plan.json").read_text())),
    }


def test_tables_show_names_with_brackets(model, plan):
    with er.saving("dither", noise=0.0987) as saved:
        loss = model(torch.randn(512, 64)).sum()
    loss.backward()
    for text in (plan.explain(), str(saved.ledger), str(saved.error_report())):
        assert all(f"parts.{name}"[:24] in text for name in NAMES), text  # long names are cut


def test_a_command_shows_them_and_paths_with_brackets(profile, plan, tmp_path):
    profile.save(tmp_path / "p.json")
    command = [sys.executable, "-m", "elbowroom", "plan", "p.json", "--budget", str(plan.budget)]
    told = subprocess.run(
        [*command, "--explain", "--html", "[bold]x.html", "--out", "[red]x.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "[bold]x.html" in told.stderr
    assert "[red]x.json" in told.stderr
    assert "parts.[mask].0" in told.stdout
    assert "<script>alert" not in (tmp_path / "[bold]x.html").read_text()


@pytest.mark.parametrize("kind", ["profile", "plan"])
@pytest.mark.parametrize("text", [DEEP, '{"elbowroom_KIND": 1, "sites": ' + DEEP + "}"])
def test_lists_of_lists_without_end_are_refused(kind, text, written, tmp_path):
    (tmp_path / "deep.json").write_text(text.replace("KIND", kind))
    with pytest.raises(DataError, match=f"is not a {kind}"):
        written[kind][0](tmp_path / "deep.json")


@pytest.mark.parametrize(("kind", "other"), [("profile", "plan"), ("plan", "profile")])
def test_a_file_of_another_kind_is_named(kind, other, written, tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(written[other][1]))
    with pytest.raises(DataError, match=f"one.json is a {other}, not a {kind}"):
        written[kind][0](tmp_path / "one.json")


def put(data, path, value):
    data = copy.deepcopy(data)
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("profile", ("seconds",), 1e400),
        ("profile", ("seconds",), 10**400),
        ("profile", ("static",), 10**30),
        ("profile", ("static",), True),
        ("profile", ("fixed_s",), None),
        ("profile", ("fixed_s",), {"encode": "x"}),
        ("profile", ("rates",), {"encode": 0}),
        ("profile", ("level", 0), 1e400),
        ("profile", ("device",), ["cpu"]),
        ("profile", ("storages", 0, "nbytes"), "x"),
        ("profile", ("storages", 0, "producer_s"), None),
        ("profile", ("storages", 0, "saves", 0, "site", "nth"), []),
        ("profile", ("storages", 0, "saves", 0, "site", "why"), 3),
        ("profile", ("storages", 0, "made_of"), [0.5]),
        ("profile", ("modules", 0, "name"), [[]]),
        ("plan", ("budget",), 10**30),
        ("plan", ("peak",), 10**400),
        ("plan", ("seconds",), 10**400),
        ("plan", ("lines", 0, "seconds"), 1e400),
    ],
)
def test_a_field_of_another_type_is_refused_when_it_is_read(kind, path, value, written, tmp_path):
    load, good = written[kind]
    (tmp_path / "good.json").write_text(json.dumps(good))
    load(tmp_path / "good.json")
    (tmp_path / "bad.json").write_text(json.dumps(put(good, path, value)))
    with pytest.raises(DataError, match=f"is not a {kind}"):
        load(tmp_path / "bad.json")


def test_what_is_measured_has_the_types_that_its_classes_declare(profile):
    check_types(profile)


@pytest.mark.parametrize("load", [er.Profile.load, er.Plan.load])
def test_a_file_that_is_no_text_is_refused_in_few_words(load, tmp_path):
    (tmp_path / "picture.json").write_bytes(bytes(range(256)) * 4096)
    with pytest.raises(DataError, match="it is not text") as refused:
        load(tmp_path / "picture.json")
    assert len(str(refused.value)) < 500
