"""The search over schedules: never worse than its start, legal, repeatable, bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.engine.batch import BatchEngine
from gpusim.engine.fast import FastEngine
from gpusim.errors import OptionError
from gpusim.formats.trace import Trace
from gpusim.plan.graph import OpGraph, is_legal_order
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import StepSync, works
from gpusim.policies.registry import POLICIES
from gpusim.search.events import EVENT_NS, compared_ns, events_of
from gpusim.search.explore import explore
from gpusim.search.judging import JUDGED
from gpusim.search.neighbourhood import BATCH, JOINED, Refined, refine
from gpusim.search.robust import OFF_FRAC, STEPS, RobustEngine
from gpusim.search.trial import contenders
from tests.support.helpers import (
    build_graph,
    hardware_models,
    make_hardware,
    make_trace,
    op,
    schedule_of,
    traces,
    wide_trace,
)

#: Never reached: these searches end by their number of evaluations.
NO_TIME_PRESSURE_S = 1e6
HARDWARE = make_hardware(chain_ns=100, slowdown=0.8)


def simulate(graph: OpGraph, schedule: Schedule) -> tuple[int, int]:
    """Return makespan and peak memory."""
    timeline = FastEngine().run(lower(graph, schedule), graph.hardware)
    return timeline.makespan_ns, timeline.peak_bytes


def made(graph: OpGraph, streams: int) -> list[Schedule]:
    """Return the schedules of every policy."""
    return [policy(graph, min(streams, policy.max_streams or streams)) for policy in POLICIES.values()]


def robust_ns(graph: OpGraph, schedules: Sequence[Schedule]) -> list[int]:
    """Return the search's objective for schedules."""
    orders, streams = (np.array([getattr(each, name) for each in schedules], np.int32) for name in ("order", "streams"))
    return RobustEngine(BatchEngine(graph)).mean_ns(orders, streams, None, None).tolist()


def events_by_replay(graph: OpGraph, schedules: Sequence[Schedule]) -> list[int]:
    """Return the events of schedules as the rows of an exploration have them."""
    return [events_of(graph, each, StepSync.of(graph.trace, graph.preds, {})) for each in schedules]


def search(graph: OpGraph, streams: int, evaluations: int = 6 * BATCH, **options: Any) -> Refined:
    wanted: dict[str, Any] = {"budget_s": NO_TIME_PRESSURE_S, "seed": 0, "evaluations": evaluations}
    return refine(graph, made(graph, streams), streams, **wanted | options)


@settings(max_examples=25)
@given(traces(), hardware_models(), st.integers(1, 4), st.integers(0, 5))
def test_result_is_legal_is_what_the_engine_says_and_is_never_worse_than_any_policy(
    trace: Trace, hardware: Any, streams: int, seed: int
) -> None:
    graph = OpGraph.build(trace, hardware)
    found = search(graph, streams, seed=seed)
    for schedule, makespan_ns in zip(found.schedules, found.makespans_ns, strict=True):
        assert is_legal_order(schedule.order, graph.preds)
        assert max(schedule.streams) < streams
        assert simulate(graph, schedule)[0] == makespan_ns
    assert list(found.robust_ns) == robust_ns(graph, found.schedules)
    compared = list(map(compared_ns, found.robust_ns, found.events))
    assert compared == sorted(set(compared))
    if all(works(each) == bool(each.kernels) for each in trace.ops):
        assert list(found.events) == events_by_replay(graph, found.schedules)
    seeds = made(graph, streams)
    events = BatchEngine(graph).events([each.order for each in seeds], [each.streams for each in seeds]).tolist()
    assert compared[0] <= min(map(compared_ns, robust_ns(graph, seeds), events))


def test_search_ends_at_once_where_a_seed_meets_the_bound() -> None:
    graph = build_graph(wide_trace(5, 7000, 3), HARDWARE)
    seeds = made(graph, 4)
    best_ns = min(simulate(graph, each)[0] for each in seeds)
    found = search(graph, 4, lower_bound_ns=best_ns)
    assert (found.evaluations, found.makespans_ns[0]) == (len(seeds), best_ns)
    assert search(graph, 4, lower_bound_ns=best_ns - 2).evaluations > len(seeds)


def test_exploration_ends_at_once_where_a_policy_meets_the_bound() -> None:
    """A chain: the sequential schedule is the critical path, so there is nothing to search for."""
    trace = make_trace([op("a", "x"), op("b", "a"), op("c", "b")])
    found = explore(build_graph(trace, HARDWARE), streams=2, budget_s=NO_TIME_PRESSURE_S)
    assert found.best.makespan_ns == found.bounds.largest[0]
    assert found.evaluations < 2 * BATCH


def test_same_seed_and_evaluations_are_the_same_on_any_number_of_threads() -> None:
    graph = build_graph(wide_trace(6, 9000, 3), HARDWARE)
    one, two, three = (search(graph, 4, 10 * BATCH, seed=7, threads=threads) for threads in (1, 2, 3))
    assert one == two == three
    assert search(graph, 4, 10 * BATCH, seed=8) != one


def test_what_a_number_of_evaluations_finds_depends_on_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of schedules to continue with depends on the evaluations, not on the clock."""
    graph = build_graph(wide_trace(6, 9000, 3), HARDWARE)
    wanted = search(graph, 4, 10 * BATCH, budget_s=100.0)
    now = [0.0]

    def clock() -> float:
        now[0] += 4.0
        return now[0]

    monkeypatch.setattr("gpusim.search.neighbourhood.time.monotonic", clock)
    assert search(graph, 4, 10 * BATCH, budget_s=100.0) == wanted


def test_number_of_evaluations_is_kept_to_a_batch() -> None:
    graph = build_graph(wide_trace(6, 9000, 3), HARDWARE)
    for evaluations in (1, 100, 1000):
        spent = search(graph, 4, evaluations).evaluations
        seeds = len(made(graph, 4)) * (1 + STEPS)
        assert spent <= max(evaluations, seeds) + BATCH + JOINED - 1 + 2 * JUDGED * STEPS


# --- What schedules are judged by ---


@pytest.mark.parametrize("held_ns", [EVENT_NS, 0])
def test_chain_over_three_streams_comes_together_for_its_events_alone(
    held_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chains beside each other, one of them over three streams: its two more events cost no predicted time."""
    steps = [op(f"{name}{number}", f"{name}{number - 1}" if number else "x") for name in "ab" for number in range(3)]
    graph = build_graph(make_trace(steps), make_hardware(chain_ns=100))
    spread, together = schedule_of(range(6), (0, 1, 2, 3, 3, 3)), schedule_of(range(6), (0, 0, 0, 1, 1, 1))
    assert simulate(graph, spread) == simulate(graph, together)
    assert events_by_replay(graph, [spread, together]) == [4, 1]
    monkeypatch.setattr("gpusim.search.events.EVENT_NS", held_ns)
    found = refine(graph, [spread], 4, budget_s=NO_TIME_PRESSURE_S, seed=0, evaluations=12 * BATCH)
    assert found.makespans_ns[0] == simulate(graph, together)[0]
    assert (found.events[0] == 1) == (held_ns > 0)


def test_times_are_multiplied_task_by_task() -> None:
    """A chain of 1, 2 and 4 us without gaps, the second kernel half as long again: 8 us. The engine itself is
    unchanged.
    """
    trace = make_trace([op("a", "x", dur_ns=1000), op("b", "a", dur_ns=2000), op("c", "b", dur_ns=4000)])
    engine = BatchEngine(OpGraph.build(trace, make_hardware(chain_ns=0, front_end_ns=0)))
    longer = engine.with_times(np.array([1.0, 1.5, 1.0]))
    schedule = ([[0, 1, 2]], [[0, 0, 0]])
    assert [each.evaluate(*schedule).makespan_ns[0] for each in (engine, longer, engine)] == [7000, 8000, 7000]


def test_mean_is_near_the_prediction_and_the_same_for_everybody() -> None:
    """For a chain it is within the perturbation of the times; the search's seed does not enter it."""
    graph = build_graph(make_trace([op("a", "x"), op("b", "a"), op("c", "b")]), HARDWARE)
    (sequential,) = [POLICIES["sequential"](graph, 1)]
    (mean,) = robust_ns(graph, [sequential])
    assert abs(mean / simulate(graph, sequential)[0] - 1) < OFF_FRAC
    assert robust_ns(graph, [sequential] * 2) == [mean, mean]


# --- The memory limit ---


def hungry() -> Trace:
    """Make two branches with large results: concurrently they need more memory than in sequence."""
    steps = []
    for branch in "abc":
        steps.append(op(f"{branch}0", "x", dur_ns=5000, blocks=20))
        steps.append(op(f"{branch}1", f"{branch}0", dur_ns=5000, blocks=20))
    return make_trace([*steps, op("end", "a1 b1 c1", dur_ns=1000)])


def test_schedules_found_keep_the_memory_limit() -> None:
    graph = build_graph(hungry(), HARDWARE)
    peaks = sorted({simulate(graph, each)[1] for each in made(graph, 3)})
    assert len(peaks) > 1, "the limit must cut some schedules off"
    free, limited = search(graph, 3), search(graph, 3, memory_limit_bytes=peaks[0])
    assert simulate(graph, free.schedules[0])[1] > peaks[0]
    assert limited.schedules
    assert all(simulate(graph, each)[1] <= peaks[0] for each in limited.schedules)
    assert limited.makespans_ns[0] >= free.makespans_ns[0]


def test_nothing_is_found_where_every_schedule_needs_too_much() -> None:
    found = search(build_graph(hungry(), HARDWARE), 3, memory_limit_bytes=1)
    assert not found.schedules
    assert not found.makespans_ns


def test_exploration_recommends_and_tries_only_what_keeps_the_limit() -> None:
    options: dict[str, Any] = {"streams": 3, "budget_s": NO_TIME_PRESSURE_S, "evaluations": 6 * BATCH}
    free = explore(build_graph(hungry(), HARDWARE), **options)
    limit = min(row.peak_bytes for row in free.rows)
    assert free.best.peak_bytes > limit
    limited = explore(build_graph(hungry(), HARDWARE), memory_limit_bytes=limit, **options)
    assert limited.best.peak_bytes <= limit
    assert all(row.peak_bytes <= limit for row in limited.rows if row.policy == "search")
    assert all(row.peak_bytes <= limit for row in contenders(limited))
    with pytest.raises(OptionError, match=r"^memory limit 10 B: the least that any schedule found needs is "):
        explore(build_graph(hungry(), HARDWARE), memory_limit_bytes=10, **options)
