"""README.md is short and its example runs; troubleshooting knows every error; the site has all."""

import inspect
import re
from pathlib import Path

import pytest
import yaml

import elbowroom as er
from elbowroom import errors

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ERRORS = [
    name
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.ElbowroomError)
]


GROUPS = {"ElbowroomError", "CodecError", "OptimizerError"}  # their members are listed
LISTED = [name for name in ERRORS if name not in GROUPS]


def test_the_readme_is_short_enough_to_be_read():
    assert len(README.encode()) <= 8 * 1024


def test_the_example_of_the_readme_runs():
    code = re.search(r"## Ten lines\n\n```python\n(.+?)```", README, re.DOTALL)[1]
    names = {}
    exec(code, names)
    er.release(names["model"])
    assert names["model"][0].weight.grad is not None


def test_the_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


@pytest.mark.parametrize("name", LISTED)
def test_troubleshooting_says_what_to_do_about_every_error(name):
    assert f"`{name}`" in (ROOT / "docs" / "troubleshooting.md").read_text()


def test_the_site_leads_to_every_page():
    shown = (ROOT / "mkdocs.yml").read_text()
    assert yaml.safe_load(shown)["strict"]
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    assert {page for page in pages if page not in shown} == set()


@pytest.mark.parametrize("name", ["convnets", "medical", "gnn", "recommenders"])
def test_the_example_of_a_guide_runs(name, capsys):
    text = (ROOT / "docs" / "guides" / f"{name}.md").read_text()
    exec(re.search(r"```python\n(.+?)```", text, re.DOTALL)[1], {"__name__": "guide"})
    assert 0 < float(capsys.readouterr().out) < 10
