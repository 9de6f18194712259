"""Ranking of the kernel variants of each op, independent of the schedule."""

from __future__ import annotations

from collections.abc import Sequence

from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import Task
from gpusim.trace.merging import plain_variants


def ranked_variants(graph: OpGraph, area_weight: float, name: str | None = None) -> tuple[int, ...]:
    """Return the best variant of each op, counted from 1, or 0 for the captured kernels; empty if there are none.

    The cost weighs time alone against SM area by `area_weight`; at 0 only time counts. Ops fused into a variant are
    credited to it: later ops at their best cost, earlier ones as captured. With `name`, only variants of that name
    compete. Merges never do: they are a choice of the schedule.
    """

    def cost(op: int, number: int) -> float:
        tasks = graph.variants[op][number - 1] if number else graph.tasks[op]
        area = sum(task.dur_ns * min(1.0, max(task.demand.resources)) for task in tasks)
        saved = sum(least[other] if other > op else cost(other, 0) for other in _covers(graph, op, number))
        return (1.0 - area_weight) * _tasks_ns(graph, tasks) + area_weight * area - saved

    if not graph.variants:
        return ()
    least = [0.0] * len(graph)
    best = [0] * len(graph)
    for op in reversed(range(len(graph))):
        variants = graph.trace.ops[op].variants[: plain_variants(graph.trace.ops[op])]
        numbers = [0, *(number for number, variant in enumerate(variants, 1) if name is None or variant.name == name)]
        least[op], best[op] = min((cost(op, number), number) for number in numbers)
    return tuple(best)


def is_slower(graph: OpGraph, op: int, number: int) -> bool:
    """Return True if a variant takes longer alone than the captured kernels of all ops whose work it does."""
    instead = sum(variant_ns(graph, done, 0) for done in (op, *_covers(graph, op, number)))
    return number > 0 and variant_ns(graph, op, number) > instead


def variant_ns(graph: OpGraph, op: int, number: int) -> float:
    """Return the time of an op's variant alone on the GPU, with the gap before each kernel, in ns; 0: as captured."""
    return _tasks_ns(graph, graph.variants[op][number - 1] if number else graph.tasks[op])


def _covers(graph: OpGraph, op: int, number: int) -> tuple[int, ...]:
    return graph.trace.ops[op].variants[number - 1].covers if number else ()


def _tasks_ns(graph: OpGraph, tasks: Sequence[Task]) -> float:
    """Return the time of tasks alone on the GPU, with the gap before each, in ns."""
    return sum(task.dur_ns + graph.chain_ns + task.extra_ns for task in tasks)
