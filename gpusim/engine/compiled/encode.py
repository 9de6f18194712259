"""Encoding of a plan as arrays."""

from __future__ import annotations

from array import array

import numpy as np

from gpusim.engine.compiled.arrays import Plans, Records, encode_tasks
from gpusim.formats.hardware import HardwareModel, StreamCosts
from gpusim.plan.tasks import MAX_PARTITIONS, MAX_TIME_NS, Plan, Task
from gpusim.rules.queues import hardware_queue


def encode_plan(plan: Plan, hardware: HardwareModel) -> tuple[Records, Plans, int, int] | None:
    """Return the tasks and nodes of a plan, and its numbers of devices and hardware queues.

    None for a plan that `check_plan` refuses, except for cycles, which are not checked here.
    """
    tasks = plan.tasks
    for task in tasks:
        if not all(0 <= time_ns <= MAX_TIME_NS for time_ns in (task.dur_ns, task.extra_ns, task.idle_ns, task.host_ns)):
            return None
        if not 0 <= task.partition < MAX_PARTITIONS:
            return None
    deps, first, previous = _dependencies(tasks)
    if deps is None:
        return None
    plans = Plans.of_size(1, len(tasks), len(deps), plan.mode == "stream")
    plans.deps[0] = deps
    devices: dict[int, int] = {}
    nodes = plans.nodes[0]
    nodes["row"] = np.arange(len(tasks))
    nodes["device"] = [devices.setdefault(task.device, len(devices)) for task in tasks]
    nodes["previous"] = previous
    nodes["first_dep"] = first[:-1]
    nodes["n_deps"] = np.diff(first)
    queues = 0
    if plan.mode == "stream":
        queue_of, queues = _hardware_queues(plan, hardware.stream)
        launches = plans.launches[0]
        launches["queue"] = queue_of
        launches["events"] = [len(task.deps) for task in tasks]
        launches["host_ns"] = [task.host_ns for task in tasks]
    return encode_tasks(tasks), plans, len(devices), queues


def _dependencies(tasks: tuple[Task, ...]) -> tuple[array[int] | None, array[int], array[int]]:
    """Return dependencies of all tasks without queue predecessors, the first index of each task's, and the latter."""
    last: dict[tuple[int, int], int] = {}
    flat, first, before = array("i"), array("q", [0]), array("i")
    for index, task in enumerate(tasks):
        stream = (task.device, task.queue)
        previous = last.get(stream, -1)
        last[stream] = index
        before.append(previous)
        if task.deps:
            if not all(0 <= dep < len(tasks) for dep in task.deps):
                return None, first, before
            flat.extend(dep for dep in dict.fromkeys(task.deps) if dep != previous)
        first.append(len(flat))
    return flat, first, before


def _hardware_queues(plan: Plan, costs: StreamCosts) -> tuple[list[int], int]:
    """Return the hardware queue of each task and their number; streams take the queues of a device round-robin."""
    dealt: dict[int, int] = {}
    numbers: dict[tuple[int, int], int] = {}
    number_of: dict[tuple[int, int], int] = {}
    for device, stream in plan.queues():
        turn = dealt.get(device, 0)
        dealt[device] = turn + 1
        number_of[(device, stream)] = numbers.setdefault((device, hardware_queue(costs, turn)), len(numbers))
    return [number_of[(task.device, task.queue)] for task in plan.tasks], len(numbers)
