"""Explore: the best is the fastest, bounds and verdict agree with it, seeds repeat, and Ctrl-C keeps the result
so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.bounds.bounds import Bounds
from gpusim.engine.compiled.warm import COMPILING
from gpusim.errors import OptionError
from gpusim.formats.trace import Op, Trace, Variant, VariantSettings
from gpusim.plan.schedule import Schedule
from gpusim.policies.registry import POLICIES, stream_counts
from gpusim.policies.shared.list_scheduling import FastLists
from gpusim.search import explore as exploring
from gpusim.search import priorities as local
from gpusim.search.budget import POLICIES_WITH_VARIANTS
from gpusim.search.explore import choose, explore
from gpusim.search.explored import Explored
from gpusim.search.priorities import BATCH, SHARES, Found, local_search
from gpusim.search.verdict import verdict
from tests.support.helpers import (
    HALF,
    ONE_SM,
    WHOLE,
    build_graph,
    chain_trace,
    make_hardware,
    make_trace,
    op,
    traces,
    wide_trace,
)

#: Never reached: these searches end by their number of evaluations or their own patience.
NO_TIME_PRESSURE_S = 1e6
EVALUATIONS = 6 * BATCH


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "PATIENCE", 10)


def run(trace: Trace, **options: Any) -> Explored:
    hardware = options.pop("hardware", None) or make_hardware(chain_ns=100, slowdown=0.5)
    return explore(
        build_graph(trace, hardware),
        **({"streams": 4, "budget_s": NO_TIME_PRESSURE_S, "evaluations": EVALUATIONS} | options),
    )


def raise_after(batches: int) -> Callable[..., Any]:
    """A list scheduler that is interrupted at its batch number `batches`, counted from 0."""
    left = [batches]
    schedules = FastLists.schedules

    def scheduler(lists: FastLists, *arguments: Any, **options: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return schedules(lists, *arguments, **options)

    return scheduler


@settings(max_examples=15)
@given(traces(max_ops=8), st.integers(1, 4))
def test_best_is_never_compared_slower_than_any_row_nor_faster_than_any_bound(trace: Trace, streams: int) -> None:
    if not any(found.dur_ns for each in trace.ops for found in each.kernels):
        return
    found = run(trace, streams=streams)
    assert {row.policy for row in found.rows} == {"search", *(name for name in POLICIES if not POLICIES[name].slow)}
    policies = [row.compared_ns for row in found.rows if row.policy != "search"]
    searched = [row.compared_ns for row in found.rows if row.policy == "search"]
    assert found.best.compared_ns <= min(policies)
    assert found.best.compared_ns <= min(searched)  # this model knows no further slowdown of searched ones
    assert found.best.makespan_ns <= found.sequential_ns
    assert found.best.makespan_ns == found.timeline.makespan_ns == found.schedule.predicted_ns
    assert found.best.makespan_ns >= found.bounds.largest[0] - 1
    assert all(max(row.schedule.streams) < streams for row in found.rows)


def test_best_within_the_models_uncertainty_of_sequential_is_sequential() -> None:
    # 6 branches side by side save far less than 30 %
    trace = make_trace([op("big", "x", dur_ns=100_000, blocks=WHOLE), op("a", "x"), op("b", "x")])
    hardware = make_hardware(uncertainty=0.3)
    found = run(trace, hardware=hardware)
    assert found.best.policy == "sequential"
    assert found.schedule.stream_count == 1
    assert min(row.makespan_ns for row in found.rows) * 1.3 > found.sequential_ns
    assert not found.verdict.worth_it
    assert choose(list(found.rows), make_hardware(), found.sequential_ns).makespan_ns < found.sequential_ns


def test_speedups_of_rows_are_over_the_sequential_graph() -> None:
    found = run(wide_trace())
    assert all(row.speedup == found.sequential_ns / row.makespan_ns for row in found.rows)
    assert next(row for row in found.rows if row.policy == "sequential").speedup == 1.0
    assert found.best_of("wavefront").makespan_ns == min(r.makespan_ns for r in found.rows if r.policy == "wavefront")


def test_attribution_adds_up_to_the_whole_gain() -> None:
    found = run(wide_trace(graph_ns=130_000, eager_ns=500_000))
    parts = found.attribution
    assert parts.eager_ns == 500_000
    assert parts.launch_ns == 500_000 - found.sequential_ns
    assert parts.concurrency_ns + parts.kernels_ns + parts.order_ns == found.sequential_ns - found.best.makespan_ns
    assert parts.concurrency_ns >= 0


def test_attribution_without_a_measured_eager_time_claims_nothing_about_launches() -> None:
    found = run(wide_trace())
    assert found.attribution.eager_ns is found.attribution.launch_ns is None


def test_schedule_of_explore_is_legal_for_its_trace() -> None:
    trace = wide_trace()
    found = run(trace)
    assert Schedule.from_document(found.schedule.to_document(trace), found.graph) == found.best.schedule
    assert (found.schedule.policy, found.schedule.predicted_ns) == (found.best.policy, found.best.makespan_ns)
    assert found.hardware.label in found.schedule.made_by


def test_same_seed_gives_the_same_result_without_time_pressure() -> None:
    first, second = run(wide_trace(5, 7000, 3), seed=3), run(wide_trace(5, 7000, 3), seed=3)
    assert first == second
    assert first.evaluations == second.evaluations > 0


def test_seed_is_part_of_who_made_the_schedule() -> None:
    assert run(wide_trace(3), seed=7).schedule.made_by.endswith("seed 7")


# --- Verdict ---


def test_chain_is_not_worth_it_and_the_verdict_says_that_nothing_is_left_to_win() -> None:
    found = run(chain_trace(6), hardware=make_hardware(chain_ns=100, uncertainty=0.05))
    assert not found.verdict.worth_it
    assert found.verdict.text.startswith("Not worth it")
    assert "even the bound leaves nothing to win" in found.verdict.text
    assert found.best.policy == "sequential"
    assert found.bounds.critical_path_ns == found.sequential_ns == 6500


def test_wide_graph_is_worth_it_and_the_verdict_says_how_much() -> None:
    hardware = make_hardware(chain_ns=100, uncertainty=0.1)
    found = run(wide_trace(6, 10_000, 2), hardware=hardware, streams=8)
    # stem, two ops of a branch, join: the critical path is reached, as all six branches fit side by side
    assert found.bounds.critical_path_ns == 1000 + 2 * 10_000 + 1000 + 3 * 100
    assert found.best.makespan_ns == found.bounds.critical_path_ns
    assert found.verdict.worth_it
    assert found.verdict.text.startswith(f"Worth it: {found.best.speedup:.2f}x")
    assert found.verdict.low == pytest.approx(found.best.speedup / 1.1)
    assert found.verdict.low < found.verdict.speedup == found.verdict.high  # no schedule is faster than the bound


def test_kernels_that_fill_the_gpu_are_not_worth_it_and_the_area_is_named() -> None:
    trace = make_trace([op(f"a{i}", "x", dur_ns=10_000, blocks=WHOLE) for i in range(4)])
    found = run(trace, hardware=make_hardware(uncertainty=0.1))
    assert not found.verdict.worth_it
    assert found.bounds.largest == (40_000, "SM area")


def test_uncalibrated_model_is_named_in_every_verdict() -> None:
    for trace in (chain_trace(3), wide_trace(6)):
        assert "uncalibrated" in run(trace, hardware=make_hardware(calibrated=False)).verdict.text
        assert "uncalibrated" not in run(trace, hardware=make_hardware(calibrated=True)).verdict.text


def test_gain_that_the_uncertainty_swallows_is_not_worth_it() -> None:
    bound = Bounds(critical_path_ns=500, area_ns=100, bandwidth_ns=0, front_end_ns=0)
    hardware = make_hardware(uncertainty=0.1)
    assert not verdict(hardware, 1090, 1000, "search", 4, bound).worth_it
    assert verdict(hardware, 1110, 1000, "search", 4, bound).worth_it


def test_progress_of_an_endless_budget_is_a_share() -> None:
    seen: list[float] = []
    run(wide_trace(6, 9000, 3), budget_s=float("inf"), report=lambda what, share, best_ns: seen.append(share))
    assert all(0.0 <= share <= 1.0 for share in seen)


# --- The local search ---


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_interrupt_inside_the_list_search_keeps_the_best_so_far(batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastLists, "schedules", raise_after(batches))
    monkeypatch.setattr(local, "PATIENCE", 100 * BATCH)
    found = local_search(build_graph(wide_trace(5, 7000, 3)), 4, budget_s=NO_TIME_PRESSURE_S, seed=0)
    assert found.interrupted
    assert found.evaluations == 4 * len(SHARES) + (batches - 1) * BATCH
    assert found.candidates


def test_interrupt_inside_the_search_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastLists, "schedules", raise_after(1))
    found = run(wide_trace(5, 7000, 3))
    assert found.interrupted
    policies = [row.compared_ns for row in found.rows if row.policy != "search"]
    searched = [row.compared_ns for row in found.rows if row.policy == "search"]
    assert found.best.compared_ns <= min(policies)
    assert found.best.compared_ns <= min(searched)


def test_interrupt_before_anything_was_found_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastLists, "schedules", raise_after(0))
    with pytest.raises(KeyboardInterrupt):
        run(wide_trace(3))


def test_undisturbed_search_is_not_marked_as_interrupted() -> None:
    assert not run(wide_trace(3)).interrupted


def test_candidates_come_best_first_and_differ() -> None:
    graph = build_graph(wide_trace(6, 9000, 3), make_hardware(chain_ns=100, slowdown=0.8))
    found = local_search(graph, 6, budget_s=NO_TIME_PRESSURE_S, seed=0, keep=3)
    times = [candidate.compared_ns for candidate in found.candidates]
    assert 0 < len(times) <= 3
    assert times == sorted(times)


def test_search_stops_once_the_bound_is_met() -> None:
    graph = build_graph(wide_trace(4))
    best = local_search(graph, 4, budget_s=NO_TIME_PRESSURE_S, seed=0)
    stopped = local_search(graph, 4, budget_s=NO_TIME_PRESSURE_S, seed=0, lower_bound_ns=best.candidates[0].makespan_ns)
    assert stopped.candidates[0].makespan_ns == best.candidates[0].makespan_ns
    assert stopped.evaluations < best.evaluations


@pytest.mark.parametrize("evaluations", [1, 30, BATCH + 30, 4 * BATCH])
def test_search_of_a_number_of_evaluations_makes_that_many_and_is_the_same_on_any_number_of_threads(
    evaluations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "PATIENCE", 100 * BATCH)
    graph = build_graph(wide_trace(6, 9000, 3), make_hardware(chain_ns=100, slowdown=0.8))

    def search(threads: int) -> Found:
        return local_search(graph, 6, budget_s=NO_TIME_PRESSURE_S, seed=5, evaluations=evaluations, threads=threads)

    assert search(1) == search(2) == search(3)
    assert search(2).evaluations == evaluations


def test_longer_search_begins_with_the_candidates_of_the_shorter_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "PATIENCE", 100 * BATCH)
    graph = build_graph(wide_trace(6, 9000, 3), make_hardware(chain_ns=100, slowdown=0.8))
    best = [
        local_search(graph, 6, budget_s=NO_TIME_PRESSURE_S, seed=1, evaluations=count).candidates[0].compared_ns
        for count in (10, BATCH, 3 * BATCH + 1, 3 * BATCH + 2, 6 * BATCH)
    ]
    assert best == sorted(best, reverse=True)


def test_search_finds_what_bottom_levels_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two streams, all ops of half a GPU: the order of bottom levels is not the best one here.
    steps = [op("a0", "x", dur_ns=3000, blocks=HALF), op("a1", "a0", dur_ns=3000, blocks=HALF)]
    steps += [op(f"w{i}", "x", dur_ns=2000 + 500 * i, blocks=HALF) for i in range(4)]
    steps += [op("end", "w0 w1 w2 w3", dur_ns=5000, blocks=ONE_SM)]
    graph = build_graph(make_trace(steps), make_hardware(chain_ns=100, slowdown=0.5))
    monkeypatch.setattr(local, "PATIENCE", 10 * BATCH)
    start = local_search(graph, 2, budget_s=0.0, seed=0).candidates[0].makespan_ns
    assert local_search(graph, 2, budget_s=NO_TIME_PRESSURE_S, seed=0).candidates[0].makespan_ns < start


def test_no_budget_still_gives_a_candidate() -> None:
    found = local_search(build_graph(wide_trace(4)), 4, budget_s=0.0, seed=0)
    assert found.candidates


def test_progress_reports_a_share_and_a_best_that_never_gets_worse() -> None:
    seen: list[tuple[str, float, int]] = []
    run(wide_trace(6, 9000, 3), report=lambda what, share, best_ns: seen.append((what, share, best_ns)))
    assert all(0.0 <= share <= 1.0 and (best_ns > 0 or what == COMPILING) for what, share, best_ns in seen)
    searching = [best_ns for what, _, best_ns in seen if what == "search"]
    assert searching == sorted(searching, reverse=True)


@pytest.mark.parametrize("first", [True, False])
def test_first_start_says_that_it_compiles_before_anything_else(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exploring, "needs_compiling", lambda: first)
    seen: list[str] = []
    run(chain_trace(3), report=lambda what, share, best_ns: seen.append(what))
    assert (seen[0] == COMPILING) == first
    assert COMPILING not in seen[1:]


@pytest.mark.parametrize("streams", [0, -1, 129])
def test_stream_count_out_of_range_is_refused(streams: int) -> None:
    with pytest.raises(OptionError, match=str(streams)):
        run(chain_trace(2), streams=streams)


@pytest.mark.parametrize(("limit", "counts"), [(1, (1,)), (2, (2,)), (5, (2, 3, 4, 5)), (8, (2, 3, 4, 6, 8))])
def test_stream_counts_tried_end_with_the_limit(limit: int, counts: tuple[int, ...]) -> None:
    assert stream_counts(limit) == counts


def test_policies_run_on_the_variants_that_are_fastest_alone_too() -> None:
    """Their rows say which policy; they are recommended by a clear lead over captured kernels alone."""
    trace = wide_trace(eager_ns=400_000, graph_ns=130_000)
    ops = tuple(
        msgspec.structs.replace(each, variants=(variant(each, "slow", 3), variant(each, "fast", 4)))
        for each in trace.ops
    )
    explored = run(msgspec.structs.replace(trace, ops=ops), policies=("wavefront", "critical_path"))
    rows = [row for row in explored.rows if row.policy == POLICIES_WITH_VARIANTS]
    assert {row.schedule.policy for row in rows} == {
        f"{name} with variants" for name in ("sequential", "wavefront", "critical_path")
    }
    assert all(set(row.schedule.variants) == {2} for row in rows)
    fastest = min(rows, key=lambda row: row.compared_ns)
    captured = [row for row in explored.rows if row.policy in POLICIES]
    ahead = replace(fastest, makespan_ns=1000)
    near = replace(fastest, makespan_ns=min(row.makespan_ns for row in captured) - 1, events=0)
    assert choose([*captured, ahead], make_hardware(), explored.sequential_ns) is ahead
    assert choose([*captured, near], make_hardware(), explored.sequential_ns) in captured


def variant(captured: Op, name: str, divisor: int) -> Variant:
    """Return a variant of an op with kernels of 2 / `divisor` of the time."""
    kernels = (msgspec.structs.replace(k, dur_ns=2 * k.dur_ns // divisor) for k in captured.kernels)
    return Variant(name=name, settings=VariantSettings(benchmark=True), kernels=tuple(kernels))
