"""The fast engine: the reference's rules compiled with numba. Same plan, same times; nothing is recorded on the way.

The rules are in `gpusim.engine.compiled`; research/2026-11-23-engine-rules.md says how to change one in both engines.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpusim.engine.base import Timeline
from gpusim.engine.compiled.arrays import Room, encode_hardware
from gpusim.engine.compiled.encode import encode_plan
from gpusim.engine.compiled.link import link_plans
from gpusim.engine.compiled.simulate import simulate_plans
from gpusim.errors import PlanError
from gpusim.hardware.model import HardwareModel
from gpusim.plan.tasks import Plan, check_plan


class FastEngine:
    """Simulates a plan as the reference engine does; see `gpusim.engine.base.Engine`."""

    name = "fast"

    def run(self, plan: Plan, hardware: HardwareModel) -> Timeline:
        """Simulate `plan`. Raises `PlanError`."""
        if not len(plan):
            return Timeline(plan, (), (), ())
        encoded = encode_plan(plan, hardware)
        if encoded is None:
            check_plan(plan)
            raise AssertionError("encode_plan refused a plan that check_plan accepts")
        tasks, plans, devices, queues = encoded
        record = encode_hardware(hardware, 1 + max(task.partition for task in plan.tasks))
        if plan.mode == "graph":
            link_plans(record, tasks, plans, 0, 1)
        launches = plans.launches if plan.mode == "stream" else None
        room = Room.for_plans(plans, devices, queues, hardware)
        simulate_plans(record, tasks, plans, launches, room, 0, 1)
        nodes = plans.nodes[0]
        if plans.ended[0] < len(plan):
            check_plan(plan)  # a cycle is the likely reason
            stuck = int(np.flatnonzero(nodes["end_ns"] < 0)[0])
            raise PlanError(f"task {stuck} never ran: the plan's queues wait for each other")
        return Timeline(
            plan=plan,
            start_ns=_rounded(nodes["start_ns"]),
            end_ns=_rounded(nodes["end_ns"]),
            ready_ns=_rounded(nodes["ready_ns"]),
        )


def _rounded(times: npt.NDArray[Any]) -> tuple[int, ...]:
    return tuple(np.rint(times).astype(np.int64).tolist())
