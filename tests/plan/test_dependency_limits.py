"""A small file can have more dependencies than memory holds: it is refused once there are too many."""

from __future__ import annotations

import pytest

from gpusim.errors import PlanError
from gpusim.plan import graph as op_graph
from gpusim.plan.graph import OpGraph
from tests.support.helpers import Step, build_graph, make_trace, op, view


def handed_on(makers: int, users: int) -> list[Step]:
    """Make kernels, a view of them all, and kernels that each need it."""
    made = [op(f"m{n}", "x") for n in range(makers)]
    return [*made, view("all", " ".join(f"m{n}" for n in range(makers))), *(op(f"u{n}", "all") for n in range(users))]


def test_view_hands_on_all_that_it_needs_and_that_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 for the view, and 30 for each user and as many in passing."""
    monkeypatch.setattr(op_graph, "FREE_DEPENDENCIES", 30 + 2 * 30 * 40)
    monkeypatch.setattr(op_graph, "MAX_DEPENDENCIES_PER_OP", 1)
    graph = build_graph(make_trace(handed_on(30, 40)))
    assert all(graph.work_preds[user] == tuple(range(30)) for user in range(31, 71))
    with pytest.raises(PlanError, match=r"more than 2,430 dependencies between the ops up to 'u40': an op without"):
        build_graph(make_trace(handed_on(30, 41)))


def test_a_large_step_may_have_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_graph, "FREE_DEPENDENCIES", 0)
    steps = [op("a", "x"), op("b", "x")]
    steps += [op(f"c{n}", f"{'c' if n else 'a'}{n - 1 if n else ''} {'b'}") for n in range(200)]
    assert isinstance(build_graph(make_trace(steps)), OpGraph)
    monkeypatch.setattr(op_graph, "MAX_DEPENDENCIES_PER_OP", 1)
    with pytest.raises(PlanError, match="more than 202 dependencies"):
        build_graph(make_trace(steps))


def test_chain_of_views_of_everything_ends_at_the_limit() -> None:
    """A file of 300 kB: each view refers to the one before, and all to 2,000 kernels."""
    steps = [op(f"m{n}", "x") for n in range(2000)]
    steps += [view("v0", " ".join(f"m{n}" for n in range(2000)))]
    steps += [view(f"v{n}", f"v{n - 1}") for n in range(1, 1500)]
    steps += [op(f"u{n}", f"v{n}") for n in range(1500)]
    with pytest.raises(PlanError, match="more than 2,000,000 dependencies"):
        build_graph(make_trace(steps))
