"""No file of `optim/` imports, even for its types, what imports it."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import elbowroom.optim

FOLDER = Path(elbowroom.optim.__file__).parent


def imported(path: Path) -> set[str]:
    names = {node.module for node in ast.walk(ast.parse(path.read_text())) if _is_from(node)}
    return {name.split(".")[-1] for name in names if name.startswith("elbowroom.optim.")}


def _is_from(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module is not None


def test_imports_run_in_no_circle():
    files = [path for path in FOLDER.glob("*.py") if path.stem != "__init__"]
    order = list(TopologicalSorter({path.stem: imported(path) for path in files}).static_order())
    assert order.index("layout") < order.index("base") < order.index("auto")
