"""Schedules are compared by their predicted time and their events: many events take longer than predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import StepSync
from gpusim.search.events import EVENT_NS, events_of
from gpusim.search.explore import choose, explore
from gpusim.search.explored import SEARCH_MARGIN, Row
from gpusim.search.trial import contenders
from tests.support.helpers import make_hardware, make_trace, op

SEQUENTIAL = Row("sequential", 1, 100_000, 1.0, 0, Schedule((), ()))


def row(policy: str, makespan_ns: int, events: int, streams: int = 2) -> Row:
    return Row(policy, streams, makespan_ns, 100_000 / makespan_ns, 0, Schedule((), ()), events=events)


def test_each_event_counts_against_a_schedule() -> None:
    few, many = row("wavefront", 50_000, 10), row("opara", 50_000 - 3 * EVENT_NS, 12)
    assert choose([SEQUENTIAL, few, many], make_hardware(), 100_000) is many
    assert choose([SEQUENTIAL, few, replace(many, events=14)], make_hardware(), 100_000) is few


@pytest.mark.parametrize(("events", "policy"), [(10, "search"), (40, "wavefront")])
def test_a_searched_schedule_needs_its_lead_with_its_events(events: int, policy: str) -> None:
    planned = row("wavefront", 50_000, 10)
    ahead_ns = round((1 - SEARCH_MARGIN) * planned.compared_ns) - 10 * EVENT_NS - 100
    assert choose([SEQUENTIAL, planned, row("search", ahead_ns, events)], make_hardware(), 100_000).policy == policy


def test_events_are_those_of_the_replay() -> None:
    """A diamond on two streams: c waits for a, d for c. On one stream nothing waits."""
    trace = make_trace([op("a"), op("b", "a"), op("c", "a"), op("d", "b c")])
    graph = OpGraph.build(trace, make_hardware())
    step = StepSync.of(trace, graph.preds, {})
    assert events_of(graph, Schedule((0, 1, 2, 3), (0, 0, 1, 0)), step) == 2
    assert events_of(graph, Schedule.in_recorded_order(4), step) == 0


def test_trial_takes_schedules_in_the_order_in_which_they_are_compared() -> None:
    """Of two equal predictions it takes the one with fewer events."""
    trace = make_trace([op("a"), op("b", "a"), op("c", "a"), op("d", "b c")])
    explored = explore(OpGraph.build(trace, make_hardware()), evaluations=10)
    few, many, even = row("wavefront", 50_000, 2), row("opara", 49_900, 4), row("nimble", 49_900, 3)
    explored = replace(explored, rows=(SEQUENTIAL, many, few, even))
    assert contenders(explored) == [few, even, SEQUENTIAL]
    assert contenders(explored, 1) == [few]


def test_schedule_that_is_passed_over_for_its_events_is_named_with_them() -> None:
    trace = make_trace([op("a"), op("b", "a"), op("c", "a"), op("d", "b c")])
    explored = explore(OpGraph.build(trace, make_hardware()), evaluations=10)
    few, many = row("wavefront", 50_000, 10), row("opara", 49_900, 14)
    explored = replace(explored, rows=(SEQUENTIAL, few, many), best=few)
    assert explored.passed_over is many
    assert explored.passed_over_reason == "it has 4 more events, which may cost its lead"
    explored = replace(explored, best=SEQUENTIAL)
    assert explored.passed_over is None
