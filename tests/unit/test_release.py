"""The workflow that publishes: what of it can be tried without GitHub."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

import elbowroom as er

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
RELEASE = yaml.safe_load((WORKFLOWS / "release.yml").read_text())
JOBS = RELEASE["jobs"]
FILES = ("pyproject.toml", "src/elbowroom/__init__.py", "CITATION.cff", "CHANGELOG.md", "README.md")


def check_version(folder, tag):
    (step,) = (one for one in JOBS["build"]["steps"] if one.get("name", "").startswith("The tag"))
    command = ["bash", "-e", "-c", step["run"]]  # as a runner calls it
    environment = os.environ | {"GITHUB_REF_NAME": tag}
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


@pytest.fixture
def released(tmp_path):
    """The files that name a version, as they are when one is released."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    changes, readme = tmp_path / "CHANGELOG.md", tmp_path / "README.md"
    changes.write_text(changes.read_text().replace("## Unreleased: ", "## "))
    readme.write_text(readme.read_text().replace("not on PyPI yet", "on PyPI"))
    return tmp_path


def test_a_release_needs_its_version_in_every_file(released):
    tag = f"v{er.__version__}"
    assert check_version(released, tag) == 0
    assert check_version(released, "v9.9.9") != 0
    for name in FILES[:-1]:
        text = (released / name).read_text()
        (released / name).write_text(text.replace(er.__version__, "9.9.9"))
        assert check_version(released, tag) != 0, name
        (released / name).write_text(text)


def test_a_readme_that_says_that_there_is_no_release_is_not_published(released):
    (released / "README.md").write_text("The package is not on PyPI yet.\n")
    assert check_version(released, f"v{er.__version__}") != 0


def test_nothing_is_published_before_all_tests_have_passed():
    assert set(JOBS["publish"]["needs"]) == {"scripts", "build"}
    called = JOBS["scripts"]["uses"].removeprefix("./")
    triggers = yaml.safe_load((ROOT / called).read_text())[True]  # YAML reads "on" so
    assert "workflow_call" in triggers


def test_a_candidate_is_no_release():
    (tag,) = RELEASE[True]["push"]["tags"]
    as_regex = tag.replace(".", r"\.")
    assert re.fullmatch(as_regex, "v0.10.2")
    assert not re.fullmatch(as_regex, "v0.2.0rc1")
