"""Limits of parallelism: known small graphs by hand, losses that add up, the command."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.analysis.limits import STEP, Scope, limits
from gpusim.analysis.relaxed import (
    CONTENTION,
    DEPENDENCIES,
    DRAM,
    FRONT_END,
    GAPS,
    LIMITS,
    SMS,
    STREAMS,
    relaxed,
    without_contention,
)
from gpusim.cli import main
from gpusim.engine.base import engine_by_name
from gpusim.engine.evaluate import Evaluator
from gpusim.errors import OptionError
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.formats.trace import Trace
from gpusim.plan.graph import OpGraph
from gpusim.policies.registry import POLICIES
from gpusim.report.limits_table import CSV_FIELDS, limits_csv, limits_document
from gpusim.trace.dependencies import dependencies
from gpusim.trace.store import load_trace, write_trace
from tests.support.helpers import (
    HALF,
    Step,
    build_graph,
    chain_trace,
    hardware_models,
    make_hardware,
    make_trace,
    memset,
    op,
    traces,
    view,
    wide_trace,
)

ROOT = Path(__file__).parents[2]


def step_of(trace: Trace, hardware: HardwareModel | None = None, streams: int = 8) -> Scope:
    """Return the whole step's limits, on round numbers."""
    return limits(build_graph(trace, hardware or make_hardware()), streams=streams).scopes[-1]


def losses(scope: Scope) -> dict[str, int]:
    """Return the losses other than zero."""
    return {loss.limit: loss.loss_ns for loss in scope.losses if loss.loss_ns}


def with_phases(trace: Trace, *phases: str) -> Trace:
    """Return the trace with these phases for its ops."""
    ops = tuple(msgspec.structs.replace(op, phase=phase) for op, phase in zip(trace.ops, phases, strict=True))
    return msgspec.structs.replace(trace, ops=ops)


# --- By hand ---


def test_chain_has_no_parallelism_and_loses_all_to_dependencies() -> None:
    scope = step_of(chain_trace(5, 1000))
    found = scope.parallelism
    assert (found.work_ns, found.span_ns, found.mean, found.maximum, found.width) == (5000, 5000, 1.0, 1, 1)
    assert found.running == ((0, 1), (5000, 0))
    assert (scope.ops, scope.kernels, scope.streams) == (5, 5, 1)
    assert (scope.unlimited_ns, scope.best_ns, scope.sequential_ns) == (1000, 5000, 5000)
    assert losses(scope) == {DEPENDENCIES: 4000}
    assert (scope.potential_ns, scope.won_ns, scope.share(4000)) == (4000, 0, 1.0)


def test_gaps_of_a_chain_are_a_loss_of_their_own() -> None:
    scope = step_of(chain_trace(5, 1000), make_hardware(chain_ns=100))
    assert losses(scope) == {DEPENDENCIES: 4000, GAPS: 400}
    assert (scope.sequential_ns, scope.speedup) == (5400, 1.0)


def test_fork_and_join_is_as_parallel_as_its_branches() -> None:
    scope = step_of(wide_trace(3, 10_000, depth=1))
    found = scope.parallelism
    assert (found.work_ns, found.span_ns, found.maximum, found.width) == (32_000, 12_000, 3, 3)
    assert found.mean == pytest.approx(32 / 12)
    assert found.running == ((0, 1), (1000, 3), (11_000, 1), (12_000, 0))
    assert losses(scope) == {DEPENDENCIES: 2000}
    assert (scope.unlimited_ns, scope.best_ns, scope.won_ns, scope.streams) == (10_000, 12_000, 20_000, 3)


def test_join_costs_once() -> None:
    """Stem to branch 100, branches to join 100 and 50."""
    scope = step_of(wide_trace(3, 10_000, depth=1), make_hardware(chain_ns=100, join_ns=50))
    assert losses(scope) == {DEPENDENCIES: 2000, GAPS: 250}


def test_extra_time_around_a_memory_node_is_a_gap() -> None:
    """A memset of 300 ns between two kernels, with 500 ns around it, and 100 before each."""
    steps = [op("a", "x"), Step("zero", changes="a", kernels=(memset(300),)), op("b", "a")]
    scope = step_of(make_trace(steps), make_hardware(chain_ns=100, memory_node_ns=500))
    assert scope.parallelism.span_ns == 2300
    assert losses(scope) == {DEPENDENCIES: 1300, GAPS: 700}


def test_too_few_streams_are_a_loss() -> None:
    """Three branches on two streams: one of them waits for 10 us."""
    scope = step_of(wide_trace(3, 10_000, depth=1), streams=2)
    assert losses(scope) == {DEPENDENCIES: 2000, STREAMS: 10_000}
    assert scope.streams == 2
    assert losses(step_of(wide_trace(3, 10_000, depth=1), streams=1)) == {DEPENDENCIES: 2000, STREAMS: 20_000}


def two_chains(blocks: int = 1, **options: Any) -> Trace:
    """Make two independent chains, 3 x 1000 and 2 x 1000 ns."""
    first = [op("a0", "x", dur_ns=1000, blocks=blocks), op("a1", "a0", blocks=blocks), op("a2", "a1", blocks=blocks)]
    return make_trace([*first, op("b0", "y", blocks=blocks), op("b1", "b0", blocks=blocks)], **options)


def test_two_independent_chains_run_side_by_side() -> None:
    scope = step_of(two_chains())
    found = scope.parallelism
    assert (found.work_ns, found.span_ns, found.maximum, found.width) == (5000, 3000, 2, 2)
    assert losses(scope) == {DEPENDENCIES: 2000}
    assert (scope.best_ns, scope.won_ns) == (3000, 2000)


def test_front_end_starts_one_kernel_at_a_time() -> None:
    steps = [op(f"a{i}", f"x{i}", dur_ns=1000) for i in range(3)]
    assert losses(step_of(make_trace(steps), make_hardware(front_end_ns=200))) == {FRONT_END: 400}


def test_kernels_of_half_the_gpu_run_two_at_a_time() -> None:
    steps = [op(f"a{i}", f"x{i}", dur_ns=1000, blocks=HALF) for i in range(4)]
    scope = step_of(make_trace(steps))
    assert losses(scope) == {SMS: 1000}
    assert scope.best_ns == 2000


def test_contention_is_told_from_what_does_not_fit() -> None:
    """Both fit side by side, so their slow-down is contention; without it nothing is lost."""
    steps = [op(f"a{i}", f"x{i}", dur_ns=12_000, blocks=HALF) for i in range(2)]
    found = losses(step_of(make_trace(steps), make_hardware(slowdown=0.5)))
    assert set(found) == {CONTENTION}
    assert 0 < found[CONTENTION] < 12_000
    assert losses(step_of(make_trace(steps), without_contention(make_hardware(slowdown=0.5)))) == {}


def test_kernels_that_each_fill_the_bandwidth_halve_each_other() -> None:
    """Each moves 200 MB, 137 MB of them beyond the L2, in 1 us: more than any bandwidth, so it is limited to that."""
    trace = make_trace([op("a", "x"), op("b", "y")], elements=25_000_000)
    assert losses(step_of(trace)) == {DRAM: 1000}


def test_views_and_ops_without_kernels_do_not_count() -> None:
    trace = make_trace([op("a", "x"), view("v", "a"), op("b", "v"), Step("silent", changes="b")])
    scope = step_of(trace)
    assert (scope.ops, scope.kernels, scope.parallelism.span_ns) == (2, 2, 2000)


def test_step_without_kernels_has_nothing_to_lose() -> None:
    scope = step_of(make_trace([view("v", "x")]))
    assert (scope.ops, scope.sequential_ns, scope.best_ns, scope.speedup, scope.share(0)) == (0, 0, 0, 1.0, 0.0)
    assert (scope.parallelism.mean, scope.parallelism.maximum, scope.parallelism.width) == (0.0, 0, 0)


# --- Phases ---


def phased() -> Trace:
    """Make a step: forward f, two backward ops that need it, and an optimizer op that needs one of those."""
    steps = [op("f", "x", dur_ns=5000), op("b0", "f"), op("b1", "f", dur_ns=2000), op("o", "b0", dur_ns=700)]
    return with_phases(make_trace(steps), "forward", "backward", "backward", "optimizer")


def test_phases_are_looked_at_alone_and_together() -> None:
    found = {scope.name: scope for scope in limits(build_graph(phased(), make_hardware())).scopes}
    assert list(found) == ["forward", "backward", "optimizer", STEP]
    spans = {name: scope.parallelism.span_ns for name, scope in found.items()}
    # Inputs of a phase from outside count as ready.
    assert spans == {"forward": 5000, "backward": 2000, "optimizer": 700, STEP: 7000}
    assert [found[name].ops for name in found] == [1, 2, 1, 4]
    assert found["backward"].parallelism.width == 2


def test_what_another_phase_hands_on_without_a_kernel_still_counts() -> None:
    """b1 reads the result that `silent` (forward phase, no kernel) made from b0's."""
    trace = make_trace([op("b0", "x"), Step("silent", "b0", "s"), op("b1", "s"), op("f", "y")])
    found = limits(
        build_graph(with_phases(trace, "backward", "forward", "backward", "forward"), make_hardware())
    ).scopes
    assert {scope.name: scope.parallelism.span_ns for scope in found} == {"backward": 2000, "forward": 1000, STEP: 2000}


def test_what_another_phase_computes_is_taken_to_be_there() -> None:
    """b1 needs f, and f needs b0: within the backward phase b1 waits for nothing."""
    trace = with_phases(make_trace([op("b0", "x"), op("f", "b0"), op("b1", "f")]), "backward", "forward", "backward")
    found = limits(build_graph(trace, make_hardware())).scopes
    assert {scope.name: scope.parallelism.span_ns for scope in found} == {"backward": 1000, "forward": 1000, STEP: 3000}


def test_parallelism_of_the_step_is_told_by_phase() -> None:
    found = limits(build_graph(phased(), make_hardware())).scopes[-1].parallelism
    by_phase = dict(found.by_phase)
    assert list(by_phase) == ["forward", "backward", "optimizer"]
    assert found.running == ((0, 1), (5000, 2), (6000, 2), (6700, 1), (7000, 0))
    assert by_phase["backward"] == ((0, 0), (5000, 2), (6000, 1), (6700, 1), (7000, 0))
    assert by_phase["optimizer"] == ((0, 0), (5000, 0), (6000, 1), (6700, 0), (7000, 0))


def test_step_of_one_phase_has_one_scope() -> None:
    assert [scope.name for scope in limits(build_graph(chain_trace(), make_hardware())).scopes] == [STEP]


# --- In general ---


@settings(max_examples=40)
@given(traces(max_ops=8), hardware_models(), st.integers(1, 4))
def test_losses_add_up_exactly_for_any_step(trace: Trace, hardware: HardwareModel, streams: int) -> None:
    scope = step_of(trace, hardware, streams)
    assert [loss.limit for loss in scope.losses] == list(LIMITS)
    level = scope.unlimited_ns
    for loss in scope.losses:
        level += loss.loss_ns
        assert level == loss.makespan_ns
    assert level == scope.best_ns
    assert scope.best_ns + scope.won_ns == scope.sequential_ns
    assert scope.unlimited_ns + scope.potential_ns == scope.sequential_ns
    # Candidates include the sequential schedule, and the best one on fewer streams.
    assert scope.won_ns >= 0
    assert scope.losses[-1].loss_ns >= 0
    assert scope.losses[0].loss_ns >= 0
    assert scope.streams <= streams


@settings(max_examples=40)
@given(traces(max_ops=10))
def test_span_is_the_longest_chain_and_the_mean_is_work_over_span(trace: Trace) -> None:
    graph = build_graph(trace)
    longest = [0.0] * len(graph)
    for index, preds in enumerate(dependencies(trace)):
        alone_ns = sum(task.dur_ns for task in graph.tasks[index])
        longest[index] = alone_ns + max((longest[p] for p in preds), default=0.0)
    found = step_of(trace).parallelism
    assert found.span_ns == pytest.approx(max(longest), abs=1)
    area = sum(
        count * (until - time) for (time, count), (until, _) in zip(found.running, found.running[1:], strict=False)
    )
    assert area == pytest.approx(found.work_ns, abs=2 * len(graph))
    assert found.maximum <= found.width
    assert found.mean <= found.maximum + 1e-3


def test_limits_that_are_off_cost_nothing() -> None:
    hardware = make_hardware(chain_ns=400, join_ns=300, front_end_ns=200, memory_node_ns=500, slowdown=0.8)
    graph = build_graph(wide_trace(6), hardware)
    free = relaxed(graph, ())
    assert free.hardware.graph.chain_ns == free.hardware.graph.join_ns == free.hardware.graph.front_end_ns == 0
    assert not any(any(task.demand.resources) for tasks in free.tasks for task in tasks)
    assert relaxed(graph, LIMITS).hardware == graph.hardware
    assert relaxed(graph, LIMITS).tasks == graph.tasks
    assert graph.hardware.graph.chain_ns == 400


def test_engine_that_is_asked_for_is_used() -> None:
    class Counting:
        name = "counting"
        runs = 0

        def run(self, plan: Any, hardware: HardwareModel) -> Any:
            self.runs += 1
            return engine_by_name("reference").run(plan, hardware)

    engine = Counting()
    limits(build_graph(chain_trace(), make_hardware()), engine=engine)
    assert engine.runs > len(LIMITS)


def test_stream_count_is_checked() -> None:
    with pytest.raises(OptionError, match=r"^streams=0: "):
        limits(build_graph(chain_trace(), make_hardware()), streams=0)


# --- The command ---


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "step.json"
    write_trace(phased(), path)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["gpusim", "limits", *map(str, arguments)])
    try:
        main()
    except SystemExit as exited:
        return int(exited.code or 0)
    return 0


def test_command_prints_one_json_document_whose_losses_add_up(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, trace_file, "--streams", "2", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["trace"], document["streams"], document["calibrated"]) == ("tiny-infer-b1", 2, True)
    assert [scope["scope"] for scope in document["scopes"]] == ["forward", "backward", "optimizer", "step"]
    for scope in document["scopes"]:
        lost = sum(loss["loss_ns"] for loss in scope["losses"])
        assert scope["unlimited_ns"] + lost == scope["best"]["makespan_ns"]
        assert scope["best"]["makespan_ns"] + scope["won_ns"] == scope["sequential_ns"]
        shares = sum(loss["share"] for loss in scope["losses"])
        if scope["potential_ns"]:
            assert shares + scope["won_ns"] / scope["potential_ns"] == pytest.approx(1.0)


def test_command_prints_tables_for_people(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, trace_file, "--hw", "v100") == 0
    out = capsys.readouterr().out
    assert "uncalibrated" in out
    for word in ("forward", "backward", "optimizer", "width", "T-inf", "= best list schedule", *LIMITS):
        assert word in out


def test_csv_has_one_row_for_each_scope_and_limit(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "losses.csv"
    assert run(monkeypatch, trace_file, "--csv", target) == 0
    rows = list(csv.DictReader(target.read_text().splitlines()))
    assert tuple(rows[0]) == CSV_FIELDS
    assert [(row["scope"], row["limit"]) for row in rows] == [
        (scope, limit) for scope in ("forward", "backward", "optimizer", "step") for limit in LIMITS
    ]
    step = [row for row in rows if row["scope"] == "step"]
    assert int(step[0]["unlimited_ns"]) + sum(int(row["loss_ns"]) for row in step) == int(step[0]["best_ns"])


def test_csv_and_json_say_the_same() -> None:
    found = limits(build_graph(phased(), make_hardware()))
    document = limits_document(found)
    rows = list(csv.DictReader(limits_csv(found).splitlines()))
    flat = [
        (scope["scope"], loss["limit"], str(loss["loss_ns"]))
        for scope in document["scopes"]
        for loss in scope["losses"]
    ]
    assert [(row["scope"], row["limit"], row["loss_ns"]) for row in rows] == flat


@pytest.mark.parametrize("option", ["--csv", "--html", "--png"])
def test_output_that_cannot_be_written_is_refused_before_the_work(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "missing.json", option, tmp_path / "no" / "file") == 2
    assert "cannot be written: there is no folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_stream_count_out_of_range_is_one_line(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, trace_file, "--streams", "0") == 2
    err = capsys.readouterr().err
    assert err.startswith("gpusim: --streams 0: ")
    assert err.count("\n") == 1


# --- L2 cache misses ---


def test_ops_on_streams_of_their_own_lose_no_time_to_cache_misses() -> None:
    """What-ifs without a stream limit reuse no memory: with misses, the span would exceed the sum of all kernels."""
    hardware = load_hardware("h200")
    trace = load_trace("googlenet-infer-b1")
    unmeasured = msgspec.structs.replace(hardware, memory=msgspec.structs.replace(hardware.memory, l2_bytes_per_ns=0.0))
    found, without = (limits(OpGraph.build(trace, each)).scopes[-1] for each in (hardware, unmeasured))
    assert found.parallelism == without.parallelism
    before_dram = LIMITS.index(DRAM)
    assert found.losses[:before_dram] == without.losses[:before_dram]
    assert found.losses[before_dram].loss_ns > without.losses[before_dram].loss_ns
    schedule_ns = Evaluator(OpGraph.build(trace, hardware)).makespan_ns(
        POLICIES["critical_path"](OpGraph.build(trace, hardware), found.streams)
    )
    assert found.best_ns <= schedule_ns, "the list schedule of that policy is one of those tried"
