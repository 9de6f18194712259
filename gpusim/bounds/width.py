"""Width of a partial order: how many of its members can be pairwise independent at most.

By Dilworth's theorem ("A decomposition theorem for partially ordered sets", 1950) the largest antichain has as many
members as the fewest chains that cover all. That number is the count of members less a maximum matching of the
bipartite graph "u comes before v" (Fulkerson, 1956). The relation must be transitive, hence the closure first.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpusim.policies.shared.dag import descendants, maximum_matching

#: Above this many ops the width is not computed: rows of the closure are Python integers of one bit an op, and a graph
#: of 20,000 ops has 50 MB of them.
MAX_EXACT_OPS = 20_000


def width(preds: Sequence[Sequence[int]]) -> int:
    """Size of the largest set of nodes none of which comes before another: the fewest chains that cover all.

    Every predecessor has a smaller index than its node. Raises `ValueError` where one has not.
    """
    return sum(partner < 0 for partner in maximum_matching(descendants(preds), len(preds)))
