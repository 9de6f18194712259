"""Makespan and peak memory of schedules of one step, by the shortest way to an engine's numbers."""

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
    """The numbers of one schedule."""

    makespan_ns: int
    peak_bytes: int


class Evaluator:
    """Evaluates schedules of one step.

    The fast engine has a compiled lowering of its own, to the same times, which takes all schedules on the whole GPU.
    Other engines, and schedules on partitions of the SMs, run on plans.
    """

    def __init__(self, graph: OpGraph, engine: str | Engine = DEFAULT_ENGINE) -> None:
        """Raises `UnknownNameError` for the engine."""
        self.graph = graph
        self._engine = engine_by_name(engine) if isinstance(engine, str) else engine

    def evaluate(self, schedule: Schedule, mode: LaunchMode = "graph") -> Evaluation:
        """Makespan and peak memory of a schedule. Raises `PlanError` for one that is not legal."""
        if self._needs_plan(schedule):
            timeline = self._engine.run(lower(self.graph, schedule, mode), self.graph.hardware)
            return Evaluation(timeline.makespan_ns, timeline.peak_bytes)
        batch = self._run(schedule, mode, peak=True)
        assert batch.peak_bytes is not None
        return Evaluation(int(batch.makespan_ns[0]), int(batch.peak_bytes[0]))

    def makespan_ns(self, schedule: Schedule, mode: LaunchMode = "graph") -> int:
        """The makespan alone, which takes less time. Raises `PlanError` for a schedule that is not legal."""
        if self._needs_plan(schedule):
            return self._engine.run(lower(self.graph, schedule, mode, memory=False), self.graph.hardware).makespan_ns
        return int(self._run(schedule, mode, peak=False).makespan_ns[0])

    def _needs_plan(self, schedule: Schedule) -> bool:
        return self._engine.name != "fast" or bool(schedule.partitions)

    def _run(self, schedule: Schedule, mode: LaunchMode, peak: bool) -> Evaluated:
        variants = [schedule.variants] if schedule.variants else None
        return self._batch.evaluate([schedule.order], [schedule.streams], variants, mode=mode, peak=peak, threads=1)

    @cached_property
    def _batch(self) -> BatchEngine:
        from gpusim.engine.batch import BatchEngine  # it brings numba, which the reference engine goes without

        return BatchEngine(self.graph)
