"""The description that PyPI shows, where no relative link leads anywhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("hatchling", reason="hatchling builds the package; ./scripts/setup installs it")
LINKS = re.compile(r"""\]\(([^)\s]+)\)|\b(?:src|srcset|href)=["']([^"']+)["']""")


@pytest.fixture
def built(monkeypatch):
    def built(**variables):
        from hatchling.metadata.core import ProjectMetadata
        from hatchling.plugin.manager import PluginManager

        for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_REF_NAME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return ProjectMetadata(str(ROOT), PluginManager()).core

    return built


def links(text):
    return [first or second for first, second in LINKS.findall(text)]


def without_links(text):
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)


def test_a_release_has_the_links_and_the_picture_at_their_addresses(built):
    of = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "some/body"}
    core = built(**of, GITHUB_REF_NAME="v0.1.0")
    readme = (ROOT / "README.md").read_text()
    home = "https://github.com/some/body"
    assert len(links(core.readme)) == len(links(readme))
    for was, now in zip(links(readme), links(core.readme), strict=True):
        kind = "raw" if was.endswith(".png") else "blob"
        assert now == was if "://" in was else now == f"{home}/{kind}/v0.1.0/{was}"
    assert without_links(core.readme).count("\n") == readme.count("\n")
    assert core.urls["Repository"] == home
    assert core.readme_content_type == "text/markdown"


def test_another_build_has_the_words_without_dead_links(built):
    core = built()
    readme = (ROOT / "README.md").read_text()
    assert links(core.readme) == []
    assert "picture>" not in core.readme
    assert without_links(readme).endswith(core.readme[core.readme.index("The picture shows") :])
    assert core.urls == {}
