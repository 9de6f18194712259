"""Width of a partial order: how many of its members can be pairwise independent at most.

By Dilworth's theorem ("A decomposition theorem for partially ordered sets", 1950) the largest antichain has as many
members as the fewest chains that cover all. That number is the count of members less a maximum matching of the
bipartite graph "u comes before v" (Fulkerson, 1956). The relation must be transitive, hence the closure first.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Above this many ops the width is not computed: rows of the closure are Python integers of one bit an op, and a graph
#: of 20,000 ops has 50 MB of them.
MAX_EXACT_OPS = 20_000


def width(preds: Sequence[Sequence[int]]) -> int:
    """Size of the largest set of nodes none of which comes before another, directly or not.

    Every predecessor has a smaller index than its node. Raises `ValueError` where one has not.
    """
    after = descendants(preds)
    return len(preds) - _matching(after)


def descendants(preds: Sequence[Sequence[int]]) -> list[int]:
    """For each node the set of all nodes behind it, as a bit mask."""
    found = [0] * len(preds)
    for node in reversed(range(len(preds))):
        behind = found[node] | (1 << node)
        for before in preds[node]:
            if not 0 <= before < node:
                raise ValueError(f"node {node} has predecessor {before}: predecessors have smaller numbers")
            found[before] |= behind
    return found


def _matching(after: Sequence[int]) -> int:
    """Size of a maximum matching of left nodes u with right nodes v in `after[u]`, by augmenting paths."""
    count = len(after)
    left_of, right_of = [-1] * count, [-1] * count
    free = (1 << count) - 1  # right nodes without a partner
    useful = free  # right nodes that an augmenting path may still go through
    for start in range(count):
        came_from: dict[int, int] = {}
        unseen = useful
        queue = [start]
        end = -1
        for left in queue:
            new = after[left] & unseen
            if new & free:
                end = _lowest(new & free)
                came_from[end] = left
                break
            unseen &= ~new
            while new:
                right = _lowest(new)
                new &= new - 1
                came_from[right] = left
                queue.append(left_of[right])
        if end < 0:
            useful = unseen  # what a failed search has seen leads nowhere, for good
            continue
        free &= ~(1 << end)
        right = end
        while right >= 0:  # each left node on the way gives up the partner that the path came through
            left = came_from[right]
            left_of[right], right_of[left], right = left, right, right_of[left]
    return sum(right >= 0 for right in right_of)


def _lowest(mask: int) -> int:
    """Number of the lowest bit that is set."""
    return (mask & -mask).bit_length() - 1
