"""What a build puts into the package's description: README.md, with links that work on PyPI.

PyPI shows a README outside of its repository, where a relative link is dead. A build on GitHub
knows where the repository is, and makes links absolute, to the tag that it builds; any other build
knows no address, and leaves a link's text and no picture. `hatch-fancy-pypi-readme` replaces by
fixed text only, and no address is fixed here.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)\s]+)\)")
_SOURCE = re.compile(r'\b(src|srcset)="(?![a-z]+:)([^"]+)"')
_PICTURE = re.compile(r"<picture>.*?</picture>\n*", re.DOTALL)
_FENCED = re.compile(
    r"(^```.*?^```$)", re.DOTALL | re.MULTILINE
)  # programs, which have brackets of their own


class Description(MetadataHookInterface):
    """Sets the description, and the project's addresses where they are known."""

    def update(self, metadata: dict) -> None:
        """Fills in what pyproject.toml calls dynamic."""
        address = repository()
        text = Path(self.root, "README.md").read_text()
        metadata["readme"] = {"content-type": "text/markdown", "text": described(text, address)}
        if address is not None:
            home, tag = address
            metadata["urls"] = {"Repository": home, "Changelog": f"{home}/blob/{tag}/CHANGELOG.md"}


def repository() -> tuple[str, str] | None:
    """Returns the repository's address and the tag that is built, on GitHub; None elsewhere."""
    names = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_REF_NAME")
    server, name, tag = map(os.environ.get, names)
    return (f"{server}/{name}", tag) if server and name and tag else None


def described(text: str, address: tuple[str, str] | None) -> str:
    """Returns a README without relative links."""

    def prose(part: str) -> str:
        if address is None:
            return _LINK.sub(r"\1", _PICTURE.sub("", part))
        home, tag = address
        part = _LINK.sub(rf"[\1]({home}/blob/{tag}/\2)", part)
        return _SOURCE.sub(rf'\1="{home}/raw/{tag}/\2"', part)

    return "".join(part if part.startswith("```") else prose(part) for part in _FENCED.split(text))
