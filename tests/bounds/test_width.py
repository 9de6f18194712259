"""The width of a graph, against brute force."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusim.analysis.limits as module
from gpusim.analysis.limits import limits
from gpusim.bounds.width import width
from gpusim.policies.shared.dag import descendants
from gpusim.report.limits_table import print_limits
from tests.support.helpers import (
    ancestors,
    build_graph,
    make_hardware,
    wide_trace,
)

ROOT = Path(__file__).parents[2]


@st.composite
def orders(draw: st.DrawFn) -> list[list[int]]:
    """Draw predecessors of a random acyclic graph of up to 9 nodes."""
    count = draw(st.integers(0, 9))
    return [sorted(draw(st.sets(st.integers(0, node - 1), max_size=3))) if node else [] for node in range(count)]


@settings(max_examples=300)
@given(orders())
def test_width_is_the_largest_antichain(preds: list[list[int]]) -> None:
    before = ancestors(preds)
    nodes = range(len(preds))
    independent = [
        len(group)
        for size in range(len(preds) + 1)
        for group in combinations(nodes, size)
        if not any(a in before[b] for a, b in combinations(group, 2))
    ]
    assert width(preds) == max(independent)


@given(orders())
def test_descendants_are_the_transitive_closure(preds: list[list[int]]) -> None:
    before = ancestors(preds)
    for node, mask in enumerate(descendants(preds)):
        assert {other for other in range(len(preds)) if mask >> other & 1} == {
            other for other in range(len(preds)) if node in before[other]
        }


def test_width_refuses_an_order_that_runs_backwards() -> None:
    with pytest.raises(ValueError, match="node 0 has predecessor 1"):
        width([[1], []])


def test_width_of_too_many_ops_is_a_lower_bound_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "MAX_EXACT_OPS", 3)
    found = limits(build_graph(wide_trace(3, depth=1), make_hardware()))
    parallelism = found.scopes[-1].parallelism
    assert (parallelism.width_exact, parallelism.width) == (False, parallelism.maximum)
    print_limits(found)
    assert ">= 3" in capsys.readouterr().out
