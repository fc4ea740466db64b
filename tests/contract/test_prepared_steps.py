"""A step that takes over what the last one prepared, beside one that looks at everything anew."""

import random
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from elbowroom.optim import SGD, AdamW, Lion
from elbowroom.optim.base import EncodedOptimizer


def made(rule: type[EncodedOptimizer]) -> tuple[list[nn.Parameter], EncodedOptimizer]:
    generator = torch.Generator().manual_seed(0)
    shapes = (40, 64, 2, 3), (64, 128), (64, 128), (128,), (3, 5)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    params.append(nn.Parameter(torch.randn(64, 96, generator=generator).bfloat16()))
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.02}]
    return params, rule(groups, lr=0.01, weights="sr", seed=1)


def give(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype).contiguous()


# What users and other libraries do between two steps.
Change = Callable[[list[nn.Parameter], EncodedOptimizer], object]


def put(x: Tensor, data: Tensor) -> None:
    x.data = data


def swap(params: list[nn.Parameter], o: EncodedOptimizer) -> None:
    mine = o.param_groups[0]["params"]
    mine[1], mine[2] = mine[2], mine[1]


class Spread(Tensor):
    """Looks like a DTensor."""

    def to_local(self) -> Tensor:
        return torch.ones(self.shape)


def spread(params: list[nn.Parameter], o: EncodedOptimizer) -> None:
    params[1].grad = params[1].grad.as_subclass(Spread)


def rename(params: list[nn.Parameter], o: EncodedOptimizer) -> None:
    state = o.state[params[0]]
    names, values = list(state), list(state.values())
    state.clear()
    state.update(zip(names[:1] + names[:0:-1], values, strict=True))


def give_away(params: list[nn.Parameter], o: EncodedOptimizer) -> None:
    o.state[nn.Parameter(torch.ones_like(params[-1]))] = o.state.pop(params[-1])


def view(params: list[nn.Parameter], o: EncodedOptimizer) -> None:
    state = o.state[params[1]]
    name = [name for name in state if name != "step"][-1]
    state[name] = state[name][:9]


def exchange(params: list[nn.Parameter], o: EncodedOptimizer) -> None:
    state = o.state[params[1]]
    for name in list(state):
        state[name] = state[name].clone()


CHANGES: dict[str, Change] = {
    "nothing": lambda params, o: None,
    "rate": lambda params, o: o.param_groups[0].update(lr=0.5),
    "seed": lambda params, o: o.param_groups[0].update(seed=5),
    "weights": lambda params, o: o.param_groups[1].update(weights="nearest"),
    "state": lambda params, o: o.param_groups[0].update(state="coat"),
    "another group": lambda params, o: o.param_groups.__setitem__(
        0, o.param_groups[0] | {"lr": 0.5}
    ),
    "no gradient": lambda params, o: setattr(params[1], "grad", None),
    "no other gradient": lambda params, o: setattr(params[2], "grad", None),
    "spread gradient": spread,
    "zeroed": lambda params, o: o.zero_grad(),
    "strides of a gradient": lambda params, o: put(
        params[1].grad, params[1].grad.t().contiguous().t()
    ),
    "dtype of a gradient": lambda params, o: put(params[1], params[1].data.bfloat16()),
    "sparse gradient": lambda params, o: setattr(params[1], "grad", params[1].grad.to_sparse(1)),
    "not finite": lambda params, o: params[4].grad.fill_(torch.inf),
    "negative gradient": lambda params, o: setattr(
        params[1], "grad", torch._neg_view(params[1].grad)
    ),
    "channels last": lambda params, o: put(
        params[0], params[0].data.contiguous(memory_format=torch.channels_last)
    ),
    "transposed": lambda params, o: put(params[1], params[1].data.t()),
    "another shape": lambda params, o: put(params[1], params[1].data[:32]),
    "no values": lambda params, o: put(params[1], torch.empty_like(params[1], device="meta")),
    "popped": lambda params, o: o.state.pop(params[1]),
    "copied states": exchange,
    "renamed states": rename,
    "a state of no parameter": give_away,
    "a part of a state": view,
    "a state is missing": lambda params, o: o.state[params[1]].popitem(),
    "a state of another shape": lambda params, o: put(
        next(x for name, x in o.state[params[1]].items() if name != "step"), torch.zeros(3)
    ),
    "a state in other memory": lambda params, o: put(
        (x := o.state[params[1]]["step"]), x.data.clone()
    ),
    "another counter": lambda params, o: o.state[params[1]]["step"].fill_(100),
    "other order": swap,
    "removed": lambda params, o: o.param_groups[1]["params"].pop(),
    "added": lambda params, o: o.add_param_group({"params": [nn.Parameter(torch.ones(4))]}),
    "loaded": lambda params, o: o.load_state_dict(o.state_dict()),
    "a setting of torch's": lambda params, o: o.param_groups[0].update(amsgrad=True),
    "released": lambda params, o: o.release_gradients().remove(),
}


def after(rule: type[EncodedOptimizer], names: list[str], *, prepares: bool) -> list[object]:
    """The outcome of each step, and all values in the end."""
    params, optimizer = made(rule)
    outcomes: list[object] = []
    for seed, name in enumerate(names):
        give(params, seed)
        if not prepares:
            optimizer._prepared = None
        try:
            CHANGES[name](params, optimizer)
            optimizer.step()
        except Exception as error:
            outcomes.append(f"{name}: {type(error).__name__}: {error}")
            break  # what a failed call of the user's leaves behind is another subject
        outcomes.append(optimizer.skipped)
    values = [*params, *(x for state in optimizer.state.values() for x in state.values())]
    return [*outcomes, *(None if x.is_meta else x.detach() for x in values)]


def are_alike(some: list[object], others: list[object]) -> bool:
    return len(some) == len(others) and all(
        torch.equal(a, b) and a.stride() == b.stride() if isinstance(a, Tensor) else a == b
        for a, b in zip(some, others, strict=True)
    )


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_two_steps_is_noticed(name):
    before = "no gradient" if name == "no other gradient" else "nothing"
    names = [before, before, name, "nothing"]
    anew = after(AdamW, names, prepares=False)
    assert are_alike(after(AdamW, names, prepares=True), anew)


@pytest.mark.parametrize("rule", [AdamW, Lion, SGD])
def test_changes_in_any_order_are_noticed(rule):
    rng = random.Random(rule.__name__)
    for _ in range(8):
        names = ["nothing", *rng.choices(list(CHANGES), k=5)]
        anew = after(rule, names, prepares=False)
        assert are_alike(after(rule, names, prepares=True), anew), names


def test_a_step_like_the_last_one_looks_at_no_parameter(monkeypatch):
    params, optimizer = made(AdamW)
    looked: list[int] = []
    look = EncodedOptimizer._due_one
    monkeypatch.setattr(
        EncodedOptimizer,
        "_due_one",
        lambda self, i, *more: looked.append(i) or look(self, i, *more),
    )
    for seed in range(3):
        optimizer.zero_grad()
        give(params, seed)
        optimizer.step()
    assert looked == [0, 1, 2, 3, 4, 5]


def test_no_state_and_no_gradient_is_kept_for_the_next_step():
    params, optimizer = made(AdamW)
    give(params, 0)
    optimizer.step()
    gone = [weakref.ref(p.grad) for p in params]
    gone += [weakref.ref(x) for state in optimizer.state.values() for x in state.values()]
    optimizer.zero_grad()
    optimizer.state.clear()
    assert optimizer._prepared is not None
    assert not any(ref() is not None for ref in gone)
