"""docs/formats/: every field of the JSON files, and examples that run without torch."""

import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.codecs import Facts
from elbowroom.plan.plan import ExplainedLine, PlanEntry
from elbowroom.plan.profile import ModuleCall, Save, Storage
from elbowroom.plan.resident_bytes import ResidentBytes
from elbowroom.plan.shares import NoiseShares, SiteShares
from elbowroom.plan.site import Site

DOCS = Path(__file__).parents[2] / "docs" / "formats"
CLASSES = {
    "profile": {
        kind.__name__: kind
        for kind in (
            *(er.Profile, Storage, Save, Site, Facts, ModuleCall),
            *(NoiseShares, SiteShares, ResidentBytes),
        )
    },
    "plan": {kind.__name__: kind for kind in (er.Plan, PlanEntry, ExplainedLine)},
}
NOT_WRITTEN = {"mask", "unknown_sites", "parted_nbytes", "profiled_peak"}


def sections(page):
    """The text below each heading."""
    text = (DOCS / f"{page}.md").read_text()
    _, *parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("page", CLASSES)
def test_a_page_explains_every_field_and_no_other(page):
    told = sections(page)
    assert list(told) == ["Example", *CLASSES[page]]
    for name, kind in CLASSES[page].items():
        expected = [field.name for field in fields(kind) if field.name not in NOT_WRITTEN]
        if name.lower() == page:
            expected.insert(0, f"elbowroom_{page}")
        rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", told[name], flags=re.MULTILINE)
        assert sorted(row[0] for row in rows) == sorted(expected), name


def alone(code, folder):
    """Python with the standard library only."""
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=folder, capture_output=True, text=True
    )


def test_what_runs_alone_has_no_torch(tmp_path):
    assert "No module named 'torch'" in alone("import torch", tmp_path).stderr


@pytest.fixture
def profile():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(256, 64)
    return replace(
        er.measure(lambda: model(x).square().mean().backward()),
        standing=ResidentBytes(10, 40, 10, 40),
        noise=NoiseShares(8, (SiteShares(("1", "relu", 0), (4, 2), (0.5, 1.0)),), 0.1),
    )


def test_a_profile_is_read_without_torch(profile, tmp_path):
    profile.save(tmp_path / "profile.json")
    code = re.search(r"```python\n(.+?)```", sections("profile")["Example"], re.DOTALL)[1]
    ran = alone(code, tmp_path)
    assert ran.returncode == 0, ran.stderr
    first, *lines, last = ran.stdout.splitlines()
    assert first == f"peak {profile.peak} bytes, {profile.static} before the step"
    largest = sorted(profile.storages, key=lambda one: -one.nbytes)[:5]
    assert [int(line.split()[0]) for line in lines] == [one.nbytes for one in largest]
    assert lines[0].endswith("[256, 64] float32")
    assert last == "weights 40 bytes"


def test_a_plan_is_read_without_torch(profile, tmp_path):
    plan = er.plan(profile, budget="1 GiB", exact=True)
    plan = replace(plan, lines=(*plan.lines, replace(plan.lines[0], action="recompute", held=0)))
    plan.save(tmp_path / "plan.json")
    code = re.search(r"```python\n(.+?)```", sections("plan")["Example"], re.DOTALL)[1]
    ran = alone(code, tmp_path)
    assert ran.returncode == 0, ran.stderr
    first, *lines = ran.stdout.splitlines()
    assert first == f"peak {plan.peak} of {plan.plain_peak} bytes; budget {2**30}"
    assert lines == [
        f"{action} {before} {after}" for action, (before, after) in sorted(plan.totals().items())
    ]


def test_both_are_read_back(profile, tmp_path):
    profile.save(tmp_path / "profile.json")
    assert er.Profile.load(tmp_path / "profile.json") == profile
