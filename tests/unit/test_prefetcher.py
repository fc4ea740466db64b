"""The order in which offloaded tensors come back is learned; a wrong guess only costs time."""

import gc
import weakref

import pytest

from elbowroom.runtime.prefetcher import Orders, Prefetcher


class Handle:
    """Notes what happens to it."""

    def __init__(self, prefetcher: Prefetcher, name: str, nbytes: int = 10) -> None:
        self.name, self.away_nbytes, self.is_early = name, nbytes, False
        self.prefetcher = prefetcher
        self.place = prefetcher.put(self, name)

    def prefetch(self) -> None:
        assert not self.is_early
        self.is_early = True

    def let_go(self) -> None:
        self.is_early = False

    def ask(self) -> bool:
        """Whether it was early."""
        was, self.is_early = self.is_early, False
        self.prefetcher.asked(self.place, self, was_early=was)
        return was


@pytest.fixture
def prefetcher():
    return Prefetcher(max_tensors=2, max_nbytes=100, orders=Orders())


def put(prefetcher: Prefetcher, names: str, nbytes: int = 10) -> dict[str, Handle]:
    return {name: Handle(prefetcher, name, nbytes) for name in names}


def backward(handles: dict[str, Handle], order: str) -> str:
    """The names of those that were early."""
    early = ""
    for i, name in enumerate(order):
        early += name if handles[name].ask() else ""
        if name not in order[i + 1 :]:
            del handles[name]
    return early


def test_the_first_guess_is_the_reverse(prefetcher):
    assert backward(put(prefetcher, "abcdef"), "fedcba") == "edcba"


def test_an_order_is_learned(prefetcher):
    order = "fadbec"
    first = backward(put(prefetcher, "abcdef"), order)
    assert first != "adbec"
    for _ in range(3):
        assert backward(put(prefetcher, "abcdef"), order) == "adbec"


def test_the_next_prefetcher_knows_the_order():
    order = "fadbec"
    backward(put(Prefetcher(), "abcdef"), order)
    assert backward(put(Prefetcher(), "abcdef"), order) == "adbec"


def test_a_tensor_that_is_asked_for_twice(prefetcher):
    order = "dcdbca"
    backward(put(prefetcher, "abcd"), order)
    assert backward(put(prefetcher, "abcd"), order) == "cdbca"


def test_another_order_falls_back_and_is_learned(prefetcher):
    for order in ("dcba", "abcd"):
        backward(put(prefetcher, "abcd"), order)
    assert backward(put(prefetcher, "abcd"), "abcd") == "bcd"
    assert len(backward(put(prefetcher, "abcd"), "acbd")) >= 1
    assert (prefetcher.found, prefetcher.missed) > (0, 0)


def test_other_sites_are_another_order(prefetcher):
    backward(put(prefetcher, "abcd"), "abcd")
    backward(put(prefetcher, "wxyz"), "xwzy")
    assert backward(put(prefetcher, "abcd"), "abcd") == "bcd"
    assert backward(put(prefetcher, "wxyz"), "xwzy") == "wzy"


def test_no_more_is_early_than_the_window_holds(prefetcher):
    handles = put(prefetcher, "abcdef")
    handles["f"].ask()
    assert [name for name in handles if handles[name].is_early] == ["d", "e"]
    handles = put(prefetcher, "uvwxyz", nbytes=60)
    handles["z"].ask()
    assert [name for name in handles if handles[name].is_early] == ["y"]


def test_what_was_early_in_vain_makes_room(prefetcher):
    handles = put(prefetcher, "abcdefghijklmnop")
    handles["p"].ask()
    assert handles["o"].is_early
    handles["d"].ask()
    assert [name for name in handles if handles[name].is_early] == ["b", "c"]


def test_what_needs_nothing_is_skipped(prefetcher):
    handles = put(prefetcher, "abcdef")
    for name in "ed":
        handles[name].away_nbytes = 0
    handles["f"].ask()
    assert [name for name in handles if handles[name].is_early] == ["b", "c"]


def test_two_graphs_of_one_model_in_flight(prefetcher):
    for _ in range(2):
        one, other = put(prefetcher, "abcd"), put(prefetcher, "abcd")
        backward(other, "dcba")
        early = backward(one, "dcba")
    assert early == "dcba"


def test_retained_graphs(prefetcher):
    handles = put(prefetcher, "abcd")
    for _ in range(100):
        for name in "dcba":
            handles[name].ask()
    assert max(map(len, prefetcher._orders._known.values())) <= 16


def test_nothing_is_held(prefetcher):
    gc.disable()
    try:
        handles = put(prefetcher, "abcd")
        handles["d"].ask()
        handles["a"].ask()
        weak = [weakref.ref(handle) for handle in handles.values()]
        del handles
        assert [ref() for ref in weak] == [None] * 4
        for i in range(200):
            backward(put(prefetcher, f"a{i}"[:1] + chr(200 + i)), "a")
        assert len(prefetcher._orders._known) <= 32
        assert len(prefetcher._early) == 0
    finally:
        gc.enable()


def test_who_finds_it_busy_starts_nothing(prefetcher):
    handles = put(prefetcher, "abcd")
    with prefetcher._busy:
        handles["d"].ask()
    assert not handles["c"].is_early
    handles["c"].ask()
    assert handles["b"].is_early
