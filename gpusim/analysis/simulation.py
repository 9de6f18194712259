"""Simulation of one schedule and of the sequential graph of its step (`gpusim simulate`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from gpusim.bounds.bounds import Bounds, bounds
from gpusim.defaults import DEFAULT_ENGINE
from gpusim.engine.base import Engine, Timeline, engine_by_name
from gpusim.engine.evaluate import Evaluator
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.lowering import schedule_of
from gpusim.memplan.plan import MemoryPlan
from gpusim.notebook import html_table, short_name, short_repr
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import LaunchMode
from gpusim.units import counted, format_bytes, format_ns


@dataclass(frozen=True, repr=False)
class Simulated:
    """A simulated schedule of a step, with the sequential graph of the step as baseline."""

    graph: OpGraph
    mode: LaunchMode
    schedule: Schedule
    engine: Engine
    makespan_ns: int
    """Predicted time of the step."""
    peak_bytes: int
    """Predicted peak memory."""
    sequential_ns: int
    """Predicted time of the sequential graph of the captured kernels."""
    plan: MemoryPlan | None = None
    """Memory actions of the schedule, with its streams and order; None if it has none."""

    @cached_property
    def timeline(self) -> Timeline:
        """Start and end of each task; simulated on first use, since the fields need no plan."""
        if self.plan is not None:
            evaluator = MemoryEvaluator(self.graph, self.engine)
            return evaluator.choosing(self.plan).time(evaluator.program(self.plan), memory=True)
        return self.engine.run(lower(self.graph, self.schedule, self.mode), self.graph.hardware)

    @property
    def policy(self) -> str:
        """Policy or search that made the schedule."""
        return self.schedule.policy

    @property
    def streams(self) -> int:
        """Number of streams in use, for copies too."""
        return self.schedule.stream_count if self.plan is None else self.plan.streams

    @property
    def interval_ns(self) -> tuple[int, int]:
        """Prediction interval of the time in a CUDA graph, in ns, which held 90 % of past measurements."""
        if self.plan is None:
            return self.schedule.interval_ns(self.graph, self.makespan_ns)
        return self.plan.interval_ns(self.graph, self.makespan_ns)

    @property
    def speedup(self) -> float:
        """Speed-up over the sequential graph."""
        return self.sequential_ns / self.makespan_ns if self.makespan_ns else 1.0

    @cached_property
    def ran(self) -> OpGraph:
        """Op graph with the kernels that the schedule runs."""
        return self.graph.choosing(self.schedule.variants)

    @cached_property
    def bounds(self) -> Bounds:
        """Lower bounds with these kernels."""
        return bounds(self.ran)

    @cached_property
    def recorded(self) -> Timeline:
        """Timeline with occupancy and DRAM traffic over time, which only the reference engine records."""
        if self.timeline.occupied:
            return self.timeline
        return engine_by_name("reference").run(self.timeline.plan, self.graph.hardware)

    def __repr__(self) -> str:
        where = f"{short_name(self.graph.trace.name)} on {short_name(self.graph.hardware.label)}"
        text = f"{where}: {short_name(self.policy)}, {counted(self.streams, 'stream')}, {format_ns(self.makespan_ns)}"
        return short_repr("Simulated", f"{text}, {self.speedup:.2f}x")

    def _repr_html_(self) -> str:
        rows = [
            ("schedule", f"{self.policy}, {counted(self.streams, 'stream')}"),
            ("launched", "in one CUDA graph" if self.mode == "graph" else "from the host"),
            ("predicted time", format_ns(self.makespan_ns)),
            ("sequential CUDA graph", format_ns(self.sequential_ns)),
            ("speed-up", f"{self.speedup:.2f}x"),
            ("peak memory", format_bytes(self.peak_bytes)),
        ]
        title = f"Simulated {self.graph.trace.name} on {self.graph.hardware.label}"
        return html_table(title, ("", ""), rows)


def simulate(graph: OpGraph, schedule: Schedule, mode: LaunchMode = "graph", engine: Engine | None = None) -> Simulated:
    """Simulate a legal schedule, launched by one CUDA graph or by the host, on an engine (default: the fast one)."""
    runs = engine or engine_by_name(DEFAULT_ENGINE)
    evaluator = Evaluator(graph, runs)
    evaluation = evaluator.evaluate(schedule, mode)
    sequential_ns = evaluator.makespan_ns(Schedule.in_recorded_order(len(graph)))
    return Simulated(graph, mode, schedule, runs, evaluation.makespan_ns, evaluation.peak_bytes, sequential_ns)


def simulate_plan(graph: OpGraph, plan: MemoryPlan, engine: Engine | None = None) -> Simulated:
    """Simulate a memory plan in one CUDA graph on an engine (default: the fast one). Raises `PlanError`."""
    runs = engine or engine_by_name(DEFAULT_ENGINE)
    outcome = MemoryEvaluator(graph, runs).evaluate(plan)
    schedule = replace(schedule_of(outcome.program), variants=plan.variants)
    schedule = schedule.made(plan.policy, plan.made_by, outcome.step_ns)
    sequential_ns = Evaluator(graph, runs).makespan_ns(Schedule.in_recorded_order(len(graph)))
    return Simulated(graph, "graph", schedule, runs, outcome.step_ns, outcome.peak_bytes, sequential_ns, plan)
