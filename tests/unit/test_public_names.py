"""Public names: what they are, what importing them costs, and the pages that have them."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import elbowroom as er
from elbowroom._lazy import show_lazily

ROOT = Path(__file__).parents[2]


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_importing_loads_one_small_file_and_not_torch():
    code = (
        "import sys; before = set(sys.modules); import elbowroom; print(*set(sys.modules) - before)"
    )
    loaded = in_a_fresh_process(code).split()
    assert {name for name in loaded if "elbowroom" in name} == {"elbowroom", "elbowroom._lazy"}
    assert "torch" not in loaded
    others = {name.partition(".")[0] for name in loaded} - {"elbowroom"}
    assert others <= sys.stdlib_module_names


def test_type_checkers_and_editors_see_the_names_that_there_are():
    tree = ast.parse(Path(er.__file__).read_text())
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = [alias.asname for node in guarded.body for alias in node.names]
    assert sorted(seen) == sorted(er.__all__)


@pytest.mark.parametrize("name", er.__all__)
def test_a_name_is_there_and_listed(name):
    assert getattr(er, name) is not None
    assert name in dir(er)


def test_a_star_import_has_all_names():
    names: dict[str, object] = {}
    exec("from elbowroom import *", names)
    assert set(er.__all__) <= names.keys()


def test_functions_that_are_called_like_packages_stay_functions():
    code = """
import elbowroom.plan.profile, elbowroom.measure.peak, elbowroom.codecs
import elbowroom as er
from elbowroom.plan import Site
print(*(type(one).__name__ for one in (er.plan, er.measure, er.codecs, er.codec)))
"""
    assert in_a_fresh_process(code).split() == ["function"] * 4
    assert isinstance(sys.modules["elbowroom.plan"], ModuleType)
    assert isinstance(er.plan, FunctionType)


def test_every_part_can_be_imported_first():
    """In forks of a process that has torch alone."""
    code = f"""
import importlib, os, sys, torch
sys.path[:] = {sys.path!r}
import elbowroom
parts = "adaptive nn optim codecs files measure plan tools fitting compiled report cli demo".split()
parts += ["runtime.slot", "runtime.storage", "runtime.sources", "runtime.handles", "plan.solve"]
parts += ["_api", "_training"]
for part in parts:
    child = os.fork()
    if not child:
        importlib.import_module(f"elbowroom.{{part}}")
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(part)
"""
    assert in_a_fresh_process(code) == ""


def test_a_name_that_is_misspelt_is_an_error_that_knows_what_was_meant():
    with pytest.raises(AttributeError, match="no attribute 'fitt'") as caught:
        er.fitt  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("fitt", er)  # so Python adds "Did you mean"


def test_a_name_can_be_replaced_and_put_back(monkeypatch):
    fit = er.fit
    monkeypatch.setattr(er, "fit", None)
    assert er.fit is None
    monkeypatch.undo()
    assert er.fit is fit


def test_a_compiled_function_may_be_the_first_to_ask():
    code = """
import torch
import elbowroom as er

@torch.compile(backend="eager")
def loss(x):
    with er.saving():
        return torch.nn.functional.gelu(x).sum()

x = torch.ones(4, requires_grad=True)
loss(x).backward()
print(x.grad is not None)
"""
    assert in_a_fresh_process(code).strip() == "True"


def test_a_package_of_two_names_shows_them(monkeypatch):
    package = ModuleType("two")
    monkeypatch.setitem(sys.modules, "two", package)
    assert show_lazily("two", ["inner"], {"deep.home": ["call"]}) == ["inner", "call"]
    assert {"inner", "call"} <= set(dir(package))


SHOWN = ["elbowroom.adaptive", "elbowroom.codecs", "elbowroom.nn", "elbowroom.optim"]
NO_PAGE = {"PART", "Affine", "codec_class", "STATES"}  # what a codec is written with; a list


def names_of(package: str) -> set[str]:
    """What the package shows that is no module, and no attribute but by name."""
    if package == "elbowroom":
        return {name for name in er.__all__ if f"elbowroom.{name}" not in {*SHOWN[:1], *SHOWN[2:]}}
    tree = ast.parse(Path(import_module(package).__file__).read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname for node in imports for alias in node.names} - {None} - NO_PAGE


@pytest.mark.parametrize("package", ["elbowroom", *SHOWN])
def test_the_reference_has_every_public_name(package):
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    shown = re.findall(rf"^::: {package}\.(?:\w+\.)*(\w+)$", pages, re.MULTILINE)
    assert names_of(package) - {"__version__"} <= set(shown)


@pytest.mark.parametrize("name", ["Option", "Known", "Held", "Row"])
def test_a_word_means_one_thing(name):
    """A class, or an alias, of this name is in one file at most."""
    files = [
        path
        for path in (ROOT / "src").rglob("*.py")
        if re.search(rf"^(class {name}\b|{name} = )", path.read_text(), re.MULTILINE)
    ]
    assert len(files) <= 1
