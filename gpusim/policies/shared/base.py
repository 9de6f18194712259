"""The policy type, op graph -> schedule, and its helpers; the registry is in `gpusim.policies.registry`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule

Policy = Callable[[OpGraph, int], Schedule]
"""Function from an op graph and a number of streams to a legal schedule."""


def spread_views(graph: OpGraph, order: Sequence[int], streams: dict[int, int]) -> Schedule:
    """Complete a schedule of the ops with kernels: each view follows its source, on the same stream.

    `order` has the ops with kernels, in launch order.
    """
    placed: list[int] = []
    done = bytearray(len(graph))
    known = bytearray(map(bool, graph.tasks))  # 1 if dependents need not wait for its placement
    stream_of = [0] * len(graph)
    for op in chain(order, range(len(graph))):
        if done[op]:
            continue
        todo = [op]
        while todo:
            current = todo[-1]
            near = graph.preds[current]
            if not all(map(known.__getitem__, near)):
                todo.extend(before for before in near if not known[before])
                continue
            todo.pop()
            if not done[current]:
                done[current] = known[current] = True
                placed.append(current)
                stream_of[current] = streams.get(current, stream_of[near[-1]] if near else 0)
    return Schedule(tuple(placed), tuple(stream_of))


def work_order(graph: OpGraph) -> list[int]:
    """Return the ops with kernels, in recorded order."""
    return [op for op in range(len(graph)) if graph.tasks[op]]
