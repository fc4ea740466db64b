"""docs/notebooks: executed, small, and what they claim of exactness came out true.

`./scripts/docs --notebooks` executes them, in an environment of their own.
"""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_five():
    assert len(NOTEBOOKS) == 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_opens_with_what_it_shows_and_has_its_outputs(path):
    text = path.read_text()
    assert len(text) < 20_000
    assert not re.search(r"/(tmp|root|home|work)/", text)  # nothing of the machine that ran it
    cells = json.loads(text)["cells"]
    assert cells[0]["cell_type"] == "markdown"
    opening = "".join(cells[0]["source"])
    assert opening.startswith("# ")
    assert "shows" in opening
    assert "measured when the notebook ran" in opening
    outputs = [out for cell in cells for out in cell.get("outputs", ())]
    assert {out["output_type"] for out in outputs} == {"stream"}  # no errors, no pictures
    assert {out["name"] for out in outputs} == {"stdout"}
    printed = "".join("".join(out["text"]) for out in outputs)
    assert "MiB" in printed or "bytes a parameter" in printed
    claims = re.findall(r"^same .*: (\w+)$", printed, re.MULTILINE)
    assert all(claim == "True" for claim in claims)


def test_four_of_them_train_exactly():
    assert sum("same " in path.read_text() for path in NOTEBOOKS) == 4
