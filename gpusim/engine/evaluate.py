"""Makespan and peak memory of schedules of one step, on the fastest path of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from gpusim.defaults import DEFAULT_ENGINE
from gpusim.engine.base import Engine, engine_by_name
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import LaunchMode

if TYPE_CHECKING:
    from gpusim.engine.batch import BatchEngine, Evaluated


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Makespan and peak memory of one schedule."""

    makespan_ns: int
    peak_bytes: int


class Evaluator:
    """Evaluator of schedules of one step.

    The fast engine lowers schedules on the whole GPU in compiled code, with the same times. Other engines, schedules
    with SM partitions, and schedules that may lose the L2 cache, run on plans.
    """

    def __init__(self, graph: OpGraph, engine: str | Engine = DEFAULT_ENGINE) -> None:
        """Raises `UnknownNameError` for the engine."""
        self.graph = graph
        self._engine = engine_by_name(engine) if isinstance(engine, str) else engine

    def evaluate(self, schedule: Schedule, mode: LaunchMode = "graph") -> Evaluation:
        """Return makespan and peak memory of a schedule. Raises `PlanError` for an illegal one."""
        if self._needs_plan(schedule):
            timeline = self._engine.run(lower(self.graph, schedule, mode), self.graph.hardware)
            return Evaluation(timeline.makespan_ns, timeline.peak_bytes)
        batch = self._run(schedule, mode, peak=True)
        assert batch.peak_bytes is not None
        return Evaluation(int(batch.makespan_ns[0]), int(batch.peak_bytes[0]))

    def makespan_ns(self, schedule: Schedule, mode: LaunchMode = "graph") -> int:
        """Return only the makespan, which is faster. Raises `PlanError` for an illegal schedule."""
        if self._needs_plan(schedule):
            return self._engine.run(lower(self.graph, schedule, mode, memory=False), self.graph.hardware).makespan_ns
        return int(self._run(schedule, mode, peak=False).makespan_ns[0])

    def _needs_plan(self, schedule: Schedule) -> bool:
        if self._engine.name != "fast" or schedule.partitions:
            return True
        return schedule.stream_count > 1 and self.graph.predicts_misses

    def _run(self, schedule: Schedule, mode: LaunchMode, peak: bool) -> Evaluated:
        variants = [schedule.variants] if schedule.variants else None
        return self._batch.evaluate([schedule.order], [schedule.streams], variants, mode=mode, peak=peak, threads=1)

    @cached_property
    def _batch(self) -> BatchEngine:
        from gpusim.engine.batch import BatchEngine  # imports numba, which the reference engine does not need

        return BatchEngine(self.graph)
