"""The graph of the ops with kernels, shared by policies: transitive reduction, matching, chains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpusim.plan.graph import OpGraph


@dataclass(frozen=True)
class Dag:
    """A graph of nodes 0 to n - 1 in a legal order: every predecessor of a node has a smaller number."""

    preds: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.preds)

    @cached_property
    def succs(self) -> tuple[tuple[int, ...], ...]:
        """Successors of each node, ascending."""
        successors: list[list[int]] = [[] for _ in self.preds]
        for node, before in enumerate(self.preds):
            for p in before:
                successors[p].append(node)
        return tuple(tuple(nodes) for nodes in successors)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Bit mask of the ancestors of each node."""
        masks: list[int] = []
        for before in self.preds:
            mask = 0
            for p in before:
                mask |= masks[p] | 1 << p
            masks.append(mask)
        return tuple(masks)

    @cached_property
    def reduced(self) -> Dag:
        """Transitive reduction (minimum equivalent graph), without edges implied by longer paths."""
        ancestors = self.ancestors
        kept: list[tuple[int, ...]] = []
        for before in self.preds:
            implied, needed = 0, []
            for p in sorted(before, reverse=True):  # a path from p' to p has p' < p, so the later ones come first
                if not implied >> p & 1:
                    needed.append(p)
                implied |= ancestors[p] | 1 << p
            kept.append(tuple(reversed(needed)))
        return Dag(tuple(kept))


def work_dag(graph: OpGraph) -> tuple[tuple[int, ...], Dag]:
    """Return the ops with kernels (op indices, in recorded order) and their dependencies; views pass theirs on."""
    preds = graph.work_preds
    ops = tuple(preds)
    node_of = {op: node for node, op in enumerate(ops)}
    return ops, Dag(tuple(tuple(sorted(node_of[p] for p in preds[op])) for op in ops))


def descendants(preds: Sequence[Sequence[int]]) -> list[int]:
    """Return the bit mask of the descendants of each node."""
    behind_of = [0] * len(preds)
    for node in reversed(range(len(preds))):
        behind = behind_of[node] | (1 << node)
        for before in preds[node]:
            if not 0 <= before < node:
                raise ValueError(f"node {node} has predecessor {before}: predecessors have smaller numbers")
            behind_of[before] |= behind
    return behind_of


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the set bits, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def mask_of(numbers: Iterable[int]) -> int:
    """Return the bit mask with these bits."""
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


def maximum_matching(edges: Sequence[int], right: int) -> list[int]:
    """Return a maximum matching of a bipartite graph: the partner of each left node among `right` right nodes, or -1.

    `edges[i]` is a bit mask of the right nodes adjacent to left node i, since graphs may be dense. Hopcroft and
    Karp, "An n^5/2 algorithm for maximum matchings in bipartite graphs" (SIAM J. Comput. 2(4), 1973): in each phase a
    breadth-first search from the free left nodes finds the length of the shortest augmenting paths, and a depth-first
    search flips a maximal set of disjoint ones. Nodes of both sides are tried in ascending order.
    """
    partner = [-1] * len(edges)
    owner = [-1] * right
    free = (1 << right) - 1
    while True:
        layers = _layers(edges, partner, owner, free)
        if layers is None:
            return partner
        left_over = list(edges)  # without the edges dropped in this phase
        for root in range(len(edges)):
            if partner[root] < 0:
                free = _augment(root, left_over, partner, owner, free, layers)


def _layers(edges: Sequence[int], partner: list[int], owner: list[int], free: int) -> list[int] | None:
    """Return right nodes by distance of their owners from the free left nodes, or None if no path ends free.

    Layer 0 is empty: free left nodes own nothing.
    """
    layers, unseen, augmentable = [0], ~free, False
    here = [left for left, right in enumerate(partner) if right < 0]
    while here:
        new = 0
        for left in here:
            augmentable |= bool(edges[left] & free)
            new |= edges[left] & unseen
        unseen &= ~new
        layers.append(new)
        here = [owner[right] for right in bits(new)]
    return [*layers, 0] if augmentable else None


def _augment(
    root: int, left_over: list[int], partner: list[int], owner: list[int], free: int, layers: list[int]
) -> int:
    """Follow layers from `root` to a free right node, flip the path and return the right nodes that remain free.

    Nodes of the path leave their layers, so that the paths of one phase are disjoint.
    """
    path = [root]
    taken: list[int] = []
    while path:
        depth = len(path)
        useful = left_over[path[-1]] & (free | layers[depth])
        if not useful:
            path.pop()
            if path:
                left_over[path[-1]] &= ~(1 << taken.pop())
            continue
        right = (useful & -useful).bit_length() - 1
        taken.append(right)
        if owner[right] >= 0:
            left_over[path[-1]] &= ~((1 << right) - 1)  # smaller ones are dead ends
            path.append(owner[right])
            continue
        for place, (left, end) in enumerate(zip(path, taken, strict=True), start=1):
            layers[place] &= ~(1 << end)
            partner[left], owner[end] = end, left
        return free & ~(1 << right)
    return free


def chains(following: Sequence[int]) -> list[list[int]]:
    """Return the chains given by the successor of each node (-1: none), in ascending order of their first nodes."""
    has_previous = {node for node in following if node >= 0}
    all_chains = []
    for head in range(len(following)):
        if head in has_previous:
            continue
        chain, node = [], head
        while node >= 0:
            chain.append(node)
            node = following[node]
        all_chains.append(chain)
    return all_chains
