"""Gap between the largest bound and a schedule: parts by hand, sums of parts, and gaps of a recipe's results."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.analysis.gap import IMBALANCE, MODEL, ORDER, PARTS, Gap, _take_off, gap_to_bound
from gpusim.analysis.relaxed import CONTENTION, FRONT_END, GAPS, SMS
from gpusim.bounds.bounds import AREA, CRITICAL_PATH, Bounds, bounds
from gpusim.engine.fast import FastEngine
from gpusim.errors import MeasurementError
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Trace
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.trace.store import structure_hash, write_trace
from gpusim.validation.chosen import hardware_of
from gpusim.validation.gaps import gaps_markdown, measured_gaps
from gpusim.validation.replayed import ReplayedSchedule
from tests.support.helpers import (
    HALF,
    WHOLE,
    build_graph,
    hardware_models,
    lowered,
    make_hardware,
    make_trace,
    op,
    traces_with_schedules,
    wide_trace,
)

ENGINE = FastEngine()


def gap_of(graph: OpGraph, streams: list[int], measured_ns: int | None = None) -> Gap:
    return gap_to_bound(graph, Schedule(tuple(range(len(graph))), tuple(streams)), bounds(graph), ENGINE, measured_ns)


def parts(gap: Gap) -> dict[str, int]:
    """Return the parts that are not zero."""
    return {name: time_ns for name, time_ns in gap.parts if time_ns}


def test_op_that_waits_in_its_stream_is_put_down_to_the_order() -> None:
    # the chain a -> b of 2000; c, of 500, runs between them on their stream
    graph = build_graph(make_trace([op("a", "x"), op("c", "x", dur_ns=500), op("b", "a")]))
    found = gap_of(graph, [0, 0, 0])
    assert (found.bound, found.bound_ns, found.time_ns) == (CRITICAL_PATH, 2000, 2500)
    assert parts(found) == {ORDER: 500}
    assert found.largest == ORDER
    assert found.ratio == 1.25


@pytest.mark.parametrize(
    ("blocks", "slowdown", "wanted"),
    [
        (HALF, 0.5, {CONTENTION: 333}),  # while the older kernel runs, for 1000, the other does 1000 / 1.5
        (WHOLE, 0.0, {SMS: 1000}),  # the older kernel leaves no room
    ],
)
def test_older_kernel_costs_contention_or_sm_resources(blocks: int, slowdown: float, wanted: dict[str, int]) -> None:
    steps = [op("older", "x", dur_ns=1000, blocks=blocks), op("longer", "x", dur_ns=3000, blocks=HALF)]
    found = gap_of(build_graph(make_trace(steps), make_hardware(slowdown=slowdown)), [0, 1])
    assert (found.bound, found.bound_ns) == (CRITICAL_PATH, 3000)
    assert parts(found) == wanted


def test_kernels_that_do_not_fill_the_gpu_evenly_are_imbalance() -> None:
    three = build_graph(make_trace([op(f"a{i}", "x", dur_ns=1000, blocks=HALF) for i in range(3)]))
    found = gap_of(three, [0, 1, 2])
    assert (found.bound, found.bound_ns, found.time_ns) == (AREA, 1500, 2000)
    assert parts(found) == {IMBALANCE: 500}


def test_gaps_and_order_are_parts_where_area_binds() -> None:
    """Of 6 kernels of the whole GPU, 3 are a chain. With a stream each, one gap of 50 stays open: all other kernels end
    before the last of the chain.
    """
    steps = [op("a0", "x", blocks=WHOLE), op("a1", "a0", blocks=WHOLE), op("a2", "a1", blocks=WHOLE)]
    steps += [op(f"w{i}", "x", blocks=WHOLE) for i in range(3)]
    found = gap_of(build_graph(make_trace(steps), make_hardware(chain_ns=50)), [0] * len(steps))
    assert (found.bound, found.bound_ns, found.time_ns) == (AREA, 6000, 6000 + 5 * 50)
    assert parts(found) == {GAPS: 50, ORDER: 200}


def test_measurement_adds_what_the_model_did_not_foresee() -> None:
    graph = build_graph(make_trace([op("a", "x"), op("b", "a")]))
    found = gap_of(graph, [0, 0], measured_ns=2100)
    assert (found.time_ns, parts(found)) == (2100, {MODEL: 100})
    assert parts(gap_of(graph, [0, 0], measured_ns=1900)) == {MODEL: -100}


def test_schedule_at_the_bound_has_no_part_that_is_largest() -> None:
    assert gap_of(build_graph(make_trace([op("a", "x")])), [0]).largest == ""


@given(st.dictionaries(st.sampled_from((SMS, CONTENTION, FRONT_END)), st.integers(-50, 50)), st.integers(0, 100))
def test_what_a_bound_already_has_is_taken_off_whole(found: dict[str, int], time_ns: int) -> None:
    before = sum(found.values())
    _take_off(found, (SMS, CONTENTION), time_ns)
    assert sum(found.values()) == before - time_ns


@settings(max_examples=60)
@given(traces_with_schedules(), hardware_models(), st.integers(0, 100_000), st.sampled_from((0.0, 0.55)))
def test_parts_are_known_and_add_up_to_the_whole_gap(
    found: tuple[Trace, list[int], list[int]], hardware: HardwareModel, measured_ns: int, sharing: float
) -> None:
    trace, order, streams = found
    contention = msgspec.structs.replace(hardware.contention, sharing_exponent=sharing)
    hardware = msgspec.structs.replace(hardware, contention=contention)
    graph = OpGraph.build(trace, hardware)
    bound = bounds(graph)
    schedule = Schedule(tuple(order), tuple(streams))
    predicted_ns = ENGINE.run(lowered(graph, order, streams), graph.hardware).makespan_ns
    for time_ns, gap in (
        (predicted_ns, gap_to_bound(graph, schedule, bound, ENGINE)),
        (measured_ns, gap_to_bound(graph, schedule, bound, ENGINE, measured_ns)),
    ):
        assert (gap.bound_ns, gap.bound) == bound.largest
        assert gap.time_ns == time_ns
        assert sum(dict(gap.parts).values()) == time_ns - gap.bound_ns
        assert set(dict(gap.parts)) <= set(PARTS)


@pytest.mark.parametrize("binds", ["critical_path_ns", "area_ns", "contention_ns", "bandwidth_ns", "front_end_ns"])
def test_parts_add_up_whichever_bound_binds(binds: str) -> None:
    graph = build_graph(wide_trace(5), make_hardware(chain_ns=100, slowdown=0.8))
    bound = Bounds(**{**bounds(graph).document(), binds: 10_000_000})
    found = gap_to_bound(graph, Schedule(tuple(range(len(graph))), (0,) * len(graph)), bound, ENGINE)
    assert sum(dict(found.parts).values()) == found.time_ns - 10_000_000


# --- Of a recipe's results ---


def replayed(trace: Trace, policy: str, measured_ns: int, streams: int) -> ReplayedSchedule:
    n = len(trace.ops)
    return ReplayedSchedule(
        trace=trace.name,
        trace_hash=structure_hash(trace),
        policy=policy,
        order=tuple(range(n)),
        stream_of=tuple(number % streams for number in range(n)),
        measured_ns=measured_ns,
        sequential_ns=measured_ns,
    )


def test_fastest_measured_schedule_of_each_step_counts(tmp_path: Path) -> None:
    trace = wide_trace(4)
    write_trace(trace, tmp_path / "t.json")
    bound_ns = bounds(OpGraph.build(trace, hardware_of(trace))).largest[0]
    schedules = [replayed(trace, "slow", 3 * bound_ns, 1), replayed(trace, "fast", 2 * bound_ns, 3)]
    (found,) = measured_gaps(schedules, {trace.name: tmp_path / "t.json"})
    assert (found.policy, found.gap.time_ns, found.gap.ratio) == ("fast", 2 * bound_ns, 2.0)
    text = "\n".join(gaps_markdown([found]))
    assert "**2.00**" in text
    assert f"| {MODEL} |" in text, "a large gap has a column with its parts"
    (near,) = measured_gaps([replayed(trace, "near", round(1.2 * bound_ns), 3)], {trace.name: tmp_path / "t.json"})
    assert "No step is above 1.25." in gaps_markdown([near])


def test_step_without_its_own_trace_is_refused(tmp_path: Path) -> None:
    schedule = replayed(wide_trace(4), "p", 1000, 2)
    with pytest.raises(MeasurementError, match="no trace"):
        measured_gaps([schedule], {})
    write_trace(wide_trace(5), tmp_path / "t.json")
    with pytest.raises(MeasurementError, match="is not the step"):
        measured_gaps([schedule], {schedule.trace: tmp_path / "t.json"})
