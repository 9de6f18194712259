"""Width of a partial order: the maximum number of pairwise independent members.

By Dilworth's theorem ("A decomposition theorem for partially ordered sets", 1950), the largest antichain has as many
members as the fewest chains that cover all. That number is the number of members minus a maximum matching of the
bipartite graph "u comes before v" (Fulkerson, 1956). The relation must be transitive, hence the closure first.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpusim.policies.shared.dag import descendants, maximum_matching

#: Above this many ops the width is not computed: rows of the closure are Python integers with one bit per op, 50 MB for
#: 20,000 ops.
MAX_EXACT_OPS = 20_000


def width(preds: Sequence[Sequence[int]]) -> int:
    """Return the size of the largest set of pairwise unordered nodes, the fewest chains that cover all.

    Raises `ValueError` unless every predecessor has a smaller index than its node.
    """
    return sum(partner < 0 for partner in maximum_matching(descendants(preds), len(preds)))
