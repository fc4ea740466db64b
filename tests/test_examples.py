"""Every example runs, ends well and says something."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
# To start a process takes longer than an example does: all run in one, each as a script of its own.
RUN = """
import contextlib, io, json, os, runpy, sys, tempfile, traceback
for path in sys.argv[1:]:
    said, error = io.StringIO(), ""
    sys.argv = [path]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            with contextlib.redirect_stdout(said):
                runpy.run_path(path, run_name="__main__")
        except BaseException:
            error = traceback.format_exc()
        left = os.listdir(folder)
    print(json.dumps([path, {"said": said.getvalue(), "error": error, "left": left}]))
"""


@pytest.fixture(scope="module")
def ran() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, EXAMPLES)],
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, ran: dict[str, Any]) -> None:
    done = ran[str(path)]
    assert not done["error"], done["error"]
    assert done["said"].strip()
    assert not done["left"], "an example left files behind"
    assert len(path.read_text().splitlines()) <= 60
