"""The fast engine is the compiled reference engine: same times on every plan, same errors."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpusim.defaults import DEFAULT_ENGINE
from gpusim.engine.base import ENGINES, Engine, Timeline, engine_by_name
from gpusim.engine.batch import BatchEngine
from gpusim.engine.fast import FastEngine
from gpusim.engine.reference import ReferenceEngine
from gpusim.errors import PlanError
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.tasks import MAX_PARTITIONS, LaunchMode, Plan, Task
from gpusim.policies.registry import POLICIES
from gpusim.trace.store import bundled_traces, load_trace
from tests.support.helpers import copy, make_hardware, plan, task
from tests.support.random_plans import BLOCKS, random_plan

MODES: tuple[LaunchMode, ...] = ("graph", "stream")


def times(timeline: Timeline) -> tuple[tuple[int, ...], ...]:
    return timeline.ready_ns, timeline.start_ns, timeline.end_ns


def outcome(engine: Engine, tested: Plan, hardware: HardwareModel) -> tuple[tuple[int, ...], ...] | str:
    """Return ready, start and end of each task, or the plan's error."""
    try:
        return times(engine.run(tested, hardware))
    except PlanError as error:
        return str(error)


def assert_equal(tested: Plan, hardware: HardwareModel) -> None:
    """Both engines give the same times, or the same error."""
    assert outcome(FastEngine(), tested, hardware) == outcome(ReferenceEngine(), tested, hardware)


# --- Equality ---


@pytest.mark.parametrize(("place", "name"), list(enumerate(bundled_traces())))
def test_bundled_trace_takes_the_same_time_on_both_engines_under_half_of_the_policies(place: int, name: str) -> None:
    """In turns, so that each policy has half of the steps.

    Without the rule for the L2 cache, which batches leave out (tests/plan/test_cache_misses.py has both engines).
    """
    hardware = load_hardware("h200")
    memory = msgspec.structs.replace(hardware.memory, l2_bytes_per_ns=0.0)
    graph = OpGraph.build(load_trace(name), msgspec.structs.replace(hardware, memory=memory))
    fast, reference = FastEngine(), ReferenceEngine()
    counts = (4, 2, 8, 3)
    made = [
        policy(graph, counts[number % len(counts)])
        for number, policy in enumerate(POLICIES.values())
        if not policy.slow and number % 2 == place % 2
    ]
    batch = BatchEngine(graph).evaluate([m.order for m in made], [m.streams for m in made], peak=True)
    assert batch.peak_bytes is not None
    for number, each in enumerate(made):
        lowered = lower(graph, each)
        expected = reference.run(lowered, graph.hardware, record=False)
        assert (batch.makespan_ns[number], batch.peak_bytes[number]) == (expected.makespan_ns, expected.peak_bytes)
        assert times(fast.run(lowered, graph.hardware)) == times(expected)
    lowered = lower(graph, made[-1], "stream")
    assert times(fast.run(lowered, graph.hardware)) == times(reference.run(lowered, graph.hardware, record=False))


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if policy.slow])
@pytest.mark.parametrize("mode", MODES)
def test_schedule_of_a_slow_policy_has_the_same_times_on_both_engines(policy: str, mode: LaunchMode) -> None:
    graph = OpGraph.build(load_trace("googlenet-infer-b1"), load_hardware("h200"))
    made = POLICIES[policy](graph, 4)
    lowered = lower(graph, made, mode)
    expected = ReferenceEngine().run(lowered, graph.hardware, record=False)
    assert times(FastEngine().run(lowered, graph.hardware)) == times(expected)


@settings(max_examples=500)
@given(st.builds(random_plan, st.integers(0, 2**32), st.integers(1, 24), st.sampled_from(MODES)))
def test_any_plan_has_the_same_times_or_the_same_error_on_both_engines(case: tuple[Plan, HardwareModel]) -> None:
    assert_equal(*case)


@settings(max_examples=500)
@given(st.builds(random_plan, st.integers(0, 2**32), st.integers(1, 40), st.just("graph"), st.just(True)))
@example(random_plan(9817, 7, "graph", alone=True))  # rounding leaves less than nothing of a resource
def test_any_plan_of_one_gpu_alone_has_the_same_times_on_both_engines(
    case: tuple[Plan, HardwareModel],
) -> None:
    assert_equal(*case)


def test_memory_operations_run_behind_a_blocked_kernel_and_end_before_it_goes_on() -> None:
    """Pooled SMs: the second kernel gets a third of its blocks, the third none; the memset runs all the same."""
    memset = Task(name="memset", kind="memset", dur_ns=30.0, queue=3)
    tested = plan(task(90, part=0.75, queue=0), task(60, part=0.75, queue=1), task(10, part=0.5, queue=2), memset)
    # At 90 the second one has done 30 of 60 ns and continues in full; the third gets half of its blocks then.
    assert FastEngine().run(tested, make_hardware()).end_ns == (90, 120, 110, 30)
    assert_equal(tested, make_hardware())


def test_traffic_of_a_pool_that_is_too_much_for_a_while_slows_it_for_that_while() -> None:
    tested = plan(
        task(100, part=0.25, queue=0, dram_bytes=80_000.0),
        task(50, part=0.25, queue=1, dram_bytes=40_000.0),
        task(100, part=0.25, queue=2),
    )
    # Both together need 1,600 of 1,000 bytes per ns: the second is done at 80, the first has 50 ns left then.
    assert FastEngine().run(tested, make_hardware()).end_ns == (130, 80, 100)
    assert_equal(tested, make_hardware())


def test_as_many_groups_of_sms_as_there_can_be_end_in_the_same_order() -> None:
    """One partition makes all groups it may, each of the others has one: every place of a group is used."""
    dice = random.Random(0)
    per_sm, footprint = BLOCKS[0]
    made = [
        Task(
            name=f"t{number}",
            queue=number,
            dur_ns=dice.choice((500.0, 700.0, 1234.5)) + number,
            dram_bytes=1e3,
            partition=partition,
            partition_sms=132 if partition == 0 else 4,
            blocks=dice.randrange(1, 40) if partition == 0 else dice.randrange(1, 20),
            blocks_per_sm=per_sm,
            footprint=footprint,
        )
        for number, partition in enumerate([0] * 60 + [*range(1, MAX_PARTITIONS)] * 2)
    ]
    assert_equal(Plan(tuple(made), "graph"), make_hardware(sharing=0.5, front_end_ns=1.0))


@pytest.mark.parametrize("mode", MODES)
def test_more_ready_kernels_than_grid_slots_start_in_the_same_order(mode: LaunchMode) -> None:
    dice = random.Random(0)
    tasks = [task(dice.choice((100.0, 250.5)), part=0.01, queue=number % 160) for number in range(200)]
    assert_equal(plan(*tasks, mode=mode), make_hardware(front_end_ns=1.5, launch_ns=1.0, queues=32))


def test_empty_copy_at_the_start_frees_its_successors_before_the_front_end_starts_a_kernel() -> None:
    # The copy ends at 0. Task 1 is ready at 0, too, and was launched before task 2: it goes first.
    tested = plan(copy("d2h", 0, queue=1), task(10, queue=1), task(10, queue=2))
    hardware = make_hardware(front_end_ns=100)
    assert FastEngine().run(tested, hardware).start_ns == (0, 0, 100)
    assert_equal(tested, hardware)


def test_front_ends_of_several_gpus_take_turns_as_their_tasks_became_ready() -> None:
    # All at 0: GPU 0 starts its two empty kernels before GPU 1 starts anything. The second one's successor is ready by
    # then, and goes before the kernel that has waited on GPU 1: it was launched before it.
    tested = plan(
        task(0, queue=0),
        task(0, queue=1),
        task(100, part=1.0, queue=1, device=1, deps=[1]),
        task(100, part=1.0, queue=0, device=1),
    )
    assert FastEngine().run(tested, make_hardware()).end_ns == (0, 0, 100, 200)
    assert_equal(tested, make_hardware())


def test_engines_have_names_and_the_fast_one_is_the_default() -> None:
    assert {engine_by_name(name).name for name in ENGINES} == {"fast", "reference"}
    assert engine_by_name(DEFAULT_ENGINE).name == "fast"


# --- Plans that cannot run ---


@pytest.mark.parametrize(
    "tested",
    [
        plan(task(1, deps=[1], queue=0), task(1, deps=[0], queue=1)),
        plan(task(1, deps=[1]), task(1)),
        plan(task(1, deps=[0])),
        plan(task(1, deps=[1]), task(1), mode="stream"),
        plan(task(1), task(1, deps=[2])),
        plan(task(1), task(1, deps=[-1])),
        plan(task(1), task(1, deps=[10**30])),
        plan(task(1), task(-1.0)),
        plan(task(1), task(float("nan"))),
        plan(task(1), task(float("inf"))),
        plan(task(1), task(1, host_ns=-1.0), mode="stream"),
        plan(task(1, queue=0, deps=[1]), task(1, queue=1), mode="stream"),
    ],
    ids=lambda tested: f"{tested.mode} {[(found.queue, found.deps, found.dur_ns) for found in tested.tasks]}",
)
def test_plan_that_cannot_run_is_refused_in_the_same_words(tested: Plan) -> None:
    hardware = make_hardware(queues=1)
    with pytest.raises(PlanError):
        FastEngine().run(tested, hardware)
    assert_equal(tested, hardware)
