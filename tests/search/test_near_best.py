"""Schedules near the best: legal, within the range, one of each time, evenly spread, and the same for the same seed."""

from __future__ import annotations

from gpusim.engine.fast import FastEngine
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.policies.registry import POLICIES
from gpusim.search.near_best import NEAR_FRAC, _evenly, near_best
from tests.support.helpers import build_graph, make_hardware, wide_trace

HARDWARE = make_hardware(chain_ns=100, slowdown=0.8)


def graph() -> OpGraph:
    return build_graph(wide_trace(width=6, depth=4), HARDWARE)


def test_each_is_legal_and_within_the_range_of_the_best_and_has_a_time_of_its_own() -> None:
    step = graph()
    seeds = [POLICIES[name](step, 4) for name in ("nimble", "critical_path", "sequential")]
    found = near_best(step, seeds, 4, 12, seed=1)
    engine = FastEngine()
    times = [engine.run(lower(step, each.check(step)), step.hardware).makespan_ns for each in found]
    seeded = [engine.run(lower(step, each), step.hardware).makespan_ns for each in seeds]
    assert 3 <= len(found) <= 12
    assert len(set(times)) == len(times)
    assert max(times) <= (1 + NEAR_FRAC) * min(seeded) + 1
    assert found == near_best(step, seeds, 4, 12, seed=1)


def test_times_are_spread_evenly_from_the_best_to_the_end_of_the_range() -> None:
    found = {1000: "a", 1010: "b", 1022: "c", 1030: "d", 1049: "e", 1060: "too late"}
    assert _evenly(found, 3) == ["a", "c", "e"]
    assert _evenly(found, 9) == ["a", "b", "c", "d", "e"]  # no more than there are
