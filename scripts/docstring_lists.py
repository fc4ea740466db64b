"""Shows the columns of a docstring as a list on the site; `mkdocs.yml` names this file.

    budget      bytes, or a size          - `budget`: bytes, or a size such as "6 GiB"
                such as "6 GiB"     -->   - `optimizer`: the optimizer, whose states
    optimizer   the optimizer, whose ...

Without it, Markdown would join all lines of the columns to one paragraph.
"""

import re
from typing import Any

import griffe

_ITEM = re.compile(r"(\w[\w.]*(?:, \w[\w.]*)*)( {2,})(\S.*)")


def as_list(text: str) -> str:
    """The docstring with each run of columns as a list of Markdown."""
    lines: list[str] = []
    column = 0  # where the texts of the open run begin; 0: none is open
    for line in text.splitlines():
        item = _ITEM.fullmatch(line)
        if item:
            if not column and lines and lines[-1]:
                lines.append("")  # a list begins after an empty line
            column = len(item[1]) + len(item[2])
            names = ", ".join(f"`{name}`" for name in item[1].split(", "))
            lines.append(f"- {names}: {item[3]}")
        elif column and line[:column].strip() == "" and line.strip():
            lines.append(f"    {line.strip()}")
        else:
            column = 0
            lines.append(line)
    return "\n".join(lines)


class DocstringLists(griffe.Extension):
    """Rewrites every docstring before the site is made of it."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)
