"""Parameters that a program changes between the op that reads them and backward.

Plain autograd accepts that of what backward does not read: a bias, and whatever is changed through
its data. Then no bit differs from it; where it raises, so do we.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.errors import RestoreError
from elbowroom.plan import Exact
from elbowroom.runtime.changed_parameters import ChangedParameters
from elbowroom.runtime.context import Context
from elbowroom.runtime.saving import Saving

WIDTH = 160
Change = Callable[["Block"], None]
CHANGES: dict[str, Change] = {
    "bias": lambda block: block.up.bias.mul_(0.9),
    "bias of a batch norm": lambda block: block.norm.bias.add_(0.1),
    "bias through its data": lambda block: block.up.bias.data.mul_(0.9),
    "other data of a bias": lambda block: setattr(block.up.bias, "data", block.up.bias * 0.9),
    "other data of a weight": lambda block: setattr(block.up.weight, "data", block.up.weight * 0.9),
    "a scale without a dimension": lambda block: block.scale.data.mul_(0.9),
    "another bias": lambda block: setattr(block.up, "bias", nn.Parameter(block.up.bias * 0.9)),
    "buffer": lambda block: block.shift.mul_(0.9),
    "freeze a weight": lambda block: block.up.weight.requires_grad_(False),
    "freeze all": lambda block: block.requires_grad_(False),
}
REFUSED: dict[str, Change] = {
    "weight": lambda block: block.up.weight.mul_(0.9),
    "weight of a batch norm": lambda block: block.norm.weight.mul_(0.9),
}


class Block(nn.Module):
    """A block of whose parameters backward reads only some."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.BatchNorm1d(2 * WIDTH)
        self.down, self.scale = nn.Linear(2 * WIDTH, WIDTH), nn.Parameter(torch.tensor(1.1))
        self.register_buffer("shift", torch.ones(2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.relu(self.norm(self.up(x))) + self.shift)
        return x + F.gelu(x).detach() * self.scale.detach()


class Net(nn.Module):
    """Blocks after each of which the forward may change something."""

    def __init__(self, change: Change | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.change = nn.ModuleList(Block() for _ in range(3)), change

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.change is not None:
                with torch.no_grad():
                    self.change(block)
        return x


def recomputing() -> Saving:
    """A context in which two blocks run again in backward, and tensors are rebuilt elsewhere."""
    names = frozenset({"blocks.0", "blocks.2"})
    return Saving(Exact(), min_nbytes=0, context=Context(learns=False), recompute=names)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "saving": lambda: er.saving(min_nbytes=0),
    "recomputing": recomputing,
}


def trained(
    change: Change,
    context: Callable[[], AbstractContextManager[Any]],
    *,
    in_forward: bool,
    fits: Callable[[nn.Module], nn.Module] = lambda model: model,
    steps: int = 4,
    rows: int = 256,
) -> list[Tensor]:
    """Trains with a change in each step; returns losses, gradients and all that the model holds."""
    net = Net(change if in_forward else None)
    model, results = fits(net), []
    for step in range(steps):
        for block in net.blocks:
            block.requires_grad_(True)
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))
        net.zero_grad()
        with context():
            loss = model(x.requires_grad_()).square().mean()
        if not in_forward:
            with torch.no_grad():
                for block in net.blocks:
                    change(block)
        loss.backward()
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        results += [loss.detach(), x.grad, *grads]
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p -= 1e-3 * p.grad
    return [*results, *(x.detach().clone() for x in net.state_dict().values())]


@pytest.mark.parametrize("in_forward", [True, False])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("change", CHANGES)
def test_no_bit_differs(change: str, context: str, *, in_forward: bool) -> None:
    plain = trained(CHANGES[change], nullcontext, in_forward=in_forward)
    ours = trained(CHANGES[change], CONTEXTS[context], in_forward=in_forward)
    assert len(plain) == len(ours)
    assert all(map(torch.equal, plain, ours))


@pytest.mark.parametrize("in_forward", [True, False])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("change", REFUSED)
def test_what_plain_autograd_refuses_is_refused(
    change: str, context: str, *, in_forward: bool
) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained(REFUSED[change], nullcontext, in_forward=in_forward)
    with pytest.raises(RestoreError, match="modified by an inplace operation"):
        trained(REFUSED[change], CONTEXTS[context], in_forward=in_forward)


def test_a_large_weight_that_forward_changes_through_its_data() -> None:
    def change(block: Block) -> None:
        block.up.weight.data.mul_(0.9)

    plain = trained(change, nullcontext, in_forward=True)
    assert all(map(torch.equal, plain, trained(change, recomputing, in_forward=True)))


def test_a_large_weight_that_is_changed_through_its_data_after_forward_is_named_once() -> None:
    """Its values could not be restored, and gradients would be wrong."""
    change, net = CHANGES["bias"], Net()
    for step in range(3):
        with recomputing():
            loss = net(torch.randn(256, WIDTH)).square().mean()
        with torch.no_grad():
            change(net.blocks[0])
            net.blocks[0].up.weight.data.mul_(0.9)
        if step == 0:
            with pytest.raises(RestoreError, match="changed after forward through its data"):
                loss.backward()
        else:  # it is copied from now on
            loss.backward()


@pytest.mark.parametrize("in_forward", [True, False])
@pytest.mark.parametrize("change", ["bias", "bias of a batch norm", "freeze all"])
def test_a_fitted_model_goes_on_and_settles(change: str, *, in_forward: bool) -> None:
    """It ended in RestoreError, or had other gradients, once its blocks ran again."""
    fitted: list[nn.Module] = []

    def fits(model: nn.Module) -> nn.Module:
        fitted.append(er.fit(model, budget=budget, exact=True))
        return fitted[-1]

    how: dict[str, Any] = {"in_forward": in_forward, "rows": 2048}
    peak = er.peak(lambda: trained(CHANGES[change], nullcontext, **how, steps=1))
    budget = int(0.6 * peak)
    plain = trained(CHANGES[change], nullcontext, **how, steps=8)
    ours = trained(CHANGES[change], nullcontext, **how, fits=fits, steps=8)
    assert all(map(torch.equal, plain, ours))
    assert all(x.isfinite().all() for x in plain)
    assert "recompute" in str(er.summary(fitted[0]))


class NormedBlock(nn.Module):
    """A block whose norm and biases are read again, by ops or as it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Normed(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(NormedBlock() for _ in range(4)))


UNSEEN: dict[str, Callable[[Any], object]] = {
    "through its data": lambda net: [block.up.bias.data.mul_(0.9) for block in net],
    "other data": lambda net: [setattr(b.up.bias, "data", b.up.bias * 0.9) for b in net],
    "through numpy": lambda net: [b.up.bias.detach().numpy().__imul__(0.9) for b in net],
    "one element": lambda net: [block.up.bias.data[-1:].mul_(0.9) for block in net],
    "signs": lambda net: [block.up.bias.data.neg_() for block in net],
    "norms": lambda net: [block.norm.weight.data.mul_(0.9) for block in net],
    "matrices": lambda net: [block.up.weight.data.mul_(0.9) for block in net],
}


@pytest.mark.parametrize("is_fitted", [False, True])
@pytest.mark.parametrize("way", UNSEEN)
def test_a_change_without_a_version_that_first_comes_in_a_settled_step(
    way: str, *, is_fitted: bool
) -> None:
    """It gave another gradient, unsaid. Now it is an error once, and right from then on."""
    net, x, around = Normed(), torch.randn(1024, WIDTH), nullcontext()
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def step(*, changes: bool) -> list[Tensor]:
        net.zero_grad()
        net.load_state_dict(before)
        with around:
            loss = net(x).square().mean()
        with torch.no_grad():
            if changes:
                UNSEEN[way](net)
        loss.backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    plain = step(changes=True)
    if is_fitted:
        er.fit(net, budget=int(0.7 * er.peak(lambda: step(changes=False))), exact=True)
    else:
        around = er.saving(min_nbytes=0)
    for _ in range(6):
        step(changes=False)
    if is_fitted or "norm" in way:
        with pytest.raises(RestoreError, match="changed after forward through its data"):
            step(changes=True)
    for _ in range(4):
        assert all(map(torch.equal, step(changes=True), plain))
    if is_fitted:
        er.release(net)


def test_a_change_in_a_step_that_differs_from_its_script_is_seen() -> None:
    """The forward changes a bias after it was read: only what replays has no copy of it."""

    class Changes(Normed):
        changes = False

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if self.changes:
                with torch.no_grad():
                    self[2].norm.bias.data.add_(0.1)
            return x * 1.5

    net, x = Changes(), torch.randn(2048, WIDTH)
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def step(around: AbstractContextManager[Any], *, changes: bool) -> list[Tensor]:
        net.zero_grad()
        net.load_state_dict(before)
        net.changes = changes
        with around:
            loss = net(x).square().mean()
        loss.backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    plain, saving = step(nullcontext(), changes=True), er.saving(min_nbytes=0)
    for _ in range(5):
        step(saving, changes=False)
    with pytest.raises(RestoreError, match="changed after forward through its data"):
        step(saving, changes=True)
    for _ in range(4):
        assert all(map(torch.equal, step(saving, changes=True), plain))


def test_the_update_of_a_step_inside_the_context_teaches_nothing() -> None:
    """All parameters were copied in every later forward of a module that runs again."""
    net, context = Net(), Context(learns=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    learned = context.learned
    for _ in range(2):
        with Saving(Exact(), min_nbytes=0, context=context, recompute=frozenset({"blocks.0"})):
            net(torch.randn(8, WIDTH)).sum().backward()
            optimizer.step()
    assert context.learned == learned


@pytest.mark.parametrize("parts", [lambda p: p.chunk(2), lambda p: p.unbind(), lambda p: list(p)])
def test_views_of_a_parameter_may_change_one_after_the_other(parts: Callable[..., Any]) -> None:
    """torch refuses to say what the graph of the second view is, once the first was changed."""

    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for part in parts(self.weight):
                    part.clamp_(-1, 1)
            return F.linear(x, self.weight).relu()

    x, gradients = torch.randn(256, WIDTH), []
    for around in (nullcontext, lambda: er.saving(min_nbytes=0)):
        torch.manual_seed(0)
        net = Clamped()
        with around():
            net(x).sum().backward()
        gradients.append(net.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("share", [2.0, 0.8])
def test_a_forward_that_replaces_a_parameter_does_so_once(share: float) -> None:
    """A trial of it left the parameter that it had made."""

    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
            self.shift = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = x + self.down(F.gelu(self.up(x))) + self.shift
            self.shift = nn.Parameter(self.shift.detach() + 0.1)
            return y

    def losses(budget: int | None) -> list[float]:
        torch.manual_seed(0)
        net, found = nn.Sequential(*(Replaces() for _ in range(4))), []
        if budget is not None:
            er.fit(net, budget=budget, exact=True)
        for _ in range(5):
            loss = net(x).square().mean()
            loss.backward()
            found.append(loss.item())
        return found

    x = torch.randn(1024, WIDTH)
    peak = er.peak(lambda: losses(None))
    assert losses(round(share * peak)) == losses(None)


def test_a_library_that_exchanges_parameters_takes_them_back_itself() -> None:
    """FSDP2 gathers weights in a forward: a trial put the stored ones back, of other shapes."""

    class Stored(nn.Parameter):
        """As a DTensor is: a class of the library's own."""

    net = nn.Linear(4, 4)
    net.weight, bias = Stored(net.weight.detach()), net.bias
    gathered = nn.Parameter(torch.randn(4, 4))
    with ChangedParameters(net) as seen:
        net.weight = gathered
    assert seen.first is None
    seen.restore()
    assert net.weight is gathered
    with ChangedParameters(net) as seen:
        net.bias = nn.Parameter(torch.zeros(4))
    assert seen.first == "bias"
    seen.restore()
    assert net.bias is bias


@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_matrix_of_a_chain_that_changes_through_its_data_is_named_once(first: int) -> None:
    """A linear layer that tensors are made again from has no copy, in no kind of step."""
    torch.manual_seed(0)
    layers = [one for _ in range(5) for one in (nn.Linear(64, 64), nn.ReLU())]
    model, x = nn.Sequential(*layers), torch.randn(1024, 64)
    weight = model[2].weight
    start = weight.detach().clone()

    def steps(context: Callable[[], AbstractContextManager[Any]]) -> list[list[Tensor] | None]:
        weight.data.copy_(start)
        found: list[list[Tensor] | None] = []
        for step in range(6):
            model.zero_grad()
            with context():
                loss = model(x).square().mean()
            if step >= first:
                weight.data.mul_(0.9)
            try:
                loss.backward()
            except RestoreError:
                found.append(None)
            else:
                found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        return found

    plain, ours = steps(nullcontext), steps(er.saving)
    assert ours.count(None) <= 1
    for one, other in zip(plain, ours, strict=True):
        assert one is not None
        assert other is None or all(map(torch.equal, one, other))
