"""The exact search: one configuration for each layer, with the least sum of costs over layers and edges.

Source: Jia et al. 2018, section 5.2. A layer between two others is eliminated: its best configuration for each pair of
theirs is stored, and its cost is added to an edge between them (node elimination). Edges between the same two layers
are summed (edge elimination). Both preserve the optimum. The remaining layers (two for the networks of the paper) are
enumerated, and eliminations are undone with the stored configurations.

A graph that does not reduce is handled by eliminating layers with more neighbours, while tables fit (`MOST_ENTRIES`):
bucket elimination (Dechter, "Bucket Elimination", AI 113, 1999), still exact. Beyond that the result is bounded: a
lower bound from smaller tables (mini-buckets), and the best of some choices improved layer by layer, given ones among
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpusim.layerwise.communication import Floats

#: Entries of the largest table: 128 MiB of doubles.
MOST_ENTRIES: Final = 1 << 24
#: Entries of a sum over three layers computed at a time.
_PIECE: Final = 1 << 22
#: Rounds of improvement layer by layer, for a bounded result.
_ROUNDS: Final = 50

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Solution:
    """The best choice found: `choice[i]` is the index of layer i's configuration."""

    choice: tuple[int, ...]
    cost_ns: float
    bound_ns: float
    """Lower bound on the cost of any choice; equal to the cost if exact."""
    kernel: int
    """Number of layers left to enumerate."""

    @property
    def exact(self) -> bool:
        """Whether the choice is proved optimal."""
        return self.bound_ns >= self.cost_ns * (1 - 1e-12)


@dataclass(frozen=True, slots=True)
class Eliminated:
    """An eliminated layer: its neighbours, and its best configuration for each of theirs."""

    node: int
    neighbours: tuple[int, ...]
    best: np.ndarray


def solve(
    nodes: Sequence[Floats],
    edges: Mapping[Pair, Floats],
    most_entries: int = MOST_ENTRIES,
    known: Sequence[Sequence[int]] = (),
) -> Solution:
    """Return the best choice for costs of layers and of edges (i < j); a bounded one is no worse than those `known`."""
    costs = [np.array(each, np.float64) for each in nodes]
    links: dict[int, dict[int, Floats]] = {index: {} for index in range(len(costs))}
    for (first, second), table in edges.items():
        _add_edge(links, first, second, np.asarray(table, np.float64))
    gone, kernel = _reduce(costs, links)
    if kernel > 2 and not _eliminate_many(costs, links, gone, most_entries):
        return _bounded(nodes, edges, kernel, known)
    chosen = _enumerate(costs, links)
    for each in reversed(gone):
        chosen[each.node] = int(each.best[tuple(chosen[near] for near in each.neighbours)])
    choice = tuple(chosen[index] for index in range(len(nodes)))
    cost = cost_of(nodes, edges, choice)
    return Solution(choice, cost, cost, kernel)


def cost_of(nodes: Sequence[Floats], edges: Mapping[Pair, Floats], choice: Sequence[int]) -> float:
    """Return the total cost of a choice."""
    total = sum(float(costs[choice[index]]) for index, costs in enumerate(nodes))
    return total + sum(float(table[choice[first], choice[second]]) for (first, second), table in edges.items())


def _add_edge(links: dict[int, dict[int, Floats]], first: int, second: int, table: Floats) -> None:
    """Edge elimination: sum the tables between the same layers."""
    if second in links[first]:
        table = links[first][second] + table
    links[first][second] = table
    links[second][first] = table.T


def _reduce(costs: list[Floats], links: dict[int, dict[int, Floats]]) -> tuple[list[Eliminated], int]:
    """Eliminate layers with at most two neighbours until two are left; returns eliminations and layers left."""
    gone: list[Eliminated] = []
    ready = [node for node in links if len(links[node]) <= 2]
    while ready and len(links) > 2:
        node = ready.pop()
        if node not in links or len(links[node]) > 2:
            continue
        near = sorted(links[node])
        if not near:
            gone.append(Eliminated(node, (), np.array(int(costs[node].argmin()))))
            keeper = next(other for other in links if other != node)
            costs[keeper] = costs[keeper] + costs[node].min()
        elif len(near) == 1:
            total = links[near[0]][node] + costs[node][None, :]
            gone.append(Eliminated(node, (near[0],), total.argmin(axis=1)))
            costs[near[0]] = costs[near[0]] + total.min(axis=1)
        else:
            table, best = between(links[near[0]][node], costs[node], links[node][near[1]])
            gone.append(Eliminated(node, (near[0], near[1]), best))
            _add_edge(links, near[0], near[1], table)
        for other in near:
            del links[other][node]
        del links[node]
        ready += [other for other in near if len(links[other]) <= 2]
    return gone, len(links)


def between(left: Floats, costs: Floats, right: Floats) -> tuple[Floats, np.ndarray]:
    """Node elimination (equation 2): the least of left[i, j] + costs[j] + right[j, k] over j, and its j."""
    table = np.empty((left.shape[0], right.shape[1]))
    best = np.empty(table.shape, np.int32)
    for rows, total in _totals(left, costs, right):
        best[rows] = total.argmin(axis=2)
        table[rows] = np.take_along_axis(total, best[rows, :, None], axis=2)[:, :, 0]
    return table, best


def least_between(left: Floats, costs: Floats, right: Floats) -> Floats:
    """Return the table of `between` alone, which takes less than half of the time."""
    table = np.empty((left.shape[0], right.shape[1]))
    for rows, total in _totals(left, costs, right):
        table[rows] = total.min(axis=2)
    return table


def _totals(left: Floats, costs: Floats, right: Floats) -> Iterator[tuple[slice, Floats]]:
    """Iterate over some rows at a time, with left[i, j] + (costs[j] + right[j, k]) in the order i, k, j."""
    step = max(1, _PIECE // max(1, right.size))
    behind = (costs[:, None] + right).T
    for start in range(0, left.shape[0], step):
        rows = slice(start, start + step)
        yield rows, left[rows, None, :] + behind[None]


def _eliminate_many(
    costs: list[Floats], links: dict[int, dict[int, Floats]], gone: list[Eliminated], most_entries: int
) -> bool:
    """Bucket elimination of all but two layers; returns whether all tables fit.

    Tables over more than two layers are stored separately until these are gone. Updates `costs` and `links`.
    """
    factors: list[tuple[tuple[int, ...], Floats]] = []
    for first, others in links.items():
        factors.append(((first,), costs[first]))
        factors += [((first, second), table) for second, table in others.items() if first < second]
    left = set(links)
    while len(left) > 2:
        sizes = {node: _scope_size(node, factors, costs) for node in left}
        node = min(left, key=lambda each: (sizes[each], each))
        if sizes[node] > most_entries:
            return False
        mine = [factor for factor in factors if node in factor[0]]
        factors = [factor for factor in factors if node not in factor[0]]
        scope = tuple(sorted({each for members, _ in mine for each in members} - {node}))
        total = _sum(mine, (*scope, node), costs)
        gone.append(Eliminated(node, scope, total.argmin(axis=-1)))
        factors.append((scope, total.min(axis=-1)))
        left.discard(node)
    links.clear()
    for node in left:
        links[node] = {}
        costs[node] = np.zeros_like(costs[node])
    pair = sorted(left)
    total = _sum(factors, tuple(pair), costs)
    links[pair[0]][pair[1]] = total
    links[pair[1]][pair[0]] = total.T
    return True


def _scope_size(node: int, factors: Sequence[tuple[tuple[int, ...], Floats]], costs: Sequence[Floats]) -> int:
    members = {node}.union(*(scope for scope, _ in factors if node in scope))
    size = 1
    for member in members:
        size *= len(costs[member])
    return size


def _sum(factors: Sequence[tuple[tuple[int, ...], Floats]], scope: tuple[int, ...], costs: Sequence[Floats]) -> Floats:
    """Sum tables, each over some of the layers of `scope`."""
    total = np.zeros([len(costs[node]) for node in scope])
    for members, table in factors:
        places = [scope.index(node) for node in members]
        order = np.argsort(places)
        shape = [1] * len(scope)
        for place in places:
            shape[place] = len(costs[scope[place]])
        total += np.transpose(table, order).reshape(shape)
    return total


def _enumerate(costs: Sequence[Floats], links: Mapping[int, Mapping[int, Floats]]) -> dict[int, int]:
    """Return the best choice of the two layers that are left (or of one)."""
    left = sorted(links)
    if len(left) == 1:
        return {left[0]: int(costs[left[0]].argmin())}
    first, second = left
    total = costs[first][:, None] + costs[second][None, :]
    if second in links[first]:
        total = total + links[first][second]
    best = int(total.argmin())
    return {first: best // total.shape[1], second: best % total.shape[1]}


def _bounded(
    nodes: Sequence[Floats], edges: Mapping[Pair, Floats], kernel: int, known: Sequence[Sequence[int]]
) -> Solution:
    """Improve choices layer by layer from two starts and those known, with a lower bound."""
    starts = [tuple(int(costs.argmin()) for costs in nodes), _first_come(nodes, edges), *known]
    best = min((_improved(nodes, edges, start) for start in starts), key=lambda each: cost_of(nodes, edges, each))
    return Solution(best, cost_of(nodes, edges, best), lower_bound(nodes, edges), kernel)


def _first_come(nodes: Sequence[Floats], edges: Mapping[Pair, Floats]) -> tuple[int, ...]:
    """Choose for each layer in order the best configuration given the earlier ones."""
    chosen: list[int] = []
    before: dict[int, list[tuple[int, Floats]]] = {}
    for (first, second), table in edges.items():
        before.setdefault(second, []).append((first, table))
    for index, costs in enumerate(nodes):
        total = costs.copy()
        for first, table in before.get(index, ()):
            total += table[chosen[first]]
        chosen.append(int(total.argmin()))
    return tuple(chosen)


def _improved(nodes: Sequence[Floats], edges: Mapping[Pair, Floats], start: Sequence[int]) -> tuple[int, ...]:
    chosen = list(start)
    near: dict[int, list[tuple[int, Floats]]] = {index: [] for index in range(len(nodes))}
    for (first, second), table in edges.items():
        near[first].append((second, table.T))
        near[second].append((first, table))
    for _ in range(_ROUNDS):
        before = list(chosen)
        for index, costs in enumerate(nodes):
            total = costs.copy()
            for other, table in near[index]:
                total = total + table[chosen[other]]
            chosen[index] = int(total.argmin())
        if chosen == before:
            break
    return tuple(chosen)


def lower_bound(nodes: Sequence[Floats], edges: Mapping[Pair, Floats]) -> float:
    """Lower bound on the cost of any choice: mini-buckets of at most two neighbours.

    Each layer is eliminated with two neighbours at a time, as if it could choose anew for each pair; its own costs
    count once.
    """
    costs = [np.array(each, np.float64) for each in nodes]
    links: dict[int, dict[int, Floats]] = {index: {} for index in range(len(costs))}
    for (first, second), table in edges.items():
        _add_edge(links, first, second, np.asarray(table, np.float64))
    total = 0.0
    while links:
        node = min(links, key=lambda each: (len(links[each]), each))
        near = sorted(links[node])
        own = costs[node]
        if not near:
            total += float(own.min())
        for place in range(0, len(near), 2):
            two = near[place : place + 2]
            if len(two) == 2:
                table, _ = between(links[two[0]][node], own, links[node][two[1]])
                _add_edge(links, two[0], two[1], table)
            else:
                costs[two[0]] = costs[two[0]] + (links[two[0]][node] + own[None, :]).min(axis=1)
            own = np.zeros_like(own)
        for other in near:
            del links[other][node]
        del links[node]
    return total


def enumerate_all(nodes: Sequence[Floats], edges: Mapping[Pair, Floats]) -> Solution:
    """Return the best choice by enumeration, to check the search on small graphs."""
    best: tuple[float, tuple[int, ...]] | None = None
    for flat in range(int(np.prod([len(costs) for costs in nodes]))):
        choice, rest = [], flat
        for costs in nodes:
            choice.append(rest % len(costs))
            rest //= len(costs)
        cost = cost_of(nodes, edges, choice)
        if best is None or cost < best[0]:
            best = cost, tuple(choice)
    assert best is not None
    return Solution(best[1], best[0], best[0], len(nodes))
