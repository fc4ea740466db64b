"""Forwards that change parameters: er.fit may run them again, and they change once a step."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er

_KEEP = 0.9


@torch.no_grad()
def _in_place(p: Tensor, q: Tensor) -> None:
    p.mul_(_KEEP).add_(q, alpha=1 - _KEEP)


def _other_memory(p: Tensor, q: Tensor) -> None:
    p.data = p.data * _KEEP + q.data * (1 - _KEEP)


def _by_data(p: Tensor, q: Tensor) -> None:
    p.data.mul_(_KEEP).add_(q.data, alpha=1 - _KEEP)


@torch.no_grad()
def _by_list(p: Tensor, q: Tensor) -> None:
    torch._foreach_lerp_([p], [q], 1 - _KEEP)


@torch.no_grad()
def _by_out(p: Tensor, q: Tensor) -> None:
    torch.lerp(p, q, 1 - _KEEP, out=p)


@torch.no_grad()
def _by_index(p: Tensor, q: Tensor) -> None:
    p[...] = _KEEP * p + (1 - _KEEP) * q


_WAYS = (_in_place, _other_memory, _by_data, _by_list, _by_out, _by_index)
Follow = Callable[[Tensor, Tensor], None]


class _Momentum(nn.Module):
    """A network and a twin that follows it, as in MoCo and BYOL."""

    def __init__(self, follow: Follow, *, twin_of_its_own: bool) -> None:
        super().__init__()
        layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())]
        self.online = nn.Sequential(*layers)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.target[0].register_buffer("steps", torch.zeros(()))
        self.head = nn.Sequential(_Followed(128, follow), nn.GELU()) if twin_of_its_own else None
        self.follow = follow

    def forward(self, x: Tensor) -> Tensor:
        for p, q in zip(self.target.parameters(), self.online.parameters(), strict=True):
            self.follow(p, q)
        with torch.no_grad():
            target = self.target(x)
        out = self.online(x) if self.head is None else self.head(self.online(x))
        return (out - target).square().mean() + self.online(x.flip(0)).square().mean()


class _Followed(nn.Linear):
    """A layer that holds, and changes, an average of its own weight."""

    def __init__(self, width: int, follow: Follow) -> None:
        super().__init__(width, width)
        self.average = nn.Parameter(self.weight.detach().clone(), requires_grad=False)
        self.follow = follow

    def forward(self, x: Tensor) -> Tensor:
        self.follow(self.average, self.weight)
        return super().forward(x) + nn.functional.linear(x, self.average)


def _trained(model: nn.Module, x: Tensor, steps: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for _ in range(steps):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("follow", "twin_of_its_own"), [*((way, False) for way in _WAYS), (_by_data, True)]
)
def test_a_momentum_encoder_moves_once_a_step(follow: Follow, twin_of_its_own: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(1024, 128)
    model = _Momentum(follow, twin_of_its_own=twin_of_its_own)
    fitted, measured = copy.deepcopy(model), copy.deepcopy(model)
    static = sum(p.nbytes for p in model.parameters())
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    peak = er.peak(lambda: _trained(measured, x, 1))
    losses, weights = _trained(model, x)
    er.fit(fitted, budget=static + gradients + int(0.66 * (peak - gradients)), exact=True)
    again = _trained(fitted, x)
    assert er.summary(fitted).setting != "keep"  # else nothing ran twice
    assert all(map(torch.equal, losses, again[0]))
    assert all(map(torch.equal, weights, again[1]))


def test_frozen_weights_that_nobody_changes_are_not_copied() -> None:
    from elbowroom.runtime.undo import Undo

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    x = torch.randn(4, 64)

    def forward() -> Tensor:
        with torch.no_grad():
            model[1].weight.data.mul_(2)
        return model(x)

    before = [p.clone() for p in model.parameters()]
    undo = Undo(model, ())
    undo.watching(forward)()
    assert undo.copied_nbytes == model[1].weight.nbytes
    undo.back()
    assert all(map(torch.equal, before, model.parameters()))


class _Normed(nn.Module):
    """Embeddings whose rows the forward scales down in place to a norm of at most 1."""

    def __init__(self, *, bags: bool) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(300, 128, 1.0) if bags else nn.Embedding(300, 128, 0, 1.0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in "1234")

    def forward(self, indices: Tensor) -> Tensor:
        x = self.embedding(indices)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.parametrize("bags", [False, True])
def test_rows_of_an_embedding_are_scaled_to_their_norm_once_a_step(bags: bool) -> None:
    torch.manual_seed(0)
    indices = torch.randint(0, 300, (2048, 3) if bags else (2048,))
    model = _Normed(bags=bags)
    fitted, measured = copy.deepcopy(model), copy.deepcopy(model)
    peak = er.peak(lambda: _trained(measured, indices, 1))
    losses, weights = _trained(model, indices)
    er.fit(fitted, budget=int(0.75 * peak), exact=True)
    again = _trained(fitted, indices)
    assert er.summary(fitted).setting != "keep"
    assert all(map(torch.equal, losses, again[0]))
    assert all(map(torch.equal, weights, again[1]))
    er.release(fitted)
