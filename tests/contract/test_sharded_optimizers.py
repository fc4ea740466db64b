"""Optimizers over DTensors: two processes (gloo), `fully_shard`, torch.distributed.checkpoint.

One pair of processes does all jobs, in turn (`sharding.py`): to start one takes seconds.
"""

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

TIMEOUT_S = 300
SCRIPT = Path(__file__).with_name("sharding.py")
STEPS = [("AdamW", "fp32"), ("AdamW", "coat"), ("AdamW", "int8"), ("AdamW", "int4")]
STEPS += [("Lion", "int8"), ("SGD", "coat")]
SAVED = [("AdamW", "int8"), ("AdamW", "coat"), ("SGD", "int8"), ("AdamW", "int4/bfloat16")]

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed"),
    pytest.mark.slow,
]


@cache
def directory() -> Path:
    made = Path(mkdtemp(prefix="elbowroom-sharded-"))
    atexit.register(rmtree, made, ignore_errors=True)
    return made


def checkpoint(rule: str, state: str) -> str:
    return str(directory() / f"{rule}-{state.replace('/', '-')}")


def run(world: int, jobs: list[list[str]]) -> list[dict[tuple[str, ...], Any]]:
    """What each rank has found: (task, rule, state) -> results."""
    store = directory() / f"store-{world}"
    command = [sys.executable, str(SCRIPT)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(store), json.dumps(jobs)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_WAIT_POLICY": "passive"},
        )
        for rank in range(world)
    ]
    found = []
    try:
        for process in processes:
            out, error = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, error
            lines = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
            found.append({tuple(what): results for *what, results in lines})
    finally:
        for process in processes:
            process.kill()
    return found


@cache
def two() -> list[dict[tuple[str, ...], Any]]:
    jobs = [["steps", *case] for case in STEPS]
    jobs += [["save", *case, checkpoint(*case)] for case in SAVED]
    jobs += [["lacking", "AdamW", "int8"]]
    jobs += [["skip", "AdamW", "int8"], ["released", "AdamW", "int8"], ["convert", "AdamW", "fp32"]]
    return run(2, jobs)


@cache
def one() -> dict[tuple[str, ...], Any]:
    two()
    return run(1, [["load", *case, checkpoint(*case)] for case in SAVED])[0]


@pytest.mark.parametrize(("rule", "state"), STEPS)
def test_shards_make_the_steps_of_the_whole(rule, state):
    """Small parameters too; one has fewer rows than there are ranks."""
    for found in two():
        results = found["steps", rule, state]
        assert results["bytes"]
        assert results["kinds"]
        assert results["same"] == (state == "fp32")  # noise of codes goes by the shard
        assert results["worst"] < 0.02


@pytest.mark.parametrize(("rule", "state"), SAVED)
def test_a_checkpoint_of_two_resumes_bit_for_bit_and_loads_on_one(rule, state):
    for found in two():
        assert found["save", rule, state] == {"loaded": True, "resumed": True}
    assert one()["load", rule, state] == {"loaded": True, "steps": 4}


def test_all_ranks_skip_a_step_in_which_one_has_a_gradient_that_is_not_finite():
    for found in two():
        assert found["skip", "AdamW", "int8"] == {"skipped": 1, "same": True}


def test_a_rank_without_gradients_keeps_nobody_waiting():
    for found in two():
        results = found["lacking", "AdamW", "int8"]
        assert results["same"] == (results["rank"] == 1)


def test_gradients_are_released_under_fully_shard():
    for found in two():
        assert found["released", "AdamW", "int8"] == {"freed": True, "same": True}


def test_sharded_states_convert_replicas_agree_and_the_rest_is_refused():
    for found in two():
        results = found["convert", "AdamW", "fp32"]
        assert results["converted"] <= 0.02
        assert results["replicas"]
        assert "set_optimizer_state_dict" in results["refused"]
        assert "Shard(0), as fully_shard does" in results["columns"]
