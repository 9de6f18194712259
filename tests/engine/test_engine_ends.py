"""Every simulation ends, with correct times from 1 ns to hours or with one error line; both engines, to the last
bit.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.engine import budget
from gpusim.engine.base import Engine, Timeline
from gpusim.engine.batch import BatchEngine
from gpusim.engine.fast import FastEngine
from gpusim.engine.reference import ReferenceEngine
from gpusim.errors import PlanError
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import MAX_TIME_NS, LaunchMode, Plan, Task
from gpusim.policies.ios import ios
from gpusim.policies.shared.list_scheduling import FastLists
from gpusim.rules import dispatch
from gpusim.rules.occupancy import Footprint
from gpusim.trace.store import load_trace
from tests.support.helpers import make_hardware, share
from tests.support.list_scheduling import list_schedule

ENGINES = (ReferenceEngine(), FastEngine())
MODES: tuple[LaunchMode, ...] = ("graph", "stream")
HOUR_NS = 3.6e12
FOOTPRINT = Footprint(threads=256, regs=8192, smem_bytes=1024, carveout_bytes=8192, own_carveout_bytes=8192)
BLOCKS_PER_SM = 8
#: Waves of an H200: one block, part of one, one, slightly more, many.
BLOCKS = (1, 100, 132 * 8, 132 * 8 + 1, 5000, 100_000)


def kernel(dur_ns: float, blocks: int = 132 * 8, queue: int = 0, **fields: object) -> Task:
    """Make a kernel by its number of blocks."""
    placed = {"blocks": blocks, "blocks_per_sm": BLOCKS_PER_SM, "footprint": FOOTPRINT, "demand": share(1.0)}
    return Task(name="k", dur_ns=dur_ns, queue=queue, **(placed | fields))  # type: ignore[arg-type]


def free_gpu(**costs: float) -> HardwareModel:
    """Block-level placement; costs not given are zero."""
    return make_hardware(sharing=0.5, **costs)


def times(timeline: Timeline) -> tuple[tuple[int, ...], ...]:
    return timeline.ready_ns, timeline.start_ns, timeline.end_ns


# --- Times ---


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_ten_kernels_of_1000_s_in_a_chain_end_at_whole_nanoseconds(engine: Engine, blocks: int) -> None:
    tested = Plan(tuple(kernel(1e12, blocks) for _ in range(10)))
    ended = engine.run(tested, free_gpu(chain_ns=7.0)).end_ns
    assert ended == tuple(k * 10**12 + 7 * (k - 1) for k in range(1, 11))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_a_kernel_of_1_ns_after_an_hour_takes_1_ns(engine: Engine) -> None:
    timeline = engine.run(Plan((kernel(HOUR_NS), kernel(1.0), kernel(HOUR_NS))), free_gpu())
    assert timeline.end_ns == (3_600_000_000_000, 3_600_000_000_001, 7_200_000_000_001)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_a_kernel_of_1_ns_runs_beside_one_of_an_hour(engine: Engine) -> None:
    # Together they have 2 of 1056 blocks, each on an SM of its own: neither slows the other.
    timeline = engine.run(Plan((kernel(HOUR_NS, 1), kernel(1.0, 1, queue=1))), free_gpu())
    assert timeline.end_ns == (3_600_000_000_000, 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dur_ns", [4e9, 8e9, 1e11, 1e13])
def test_past_2_to_the_33_ns_blocks_still_end(mode: LaunchMode, dur_ns: float) -> None:
    tested = Plan(tuple(kernel(dur_ns + number, 5000, queue=number % 3) for number in range(9)), mode=mode)
    first, second = (times(engine.run(tested, load_hardware("h200"))) for engine in ENGINES)
    assert first == second
    assert max(first[2]) < 10 * dur_ns


@st.composite
def mixed_plans(draw: st.DrawFn) -> Plan:
    """Draw kernels from 1 ns to hours, with and without blocks, in a few streams with dependencies."""
    tasks = []
    for index in range(draw(st.integers(1, 10))):
        deps = tuple(sorted(draw(st.sets(st.integers(0, index - 1), max_size=2)))) if index else ()
        dur_ns = float(draw(st.sampled_from((1, 1000, 10**9, 2**33, 3_600_000_000_000)) | st.integers(1, 10**13)))
        blocks = draw(st.sampled_from(BLOCKS))
        made = kernel(dur_ns, blocks, draw(st.integers(0, 3)), deps=deps, dram_bytes=draw(st.sampled_from((0, 1e9))))
        if draw(st.booleans()):
            made = msgspec.structs.replace(made, demand=share(draw(st.sampled_from((0.1, 0.4, 1.0)))), host_ns=dur_ns)
        tasks.append(made)
    return Plan(tuple(tasks), mode=draw(st.sampled_from(MODES)))


@settings(max_examples=30, deadline=None)
@given(mixed_plans(), st.booleans())
def test_both_engines_agree_to_the_last_bit_over_mixed_scales(tested: Plan, by_block: bool) -> None:
    hardware = load_hardware("h200") if by_block else make_hardware()
    first, second = (times(engine.run(tested, hardware)) for engine in ENGINES)
    assert first == second
    assert all(end >= begin >= 0 for begin, end in zip(first[1], first[2], strict=True))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 10**6), st.sampled_from(BLOCKS)), min_size=1, max_size=8), st.integers(1, 22))
def test_a_chain_with_all_times_doubled_k_times_takes_2_to_the_k_as_long(
    kernels: list[tuple[int, int]], k: int
) -> None:
    scale = 2.0**k
    plain, scaled = (
        FastEngine().run(
            Plan(tuple(kernel(dur_ns * factor, blocks) for dur_ns, blocks in kernels)),
            free_gpu(chain_ns=3.0 * factor),
        )
        for factor in (1.0, scale)
    )
    assert scaled.makespan_ns == plain.makespan_ns * int(scale)


# --- Grids ---


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize("blocks", [10**6, 2**31 - 1, 2**62, 2**63 + 1])
def test_a_kernel_alone_takes_its_time_whatever_its_grid(engine: Engine, blocks: int) -> None:
    assert engine.run(Plan((kernel(12_345.0, blocks),)), free_gpu()).makespan_ns == 12_345


@given(st.integers(1, 2**53), st.integers(1, 10**4))
def test_blocks_are_placed_in_at_most_so_many_waves_and_never_fewer_than_fit_at_once(count: int, at_once: int) -> None:
    placed = dispatch.placed_blocks(count, at_once)
    assert placed <= count
    assert placed <= dispatch.MOST_WAVES * at_once
    assert placed == count or placed > dispatch.MOST_WAVES * at_once // 2


# --- What cannot be simulated ---


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_a_step_longer_than_the_clock_counts_is_refused_with_its_time(engine: Engine) -> None:
    with pytest.raises(PlanError, match=r"takes 1\.8e\+16 ns; at most 9007199254740992 ns \(104 days\)"):
        engine.run(Plan((kernel(9e15), kernel(9e15))), free_gpu())


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize("field", ["dur_ns", "extra_ns", "idle_ns", "host_ns"])
def test_a_task_longer_than_the_clock_counts_is_refused_by_number(engine: Engine, field: str) -> None:
    with pytest.raises(PlanError, match=r"task 1 'k' has a duration of .*; at most 9007199254740992 ns"):
        engine.run(Plan((kernel(1.0), msgspec.structs.replace(kernel(1.0), **{field: 2.0 * MAX_TIME_NS}))), free_gpu())


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize(
    ("section", "name"),
    [("stream", "chain_ns"), ("stream", "start_ns"), ("stream", "event_host_ns"), ("graph", "busy_ns")],
)
@pytest.mark.parametrize("mode", MODES)
def test_costs_of_an_hour_end_and_larger_ones_than_the_clock_counts_are_refused(
    engine: Engine, section: str, name: str, mode: LaunchMode
) -> None:
    tested = Plan((kernel(5.0, 1), kernel(9.0, 1), kernel(9.0, 5000, queue=1, deps=(0,))), mode=mode)
    model = free_gpu()
    part = getattr(model, section)
    hour, endless = (
        msgspec.structs.replace(model, **{section: msgspec.structs.replace(part, **{name: time_ns})})
        for time_ns in (HOUR_NS, 1e300)
    )
    assert engine.run(tested, hour).makespan_ns < 10 * HOUR_NS
    with pytest.raises(PlanError, match=rf"{section}\.{name} is 1e\+300 ns"):
        engine.run(tested, endless)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_a_gpu_with_room_for_1e18_blocks_is_refused_by_field(engine: Engine) -> None:
    model = free_gpu()
    model = msgspec.structs.replace(model, limits=msgspec.structs.replace(model.limits, blocks_per_sm=10**18))
    with pytest.raises(PlanError, match=r"limits\.blocks_per_sm is 1e\+18"):
        engine.run(Plan((kernel(1.0),)), model)


# --- The budget ---


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sharing", [0.0, 0.5])
def test_a_simulation_past_its_budget_ends_with_task_and_time(
    engine: Engine, mode: LaunchMode, sharing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "EVENTS", 0)
    with pytest.raises(PlanError, match=r"the simulation passed 0 events without an end; task -?\d+, time \d+ ns"):
        engine.run(Plan((kernel(5.0), kernel(7.0)), mode=mode), make_hardware(sharing=sharing))


def test_batches_list_schedules_and_ios_stages_have_the_budget_too(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = OpGraph.build(load_trace("squeezenet1_1-infer-b1"), load_hardware("h200"))
    count = len(graph)
    lists, batch = FastLists(graph), BatchEngine(graph)
    monkeypatch.setattr(budget, "EVENTS", 0)
    for run in (
        lambda: batch.evaluate([range(count)], [[0] * count]),
        lambda: lists.schedule(2, [0.0] * count),
        lambda: list_schedule(graph, 2, [0.0] * count),
        lambda: ios(graph, 2),
    ):
        with pytest.raises(PlanError, match="passed 0 events without an end"):
            run()
