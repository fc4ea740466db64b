"""Forwards that do more than return a result: caches, dictionaries, generators, collected outputs.

`er.fit` runs a forward again to plan it, and modules again to try and to recompute them. Nothing
outside may see that, and no bit may differ. Each net here does one thing that public models do.
"""

import contextvars
import copy
import gc
import logging
import pkgutil
from contextlib import suppress
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom import errors
from elbowroom.fitting import planner, planner_settings
from elbowroom.fitting.forward import FittedSaving
from elbowroom.fitting.session import Fitting
from elbowroom.measure import peak
from elbowroom.plan import Exact
from elbowroom.runtime.arguments import Arguments
from elbowroom.runtime.attach import opener_of
from elbowroom.runtime.context import Context
from elbowroom.runtime.repeats import Unrepeatable, why_not_again
from elbowroom.runtime.replay.tracer import Unwritable
from elbowroom.runtime.saving import Saving
from elbowroom.tools.discovery import Unseen

STEPS, ROWS, WIDTH = 5, 256, 32
COLLECTED = []
COLLECTOR = contextvars.ContextVar("collector")


@pytest.fixture(autouse=True)
def nothing_stays_collected(nothing_stays_attached):
    yield
    COLLECTED.clear()
    COLLECTOR.set([])  # its outputs hold graphs, and these the recorder of a refused step


class Block(nn.Module):
    """Saves much more than it is given; `acts` is what else it does."""

    def __init__(self, acts):
        super().__init__()
        sizes = (WIDTH, 4 * WIDTH, 4 * WIDTH, WIDTH)
        self.layers = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))
        self.acts = acts
        self.state = None
        self.kept = []

    def forward(self, x, *args, **kwargs):
        x, out = self.acts(self, x, *args, **kwargs)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if out is None else (x, out)


class Layer:
    """A cache of one block, as those of decoders: it makes its tensors when it is first used."""

    def __init__(self):
        self.keys = None

    def update(self, x):
        self.keys = x if self.keys is None else torch.cat([self.keys, x])
        return self.keys


class Cache:
    def __init__(self, layers=()):
        self.layers = list(layers)

    def update(self, i, x):
        while len(self.layers) <= i:
            self.layers.append(Layer())
        return self.layers[i].update(x)


def reads_cache(block, x, cache, place):
    return x + cache.update(place, x).mean(0), None


def returns_cache(block, x, cache, place):
    return x + cache.update(place, x).mean(0), cache


def pops(block, x, options):
    return x * options.pop("scale", 100.0), None


def appends(block, x, found):
    found.append(x.mean())
    return x / len(found), found


def appends_to_itself(block, x):
    block.kept.append(x.square().mean())
    return x, None


def appends_to_a_global(block, x):
    COLLECTED.append(x.square().mean())
    return x, None


def appends_to_a_context(block, x):
    COLLECTOR.get().append(x.square().mean())
    return x, None


def goes_on(block, x):
    """From the state that its last call has left, as a recurrent net over parts of a sequence."""
    state = torch.zeros_like(x) if block.state is None else block.state
    block.state = 0.5 * (state + x).detach()
    return x + block.state, None


def counts_in_a_tensor(block, x):
    if block.state is None:
        block.state = torch.ones(())
    block.state += 1
    return x / block.state, None


def changes_what_it_gets(block, x):
    return x.mul_(0.5), None


def changes_what_it_gets_through_data(block, x):
    x.data.mul_(0.5)
    return x, None


def counts_in_a_tensor_through_numpy(block, x):
    if block.state is None:
        block.state = torch.ones(())
    block.state.numpy()[...] += 1
    return x / float(block.state), None


def hooks_what_it_gets(block, x):
    if x.requires_grad:
        x.register_hook(lambda gradient: 0.7 * gradient)
    return x, None


def hooks_its_weight_once(block, x):
    if block.state is None:
        block.state = torch.zeros(())
        block.layers[0].weight.register_hook(lambda gradient: 0.5 * gradient)
    return x, None


def plain(block, x):
    return x, None


def takes_items(block, x, items):
    return x * next(items), None


class Net(nn.Module):
    """Blocks one after another; what those that act are handed besides x is for `given` to say."""

    def __init__(self, acts, given=lambda net: lambda place: ((), {}), acting=5):
        super().__init__()
        self.blocks = nn.ModuleList(Block(acts if i < acting else plain) for i in range(5))
        self.given, self.acting = given, acting

    def forward(self, x):
        give = self.given(self)
        for place, block in enumerate(self.blocks):
            args, kwargs = give(place) if place < self.acting else ((), {})
            out = block(1 * x, *args, **kwargs)
            x = x + (out[0] if isinstance(out, tuple) else out)
        return x


def shared_cache(net):
    net.cache = Cache()
    return lambda place: ((), {"cache": net.cache, "place": place})


def shared_list(net):
    net.found = []
    return lambda place: ((net.found,), {})


def options(net):
    return lambda place: (({"scale": 0.5 + place},), {})


def items(net):
    one = (0.5 + i for i in range(len(net.blocks)))
    return lambda place: ((one,), {})


NETS = {
    "a cache for all blocks": lambda: Net(reads_cache, shared_cache),
    "a cache that is returned": lambda: Net(returns_cache, shared_cache),
    "a dictionary that loses an entry": lambda: Net(pops, options),
    "a list that is appended to and returned": lambda: Net(appends, shared_list),
    "a list of the module": lambda: Net(appends_to_itself, acting=2),
    "a global list": lambda: Net(appends_to_a_global, acting=2),
    "a list in a context variable": lambda: Net(appends_to_a_context, acting=2),
    "a state that goes on": lambda: Net(goes_on),
    "a tensor that counts": lambda: Net(counts_in_a_tensor, acting=2),
    "an input in place": lambda: Net(changes_what_it_gets, acting=2),
    "a generator": lambda: Net(takes_items, items, acting=2),
    **(
        UNCOUNTED := {
            "an input through its data": lambda: Net(changes_what_it_gets_through_data, acting=2),
            "a tensor that counts, through NumPy": lambda: Net(
                counts_in_a_tensor_through_numpy, acting=2
            ),
            "a hook on its input": lambda: Net(hooks_what_it_gets),
            "a hook on a weight": lambda: Net(hooks_its_weight_once, acting=2),
        }
    ),
}
ARE_RECOMPUTED = {
    "a cache for all blocks",
    "a cache that is returned",
    "a dictionary that loses an entry",
    "a list that is appended to and returned",
    "a list of the module",
    "a state that goes on",
    "a hook on its input",
}


def collected(model):
    """What forward has left behind outside of its result, in numbers."""
    found = [*COLLECTED, *COLLECTOR.get([]), *getattr(model, "found", [])]
    if hasattr(model, "cache"):
        found += [layer.keys.sum() for layer in model.cache.layers]
    for block in getattr(model, "blocks", []):
        found += block.kept
        found += [] if block.state is None else [block.state.sum()]
    return torch.stack(found) if found else torch.zeros(1)


def square(model, *given):
    return model(*given).square().mean()


def trained(make, budget=None, loss_of=square, batch=lambda: (torch.randn(ROWS, WIDTH),)):
    """Of each step loss, gradients, and what was collected. The collected is part of the loss."""
    torch.manual_seed(0)
    COLLECTOR.set([])
    COLLECTED.clear()
    model, found = make(), []
    if budget is not None:
        er.fit(model, budget=budget, exact=True, min_nbytes=4096)
    for seed in range(STEPS):
        model.zero_grad()
        COLLECTOR.get().clear()
        COLLECTED.clear()
        for block in getattr(model, "blocks", []):
            block.kept.clear()
        torch.manual_seed(seed)
        loss = loss_of(model, *batch())
        beside = collected(model)
        (loss + beside.mean()).backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([loss.detach(), beside.detach(), *gradients, collected(model).detach()])
    return model, found


def plain_nbytes():
    model, x = Net(plain), torch.randn(ROWS, WIDTH)
    held = sum(p.nbytes for p in model.parameters())
    return held + peak(lambda: model(x).square().mean().backward())


def assert_same(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        assert len(one) == len(other)
        for x, y in zip(one, other, strict=True):
            assert x.shape == y.shape
            assert torch.equal(x, y)


@pytest.mark.parametrize("name", UNCOUNTED)
def test_what_raises_no_version_is_done_once(name):
    ours = trained(NETS[name], int(0.7 * plain_nbytes()))[1]
    assert_same(ours, trained(NETS[name])[1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", [0.85, 0.7])
@pytest.mark.parametrize("name", NETS)
def test_what_a_block_does_besides_is_done_once(name, share):
    expected = trained(NETS[name])[1]
    try:
        model, ours = trained(NETS[name], int(share * plain_nbytes()))
    except er.errors.BudgetTooSmall:
        assert name not in ARE_RECOMPUTED
        return
    assert_same(ours, expected)
    assert opener_of(model).planner.recompute


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a global list", "it changes what outlives its call (a 'list')"),
        ("a list in a context variable", "it changes what outlives its call (a 'list')"),
        ("an input in place", "it changes a tensor in place that it is given"),
        ("a generator", "it is given a 'generator', which gives its items only once"),
    ],
)
def test_what_cannot_run_twice_is_not_recomputed_and_said(name, why, caplog):
    caplog.set_level(logging.WARNING, "elbowroom")
    COLLECTOR.set([])
    model, x = NETS[name](), torch.randn(ROWS, WIDTH)
    names = {"blocks.1", "blocks.4"}
    torch.manual_seed(0)
    with Saving(Exact(), min_nbytes=0, context=Context(), recompute=names):
        model(x.clone()).square().mean().backward()
    assert f"module 'blocks.1' is not recomputed: {why}. What it saves is held" in caplog.text
    ours, left = [p.grad for p in model.parameters()], collected(model)
    COLLECTOR.set([])
    COLLECTED.clear()
    again = NETS[name]()
    again.load_state_dict(model.state_dict())
    again(x.clone()).square().mean().backward()
    assert all(map(torch.equal, ours, [p.grad for p in again.parameters()]))
    assert torch.equal(left, collected(again))


# --- What others see: hooks, and the objects that a model is handed


def hooked(register):
    def make():
        net = Net(plain)
        for block in net.blocks[:2]:
            register(net, block)
        return net

    return make


def into_a_global(net, block):
    block.register_forward_hook(lambda module, args, out: COLLECTED.append(out.mean()))


def into_a_closure(net, block):
    found = net.__dict__.setdefault("found", [])
    block.register_forward_hook(lambda module, args, out: found.append(out.mean()))


def into_a_context(net, block):
    def collect(module, args, out):
        COLLECTOR.get().append(out.mean())

    block.register_forward_hook(collect)


def into_an_object(net, block):
    class Keeper:
        def __init__(self, found):
            self.found = found

        def __call__(self, module, args, out):
            self.found.append(out.mean())

    block.layers[1].register_forward_hook(Keeper(net.__dict__.setdefault("found", [])))


def what_comes_in(net, block):
    block.register_forward_pre_hook(lambda module, args: COLLECTED.append(args[0].mean()))


def installed_by_forward(net, block):
    """As transformers does: once, in the first forward, by a flag."""

    def install(module, args):
        if not getattr(net, "is_installed", False):
            net.is_installed = True
            for one in net.blocks[:2]:
                into_a_global(net, one)

    if block is net.blocks[0]:
        net.register_forward_pre_hook(install)


HOOKS = [
    into_a_global,
    into_a_closure,
    into_a_context,
    into_an_object,
    what_comes_in,
    installed_by_forward,
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", [0.85, 0.7])
@pytest.mark.parametrize("register", HOOKS)
def test_hooks_collect_each_output_once(register, share):
    def clears(model, x):
        getattr(model, "found", []).clear()
        return square(model, x)

    expected = trained(hooked(register), loss_of=clears)[1]
    with suppress(er.errors.BudgetTooSmall):
        ours = trained(hooked(register), int(share * plain_nbytes()), loss_of=clears)[1]
        assert_same(ours, expected)


class Handed(nn.Module):
    """A net whose own forward does something to what it is handed."""

    def __init__(self, does):
        super().__init__()
        self.net, self.does = Net(plain), does

    def forward(self, *args, **kwargs):
        return self.net(self.does(*args, **kwargs))


def x_and(*others):
    return lambda: (torch.randn(ROWS, WIDTH), *(other() for other in others))


MODELS = {
    "a dictionary": (lambda batch: batch.pop("x"), lambda: ({"x": torch.randn(ROWS, WIDTH)},)),
    "a list": (lambda x, found: found.append(x) or x / len(found), x_and(list)),
    "an object": (lambda x, cache: x + cache.update(0, x).mean(0), x_and(Cache)),
    "a generator": (
        lambda parts: torch.cat(list(parts)),
        lambda: (torch.randn(ROWS // 4, WIDTH) for _ in range(4)),
    ),
    "a tensor in place": (lambda x: x.mul_(0.5), x_and()),
    "a tensor through its data": (lambda x: x.data.mul_(0.5) + 0 * x, x_and()),
    "a tensor through NumPy": (lambda x: np.multiply(x, 0.5, out=x.numpy()) is None or x, x_and()),
    "a set": (lambda x, seen: x / (len(seen) + (seen.add(len(seen)) or 1)), x_and(set)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", [0.85, 0.7])
@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_is_handed_is_handed_to_it_once(name, share):
    does, batch = MODELS[name]
    if name == "a generator":
        batch = lambda make=batch: (make(),)  # noqa: E731
    expected = trained(lambda: Handed(does), batch=batch)[1]
    with suppress(er.errors.BudgetTooSmall):
        ours = trained(lambda: Handed(does), int(share * plain_nbytes()), batch=batch)[1]
        assert_same(ours, expected)


class SumsGradients(nn.Module):
    """Runs a backward inside, which gives its input a gradient."""

    def __init__(self):
        super().__init__()
        self.net = Net(plain)

    def forward(self, x):
        out = self.net(x)
        out.mean().backward(retain_graph=True)
        return out


def hooks_what_it_is_handed():
    return Handed(lambda x: (x.register_hook(lambda gradient: 0.5 * gradient) and None) or x)


@pytest.mark.parametrize("make", [hooks_what_it_is_handed, SumsGradients])
def test_what_is_handed_has_the_gradient_of_plain_training(make):
    def gradients(budget=None):
        torch.manual_seed(0)
        model = make()
        if budget is not None:
            er.fit(model, budget=budget, exact=True, min_nbytes=4096)
        found = []
        for seed in range(STEPS):
            torch.manual_seed(seed)
            x = torch.randn(4 * ROWS, WIDTH, requires_grad=True)
            model.zero_grad()
            model(x).square().mean().backward()
            found.append([x.grad, *(p.grad.clone() for p in model.parameters())])
        return found

    model, x = make(), torch.randn(4 * ROWS, WIDTH, requires_grad=True)
    held = sum(p.nbytes for p in model.parameters())
    nbytes = held + peak(lambda: model(x).square().mean().backward())
    assert_same(gradients(int(0.8 * nbytes)), gradients())


class SumsUp(nn.Module):
    """Adds in place what its blocks give to a tensor that had no graph until then."""

    def __init__(self):
        super().__init__()
        self.net = Net(plain)
        self.register_buffer("total", torch.zeros(WIDTH), persistent=False)
        self.memory = torch.zeros(WIDTH)

    def forward(self, x, total):
        for block in self.net.blocks:
            x = x + block(x)
            total.add_(x.mean(0))
        return x + total


def sum_of(kind, model):
    if kind == "an argument":
        return torch.zeros(WIDTH)
    if kind == "a view":
        return torch.zeros(2, WIDTH)[1]
    name = {"a buffer": "total", "an attribute": "memory"}[kind]
    setattr(model, name, torch.zeros(WIDTH))
    return getattr(model, name)


def sums_up(kind):
    def loss_of(model, x):
        total = sum_of(kind, model)
        return model(x, total).square().mean() + total.square().mean()

    return loss_of


@pytest.mark.parametrize("share", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["an argument", "a buffer", "an attribute"])
def test_a_tensor_that_gets_a_graph_in_place_has_only_that_of_the_real_forward(kind, share):
    expected = trained(SumsUp, loss_of=sums_up(kind))[1]
    ours = trained(SumsUp, int(share * plain_nbytes()), loss_of=sums_up(kind))[1]
    assert_same(ours, expected)


def test_a_view_that_gets_a_graph_in_place_cannot_leave_it():
    with pytest.raises(errors.PlanError, match=r"changed a tensor in place .* \(32,\)"):
        trained(SumsUp, int(0.7 * plain_nbytes()), loss_of=sums_up("a view"))


# --- Nothing of ours is left


def test_a_graph_with_a_cache_dies_without_the_garbage_collector():
    model, x = Net(reads_cache, shared_cache), torch.randn(ROWS, WIDTH)
    names = {f"blocks.{i}" for i in range(5)}
    gc.collect()
    gc.disable()
    try:
        with Saving(Exact(), min_nbytes=0, context=Context(), recompute=names) as saving:
            y = model(x)
        assert saving.ledger.held_nbytes > 0
        del y, model.cache
        assert saving.ledger.held_nbytes == 0
    finally:
        gc.enable()


def ask(module, *args, **kwargs):
    return why_not_again(module, module.__call__, Arguments(args, kwargs))


def test_a_trial_changes_no_tensor_that_a_module_is_given_or_keeps():
    x, hidden = torch.randn(4, WIDTH), torch.ones(3)

    def acts(block, x):
        hidden.mul_(2)
        return x.add_(1), None

    before = x.clone()
    assert "in place" in ask(Block(acts), x)
    assert torch.equal(x, before)
    assert x._version == 0
    assert torch.equal(hidden, torch.ones(3))
    assert hidden._version == 0


def test_a_tensor_that_counts_is_found():
    block = Block(counts_in_a_tensor)
    block.state = torch.ones(())
    assert "it changes what outlives its call (a 'tensor')" in ask(block, torch.randn(4, WIDTH))
    assert block.state == 1


def test_a_trial_that_raises_is_no_error_of_the_step():
    def acts(block, x):
        assert x is expected
        return x, None

    expected = torch.randn(4, WIDTH)
    assert "it raised AssertionError when it was tried" in ask(Block(acts), expected)


def test_a_generator_of_random_numbers_may_be_an_argument():
    def acts(block, x, generator):
        return x * torch.rand(x.shape, generator=generator), None

    def gradients(names):
        torch.manual_seed(0)
        block, generator = nn.ModuleList([Block(acts)]), torch.Generator().manual_seed(1)
        block.forward = lambda x: block[0](x, generator)
        with Saving(Exact(), min_nbytes=0, context=Context(), recompute=names):
            loss = block(torch.ones(8, WIDTH)).square().mean()
        torch.rand(8, generator=generator)
        loss.backward()
        return [p.grad for p in block.parameters()]

    assert all(map(torch.equal, gradients({"0"}), gradients(())))


def test_what_is_kept_of_a_trial_says_so_in_backward():
    found = []

    class Sends(nn.Linear):
        send = staticmethod(found.append)  # a function of C: nobody sees where it leads

        def forward(self, x):
            y = super().forward(x).tanh()
            self.send(y)
            return y

    ask(Sends(8, 8), torch.randn(4, 8))
    with pytest.raises(errors.NothingHeld, match="graph of a trial"):
        found[0].sum().backward()


# --- Errors


def exceptions():
    """All exception classes of the package, by the module that defines them."""
    packages = pkgutil.walk_packages(er.__path__, "elbowroom.")
    names = [one.name for one in packages if not one.name.endswith(("__main__", ".triton"))]
    for name in names:
        if ".triton." in name:
            continue
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:  # of a framework that is not installed
            is_theirs = not str(error.name).startswith("elbowroom")
            if not (is_theirs and name.startswith("elbowroom.integrations.")):
                raise
            continue
        for one in vars(module).values():
            is_class = isinstance(one, type) and issubclass(one, BaseException)
            if is_class and one.__module__ == name:
                yield one


def test_every_exception_of_the_package_is_public_or_waited_for():
    """A class that `elbowroom.errors` does not define has a test of its own that it is caught."""
    private = {one for one in exceptions() if one.__module__ != "elbowroom.errors"}
    kinds = {one.__qualname__: one.__bases__ for one in private}
    assert kinds == {
        "Unrepeatable": (BaseException,),  # below
        "Unwritable": (Exception,),  # a forward that nothing can follow: the next is examined
        "OnceUnwritable": (Unwritable,),  # likewise
        "_Different": (Exception,),  # two scripts that are not to become one: test_numbers_of_rows
        "NoScript": (errors.DataError,),  # likewise
        "Unseen": (errors.PlanError,),  # of a script: the command line shows its message
        "_Refused": (Unseen,),  # likewise
        "_Hostile": (Exception,),  # in a snapshot: test_snapshot.py
        "_AllMade": (BaseException,),  # ends the second run of a module: test_rerun.py
        "NothingCompiled": (Exception,),  # Dynamo runs all as it is: test_compiled_inside.py
        "_Enough": (SystemExit,),  # the command line ends a script that has run for long enough
    }


class Swallows(nn.Module):
    """Handles all that happens inside of it."""

    def __init__(self):
        super().__init__()
        self.net = Net(appends_to_a_global, acting=2)

    def forward(self, x):
        try:
            return self.net(x)
        except:  # noqa: E722 - on purpose
            return x * next(self.net.parameters()).sum()


SHARE = 0.6  # low enough that modules run again


@pytest.mark.parametrize("make", [NETS["a global list"], Swallows])
def test_that_a_forward_begins_again_is_seen_by_nobody(make, monkeypatch):
    raised = []
    plain_init = Unrepeatable.__init__
    monkeypatch.setattr(
        Unrepeatable, "__init__", lambda self, *a: raised.append(1) or plain_init(self, *a)
    )
    with suppress(er.errors.BudgetTooSmall):
        ours = trained(make, int(SHARE * plain_nbytes()))[1]
        assert_same(ours, trained(make)[1])
    assert raised


def test_a_forward_that_begins_again_is_planned_by_the_rehearsal_that_there_was(monkeypatch):
    ran = {"rehearsed": 0, "tried": 0}

    def counted(name, run):
        def counts(*args, **kwargs):
            ran[name] += 1
            return run(*args, **kwargs)

        return counts

    monkeypatch.setattr(planner, "rehearse", counted("rehearsed", planner.rehearse))
    monkeypatch.setattr(Fitting, "_kept", counted("tried", Fitting._kept))
    monkeypatch.setattr(FittedSaving, "_finished", Saving._finished)  # which notes linear layers
    with suppress(er.errors.BudgetTooSmall):
        trained(NETS["a global list"], int(SHARE * plain_nbytes()))
    assert ran == {"rehearsed": 1, "tried": 1}


def test_a_fault_in_a_plan_is_said_and_the_training_goes_on(monkeypatch, caplog):
    def fails(*args, **kwargs):
        raise IndexError("a fault of a planner")

    layers = (nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH)) * 3
    model, x = nn.Sequential(*copy.deepcopy(layers)), torch.randn(ROWS, WIDTH)
    nbytes = peak(lambda: model(x).sum().backward())
    model.zero_grad()
    model(x).sum().backward()
    truth = [p.grad.clone() for p in model.parameters()]
    monkeypatch.setattr(planner_settings, "make_plan", fails)
    er.fit(model, budget=int(0.9 * nbytes), exact=True, min_nbytes=4096)
    with caplog.at_level(logging.DEBUG, logger="elbowroom"):
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), truth, strict=True))
    said = "this step could not be planned (IndexError: a fault of a planner)"
    assert sum(said in record.getMessage() for record in caplog.records) == 1
    assert any(record.exc_info for record in caplog.records)


def test_without_somebody_who_begins_again_it_is_not_raised():
    class Follows:
        redoes = False

    saving = object.__new__(FittedSaving)
    saving._fit, saving.context, saving._begins_again = Follows(), Context(), False
    saving.keep_out(nn.Identity(), "a", "it is a test")
    assert saving.context.unrepeatable == {"a"}


def test_what_cannot_be_undone_is_said():
    state = torch.zeros(1 << 23)

    def acts(x):
        state.add_(1)
        return x

    handed = Handed(acts)
    er.fit(handed, budget=int(0.85 * plain_nbytes()), exact=True, min_nbytes=4096)
    with pytest.raises(errors.PlanError, match=r"changed a tensor in place .* \(8388608,\)"):
        handed(torch.randn(ROWS, WIDTH))
