"""The engines' rules in stream mode; invalid plans of either mode; determinism."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings

from gpusim.engine.base import engine_by_name
from gpusim.errors import PlanError, UnknownNameError
from gpusim.formats.hardware import HardwareModel
from gpusim.plan.tasks import Plan, Task
from tests.support.helpers import (
    build_graph,
    hardware_models,
    kernel,
    make_hardware,
    make_trace,
    op,
    plan,
    plans,
    share,
    task,
)
from tests.support.timelines import ROUNDING_NS, assert_legal, longest_chain_ns, run, spans

# --- Stream mode ---


def spin_plan(streams: int, depth: int, depth_first: bool, dur_ns: float) -> Plan:
    """`streams` streams of `depth` kernels on one SM each."""
    if depth_first:
        order = [stream for stream in range(streams) for _ in range(depth)]
    else:
        order = [stream for _ in range(depth) for stream in range(streams)]
    one_sm = share(1 / 4224, cover=1 / 132)
    return plan(*(Task(name="spin", dur_ns=dur_ns, demand=one_sm, queue=stream) for stream in order), mode="stream")


def test_host_launches_one_kernel_after_the_other() -> None:
    hardware = make_hardware(launch_ns=100, start_ns=40)
    timeline = run(plan(*(task(1000, part=0.1, queue=q) for q in range(3)), mode="stream"), hardware)
    # launched at 100, 200, 300; each starts 40 later
    assert timeline.start_ns == (140, 240, 340)


def test_slow_host_keeps_the_gpu_waiting() -> None:
    hardware = make_hardware(launch_ns=100, start_ns=40, stream_chain_ns=10)
    timeline = run(plan(task(50), task(50, host_ns=700), mode="stream"), hardware)
    # the host needs 700 for the second call: launched at 800
    assert spans(timeline) == [(140, 190), (840, 890)]


def test_launched_kernel_follows_its_predecessor_after_the_stream_gap_or_an_event() -> None:
    hardware = make_hardware(launch_ns=10, start_ns=40, stream_chain_ns=5, event_ns=60, event_host_ns=20)
    tested = plan(task(1000, queue=0), task(100, queue=0), task(100, queue=1, deps=[0]), mode="stream")
    # first: 10 + 40 = 50..1050. Same stream: 1055. Other stream by event: 1110.
    assert run(tested, hardware).start_ns == (50, 1055, 1110)


def test_events_cost_host_time() -> None:
    hardware = make_hardware(launch_ns=10, event_host_ns=20)
    tested = plan(task(1, queue=0), task(1, queue=1, deps=[0]), task(1, queue=2), mode="stream")
    # launches at 10, 10 + 10 + 20 = 40, 50
    assert run(tested, hardware).start_ns == (10, 40, 50)


@pytest.mark.parametrize("queues", [1, 2, 4, 8, 32])
@pytest.mark.parametrize(("k", "d"), [(1, 4), (4, 4), (8, 3), (16, 4), (32, 2), (32, 4), (64, 1)])
def test_false_dependencies_of_depth_first_launches(queues: int, k: int, d: int) -> None:
    """k/q streams of d kernels in one queue, whose head waits for its stream, take (k/q)(d-1)+1 kernel times."""
    hardware = make_hardware(queues=queues)
    expected = -(-k // queues) * (d - 1) + 1
    assert run(spin_plan(k, d, True, 1000), hardware).makespan_ns == expected * 1000


@pytest.mark.parametrize("queues", [1, 8])
def test_breadth_first_launches_have_no_false_dependencies(queues: int) -> None:
    assert run(spin_plan(16, 4, False, 1000), make_hardware(queues=queues)).makespan_ns == 4000


@given(plans(mode="stream"), hardware_models())
def test_any_stream_plan_is_run_legally(tested: Plan, hardware: HardwareModel) -> None:
    timeline = run(tested, hardware)
    assert_legal(timeline)
    assert timeline.makespan_ns >= longest_chain_ns(tested) - ROUNDING_NS


# --- Plans that cannot run ---


def test_cycle_is_refused() -> None:
    with pytest.raises(PlanError, match="cycle"):
        run(plan(task(1, queue=0, deps=[1]), task(1, queue=1, deps=[0])))


def test_cycle_through_a_queue_is_refused() -> None:
    with pytest.raises(PlanError, match="cycle"):
        run(plan(task(1, queue=0, deps=[1]), task(1, queue=0)))


def test_task_that_waits_for_itself_is_refused() -> None:
    with pytest.raises(PlanError, match="cycle"):
        run(plan(task(1, deps=[0])))


@pytest.mark.parametrize("dangling", [-1, 2, 10**9])
def test_dangling_dependency_is_refused_with_its_number(dangling: int) -> None:
    with pytest.raises(PlanError, match=f"depends on task {dangling}, of 2 tasks"):
        run(plan(task(1), task(1, deps=[dangling])))


@pytest.mark.parametrize("field", ["dur_ns", "extra_ns", "idle_ns", "host_ns"])
@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_time_that_is_negative_or_not_a_number_is_refused(field: str, value: float) -> None:
    with pytest.raises(PlanError, match="task 1"):
        run(plan(task(1), msgspec.structs.replace(task(1), **{field: value})))  # type: ignore[arg-type]


def test_infinite_time_is_refused() -> None:
    with pytest.raises(PlanError, match="task 0"):
        run(plan(task(float("inf"))))


def test_queues_that_wait_for_each_other_are_reported() -> None:
    # One hardware queue: the head waits for the task right behind it. The plan itself has no cycle.
    tested = plan(task(1, queue=0, deps=[1]), task(1, queue=1), mode="stream")
    with pytest.raises(PlanError, match="wait for each other"):
        run(tested, make_hardware(queues=1))
    assert run(tested, make_hardware(queues=2)).makespan_ns == 2


def test_unknown_engine_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'reference'"):
        engine_by_name("referense")


def test_kernel_over_a_limit_of_the_gpu_is_refused_with_its_place() -> None:
    big = replace(op("b", "a"), kernels=(kernel(5), kernel(5, threads=2048)))
    with pytest.raises(PlanError, match=r"\$\.ops\[1\]\.kernels\[1\].*2048 threads a block.*1024"):
        build_graph(make_trace([op("a", "x"), big]))


# --- Determinism ---


@settings(max_examples=30)
@given(plans() | plans(mode="stream"), hardware_models())
def test_same_plan_twice_gives_the_same_timeline(tested: Plan, hardware: HardwareModel) -> None:
    assert run(tested, hardware) == run(tested, hardware)


DIGEST = """
import hashlib
from tests.support.helpers import *
from gpusim.engine.base import engine_by_name
from gpusim.plan.lower import lower
from gpusim.plan.sync import plan_sync
from gpusim.policies.registry import POLICIES
hardware = make_hardware(chain_ns=405.3, front_end_ns=250, slowdown=0.8, launch_ns=100, event_ns=7)
graph = OpGraph.build(wide_trace(9, 7777, 3), hardware)
seen = []
for name, policy in POLICIES.items():
    made = policy(graph, 4)
    for mode in ("graph", "stream"):
        timeline = engine_by_name("reference").run(lower(graph, made, mode), graph.hardware)
        seen.append((name, mode, made.order, made.streams, timeline.start_ns, timeline.end_ns, timeline.memory))
    seen.append(plan_sync(graph.trace, graph.preds, made.order, made.streams).waits)
print(hashlib.sha256(repr(seen).encode()).hexdigest())
"""


def test_hash_seed_does_not_change_policies_timelines_or_events() -> None:
    root = Path(__file__).parents[2]

    def digest(seed: str) -> str:
        paths = filter(None, (str(root), os.environ.get("PYTHONPATH")))
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-c", DIGEST]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    first = digest("1")
    assert first == digest("2") == digest("3")
    assert len(first.strip()) == 64
