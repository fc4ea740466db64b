"""Writes the table of contents of docs/log.md: a link to each subject and to each of its entries.

python scripts/log_contents.py
"""

import re
from pathlib import Path

LOG = Path(__file__).parents[1] / "docs" / "log.md"


def slug(heading: str) -> str:
    """The anchor of a heading, as Markdown's table of contents makes it."""
    kept = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", kept)


def with_contents(text: str) -> str:
    """The log with the links to its entries written anew; what a subject is about stays."""
    opening, *subjects = re.split(r"^## ", text, flags=re.MULTILINE)
    before = re.split(r"^- \[", opening, maxsplit=1, flags=re.MULTILINE)[0].rstrip()
    about = dict(re.findall(r"^- \[(.+?)\]\(#.+?\): (.+)$", opening, flags=re.MULTILINE))
    lines = []
    for subject in subjects:
        name = subject.partition("\n")[0]
        lines.append(f"- [{name}](#{slug(name)}): {about[name]}")
        for heading in re.findall(r"^### (.+)$", subject, flags=re.MULTILINE):
            date, _, title = heading.partition(" ")
            lines.append(f"    - {date} [{title}](#{slug(heading)})")
    return "## ".join(["\n".join([before, "", *lines, "", ""]), *subjects])


if __name__ == "__main__":
    LOG.write_text(with_contents(LOG.read_text()))
