"""Critical path of a simulated schedule: causes in small plans by hand, and a sum equal to the makespan in any plan."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.analysis.critical_path import CriticalPath, critical_path
from gpusim.engine.base import Timeline, engine_by_name
from gpusim.formats.hardware import HardwareModel
from gpusim.plan.tasks import Plan
from tests.support.helpers import copy, hardware_models, make_hardware, plan, plans, task


def simulate(found: Plan, hardware: HardwareModel) -> tuple[Timeline, CriticalPath]:
    timeline = engine_by_name("reference").run(found, hardware)
    return timeline, critical_path(timeline, hardware)


def causes(found: Plan, hardware: HardwareModel | None = None) -> list[tuple[int, str, int, int]]:
    """Return (task, cause, wait, run) of each step of the critical path."""
    _, path = simulate(found, hardware or make_hardware())
    return [(step.task, step.cause, step.wait_ns, step.run_ns) for step in path.steps]


# --- By hand ---


def test_chain_in_a_stream_is_all_critical_with_its_gaps() -> None:
    found = causes(plan(task(1000), task(2000), task(500)), make_hardware(chain_ns=100))
    assert found == [(0, "start", 0, 1000), (1, "stream", 100, 2000), (2, "stream", 100, 500)]


def test_path_goes_through_the_predecessor_that_ended_last() -> None:
    """Task 2 needs both; the second one ends later, in another stream."""
    found = causes(plan(task(1000), task(3000, queue=1), task(500, deps=[1])))
    assert found == [(1, "start", 0, 3000), (2, "dependency", 0, 500)]


def test_join_costs_count_as_the_wait_for_the_last_predecessor() -> None:
    found = causes(plan(task(1000), task(3000, queue=1), task(500, deps=[1])), make_hardware(chain_ns=100, join_ns=40))
    assert found == [(1, "start", 0, 3000), (2, "dependency", 140, 500)]


def test_task_that_waits_for_the_front_end_blames_the_one_started_before() -> None:
    """All are ready at 0, and one starts every 200 ns: the path only passes the starts of the first two."""
    found = causes(plan(*(task(1000, queue=i) for i in range(3))), make_hardware(front_end_ns=200))
    assert found == [(0, "start", 0, 0), (1, "front end", 200, 0), (2, "front end", 200, 1000)]


def test_task_without_a_grid_slot_blames_the_one_that_made_room() -> None:
    model = make_hardware()
    model = msgspec.structs.replace(model, limits=msgspec.structs.replace(model.limits, resident_grids=2))
    found = causes(plan(task(3000), task(1000, queue=1), task(4000, queue=2)), model)
    assert found == [(1, "start", 0, 1000), (2, "grid slot", 0, 4000)]


def test_second_copy_of_a_direction_waits_for_the_copy_engine() -> None:
    """50 bytes per ns: 1000 and 2000 ns; the other direction does not matter."""
    found = causes(plan(copy("h2d", 50_000), copy("h2d", 100_000, queue=1), copy("d2h", 1000, queue=2)))
    assert found == [(0, "start", 0, 1000), (1, "copy engine", 0, 2000)]


def test_time_over_that_alone_is_told_apart() -> None:
    """Two kernels that each need the whole GPU: the second has started, but its blocks find no room for 1000 ns."""
    _, path = simulate(plan(task(1000, part=1.0), task(2000, part=1.0, queue=1)), make_hardware())
    assert [(step.task, step.run_ns, step.slowed_ns) for step in path.steps] == [(1, 3000, 1000)]
    assert path.totals_ns() == {"alone": 2000, "slowed": 1000}


def test_host_that_launches_too_late_is_the_cause_in_stream_mode() -> None:
    """Launches take 5 us each, kernels 1 us: the second launch comes long after the first kernel ended."""
    hardware = make_hardware(launch_ns=5000, start_ns=300, stream_chain_ns=100)
    assert causes(plan(task(1000), task(1000), mode="stream"), hardware) == [(1, "launch", 10_300, 1000)]


def test_predecessor_is_the_cause_in_stream_mode_where_the_host_is_ahead() -> None:
    hardware = make_hardware(launch_ns=10, stream_chain_ns=100, event_ns=700)
    chain = plan(task(1000), task(1000), mode="stream")
    assert causes(chain, hardware) == [(0, "launch", 10, 1000), (1, "stream", 100, 1000)]
    crossing = plan(task(1000), task(1000, queue=1, deps=[0]), mode="stream")
    assert causes(crossing, hardware) == [(0, "launch", 10, 1000), (1, "dependency", 700, 1000)]


def test_empty_plan_has_an_empty_path() -> None:
    assert simulate(plan(), make_hardware())[1] == CriticalPath(())


def test_tasks_that_run_on_the_path() -> None:
    hardware = make_hardware(front_end_ns=200)
    _, path = simulate(plan(*(task(1000, queue=i) for i in range(3))), hardware)
    assert path.tasks == (2,)
    assert path.totals_ns() == {"alone": 1000, "slowed": 0, "front end": 400}


# --- In any plan ---


@settings(max_examples=150)
@given(st.data(), hardware_models())
def test_steps_lie_end_to_end_and_add_up_to_the_makespan(data: st.DataObject, hardware: HardwareModel) -> None:
    mode = data.draw(st.sampled_from(("graph", "stream")))
    timeline, path = simulate(data.draw(plans(mode)), hardware)
    time = 0
    for step in path.steps:
        assert step.wait_ns >= 0
        assert 0 <= step.slowed_ns <= step.run_ns
        assert (step.start_ns, step.start_ns - step.wait_ns) == (timeline.start_ns[step.task], time)
        time = step.leave_ns
        assert step.run_ns in (0, timeline.end_ns[step.task] - timeline.start_ns[step.task])
    assert time == timeline.makespan_ns == sum(path.totals_ns().values())
    assert len({step.task for step in path.steps}) == len(path.steps)


@settings(max_examples=100)
@given(plans(), hardware_models())
def test_dependency_on_the_path_is_one_of_the_plan(found: Plan, hardware: HardwareModel) -> None:
    _, path = simulate(found, hardware)
    for before, step in zip(path.steps, path.steps[1:], strict=False):
        if step.cause == "dependency":
            assert before.task in found.tasks[step.task].deps
        elif step.cause == "stream":
            same = [i for i, t in enumerate(found.tasks[: step.task]) if t.queue == found.tasks[step.task].queue]
            assert before.task == same[-1]
