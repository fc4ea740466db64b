"""How much memory this process may have, and budgets that are a share of it."""

import resource
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elbowroom as er
from elbowroom.errors import PlanError
from elbowroom.measure import memory
from elbowroom.measure.memory import budget_nbytes, cgroup_limits, memory_nbytes
from elbowroom.runtime.attach import opener_of

GIB = 2**30


@pytest.fixture
def of_8_gib(monkeypatch):
    """A machine with 8 GiB, whatever the tests run on."""
    monkeypatch.setattr(memory, "_ram_nbytes", lambda: 8 * GIB)
    monkeypatch.setattr(memory, "_rlimits", lambda: iter(()))
    monkeypatch.setattr(memory, "cgroup_limits", lambda: iter(()))


def _files(root, **texts):
    for path, text in texts.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_a_cgroup_of_version_2_keeps_to_the_limits_of_those_above(tmp_path):
    tree = {
        "proc/self/cgroup": "0::/user/job\n",
        "sys/fs/cgroup/user/job/memory.max": "max\n",
        "sys/fs/cgroup/user/memory.max": "4096\n",
    }
    _files(tmp_path, **tree)
    assert list(cgroup_limits(tmp_path)) == [4096]


def test_a_cgroup_of_version_1_in_a_container_that_sees_the_path_of_its_host(tmp_path):
    tree = {
        "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/docker/3f\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "8192\n",
    }
    _files(tmp_path, **tree)
    assert list(cgroup_limits(tmp_path)) == [8192]


def test_without_cgroups_there_is_no_limit(tmp_path):
    assert list(cgroup_limits(tmp_path)) == []


def test_a_process_may_have_the_least_of_ram_cgroup_and_rlimits(of_8_gib, monkeypatch):
    assert memory_nbytes("cpu") == 8 * GIB
    monkeypatch.setattr(memory, "cgroup_limits", lambda: iter((6 * GIB, 7 * GIB)))
    assert memory_nbytes("cpu") == 6 * GIB
    monkeypatch.setattr(memory, "_rlimits", lambda: iter((5 * GIB,)))
    assert memory_nbytes(torch.device("cpu")) == 5 * GIB


def test_rlimits_count_where_they_are_set(monkeypatch):
    limits = {resource.RLIMIT_DATA: GIB, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], 9 * GIB))
    assert list(memory._rlimits()) == [GIB]


def test_this_machine_has_some_memory():
    assert 2**20 < memory_nbytes("cpu") < 2**50


def test_a_share_of_a_gpu_is_one_of_all_its_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = types.SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert budget_nbytes("50%", torch.device("cuda", 0)) == 40 * GIB
    assert budget_nbytes("6 GiB", "cuda") == 6 * GIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_share_of_a_gpu_that_is_not_there():
    with pytest.raises(PlanError, match=r"of 'cuda' is not known .*, as in budget=\"6 GiB\""):
        budget_nbytes(0.8, "cuda")
    assert budget_nbytes(6e9, "cuda") == 6 * 10**9


def test_a_share_of_a_model_without_memory():
    with pytest.raises(PlanError, match="of 'meta' is not known"):
        er.fit(nn.Linear(2, 2, device="meta"), budget=0.8)


@pytest.mark.parametrize("budget", [0.5, "0.5", "50%", 4 * GIB, 4.0 * GIB, "4 GiB"])
def test_a_budget_in_any_form_is_kept_in_bytes(of_8_gib, tmp_path, budget):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def step():
        model(torch.ones(512, 64)).sum().backward()

    plan = er.plan(er.measure(step), budget=budget)
    plan.save(tmp_path / "plan.json")
    assert er.Plan.load(tmp_path / "plan.json").budget == plan.budget == 4 * GIB
    fitting = opener_of(er.fit(model, budget=budget))
    assert fitting.options.budget_nbytes == 4 * GIB
    er.release(model)


def test_the_largest_batch_of_a_share(of_8_gib):
    model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1))
    found = er.largest_batch(
        model,
        lambda n: torch.ones(n, 1024),
        budget=15e6 / (8 * GIB),
        loss=lambda model, x: F.mse_loss(model(x), torch.zeros(len(x), 1)),
    )
    assert found.budget_nbytes == pytest.approx(15e6, abs=1)
    assert found.plan.budget == found.budget_nbytes


_CALLS = {
    "fit": lambda budget: er.fit(nn.Linear(2, 2), budget=budget),
    "largest_batch": lambda budget: er.largest_batch(
        nn.Linear(2, 2), lambda n: torch.ones(n, 2), budget=budget, loss=lambda m, x: m(x).sum()
    ),
}


@pytest.mark.parametrize("verb", _CALLS)
@pytest.mark.parametrize(
    "wrong", [None, [], "6 potatoes", -1, 0, float("nan"), float("inf"), True, 1.0, "110%"]
)
def test_what_is_no_budget_is_one_clear_error(verb, wrong):
    with pytest.raises(ValueError, match=r'"6 GiB"|"100%"'):
        _CALLS[verb](wrong)
