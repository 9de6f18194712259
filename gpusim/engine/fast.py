"""The fast engine: the rules of the reference engine compiled with numba, with equal times and causes.

It records no series over time. The code is in `gpusim.engine.compiled`; CONTRIBUTING.md says how to add a rule.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpusim.engine.base import Timeline
from gpusim.engine.causes import Causes
from gpusim.engine.compiled.arrays import Room, encode_hardware
from gpusim.engine.compiled.encode import encode_plan
from gpusim.engine.compiled.link import link_plans
from gpusim.engine.compiled.record import LOSSES_OF_A_TASK, Recording
from gpusim.engine.compiled.simulate import simulate_plans
from gpusim.errors import PlanError
from gpusim.formats.hardware import HardwareModel
from gpusim.plan.tasks import Plan, check_plan


class FastEngine:
    """Compiled engine with the times of the reference engine; see `gpusim.engine.base.Engine`."""

    name = "fast"

    def run(self, plan: Plan, hardware: HardwareModel, record: bool = False) -> Timeline:
        """Simulate `plan`, with its causes if `record`. Raises `PlanError`."""
        if not len(plan):
            return Timeline(plan, (), (), (), causes=Causes((), (), (), (), (), (), ()) if record else None)
        encoded = encode_plan(plan, hardware)
        if encoded is None:
            check_plan(plan)
            raise AssertionError("encode_plan refused a plan that check_plan accepts")
        tasks, plans, devices, queues = encoded
        encoded_hardware = encode_hardware(hardware, 1 + max(task.partition for task in plan.tasks))
        if plan.mode == "graph":
            link_plans(encoded_hardware, tasks, plans, 0, 1)
        launches = plans.launches if plan.mode == "stream" else None
        room = Room.for_plans(plans, devices, queues, hardware)
        recording = Recording.of_size(len(plan), devices, LOSSES_OF_A_TASK * len(plan)) if record else None
        simulate_plans(encoded_hardware, tasks, plans, launches, room, 0, 1, record=recording)
        if recording is not None and recording.noted[0] > len(recording.losses):
            recording = Recording.of_size(len(plan), devices, int(recording.noted[0]))
            simulate_plans(encoded_hardware, tasks, plans, launches, room, 0, 1, record=recording)
        nodes = plans.nodes[0]
        if plans.ended[0] < len(plan):
            check_plan(plan)  # a cycle is the likely reason
            stuck = int(np.flatnonzero(nodes["end_ns"] < 0)[0])
            raise PlanError(f"task {stuck} never ran: the plan's queues wait for each other")
        start_ns, end_ns = _rounded(nodes["start_ns"]), _rounded(nodes["end_ns"])
        causes = None
        if recording is not None:
            launched_ns = (0.0,) * len(plan) if launches is None else tuple(launches[0]["launched_ns"].tolist())
            causes = recording.causes(plan, start_ns, end_ns, launched_ns, hardware)
        return Timeline(plan, start_ns, end_ns, _rounded(nodes["ready_ns"]), causes=causes)


def _rounded(times: npt.NDArray[Any]) -> tuple[int, ...]:
    return tuple(np.rint(times).astype(np.int64).tolist())
