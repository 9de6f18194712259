"""Fitting the contention constants: what goes in must come out."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from gpusim.engine.reference import ReferenceEngine
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.policies.registry import POLICIES
from gpusim.runtime.contention import Point, errors, fit, with_contention
from tests.helpers import make_hardware, wide_trace


def points(slowdown: float, join_ns: float) -> list[Point]:
    """Schedules of a wide step 'measured' by the engine itself with known constants."""
    graph = OpGraph.build(wide_trace(6, 9000, 3), make_hardware(chain_ns=300, front_end_ns=200))
    found = []
    for policy in ("wavefront", "round_robin", "critical_path"):
        for streams in (2, 4):
            made = POLICIES[policy](graph, streams)
            plan = lower(graph, made.order, made.streams)
            truth = with_contention(graph.hardware, slowdown, join_ns)
            found.append(Point(plan, graph.hardware, ReferenceEngine().run(plan, truth).makespan_ns))
    return found


@pytest.mark.parametrize(("slowdown", "join_ns"), [(0.0, 0.0), (0.6, 150.0), (1.0, 300.0)])
def test_fit_finds_the_constants_that_made_the_measurements(slowdown: float, join_ns: float) -> None:
    found = fit(points(slowdown, join_ns), [300.0])
    assert found.younger_slowdown == pytest.approx(slowdown, abs=0.05)
    assert found.p90 < 0.005


def test_gap_is_the_median_of_the_traces() -> None:
    assert fit(points(0.5, 0.0), [100.0, 400.0, 200.0]).chain_ns == 200.0


def test_errors_are_logs_of_predicted_over_measured() -> None:
    measured = points(0.5, 0.0)
    assert errors(measured, 0.5, 0.0) == pytest.approx([0.0] * len(measured), abs=1e-9)
    doubled = [Point(p.plan, p.hardware, p.measured_ns * 2) for p in measured]
    assert errors(doubled, 0.5, 0.0) == pytest.approx([-0.6931] * len(measured), abs=1e-3)
