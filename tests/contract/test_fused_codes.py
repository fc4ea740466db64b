"""Codes in a GPU's graph are fused with their readers: by the source that Inductor generates."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_a_decode_is_in_the_kernel_of_its_reader(tmp_path):
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    out = tmp_path / "fused.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "fused_codes.py"), "--quick", "--out", str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(out.read_text())["rows"]
    moved = {
        graph: [r["nbytes_per_element"] for r in rows if r["graph"] == graph]
        for graph in ("backward, 16 levels", "mask, forward", "mask, backward")
    }
    # The gradient is read and written; a mask's operand is read.
    assert max(moved["backward, 16 levels"]) < 8.6
    assert sum(moved["backward, 16 levels"]) < 8.7
    assert moved["mask, forward"] == [4.125]
    assert moved["mask, backward"] == [8.125]
