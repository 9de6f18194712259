"""The ops that have kernels as a graph of their own: transitive reduction, matching, chains. Policies share these."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gpusim.plan.graph import OpGraph


@dataclass(frozen=True)
class Dag:
    """Nodes 0 to n - 1 in a legal order: every predecessor of a node has a smaller number."""

    preds: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.preds)

    @cached_property
    def succs(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the nodes that depend on it, in ascending order."""
        found: list[list[int]] = [[] for _ in self.preds]
        for node, before in enumerate(self.preds):
            for p in before:
                found[p].append(node)
        return tuple(tuple(nodes) for nodes in found)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each node, all that come before it, directly or not, as a bit mask."""
        masks: list[int] = []
        for before in self.preds:
            mask = 0
            for p in before:
                mask |= masks[p] | 1 << p
            masks.append(mask)
        return tuple(masks)

    @cached_property
    def reduced(self) -> Dag:
        """The transitive reduction (minimum equivalent graph): edges that a longer path implies are dropped."""
        ancestors = self.ancestors
        kept: list[tuple[int, ...]] = []
        for before in self.preds:
            implied, found = 0, []
            for p in sorted(before, reverse=True):  # a path from p' to p has p' < p, so the later ones come first
                if not implied >> p & 1:
                    found.append(p)
                implied |= ancestors[p] | 1 << p
            kept.append(tuple(reversed(found)))
        return Dag(tuple(kept))


def work_dag(graph: OpGraph) -> tuple[tuple[int, ...], Dag]:
    """The ops with kernels (by op index, in recorded order) and their dependencies; views hand theirs on."""
    preds, _ = graph.work_dependencies
    ops = tuple(preds)
    node_of = {op: node for node, op in enumerate(ops)}
    return ops, Dag(tuple(tuple(sorted(node_of[p] for p in preds[op])) for op in ops))


def maximum_matching(edges: Sequence[Sequence[int]], right: int) -> list[int]:
    """A maximum matching of a bipartite graph: for each left node its partner of `right` right nodes, or -1.

    `edges[i]` has the right nodes that left node i may be matched to. Hopcroft and Karp, "An n^5/2 algorithm for
    maximum matchings in bipartite graphs" (SIAM J. Comput. 2(4), 1973): in each phase a breadth-first search from the
    free left nodes finds the length of the shortest augmenting paths, and a depth-first search flips a maximal set of
    disjoint ones. Left nodes and their edges are tried in the order given.
    """
    partner = [-1] * len(edges)
    taken_by = [-1] * right
    while True:
        depth = _phase_depths(edges, partner, taken_by)
        if depth is None:
            return partner
        tried = [0] * len(edges)
        for left in range(len(edges)):
            if partner[left] < 0:
                _augment(left, edges, partner, taken_by, depth, tried)


def _phase_depths(edges: Sequence[Sequence[int]], partner: list[int], taken_by: list[int]) -> list[int] | None:
    """Distance of each left node from the free ones along alternating paths (-1: none); None without a free end."""
    depth = [0 if right < 0 else -1 for right in partner]
    queue = deque(left for left, right in enumerate(partner) if right < 0)
    found = False
    while queue:
        left = queue.popleft()
        for right in edges[left]:
            owner = taken_by[right]
            if owner < 0:
                found = True
            elif depth[owner] < 0:
                depth[owner] = depth[left] + 1
                queue.append(owner)
    return depth if found else None


def _augment(
    root: int,
    edges: Sequence[Sequence[int]],
    partner: list[int],
    taken_by: list[int],
    depth: list[int],
    tried: list[int],
) -> None:
    """Follow layers from `root` to a free right node and flip the path. `tried` counts the edges given up on."""
    path = [root]
    while path:
        left = path[-1]
        if tried[left] == len(edges[left]):
            path.pop()
            if path:
                tried[path[-1]] += 1
            continue
        owner = taken_by[edges[left][tried[left]]]
        if owner < 0:
            for node in path:
                right = edges[node][tried[node]]
                partner[node], taken_by[right] = right, node
                depth[node] = -1  # used up in this phase: paths are disjoint
            return
        if depth[owner] == depth[left] + 1:
            path.append(owner)
        else:
            tried[left] += 1


def chains(following: Sequence[int]) -> list[list[int]]:
    """Chains from the successor of each node (-1: none), in ascending order of their first nodes."""
    has_previous = {node for node in following if node >= 0}
    found = []
    for head in range(len(following)):
        if head in has_previous:
            continue
        chain, node = [], head
        while node >= 0:
            chain.append(node)
            node = following[node]
        found.append(chain)
    return found
