"""What a policy is: op graph -> schedule. The registry is in `gpusim.policies.registry`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule

Policy = Callable[[OpGraph, int], Schedule]
"""From an op graph and a number of streams, a legal schedule."""


def spread_views(graph: OpGraph, order: Sequence[int], streams: dict[int, int]) -> Schedule:
    """Complete a schedule of the ops that have kernels: each view follows what it looks at, on its stream.

    `order` has the ops with kernels, in launch order.
    """
    placed: list[int] = []
    done: set[int] = set()
    stream_of = [0] * len(graph)

    def place(op: int) -> None:
        """Place the views that `op` needs, then `op`."""
        todo = [op]
        while todo:
            current = todo[-1]
            if current in done:
                todo.pop()
                continue
            missing = [before for before in graph.preds[current] if before not in done and not graph.tasks[before]]
            if missing:
                todo.extend(missing)
                continue
            todo.pop()
            done.add(current)
            placed.append(current)
            near = graph.preds[current]
            stream_of[current] = streams.get(current, stream_of[near[-1]] if near else 0)

    for op in order:
        place(op)
    for op in range(len(graph)):
        if op not in done:
            place(op)
    return Schedule(tuple(placed), tuple(stream_of))


def work_order(graph: OpGraph) -> list[int]:
    """The ops with kernels, in recorded order."""
    return [op for op in range(len(graph)) if graph.tasks[op]]
