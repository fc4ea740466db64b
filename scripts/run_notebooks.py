"""Executes the notebooks in docs/notebooks and writes their outputs into them.

    pip install -e '.[notebooks]'
    python scripts/run_notebooks.py [--check] [NAME ...]

--check writes nothing. It fails if a notebook raises, or if a line "same ...:" has changed.
"""

import argparse
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"


def claims(notebook: nbformat.NotebookNode) -> list[str]:
    """The lines that must not depend on the machine."""
    texts = [one.get("text", "") for cell in notebook.cells for one in cell.get("outputs", ())]
    return [line for text in texts for line in text.splitlines() if line.startswith("same ")]


def run(path: Path, check: bool) -> bool:
    notebook = nbformat.read(path, as_version=4)
    before, begin_s = claims(notebook), time.perf_counter()
    try:
        NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=str(FOLDER))
    except CellExecutionError as error:
        print(f"{path.name}: {error}", file=sys.stderr)
        return False
    seconds = time.perf_counter() - begin_s
    if check and claims(notebook) != before:
        print(f"{path.name}: {claims(notebook)}, and it said {before}", file=sys.stderr)
        return False
    if not check:
        for cell in notebook.cells:
            cell.metadata = {}  # times of execution, which differ in every run
            if "outputs" in cell:  # warnings and progress, which name this machine
                cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
        notebook.metadata.pop("language_info", None)  # the version of Python, likewise
        nbformat.write(notebook, path)
    print(f"{path.name}: {seconds:.0f} s")
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    paths = [p for p in sorted(FOLDER.glob("*.ipynb")) if not asked.names or p.stem in asked.names]
    results = [run(path, asked.check) for path in paths]  # all of them, also after a failure
    sys.exit(not all(results))
