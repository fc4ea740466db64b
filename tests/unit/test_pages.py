"""The examples of the pages in docs/ that belong to no codec run."""

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["coat.md", "nn.md"])
def test_the_example_of_a_page_runs(page):
    text = (DOCS / page).read_text().split("## Example")[1].split("\n## ")[0]
    example = text.replace("```pycon", "").replace("```", "")
    test = doctest.DocTestParser().get_doctest(example, {}, page, page, 0)
    assert test.examples
    told: list[str] = []
    failed = doctest.DocTestRunner().run(test, out=told.append).failed
    assert not failed, "".join(told)
