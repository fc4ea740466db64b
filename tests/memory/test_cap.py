"""The proof of a budget: under a hard cap plain training dies, and fit finishes, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import elbowroom as er

SCRIPT = Path(__file__).with_name("capped.py")


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
def test_under_a_hard_cap_plain_training_dies_and_fit_finishes_with_the_same_losses():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert "can't allocate memory" in told["plain capped"]
    assert told["fitted capped"] == told["plain"]
    assert told["repeated capped"] == told["plain"]
    assert done.stderr.count("there was no memory left within the budget") == 1


@pytest.mark.gpu
def test_under_a_hard_cap_on_a_gpu_plain_training_dies_and_fit_finishes_with_the_same_losses():
    import capped

    with torch.device("cuda"):
        plain = capped.train()
        torch.cuda.reset_peak_memory_stats()
        capped.train()
        needs = torch.cuda.max_memory_allocated()
        capped.train(budget=int(0.6 * needs))
        torch.cuda.empty_cache()
        card = torch.cuda.get_device_properties(0).total_memory
        try:
            torch.cuda.set_per_process_memory_fraction(0.85 * needs / card)
            assert "out of memory" in capped.train()
            torch.cuda.empty_cache()
            assert capped.train(budget=int(0.6 * needs)) == plain
            assert capped.train(er.step, budget=2 * needs) == plain
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
