"""The k best choices, in proved order.

The least cost with each configuration of each layer (its min-marginal) follows from the eliminations of
`gpusim.layerwise.eliminate` in reverse. The next best choice differs from the best in at least one layer, so its cost
is the least min-marginal outside the best. The space is then split in two: with that configuration of that layer, and
without it (Nilsson, "An efficient algorithm for finding the M most probable configurations", 1998).

Choices that differ in one layer are different ones. So the k-th least min-marginal of a layer is no less than the cost
of the k-th best choice, and configurations with a larger min-marginal are in none of the k best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpusim.layerwise.communication import Floats
from gpusim.layerwise.eliminate import Pair, cost_of, least_between, solve
from gpusim.layerwise.layers import Ints

#: How much more than the k-th best choice a configuration may cost that is kept: sums in another order round otherwise.
_ROUNDING: Final = 1e-9
#: Above the cost of any choice, while sums of it stay finite.
FORBIDDEN: Final = 1e30
_PIECE: Final = 1 << 22
NO_TABLE: Final = np.zeros((0, 0))


@dataclass(frozen=True, slots=True)
class Ranked:
    """A choice and its cost."""

    choice: tuple[int, ...]
    cost_ns: float


@dataclass(frozen=True, slots=True)
class _Space:
    """A subset of all choices: its best one, and the cost, layer and configuration of its second best."""

    nodes: tuple[Floats, ...]
    best: Ranked
    next_ns: float
    layer: int
    config: int


def k_best(nodes: Sequence[Floats], edges: Mapping[Pair, Floats], count: int) -> list[Ranked]:
    """Return the `count` best choices, best first; fewer if there are no more, one if the graph does not reduce."""
    first = solve(nodes, edges)
    if first.kernel > 2 or count < 2:
        return [Ranked(first.choice, first.cost_ns)]
    kept = _kept(min_marginals(nodes, edges), count)
    fewer = [np.asarray(costs, np.float64)[some] for costs, some in zip(nodes, kept, strict=True)]
    tables = {(one, other): table[np.ix_(kept[one], kept[other])] for (one, other), table in edges.items()}
    return [
        Ranked(tuple(int(some[place]) for some, place in zip(kept, each.choice, strict=True)), each.cost_ns)
        for each in _ranked(fewer, tables, count)
    ]


def _kept(marginals: Sequence[Floats], count: int) -> list[Ints]:
    """Return the configurations of each layer that may be in one of the `count` best choices."""
    most_ns = min(
        (float(np.partition(each, count - 1)[count - 1]) for each in marginals if len(each) >= count), default=np.inf
    )
    return [np.flatnonzero(each <= most_ns + _ROUNDING * abs(most_ns)) for each in marginals]


def _ranked(nodes: Sequence[Floats], edges: Mapping[Pair, Floats], count: int) -> list[Ranked]:
    """Return the `count` best choices of a graph that reduces."""
    first = solve(nodes, edges)
    best = Ranked(first.choice, first.cost_ns)
    spaces = [_space(tuple(nodes), edges, best)]
    ranked = [best]
    while len(ranked) < count:
        number = min(range(len(spaces)), key=lambda each: spaces[each].next_ns)
        space = spaces[number]
        if space.next_ns >= FORBIDDEN / 2:
            break
        with_it, without = list(space.nodes), list(space.nodes)
        with_it[space.layer] = np.full_like(space.nodes[space.layer], FORBIDDEN)
        with_it[space.layer][space.config] = space.nodes[space.layer][space.config]
        without[space.layer] = space.nodes[space.layer].copy()
        without[space.layer][space.config] = FORBIDDEN
        choice = solve(with_it, edges).choice
        following = Ranked(choice, cost_of(nodes, edges, choice))
        ranked.append(following)
        spaces[number] = _space(tuple(without), edges, space.best)
        spaces.append(_space(tuple(with_it), edges, following))
    return ranked


def _space(nodes: tuple[Floats, ...], edges: Mapping[Pair, Floats], best: Ranked) -> _Space:
    least: tuple[float, int, int] = (np.inf, -1, -1)
    for layer, costs in enumerate(min_marginals(nodes, edges)):
        others = costs.copy()
        others[best.choice[layer]] = np.inf
        config = int(others.argmin())
        least = min(least, (float(others[config]), layer, config))
    return _Space(nodes, best, *least)


@dataclass(frozen=True, slots=True)
class _Step:
    """One elimination: the node, its neighbours, the summed tables, and their minimum."""

    node: int
    near: tuple[int, ...]
    own: Floats
    left: Floats
    right: Floats
    message: Floats
    """`NO_TABLE` where absent."""


def min_marginals(nodes: Sequence[Floats], edges: Mapping[Pair, Floats]) -> list[Floats]:
    """Return the least cost of a choice with each configuration of each layer. The graph must reduce."""
    steps, costs, links = _reduced(nodes, edges)
    result: list[Floats | None] = [None] * len(nodes)
    pairs: dict[Pair, Floats] = {}
    left = sorted(links)
    if len(left) == 1:
        result[left[0]] = costs[left[0]]
    else:
        total = costs[left[0]][:, None] + costs[left[1]][None, :]
        if left[1] in links[left[0]]:
            total = total + links[left[0]][left[1]]
        pairs[left[0], left[1]] = total
        result[left[0]], result[left[1]] = total.min(axis=1), total.min(axis=0)
    for step in reversed(steps):
        if not step.near:
            others = min(float(each.min()) for each in result if each is not None)
            result[step.node] = step.own - float(step.own.min()) + others
        elif len(step.near) == 1:
            (near,) = step.near
            there = result[near]
            assert there is not None
            belief = (there - step.message)[:, None] + step.left + step.own[None, :]
            _keep(pairs, near, step.node, belief)
            result[step.node] = belief.min(axis=0)
        else:
            first, second = step.near
            rest = pairs[first, second] - step.message
            with_first, with_second, own = _beliefs(rest, step.left, step.own, step.right)
            _keep(pairs, first, step.node, with_first)
            _keep(pairs, step.node, second, with_second)
            result[step.node] = own
    return [each for each in result if each is not None]


def _keep(pairs: dict[Pair, Floats], first: int, second: int, belief: Floats) -> None:
    """Store a table under its ascending pair."""
    if first > second:
        first, second, belief = second, first, belief.T
    pairs[first, second] = belief


def _beliefs(rest: Floats, left: Floats, own: Floats, right: Floats) -> tuple[Floats, Floats, Floats]:
    """Minima of rest[i, k] + left[i, j] + own[j] + right[j, k]: over k, over i, and over both."""
    rows, columns = left.shape[0], right.shape[1]
    with_first = np.empty((rows, len(own)))
    with_second = np.full((len(own), columns), np.inf)
    step = max(1, _PIECE // max(1, right.size))
    for start in range(0, rows, step):
        total = rest[start : start + step, None, :] + left[start : start + step, :, None]
        total += right
        with_first[start : start + step] = total.min(axis=2)
        with_second = np.minimum(with_second, total.min(axis=0))
    with_first = with_first + own[None, :]
    with_second = with_second + own[:, None]
    return with_first, with_second, with_first.min(axis=0)


def _reduced(
    nodes: Sequence[Floats], edges: Mapping[Pair, Floats]
) -> tuple[list[_Step], list[Floats], dict[int, dict[int, Floats]]]:
    """Return the eliminations of `solve`, each with its tables."""
    costs = [np.array(each, np.float64) for each in nodes]
    links: dict[int, dict[int, Floats]] = {index: {} for index in range(len(costs))}
    for (first, second), table in edges.items():
        links[first][second] = np.asarray(table, np.float64)
        links[second][first] = links[first][second].T
    steps: list[_Step] = []
    ready = [node for node in links if len(links[node]) <= 2]
    while ready and len(links) > 2:
        node = ready.pop()
        if node not in links or len(links[node]) > 2:
            continue
        near = tuple(sorted(links[node]))
        own = costs[node]
        if not near:
            steps.append(_Step(node, near, own, NO_TABLE, NO_TABLE, NO_TABLE))
            keeper = next(other for other in links if other != node)
            costs[keeper] = costs[keeper] + own.min()
        elif len(near) == 1:
            left = links[near[0]][node]
            message = (left + own[None, :]).min(axis=1)
            steps.append(_Step(node, near, own, left, NO_TABLE, message))
            costs[near[0]] = costs[near[0]] + message
        else:
            left, right = links[near[0]][node], links[node][near[1]]
            table = least_between(left, own, right)
            steps.append(_Step(node, near, own, left, right, table))
            if near[1] in links[near[0]]:
                table = links[near[0]][near[1]] + table
            links[near[0]][near[1]], links[near[1]][near[0]] = table, table.T
        for other in near:
            del links[other][node]
        del links[node]
        ready += [other for other in near if len(links[other]) <= 2]
    return steps, costs, links
