"""Finds the values of a forward through which everything has to pass: the ends of blocks.

At each place of the forward, the values that are still to be read are carried across that place.
Where these are few bytes, the model is narrow: between two blocks of a transformer only the
residual stream is carried, between two stages of a U-Net also the skip connections. Saving the
values that are carried at narrow places splits the recomputation in backward into pieces, only one
of which is alive at a time.
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
