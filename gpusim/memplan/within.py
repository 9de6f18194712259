"""Memory plan for a step of which no schedule keeps a memory limit."""

from __future__ import annotations

from gpusim.errors import PlanError
from gpusim.memplan.compare import LEAST_TIME, compare_policies
from gpusim.plan.graph import OpGraph
from gpusim.units import format_bytes, format_ns


def other_way(graph: OpGraph, limit_bytes: int) -> str:
    """Describe in a line our own policy's plan that keeps a limit, or why none does; empty for a step without
    tensors.
    """
    try:
        comparison = compare_policies(graph, policies=[LEAST_TIME], budget_bytes=limit_bytes)
    except PlanError:
        return ""
    if comparison.best is None or comparison.best.outcome is None:
        return comparison.shortfall
    outcome = comparison.best.outcome
    slower = outcome.step_ns / comparison.keep_all.step_ns - 1
    return (
        f"a memory plan on one stream does ({comparison.best.policy}: {format_ns(outcome.step_ns)}, {slower:+.1%}, "
        f"peak {format_bytes(outcome.peak_bytes)}): gpusim memory --budget, gpusim.memory(step, memory_limit=)"
    )
