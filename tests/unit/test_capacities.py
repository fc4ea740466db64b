"""How much memory payloads of unknown size get, and where the rest of one goes that needs more."""

import threading

import pytest
import torch
from torch import Tensor

from elbowroom.codecs import Dither, Facts
from elbowroom.codecs.room import Space
from elbowroom.kernels import ops
from elbowroom.plan import Encode, Need
from elbowroom.runtime import capacities as capacities_module
from elbowroom.runtime import late
from elbowroom.runtime.capacities import Capacities, HostSpill, NoSpill, can_spill
from elbowroom.runtime.context import Context
from elbowroom.runtime.ledger import Ledger
from elbowroom.runtime.serving import perform
from elbowroom.runtime.slot import CountedSlot
from waiting import no_waiting, pretended

HOST = torch.device("cpu")
MOST, TILE = 100_000, 600


@pytest.fixture(autouse=True)
def device():
    with pretended(questions=0):
        yield


def learned(capacities: Capacities, site: str, size: int) -> None:
    capacities.first(site, torch.zeros(size, dtype=torch.uint8), MOST)


def step(capacities: Capacities, sizes: dict[str, int]) -> dict[str, int]:
    """One step, in which payloads come to these sizes; what each was given."""
    given = {}
    for site, size in sizes.items():
        space = capacities.space(site, MOST, TILE, HOST)
        assert space is not None
        given[site] = space.payload.numel()
        room = space.payload.numel() + space.spill.memory.numel()
        assert room >= MOST + (TILE if space.payload.numel() < MOST else 0)
        space.used.fill_(size)
    return given


def test_a_site_that_nobody_knows_has_no_room_yet():
    capacities = Capacities()
    assert capacities.space("a", MOST, TILE, HOST) is None
    memory, spill = capacities.first("a", torch.arange(100, dtype=torch.uint8), MOST)
    assert torch.equal(memory[:100], torch.arange(100, dtype=torch.uint8))
    assert 100 < len(memory) < 2000
    assert isinstance(spill, NoSpill)
    assert len(capacities.first("b", torch.zeros(100, dtype=torch.uint8), 101)[0]) == 101


def test_a_capacity_follows_what_is_needed_and_is_steady():
    capacities = Capacities()
    learned(capacities, "a", 40_000)
    learned(capacities, "b", 400)
    first = step(capacities, {"a": 40_100, "b": 400})
    assert 42_000 < first["a"] < 44_000
    assert first["b"] < 2_000
    for _ in range(5):
        assert step(capacities, {"a": 41_000, "b": 410}) == first
    assert capacities.spills == 0
    step(capacities, {"a": 60_000, "b": 400})
    for _ in range(2):  # heard of when the site after it has come again
        grown = step(capacities, {"a": 50_000, "b": 400})
    assert 60_000 < grown["a"] < 65_000
    assert (capacities.spills, capacities.spilled_nbytes) == (2, 60_000 + 50_000 - 2 * first["a"])
    for _ in range(150):
        last = step(capacities, {"a": 20_000, "b": 400})
    assert 20_000 < last["a"] < 23_000
    assert last["b"] == first["b"]


def test_one_site_that_comes_again_and_again_in_a_step():
    capacities = Capacities()
    learned(capacities, "a", 1000)
    for _ in range(3000):
        step(capacities, {"a": 1000})
    place = next(iter(capacities._places.values()))
    assert len(place._sent) + len(place._waiting) < 4


def test_many_sites_share_slots_and_no_size_is_taken_for_anothers():
    capacities, sites = Capacities(), {str(i): 500 * (i % 7 + 1) for i in range(2500)}
    for site in sites:
        learned(capacities, site, 400)
    for _ in range(3):
        given = step(capacities, sites)
    assert all(size < given[site] < 1.2 * size + 1100 for site, size in sites.items())


def test_a_spill_is_free_again_when_the_code_dies():
    capacities = Capacities()
    learned(capacities, "a", 1000)

    def some() -> list[Space]:
        spaces = []
        for _ in range(3):
            space = capacities.space("a", MOST, TILE, HOST)
            assert space is not None
            space.used.fill_(1000)
            spaces.append(space)
        return spaces

    spaces = some()
    spots = {space.spill.memory.data_ptr() for space in spaces}
    assert len(spots) == 3
    assert all(isinstance(space.spill, HostSpill) for space in spaces)
    del spaces
    assert {space.spill.memory.data_ptr() for space in some()} == spots


def test_without_pinned_memory_a_payload_gets_all_that_it_may_need(monkeypatch):
    def refuse(nbytes: int) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    capacities = Capacities()
    learned(capacities, "a", 1000)
    monkeypatch.setattr(late, "pinned", refuse)  # tried before, when there was some
    assert step(capacities, {"a": 1000}) == {"a": MOST}
    assert step(capacities, {"a": 1000}) == {"a": MOST}


def test_where_kernels_do_not_reach_host_memory_nothing_spills(monkeypatch):
    def refuse(*_: object) -> Tensor:
        raise ValueError("Pointer argument (at 3) cannot be accessed from Triton (cpu tensor?)")

    assert can_spill(HOST)
    monkeypatch.setattr(ops, "sparse_pack_into", refuse)
    assert not can_spill(HOST)
    capacities = Capacities()
    learned(capacities, "a", 1000)
    assert step(capacities, {"a": 1000}) == {"a": MOST}
    monkeypatch.undo()


def test_trainings_share_their_part_of_the_hosts_memory_and_it_outlives_them(monkeypatch):
    monkeypatch.setattr(capacities_module, "_memory_nbytes", lambda: 8 * (16 << 20))
    for _ in range(3):
        capacities = Capacities()
        learned(capacities, "a", 1000)
        assert step(capacities, {"a": 1000})["a"] < MOST
    (pool,) = capacities_module._POOLS.values()
    assert pool.pinned_nbytes == 16 << 20
    held = [capacities.space("a", 1 << 23, TILE, HOST) for _ in range(3)]
    assert [space.payload.numel() == 1 << 23 for space in held] == [False, False, True]


def test_several_threads_share_them():
    capacities, wrong = Capacities(), []

    def train(name: str) -> None:
        try:
            learned(capacities, name, 2000)
            for _ in range(200):
                step(capacities, {name: 2000})
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=train, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_ledger_counts_the_capacity():
    ledger, context = Ledger(), Context()
    x = torch.randn(50_000).relu()
    action = Encode(Dither(levels=4), Facts(has_zeros=True))
    held = []
    for number in range(4):
        slot = CountedSlot(x, ledger.open("", "", "float32", x.nbytes))
        given = action, x, Need.LOSSY, None, number
        slot.hold(perform(*given, context=context))
        payload = slot.value._encoded.buffers[1]
        held.append(ledger.held_nbytes)
        assert slot.value.nbytes == sum(b.nbytes for b in slot.value._encoded.buffers)
        assert payload.untyped_storage().nbytes() == payload.numel()
        assert ledger.held_nbytes == slot.value.nbytes
        with no_waiting():
            slot.restore_value()
        del slot, payload
    assert len(set(held)) == 1  # what a step that waits holds is what the next ones hold
    exact = perform(*given).nbytes
    assert exact < held[0] < 1.1 * exact
