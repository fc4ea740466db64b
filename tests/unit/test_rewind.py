"""What a module holds, as it is asked for in each examined step."""

import pytest
from torch import nn

from elbowroom.runtime.reach import Reach
from elbowroom.runtime.rewind import parameters_in


class Shares(nn.Module):
    """Children that stand in each other, a weight that two have, and a child that is None."""

    def __init__(self):
        super().__init__()
        inner = nn.Linear(2, 2)
        self.outer = nn.Sequential(inner, nn.ReLU())
        self.inner, self.none = inner, None
        self.all = nn.ModuleList([nn.Linear(2, 2), self.outer, nn.Linear(2, 2, bias=False)])
        self.tied = nn.Linear(2, 2)
        self.tied.weight = inner.weight
        self.register_module("nothing", None)
        self.own = nn.Parameter(nn.Linear(1, 1).weight)


class Names(nn.Module):
    """Gives other parameters than it holds, as a wrapper may."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def parameters(self, recurse=True):
        return iter([self.inner.bias])


@pytest.mark.parametrize("make", [Shares, Names, lambda: nn.TransformerDecoderLayer(8, 2)])
def test_parameters_are_those_of_torch_in_its_order(make):
    model = make()
    assert [*map(id, parameters_in(model))] == [*map(id, model.parameters())]


def test_what_a_module_and_its_tables_hold_is_put_back():
    model = nn.Sequential(nn.Linear(2, 2))
    before = Reach([model])
    assert before.changed() == []
    hook = model.register_forward_hook(lambda *_: None)
    model.count = 1
    model.add_module("more", nn.ReLU())
    assert before.changed() == ["Sequential"]
    before.restore()
    assert before.changed() == []
    assert (len(model), hasattr(model, "count"), len(model._forward_hooks)) == (1, False, 0)
    hook.remove()
