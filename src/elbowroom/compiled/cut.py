"""A minimum cut of the graphs that PyTorch's partitioner makes, by Dinic's algorithm.

    networkx.minimum_cut(graph, source, sink)  -->  minimum_cut(graph, source, sink)

The same answer: of all minimum cuts the one nearest to the sink, whatever algorithm finds it. Its
far side is the set of nodes that can still reach the sink in the residual network. networkx keeps
edges in dicts of dicts, one object for each number; here they are numbers in lists, edge e and its
reverse e ^ 1.

Y. Dinitz, "Algorithm for solution of a problem of maximum flow in networks with power estimation",
Soviet Math. Doklady 11, 1970.
"""

from typing import Any

import networkx

Cut = tuple[float, tuple[set[Any], set[Any]]]


def minimum_cut(graph: "networkx.DiGraph[Any]", source: Any, sink: Any) -> Cut:
    """Returns the capacity of the cut, and the nodes before and behind it.

    Raises networkx.NetworkXUnbounded where a path has no capacity that bounds it.
    """
    if source not in graph or sink not in graph:
        return networkx.minimum_cut(graph, source, sink)  # type: ignore[no-any-return]
    network = _Network(graph)
    first, last = network.place[source], network.place[sink]
    total = 0.0
    while (steps := network.steps_to(last, first))[first] >= 0:
        total += network.fill(first, last, steps)
    behind = {name for name, at in network.place.items() if steps[at] >= 0}
    return total, (set(graph) - behind, behind)


class _Network:
    """A network, with the capacity that is left along each edge and back along it.

    place   of each node of the graph in all lists
    leaving the edges that leave a node
    """

    def __init__(self, graph: "networkx.DiGraph[Any]") -> None:
        self.place = {name: at for at, name in enumerate(graph)}
        self.leaving: list[list[int]] = [[] for _ in self.place]
        self._end: list[int] = []  # of each edge
        self._left: list[float] = []  # capacity
        for name, ends in graph.adjacency():
            start = self.place[name]
            for other, data in ends.items():
                end = self.place[other]
                self.leaving[start].append(len(self._end))
                self.leaving[end].append(len(self._end) + 1)
                self._end += [end, start]
                self._left += [data.get("capacity", float("inf")), 0.0]

    def steps_to(self, last: int, first: int) -> list[int]:
        """The least number of edges from each node to `last`; -1 where there is no way.

        Nodes further away than `first` are not visited.
        """
        left, end, leaving = self._left, self._end, self.leaving
        steps = [-1] * len(leaving)
        steps[last] = 0
        found = [last]
        while found and steps[first] < 0:
            before, found = found, []
            for node in before:
                further = steps[node] + 1
                for edge in leaving[node]:
                    start = end[edge]
                    if steps[start] < 0 and left[edge ^ 1] > 0:
                        steps[start] = further
                        found.append(start)
        return steps

    def fill(self, first: int, last: int, steps: list[int]) -> float:
        """Lets flow all that can along shortest paths; returns how much."""
        left, end, leaving = self._left, self._end, self.leaving
        tried = [0] * len(leaving)  # edges of each node that lead nowhere any more
        total, node = 0.0, first
        path: list[int] = []
        while True:
            if node == last:
                least = min(left[edge] for edge in path)
                if least == float("inf"):
                    raise networkx.NetworkXUnbounded("a path has no capacity that bounds it")
                total += least
                for edge in path:
                    left[edge] -= least
                    left[edge ^ 1] += least
                full = next(at for at, edge in enumerate(path) if left[edge] <= 0)
                node = end[path[full] ^ 1]
                del path[full:]
                continue
            edges, at = leaving[node], tried[node]
            while at < len(edges) and not (
                left[edges[at]] > 0 and steps[end[edges[at]]] == steps[node] - 1
            ):
                at += 1
            tried[node] = at
            if at < len(edges):
                path.append(edges[at])
                node = end[edges[at]]
            elif node == first:
                return total
            else:
                edge = path.pop()
                node = end[edge ^ 1]
                tried[node] += 1
