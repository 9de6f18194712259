"""The simulated time of a plan, and a breakdown of its difference to the sum of costs."""

from __future__ import annotations

from dataclasses import dataclass

from gpusim.defaults import DEFAULT_ENGINE
from gpusim.engine.base import Timeline, engine_by_name
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.fixed_plans import Choice
from gpusim.layerwise.lowering import COMPUTE, Lowered, Purpose, lower_plan
from gpusim.notebook import ShortRepr


@dataclass(frozen=True, slots=True, repr=False)
class Makespan(ShortRepr):
    """Breakdown of the time of the busiest GPU; the parts sum to `step_ns`."""

    step_ns: float
    compute_ns: float
    """Kernels, at the time that each takes alone."""
    slowed_ns: float
    """Slow-down of kernels by concurrent collectives, through SMs and memory traffic."""
    transfer_ns: float
    """Waits for inputs and their gradients."""
    sync_ns: float
    """Waits for sums of gradients and statistics."""
    gaps_ns: float
    """Gaps between kernels."""
    hidden_ns: float
    """Collectives that overlap kernels; not part of the step."""


@dataclass(frozen=True, slots=True)
class SimulatedPlan:
    """A plan with its tasks and timeline on an engine."""

    lowered: Lowered
    timeline: Timeline
    makespan: Makespan


def simulate_plan(problem: Problem, choice: Choice, engine: str = DEFAULT_ENGINE) -> SimulatedPlan:
    """Simulate one step of a plan. Raises `PlanError`, `UnknownNameError`."""
    lowered = lower_plan(problem, choice)
    timeline = engine_by_name(engine).run(lowered.plan, lowered.hardware)
    return SimulatedPlan(lowered, timeline, explain(lowered, timeline))


def explain(lowered: Lowered, timeline: Timeline) -> Makespan:
    """Split the step of the GPU that ends last into kernels, slow-down, waits and gaps."""
    tasks = lowered.plan.tasks
    if not tasks:
        return Makespan(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    kernels: dict[int, list[int]] = {}
    for index, task in enumerate(tasks):
        if task.device < len(lowered.roles) and task.queue == COMPUTE:
            kernels.setdefault(task.device, []).append(index)
    if not kernels:
        return Makespan(float(timeline.makespan_ns), 0.0, 0.0, float(timeline.makespan_ns), 0.0, 0.0, 0.0)
    busiest = max(kernels, key=lambda device: (timeline.end_ns[kernels[device][-1]], -device))
    parts: dict[str, float] = {"compute": 0.0, "slowed": 0.0, "transfer": 0.0, "sync": 0.0, "gaps": 0.0}
    reached = 0
    for index in kernels[busiest]:
        start, end, solo = timeline.start_ns[index], timeline.end_ns[index], lowered.solo_ns[index]
        latest = max(tasks[index].deps, key=lambda dep: timeline.end_ns[dep], default=-1)
        if latest >= 0 and timeline.end_ns[latest] > reached:
            parts[_kind(lowered.purposes[latest])] += timeline.end_ns[latest] - reached
            reached = timeline.end_ns[latest]
        parts["gaps"] += start - reached
        parts["compute"] += solo
        parts["slowed"] += end - start - solo
        reached = end
    ran_ns = parts["compute"] + parts["slowed"]  # ends are whole ns, so kernels may seem shorter than alone
    parts["compute"] = min(parts["compute"], ran_ns)
    parts["slowed"] = ran_ns - parts["compute"]
    if timeline.makespan_ns > reached:  # the step ends with a collective
        last = max(range(len(tasks)), key=lambda index: timeline.end_ns[index])
        parts[_kind(lowered.purposes[last])] += timeline.makespan_ns - reached
    on_links = [
        timeline.end_ns[i] - timeline.start_ns[i]
        for i, task in enumerate(tasks)
        if task.device == len(lowered.roles) + busiest
    ]
    hidden = max(0.0, float(sum(on_links)) - parts["transfer"] - parts["sync"])
    return Makespan(
        float(timeline.makespan_ns),
        parts["compute"],
        parts["slowed"],
        parts["transfer"],
        parts["sync"],
        parts["gaps"],
        hidden,
    )


def _kind(purpose: Purpose) -> str:
    return "sync" if purpose in ("sync", "statistics") else "transfer"
