"""The loops that serve CPUs without AVX-512 and BMI2: compiled for one, in a process apart."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from elbowroom.kernels import numba, reference
from elbowroom.kernels.numba import compress

assert not compress.HAS

def check(op, back, *given):
    stored = getattr(reference, op)(*given)
    for one, other in zip(stored, getattr(numba, op)(*given), strict=True):
        assert torch.equal(one, other), op
    bits = given[1:2] if op == "sided_quantize" else ()
    settings = given[len(bits) + 1 :]
    out, expected = torch.empty_like(given[0]), torch.empty_like(given[0])
    getattr(reference, back)(*bits, *stored, *settings, expected)
    getattr(numba, back)(*bits, *stored, *settings, out)
    assert torch.equal(out, expected), back

for n in (1, 7, 2047, 5001):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    bits = reference.pack_bits(x.cos() > 0.3)
    for settings in ((1, 4, 2, 64, 1), (1, 4, 4, 64, 8)):
        check("sided_quantize", "sided_dequantize", x, bits, *settings)
    check("nonzero_quantize", "nonzero_dequantize", x.relu(), 1, 4, 64)
print("equal")
"""


@pytest.mark.whole  # half a minute: it compiles the loops once more
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a CPU of x86-64")
def test_the_loops_of_an_older_cpu_equal_the_reference():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"NUMBA_CPU_NAME": "x86-64-v3"},
        capture_output=True,
        text=True,
    )
    assert run.stdout == "equal\n", run.stderr
