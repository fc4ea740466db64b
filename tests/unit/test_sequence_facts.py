"""Where the sequence lies in what is saved, as the op that saves it or has made it tells."""

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.plan import Keep

B, T, C = 2, 96, 32


class Rows(nn.Module):
    """A linear layer as GPT-2 of transformers has it: [B, T, C] as [B * T, C] times a matrix."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(C, C)), nn.Parameter(torch.zeros(C))

    def forward(self, x):
        y = torch.addmm(self.bias, x.reshape(-1, C), self.weight)
        return y.view(*x.shape)


class Heads(nn.Module):
    """Attention whose q, k and v are views of one product [B, T, 3 C]."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C)

    def forward(self, x):
        q, k, v = self.qkv(x).view(B, T, 3, 4, C // 4).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def sequences(module, x):
    """The sequence of what is saved, by the op that saves it."""
    found = {}

    def policy(site):
        found.setdefault(site.consumer, site.facts.sequence)
        return Keep("only examined")

    with er.saving(policy, min_nbytes=0):
        y = module(x)
    y.square().sum().backward()
    return found


def chain(*modules):
    return nn.Sequential(*modules)


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (chain(nn.Linear(C, C), nn.Linear(C, C)), (B, T, C), {"linear": -2}),
        (chain(nn.Linear(C, C), nn.LayerNorm(C)), (B, T, C), {"layer_norm": -2}),
        (chain(nn.Linear(C, C), nn.GELU()), (B, T, C), {"gelu": -2}),
        (chain(nn.Linear(C, C), Rows()), (B, T, C), {"addmm": -2}),
        (Heads(), (B, T, C), {"scaled_dot_product_attention": -2}),
        (chain(nn.Conv1d(C, C, 1), nn.Conv1d(C, C, 3)), (B, C, T), {"conv1d": -1}),
        (chain(nn.Conv1d(C, C, 1), nn.BatchNorm1d(C)), (B, C, T), {"batch_norm": -1}),
        (chain(nn.Conv1d(C, C, 1), nn.GELU()), (B, C, T), {"gelu": -1}),
        (chain(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3)), (B, 4, 16, 16), {"conv2d": None}),
        (chain(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)), (B, 4, 16, 16), {"batch_norm": None}),
    ],
    ids=lambda value: "" if not isinstance(value, dict) else str(value),
)
def test_the_op_tells_where_the_sequence_lies(module, shape, expected):
    found = sequences(module, torch.randn(shape, requires_grad=True))
    assert found.items() >= expected.items()


def test_a_profile_keeps_it(tmp_path):
    model = chain(nn.Linear(C, C), nn.GELU(), nn.Linear(C, C))
    x = torch.randn(B, T, C, requires_grad=True)
    profile = er.measure(lambda: model(x).sum().backward(), min_nbytes=0)
    profile.save(tmp_path / "profile.json")
    again = type(profile).load(tmp_path / "profile.json")
    sites = [save.site for storage in again.storages for save in storage.saves]
    assert {site.facts.sequence for site in sites if site.consumer == "linear"} >= {-2}
