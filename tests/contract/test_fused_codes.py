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
    found = json.loads(out.read_text())
    rows = found["rows"]
    moved = {
        graph: [r["nbytes_per_element"] for r in rows if r["graph"] == graph]
        for graph in (row["graph"] for row in rows)
    }
    # The gradient is read and written, and the code is read; a mask's operand is read.
    held = {"dither, 16 levels": 0.54, "group, bits=4": 0.52, "division": 0.3}
    for name, nbytes in {**held, "cast, to=fp8_e4m3": 1.02}.items():
        assert 8 < sum(moved[f"backward, {name}"]) < 8 + nbytes + 0.01
    assert moved["mask, forward"] == [4.125]
    assert moved["mask, backward"] == [8.125]
    assert sum(moved["index, backward"]) == 10  # two of the ten are the index; eight without
    assert all(one["met"] for one in found["targets"])
