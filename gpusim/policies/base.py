"""What a policy is: op graph -> launch order and streams. The registry is in `gpusim.policies.registry`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.partitions import Partition
from gpusim.plan.tasks import LaunchMode, Plan


@dataclass(frozen=True, slots=True)
class Assignment:
    """A launch order of op indices and the stream of each op (by op index)."""

    order: tuple[int, ...]
    streams: tuple[int, ...]
    variants: tuple[int, ...] = ()
    """For each op the number of its variant, counted from 1, or 0; empty: all as captured."""
    partitions: tuple[Partition, ...] = ()
    """SM partitions of the streams; empty: all streams share the whole GPU."""

    def lowered(self, graph: OpGraph, mode: LaunchMode = "graph") -> Plan:
        """Its plan, with its variants and partitions. Raises `PlanError` for partitions the GPU cannot have."""
        return lower(graph, self.order, self.streams, mode, variants=self.variants, partitions=self.partitions)


Policy = Callable[[OpGraph, int], Assignment]
"""From an op graph and a number of streams, a legal assignment."""


def spread_views(graph: OpGraph, order: Sequence[int], streams: dict[int, int]) -> Assignment:
    """Complete an assignment of the ops that have kernels: each view follows what it looks at, on its stream.

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
    return Assignment(tuple(placed), tuple(stream_of))


def work_order(graph: OpGraph) -> list[int]:
    """The ops with kernels, in recorded order."""
    return [op for op in range(len(graph)) if graph.tasks[op]]
