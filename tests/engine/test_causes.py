"""Causes recorded by the engines: equal in both, and adding up to each task's start and duration."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.engine.base import Timeline
from gpusim.engine.causes import COPIES, Causes, alone_ns
from gpusim.engine.fast import FastEngine
from gpusim.engine.reference import ReferenceEngine
from gpusim.errors import PlanError
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.tasks import LaunchMode, Plan, start_interval_ns
from gpusim.policies.registry import POLICIES
from gpusim.rules import copies, launch, queues
from gpusim.trace.store import load_trace
from tests.support.helpers import copy, make_hardware, plan, task
from tests.support.random_plans import random_plan

MODES: tuple[LaunchMode, ...] = ("graph", "stream")
#: Starts, ends and ready times are rounded to whole ns each.
ROUNDING_NS = 1.5


def recorded(tested: Plan, hardware: HardwareModel) -> tuple[Timeline, Causes]:
    timeline = ReferenceEngine().run(tested, hardware)
    assert timeline.causes is not None
    return timeline, timeline.causes


def assert_adds_up(timeline: Timeline, hardware: HardwareModel) -> None:
    """Start = ready + delay by its cause, ready = end of the last predecessor + its delay, time = alone + losses."""
    plan, causes = timeline.plan, timeline.causes
    assert causes is not None
    preds: list[set[int]] = []
    before: dict[tuple[int, int], int] = {}
    for index, tested in enumerate(plan.tasks):
        lane = (tested.device, tested.queue)
        preds.append({*tested.deps, *([before[lane]] if lane in before else [])})
        before[lane] = index
    for index, tested in enumerate(plan.tasks):
        start_ns, ready_ns, end_ns = timeline.start_ns[index], timeline.ready_ns[index], timeline.end_ns[index]
        held, by, last = causes.held[index], causes.held_by[index], causes.last[index]
        if held == "":
            assert (by, start_ns) == (-1, ready_ns)
        elif held == "front end":
            interval_ns = start_interval_ns(plan.tasks[by], hardware, plan.mode == "graph")
            assert start_ns == pytest.approx(timeline.start_ns[by] + interval_ns, abs=ROUNDING_NS)
        else:
            assert start_ns == pytest.approx(timeline.end_ns[by], abs=ROUNDING_NS)
            assert (held == "copy engine") == (tested.kind in COPIES)
        if plan.mode == "graph":
            assert (last < 0) == (not preds[index])
            if last >= 0:
                assert last in preds[index]
                gap_ns = launch.gap_ns(hardware.graph, plan.branches, len(preds[index]), tested.extra_ns)
                successors = [each for each, waits_for in enumerate(preds) if last in waits_for]
                lost_ns, place = causes.interference_ns[last] + causes.product_ns[last], successors.index(index)
                delay_ns = launch.ready_delay_ns(hardware.graph, gap_ns, lost_ns, place, len(successors))
                copying, after_copy = (plan.tasks[each].kind in COPIES for each in (index, last))
                waits_for_copy = any(plan.tasks[each].kind in COPIES for each in preds[index])
                delay_ns += copies.switch_ns(hardware.copies, copying, after_copy, waits_for_copy)
                assert ready_ns == pytest.approx(timeline.end_ns[last] + delay_ns, abs=ROUNDING_NS)
            else:
                assert ready_ns == 0
        else:
            launched_ns = queues.launched_start_ns(hardware.stream, causes.launched_ns[index])
            assert ready_ns >= launched_ns - ROUNDING_NS
            if last >= 0:
                same = (plan.tasks[last].device, plan.tasks[last].queue) == (tested.device, tested.queue)
                rule = queues.stream_start_ns if same and last not in tested.deps else None
                ends_ns = timeline.end_ns[last]
                allowed = {
                    queues.stream_start_ns(hardware.stream, ends_ns),
                    queues.event_start_ns(hardware.stream, ends_ns),
                }
                wanted = allowed if rule is None else {rule(hardware.stream, ends_ns)}
                assert any(ready_ns == pytest.approx(each, abs=ROUNDING_NS) for each in wanted)
        lost_ns = end_ns - start_ns - alone_ns(tested, hardware)
        noted_ns = sum(loss.lost_ns for loss in causes.losses[index])
        if causes.losses[index]:
            assert noted_ns == pytest.approx(lost_ns)
            assert all(loss.lost_ns >= 0.0 and loss.by != index for loss in causes.losses[index])
        else:
            assert lost_ns <= 1.0


@settings(max_examples=100, deadline=None)
@given(st.builds(random_plan, st.integers(0, 2**32), st.integers(1, 24), st.sampled_from(MODES)))
def test_any_plan_has_the_same_causes_on_both_engines_and_they_add_up(case: tuple[Plan, HardwareModel]) -> None:
    tested, hardware = case
    try:
        expected = ReferenceEngine().run(tested, hardware)
    except PlanError:
        return
    assert FastEngine().run(tested, hardware, record=True).causes == expected.causes
    assert_adds_up(expected, hardware)


@pytest.mark.parametrize("mode", MODES)
def test_bundled_step_has_the_same_causes_on_both_engines(mode: LaunchMode) -> None:
    graph = OpGraph.build(load_trace("googlenet-infer-b1"), load_hardware("h200"))
    lowered = lower(graph, POLICIES["wavefront"](graph, 6), mode)
    expected = ReferenceEngine().run(lowered, graph.hardware)
    assert FastEngine().run(lowered, graph.hardware, record=True).causes == expected.causes
    assert_adds_up(expected, graph.hardware)


def test_losses_that_find_no_room_at_first_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = plan(*(task(1000, queue=q, dram_bytes=10_000) for q in range(3)))
    hardware = make_hardware(dram_bytes_per_ns=10)
    monkeypatch.setattr("gpusim.engine.fast.LOSSES_OF_A_TASK", 0)
    found = FastEngine().run(tested, hardware, record=True).causes
    assert found == recorded(tested, hardware)[1]
    assert found is not None
    assert all(found.losses)


def test_nothing_is_recorded_unless_asked_for() -> None:
    tested, hardware = plan(task(100), task(100, queue=1)), make_hardware()
    assert FastEngine().run(tested, hardware).causes is None
    assert ReferenceEngine().run(tested, hardware, record=False).causes is None
    assert FastEngine().run(plan(), hardware, record=True).causes == recorded(plan(), hardware)[1]


# --- By hand ---


def test_who_held_a_task_that_was_ready() -> None:
    """Three are ready at 0, and one starts every 200 ns: each was delayed by the one before."""
    _, causes = recorded(plan(*(task(1000, queue=i) for i in range(3))), make_hardware(front_end_ns=200))
    assert causes.held == ("", "front end", "front end")
    assert causes.held_by == (-1, 0, 1)


def test_copy_waits_for_the_one_before_it_in_its_direction() -> None:
    _, causes = recorded(plan(copy("h2d", 50_000), copy("h2d", 100_000, queue=1)), make_hardware())
    assert (causes.held, causes.held_by) == (("", "copy engine"), (-1, 0))


def test_small_memset_loses_to_the_copy_it_waits_for() -> None:
    tested = plan(copy("d2h", 50_000, queue=1), task(100, kind="memset", part=0.0, on_copy_engine=True))
    timeline, causes = recorded(tested, make_hardware(memset_d2h_ns=30))
    assert timeline.end_ns == (1000, 130)
    (loss,) = causes.losses[1]
    assert (loss.cause, loss.by, loss.lost_ns) == ("copy engine", 0, 30.0)


def test_kernel_loses_to_a_copy_beside_it() -> None:
    """A copy of 1000 ns slows kernels by a half: the kernel has done 667 of 1000 ns when it ends."""
    hardware = make_hardware(kernel_slowdown=0.5)
    timeline, causes = recorded(plan(task(1000), copy("h2d", 50_000, queue=1)), hardware)
    assert timeline.end_ns == (1333, 1000)
    (loss,) = causes.losses[0]
    assert (loss.cause, loss.by, loss.from_ns, loss.until_ns) == ("copy engine", 1, 0.0, 1000.0)
    assert loss.lost_ns == pytest.approx(333, abs=0.5)
    assert causes.losses[1] == ()
