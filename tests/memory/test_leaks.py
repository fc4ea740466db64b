"""Nothing stays: storages die without the collector, counts return to zero, memory is flat."""

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_modules
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.demo.models import GPT, ResNet18
from elbowroom.plan import Lossy
from elbowroom.runtime.arena import ARENA
from elbowroom.runtime.tiers.choose import file_tier
from programs import looking

MODES: dict[str, Callable[[], Any]] = {
    "keep": lambda: er.saving("keep", min_nbytes=0),
    "exact": lambda: er.saving(min_nbytes=0),
    "dither": lambda: er.saving("dither", bits=2, min_nbytes=0),
    "lean": lambda: er.saving("lean", min_nbytes=0),
    "group, no rebuild": lambda: er.saving("group", bits=2, min_nbytes=0, rebuild=False),
    "lossless": lambda: er.saving("sparse_lossless", min_nbytes=0),
    "offload": lambda: er.saving("offload", from_nbytes=0, min_nbytes=0),
}
ALL_MODES = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


@pytest.fixture(autouse=True)
def without_collector(one_thread: None) -> Iterator[None]:
    """Cycles would live on: so nothing of ours may be in one."""
    torch.manual_seed(0)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Watched(nn.Module):
    """A network that notes a weak reference to every storage that its layers make."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.made: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            self.made.append(StorageWeakRef(x.untyped_storage()))
        return x

    def alive(self) -> int:
        """How many of these storages live; what a thread was just writing is written by then."""
        file_tier().flush()
        return sum(not made.expired() for made in self.made)


def network() -> Watched:
    return Watched(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3)),
        *(nn.GroupNorm(2, 4), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(100, 32)),
        *(nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.2), nn.LeakyReLU(), nn.Linear(32, 4)),
    )


def batch() -> Tensor:
    return torch.randn(8, 1, 14, 14)


@ALL_MODES
def test_after_backward_everything_is_dead(mode):
    net, saved = network(), mode()
    with saved:
        loss = net(batch()).square().sum()
    assert saved.ledger.held_nbytes == saved.ledger.after_nbytes > 0
    loss.backward()
    assert saved.ledger.held_nbytes == 0
    del loss
    assert net.alive() == 0
    assert ARENA.nbytes == 0


@ALL_MODES
def test_after_an_abandoned_forward_everything_is_dead(mode):
    net, saved = network(), mode()
    with saved:
        out = net(batch())
        del out
        assert saved.ledger.held_nbytes == 0  # while the context is open, already
    assert net.alive() == 0


@ALL_MODES
def test_after_an_error_in_forward_everything_is_dead(mode):
    net, saved = network(), mode()

    def forward() -> None:
        with saved:
            loss = net(batch()).sum()
            raise KeyError(loss.shape)

    with pytest.raises(KeyError) as raised:
        forward()
    raised.value.__traceback__ = None
    del raised
    assert saved.ledger.held_nbytes == 0
    assert net.alive() == 0


@ALL_MODES
def test_retained_graphs_free_what_is_dropped(mode):
    net, saved = network(), mode()
    with saved:
        loss = net(batch()).square().sum()
    held = saved.ledger.held_nbytes
    for _ in range(3):
        loss.backward(retain_graph=True)
        assert saved.ledger.held_nbytes == held
    del loss
    assert saved.ledger.held_nbytes == 0
    assert net.alive() == 0


@ALL_MODES
def test_an_inner_gradient_and_a_dropped_graph(mode):
    net, saved = network(), mode()
    with saved:
        h = net(batch())
        loss = F.gelu(h).square().sum()
    (g,) = torch.autograd.grad(loss, h)
    del loss, g
    assert saved.ledger.held_nbytes > 0
    del h
    assert saved.ledger.held_nbytes == 0
    assert net.alive() == 0


@pytest.mark.parametrize("name", ["exact", "dither"])
def test_lossy_and_exact_modes_let_tensors_die_in_forward(name):
    """The point of it all: what is encoded or rebuilt is dead before backward."""
    net, saved = network(), MODES[name]()
    with saved:
        out = net(batch())
    dead = len(net.made) - net.alive()
    assert dead >= (4 if name == "exact" else 10)
    del out


def test_tightened_tensors_die():
    net, saved = network(), looking("keep", min_nbytes=0)
    with saved:
        out = net(batch())
        alive, held = net.alive(), saved.ledger.held_nbytes
        saved.tighten(Lossy(er.codec("dither", bits=2)))
        assert net.alive() < alive - 3
        assert saved.ledger.held_nbytes < 0.55 * held
    out.sum().backward()
    assert saved.ledger.held_nbytes == 0


@ALL_MODES
def test_a_context_kept_open_holds_nothing_of_old_steps(mode):
    net, saved = network(), mode()
    with saved:
        for _ in range(30):
            net(batch()).square().sum().backward()
            assert saved.ledger.held_nbytes == 0
            assert net.alive() == 0
        looking = saved._parts[0]
        assert len(looking._sources.slots()) == 0
        # The records of dead storages are purged now and then.
        assert len(looking._sources._storages) <= 2 * 256
        assert looking.tracer is None or not looking.tracer._ops
    assert not looking._sources._storages


def test_checkpointed_segments_free_theirs():
    net = network()
    with er.saving("dither", bits=2, min_nbytes=0) as saved:
        loss = checkpoint(net, batch().requires_grad_(), use_reentrant=False).square().sum()
    loss.backward()
    del loss
    assert saved.ledger.held_nbytes == 0
    assert net.alive() == 0


def test_double_backward_frees_both_graphs():
    net = Watched(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))
    x = torch.randn(4, 8, requires_grad=True)
    with er.saving(min_nbytes=0) as saved:
        (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        g.square().sum().backward()
        del g
        assert saved.ledger.held_nbytes == 0
    assert net.alive() == 0


def test_nothing_is_left_in_torch():
    for mode in MODES.values():
        with mode():
            network()(batch())
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not torch_modules._global_forward_hooks
    assert not torch_modules._global_forward_pre_hooks


def test_a_model_can_die():
    """No table of ours keeps a model, its parameters or a context alive."""
    import weakref

    net = ResNet18(width=2)
    with er.saving("dither", bits=2, min_nbytes=0) as saved:
        net(torch.randn(2, 1, 28, 28)).sum().backward()
    refs = [weakref.ref(net), weakref.ref(net.head.weight), weakref.ref(net.stem)]
    weak = weakref.ref(saved)
    del net, saved
    gc.collect()  # modules hold themselves in cycles in plain torch, too
    assert [ref() for ref in refs] == [None, None, None]
    assert weak() is None


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@ALL_MODES
def test_the_number_of_live_objects_is_flat(mode):
    net = GPT(width=32, depth=1, context=16)
    x = torch.randint(0, 256, (2, 16))

    def step() -> None:
        with mode():
            loss = F.cross_entropy(net(x).flatten(0, 1), x.flatten())
        loss.backward()
        net.zero_grad()

    for _ in range(3):
        step()
    gc.collect()
    before, objects = tensors_alive(), len(gc.get_objects())
    for _ in range(20):
        step()
    assert tensors_alive() == before
    assert len(gc.get_objects()) <= objects + 50


_FLAT = """
import ctypes, gc, resource, sys, torch
from torch import nn
import elbowroom as er
ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: freed blocks go back at once
torch.set_num_threads(1)
gc.disable()
net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3),
                    nn.GELU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 576, 8))
x = torch.randn(16, 1, 28, 28)
def rss():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) * 1024
for policy, settings in [("exact", {}), ("dither", {"bits": 2}), ("offload", {"from_nbytes": 0})]:
    for step in range(220):
        with er.saving(policy, min_nbytes=0, **settings) as saved:
            loss = net(x).square().sum()
        if step % 3:
            loss.backward()
        net.zero_grad()
        if step == 20:
            before = rss()
        last = saved.ledger.before_nbytes
    print(policy, rss() - before, last)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_flat_over_200_steps():
    """A third of the steps is abandoned. One leaked tensor a step would be 200 times 50 KiB.

    Of each policy by itself, in one process: to start one takes longer than its steps.
    """
    source = os.path.dirname(os.path.dirname(er.__file__))
    run = subprocess.run(
        [sys.executable, "-c", _FLAT],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    assert [policy for policy, *_ in lines] == ["exact", "dither", "offload"]
    for policy, *figures in lines:
        grown, saved_nbytes = map(int, figures)
        assert saved_nbytes > 2**20
        assert grown < 2 * saved_nbytes < 200 * 50 * 1024, policy


@pytest.mark.parametrize("policy", ["keep", "exact"])
def test_weights_that_another_network_makes_die_with_their_graph(policy):
    """A parameter that was written to by an op has a node, which holds what that op has saved."""
    generator = nn.Linear(4, 64)
    weight = nn.Parameter(torch.zeros(8, 8), requires_grad=False)
    with er.saving(policy, min_nbytes=0):
        weight.copy_(generator(torch.randn(4)).view(8, 8)).tanh_()
        nn.functional.linear(torch.randn(2, 8), weight).sum()
    alive = weakref.ref(weight)
    del weight
    gc.collect()
    assert alive() is None
