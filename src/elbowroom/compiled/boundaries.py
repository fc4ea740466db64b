"""Finds the values of a forward through which everything has to pass: the ends of blocks.

Going through the forward in order, the values that are still to be read are what a runner would
have to carry over at that place. Where these are few bytes, the model is narrow: between two blocks
of a transformer one tensor of the residual stream is carried, between two stages of a U-Net that
and the skip connections. Saving what is carried at narrow places cuts the recomputation of backward
into pieces, each of which is alive by itself only.
"""

from collections.abc import Sequence

from torch import fx

from elbowroom.compiled.collect import Facts, Kind


def narrow_places(
    forward: Sequence[fx.Node], facts: dict[fx.Node, Facts], outside: set[fx.Node]
) -> list[tuple[fx.Node, ...]]:
    """Returns what is carried at each narrow place of a forward, in its order.

    outside: inputs, which are resident all the time
    """
    carried = _carried(forward, facts, outside)
    sizes = [sum(facts[s].nbytes for s in storages) for storages in carried]
    largest = max(sizes, default=0)
    places: list[tuple[fx.Node, ...]] = []
    for at, size in enumerate(sizes):
        if not 0 < size <= largest / 2 or facts[forward[at]].kind is Kind.VIEW:
            continue
        before = sizes[at - 1] if at else 0
        after = sizes[at + 1] if at + 1 < len(sizes) else 0
        found = tuple(s for s in carried[at] if facts[s].nbytes * 64 >= size)
        if size <= before and size <= after and found and (not places or places[-1] != found):
            places.append(found)
    return places


def _carried(
    forward: Sequence[fx.Node], facts: dict[fx.Node, Facts], outside: set[fx.Node]
) -> list[list[fx.Node]]:
    last: dict[fx.Node, int] = {}
    for at, node in enumerate(forward):
        for read in node.all_input_nodes:
            if read in facts:
                last[facts[read].storage] = at
    alive: dict[fx.Node, None] = {}
    found = []
    for at, node in enumerate(forward):
        storage = facts[node].storage
        if last.get(storage, -1) > at and storage not in outside and facts[storage].nbytes:
            alive[storage] = None
        alive = {s: None for s in alive if last[s] > at}
        found.append(list(alive))
    return found
