"""Each registered codec has a card in docs/codecs/: headings, fields, an example that runs."""

import doctest
import inspect
import re
from pathlib import Path

import pytest

from elbowroom.codecs import codec_class, codecs

CARDS = Path(__file__).parents[2] / "docs" / "codecs"
HEADINGS = [
    "What it does",
    "Mathematics and error",
    "When it helps",
    "When it does not",
    "Measured",
    "Known problems",
    "Example",
    "Settings",
    "References",
]


def sections(id: str) -> dict[str, str]:
    """The text below each heading of a card."""
    _, *parts = re.split(r"^## (.+)\n", (CARDS / f"{id}.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_codec_has_a_card_and_every_card_a_codec():
    assert sorted(path.stem for path in CARDS.glob("*.md")) == codecs()


@pytest.mark.parametrize("id", codecs())
def test_a_card_has_the_fixed_headings_and_says_something_below_each(id):
    told = sections(id)
    assert list(told) == HEADINGS
    assert all(text.strip() for text in told.values())
    assert (CARDS / f"{id}.md").read_text().startswith(f"# {id}\n")


@pytest.mark.parametrize("id", codecs())
def test_a_card_names_every_field_with_its_default(id):
    settings = sections(id)["Settings"]
    for name, parameter in inspect.signature(codec_class(id)).parameters.items():
        default = parameter.default
        shown = (
            "-" if default is None else f'`"{default}"`' if isinstance(default, str) else default
        )
        assert f"| `{name}` | {shown} |" in settings


@pytest.mark.parametrize("id", codecs())
def test_the_example_of_a_card_runs(id):
    example = sections(id)["Example"].replace("```pycon", "").replace("```", "")
    test = doctest.DocTestParser().get_doctest(example, {}, id, f"docs/codecs/{id}.md", 0)
    assert test.examples
    told: list[str] = []
    failed = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=told.append).failed
    assert not failed, "".join(told)


@pytest.mark.parametrize("id", codecs())
def test_figures_say_how_to_repeat_them(id):
    assert f"`python benchmarks/codecs.py {id}`" in sections(id)["Measured"]
