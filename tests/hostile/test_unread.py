"""Blocks that share a cache, as those of decoders, and read only their own part of it."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.errors import RestoreError
from elbowroom.measure import peak
from elbowroom.plan import Exact
from elbowroom.runtime.arguments import Arguments
from elbowroom.runtime.context import Context
from elbowroom.runtime.repeats import why_not_again
from elbowroom.runtime.saving import Saving
from elbowroom.runtime.unread import leave_out_unread

ROWS, WIDTH, BLOCKS = 256, 32, 6


class Cache:
    def __init__(self):
        self.keys = {}


class Block(nn.Module):
    """Adds to a cache what it has made, and reads `reads(cache, place)`."""

    def __init__(self, place, reads):
        super().__init__()
        self.place, self.reads = place, reads
        self.key, self.up = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 8 * WIDTH)
        self.drop, self.down = nn.Dropout(0.1), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x, cache=None):
        keys = self.key(x)
        if cache is not None:
            cache.keys[self.place] = keys
            keys = keys + self.reads(cache, self.place)
        return x + self.drop(self.down(torch.tanh(self.up(torch.sin(keys)))))


def own(cache, place):
    return cache.keys[place]


def first(cache, place):
    return cache.keys[0]


def uncheckpointed(block, x, cache):
    return block(x, cache)


class Decoder(nn.Module):
    def __init__(self, reads=own, way=uncheckpointed):
        super().__init__()
        self.blocks = nn.ModuleList(Block(place, reads) for place in range(BLOCKS))
        self.way = way

    def forward(self, x):
        cache = Cache()
        for block in self.blocks:
            x = self.way(block, x, cache)
        return x.square().mean()


def checkpointed(block, x, cache):
    return checkpoint(block, x, use_reentrant=False)


def batch(rows=ROWS):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))


def loss_of(model, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return model(batch())


def result(model, autocast):
    torch.manual_seed(1)
    model.zero_grad()
    loss = loss_of(model, autocast)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def step_of(model, autocast=False):
    def step():
        for p in model.parameters():
            p.grad = None
        loss_of(model, autocast).backward()

    return step


def held_nbytes(reads, rows=ROWS):
    torch.manual_seed(0)
    model = Decoder(reads)
    names = {f"blocks.{i}" for i in range(BLOCKS)}
    with Saving(Exact(), min_nbytes=0, context=Context(), recompute=names) as saving:
        loss = model(batch(rows))
    held = saving.ledger.held_nbytes
    loss.backward()
    return held


def test_a_block_that_runs_again_holds_no_keys_of_earlier_blocks():
    inputs, keys = BLOCKS * ROWS * WIDTH * 4, ROWS * 4 * WIDTH * 4
    assert held_nbytes(own) < 1.2 * inputs
    assert held_nbytes(first) >= inputs + keys


def test_a_profile_names_no_inputs_that_a_block_does_not_read():
    profile = er.measure(step_of(Decoder()))
    assert [len(call.inputs) for call in profile.modules if call.kind == "Block"] == [1] * BLOCKS


@pytest.mark.parametrize("autocast", [False, True])
def test_an_exact_plan_takes_no_more_than_checkpoints_of_all_blocks(autocast):
    torch.manual_seed(0)
    model = Decoder()
    expected = result(model, autocast)
    plain = peak(step_of(model, autocast))
    model.way = checkpointed
    result(model, autocast)
    least = peak(step_of(model, autocast))
    assert plain > 1.5 * least
    model.way = uncheckpointed
    keys = BLOCKS * ROWS * 4 * WIDTH * (2 if autocast else 4)  # which the cache holds
    held = sum(p.nbytes for p in model.parameters())
    er.fit(model, budget=int(1.02 * least) + keys + held, exact=True)
    for _ in range(4):
        ours = result(model, autocast)
    assert all(map(torch.equal, ours, expected))
    assert peak(step_of(model, autocast)) <= 1.02 * least + keys
    er.release(model)


def test_lengths_that_no_trial_has_seen_are_learned():
    torch.manual_seed(0)
    model = Decoder()
    names = {f"blocks.{i}" for i in range(BLOCKS)}

    def held(rows):
        with Saving(Exact(), min_nbytes=0, context=Context(), recompute=names) as saving:
            loss = model(batch(rows))
        nbytes = saving.ledger.held_nbytes
        loss.backward()
        return nbytes

    for _ in range(2):
        held(ROWS)
    assert held(2 * ROWS) > 1.5 * held(2 * ROWS)


def test_a_block_that_reads_another_tensor_in_its_second_run_is_an_error():
    model = Decoder(lambda cache, place: cache.keys[0 if late else place])
    names = {f"blocks.{i}" for i in range(BLOCKS)}
    late = False
    with Saving(Exact(), min_nbytes=0, context=Context(), recompute=names):
        loss = model(batch())
    late = True
    with pytest.raises(
        RestoreError, match=r"forward has not read\. Run this step|has other values"
    ):
        loss.backward()
    with Saving(Exact(), min_nbytes=0, context=Context(), recompute=names):
        late = False
        loss = model(batch())
    late = True
    with pytest.raises(RestoreError, match="has other values"):  # torch's checkpoint is silent
        loss.backward()


def test_what_a_module_gives_back_counts_as_read():
    class Returns(Block):
        def forward(self, x, cache):
            return super().forward(x, cache), cache

    block, cache = Returns(1, own), Cache()
    cache.keys[0] = torch.randn(4, WIDTH)
    arguments = Arguments((batch(4), cache), {})
    assert why_not_again(block, block.__call__, arguments) == ""
    assert leave_out_unread(block, arguments)
    assert len(arguments.tensors) == 2


def test_reads_that_function_modes_do_not_see_are_found_by_a_trial():
    def hidden(cache, place):
        with torch._C.DisableTorchFunction():
            return cache.keys[0] * 1

    model = Decoder(hidden)
    expected = result(model, autocast=False)
    names = {f"blocks.{i}" for i in range(BLOCKS)}
    with Saving(Exact(), min_nbytes=0, context=Context(), recompute=names):
        ours = result(model, autocast=False)
    assert all(map(torch.equal, ours, expected))
