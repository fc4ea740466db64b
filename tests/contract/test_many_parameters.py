"""One call for many parameters has the bits of the plain reference, called for each by itself."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from elbowroom.kernels import ops, reference
from elbowroom.optim import SGD, STATES, AdamW, Lion, batch

SHAPES = [(), (0,), (1,), (33,), (5000,), (32, 32), (64, 65), (3, 1500), (130, 33), (4097, 1)]
SHAPES += [(2, 3, 32, 32), (64, 8, 3, 3), (64, 80, 1, 1), (0, 500)]


def one_by_one(*args):
    *tensors, rule, weights, m_kind, v_kind, rows, factors, seeds, skip, steps = args
    assert steps is None  # which a GPU counts
    for i, (row, seed) in enumerate(zip(rows, seeds, strict=True)):
        alone = [some[i : i + 1] for some in tensors]
        how = rule, weights, m_kind, v_kind, [row], factors[i : i + 1], [seed], skip
        reference.optimizer_step(*alone, *how)


def life(seed):
    """Steps of an optimizer that is drawn by lot, and what it leaves."""
    lot, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    cls = lot.choice([AdamW, Lion, SGD])
    state = lot.choice([state for state in STATES if cls is AdamW or state != "int4"])
    weights = lot.choice(["residual", "sr", "nearest"])
    params = []
    for shape in lot.choices(SHAPES, k=lot.randint(1, 9)):
        x = torch.randn(shape, generator=draw).to(lot.choice([torch.float32, torch.bfloat16]))
        if len(shape) == 4 and lot.random() < 0.5:
            x = x.to(memory_format=torch.channels_last)
        if len(shape) == 2 and lot.random() < 0.3:
            x = x.t().contiguous().t()
        if len(shape) == 1 and lot.random() < 0.5 and x.numel():
            x = torch.cat([x[:1], x])[1:]  # at an odd address
        params.append(nn.Parameter(x))
    some = lot.randint(0, len(params) - 1)
    groups = [{"params": params[some:], "lr": 0.1}]
    if some:
        groups.append({"params": params[:some], "state": "fp32", "weight_decay": 0.2})
    optimizer = cls(groups, lr=1e-2, state=state, weights=weights, seed=seed)
    for _ in range(3):
        for p in params:
            grad = torch.randn(p.shape, generator=draw) * 10.0 ** lot.choice([0, -30, 3])
            grad = grad.to(p.dtype)
            if lot.random() < 0.2 and p.dim() == 2:
                grad = grad.to_sparse()
            if lot.random() < 0.02 and not grad.is_sparse and p.numel():
                grad.view(-1)[-1] = lot.choice([torch.nan, -torch.inf, 2e19])
            p.grad = None if lot.random() < 0.15 else grad
        optimizer.step()
    states = [optimizer.state.get(p, {}) for p in params]
    return [*params, *(s[key] for s in states for key in sorted(s))], optimizer.skipped


@pytest.mark.parametrize("first", range(0, 150, 30))
def test_many_parameters_of_an_optimizer_are_updated_as_each_by_itself(first, monkeypatch):
    plain = SimpleNamespace(optimizer_step=one_by_one, beyond=ops.beyond)
    for seed in range(first, first + 30):
        ours, skipped = life(seed)
        monkeypatch.setattr(batch, "ops", plain)
        theirs, wanted = life(seed)
        monkeypatch.setattr(batch, "ops", ops)
        assert skipped == wanted
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), seed
