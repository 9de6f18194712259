"""Graph functions that policies share: transitive reduction, maximum matching, chains; against plain definitions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim.policies.shared.dag import Dag, chains, mask_of, work_dag
from gpusim.policies.shared.dag import maximum_matching as match_masks
from tests.support.helpers import ancestors, build_graph, make_trace, op, view


@st.composite
def dags(draw: st.DrawFn, max_nodes: int = 10) -> Dag:
    """Draw a random graph whose edges all go from smaller to larger numbers."""
    count = draw(st.integers(0, max_nodes))
    return Dag(
        tuple(tuple(sorted(draw(st.sets(st.integers(0, n - 1), max_size=4)))) if n else () for n in range(count))
    )


@st.composite
def bipartite(draw: st.DrawFn, size: int = 7) -> tuple[list[list[int]], int]:
    """Draw edges of each left node, and the number of right nodes."""
    right = draw(st.integers(1, size))
    nodes = st.lists(st.integers(0, right - 1), unique=True, max_size=right)
    return draw(st.lists(nodes, max_size=size)), right


def maximum_matching(edges: Sequence[Sequence[int]], right: int) -> list[int]:
    """Return the matching of a graph given by lists."""
    return match_masks([mask_of(nodes) for nodes in edges], right)


def reachable(dag: Dag) -> list[set[int]]:
    return ancestors(dag.preds)


def test_views_hand_their_dependencies_on_and_are_no_nodes() -> None:
    steps = [op("a", "x"), view("v", "a"), op("b", "v"), op("c", "a v b")]
    ops, dag = work_dag(build_graph(make_trace(steps)))
    assert ops == (0, 2, 3)
    assert dag.preds == ((), (0,), (0, 1))
    assert dag.succs == ((1, 2), (2,), ())


def test_reduction_drops_the_edge_that_a_longer_path_implies() -> None:
    # 0 -> 1 -> 2 -> 3, with 0 -> 2, 0 -> 3, 1 -> 3
    assert Dag(((), (0,), (0, 1), (0, 1, 2))).reduced.preds == ((), (0,), (1,), (2,))


def test_reduction_keeps_both_sides_of_a_diamond() -> None:
    diamond = Dag(((), (0,), (0,), (1, 2)))
    assert diamond.reduced == diamond


@given(dags())
def test_ancestors_are_the_nodes_on_any_path_before(dag: Dag) -> None:
    assert [{n for n in range(len(dag)) if mask >> n & 1} for mask in dag.ancestors] == reachable(dag)


@given(dags())
def test_reduction_reaches_the_same_and_no_edge_of_it_can_go(dag: Dag) -> None:
    reduced = dag.reduced
    assert reachable(reduced) == reachable(dag)
    for node, before in enumerate(reduced.preds):
        assert set(before) <= set(dag.preds[node])
        for p in before:
            fewer = [tuple(q for q in ps if (n, q) != (node, p)) for n, ps in enumerate(reduced.preds)]
            assert reachable(Dag(tuple(fewer))) != reachable(dag)


def test_matching_takes_back_a_first_choice_that_blocks_another() -> None:
    # 0 may have either, 1 only the first: taking the first for 0 must be undone
    assert maximum_matching([[0, 1], [0]], 2) == [1, 0]


def test_matching_follows_an_augmenting_path_through_many_pairs() -> None:
    # each may have its own or the next one, the last only the first: all shift by one
    assert maximum_matching([[0, 1], [1, 2], [2, 3], [0]], 4) == [1, 2, 3, 0]


def test_matching_leaves_out_who_has_no_edge() -> None:
    assert maximum_matching([[], [1], [1]], 2) == [-1, 1, -1]
    assert maximum_matching([], 3) == []


def plain_matching_size(edges: list[list[int]], right: int) -> int:
    """Try every choice for every left node."""
    sizes = {0: 0}  # set of right nodes taken -> size
    for choices in edges:
        found = dict(sizes)
        for taken, size in sizes.items():
            for node in choices:
                if not taken >> node & 1:
                    found[taken | 1 << node] = max(found.get(taken | 1 << node, 0), size + 1)
        sizes = found
    return max(sizes.values())


@given(bipartite())
def test_matching_is_a_matching_of_the_largest_size(case: tuple[list[list[int]], int]) -> None:
    edges, right = case
    partner = maximum_matching(edges, right)
    taken = [node for node in partner if node >= 0]
    assert len(taken) == len(set(taken))
    assert all(node < 0 or node in edges[left] for left, node in enumerate(partner))
    assert len(taken) == plain_matching_size(edges, right)


def test_matching_of_a_long_chain_needs_no_recursion() -> None:
    # every left node prefers the one that belongs to the left node before it
    count = 5000
    edges = [[left - 1, left] if left else [0] for left in range(count)][::-1]
    assert -1 not in maximum_matching(edges, count)


@pytest.mark.parametrize(
    ("following", "expected"),
    [([], []), ([-1, -1], [[0], [1]]), ([2, 3, -1, -1], [[0, 2], [1, 3]]), ([1, 2, -1], [[0, 1, 2]])],
)
def test_chains_follow_the_successors(following: list[int], expected: list[list[int]]) -> None:
    assert chains(following) == expected


@given(dags())
def test_chains_of_a_matching_cover_each_node_once_along_edges(dag: Dag) -> None:
    found = chains(maximum_matching(dag.succs, len(dag)))
    assert sorted(node for chain in found for node in chain) == list(range(len(dag)))
    assert all(after in dag.succs[before] for chain in found for before, after in pairwise(chain))
