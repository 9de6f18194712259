"""Shared parts of the engine tests: running a plan, and invariants of every timeline."""

from __future__ import annotations

from gpusim.engine.base import Timeline, engine_by_name
from gpusim.formats.hardware import HardwareModel
from gpusim.plan.tasks import Plan
from tests.support.helpers import make_hardware

#: Start and end times are rounded to whole ns, each by at most half of one.
ROUNDING_NS = 1


def run(tested: Plan, hardware: HardwareModel | None = None) -> Timeline:
    return engine_by_name("reference").run(tested, hardware or make_hardware())


def spans(timeline: Timeline) -> list[tuple[int, int]]:
    return list(zip(timeline.start_ns, timeline.end_ns, strict=True))


def longest_chain_ns(tested: Plan) -> float:
    """Return the longest chain of durations through dependencies and queues."""
    level: list[float] = []
    last: dict[tuple[int, int], int] = {}
    for index, task in enumerate(tested.tasks):
        lane = (task.device, task.queue)
        before = [*task.deps, *([last[lane]] if lane in last else [])]
        last[lane] = index
        level.append(task.dur_ns + max((level[p] for p in before), default=0.0))
    return max(level)


def assert_legal(timeline: Timeline) -> None:
    """Check that dependencies and queue order hold, everything runs, and nothing takes less than its time alone."""
    last: dict[tuple[int, int], int] = {}
    for index, task in enumerate(timeline.plan.tasks):
        lane = (task.device, task.queue)
        before = [*task.deps, *([last[lane]] if lane in last else [])]
        last[lane] = index
        start, end = timeline.start_ns[index], timeline.end_ns[index]
        assert 0 <= timeline.ready_ns[index] <= start <= end
        assert end - start >= task.dur_ns - ROUNDING_NS
        assert all(timeline.end_ns[p] <= start for p in before)
