"""Successors of each task and launch gaps (graph mode), compiled."""

from __future__ import annotations

from typing import Any

from gpusim.engine.compiled.arrays import Plans, Records
from gpusim.engine.compiled.jit import entry, jit, rule
from gpusim.rules import launch, start_interference

gap_ns, ready_delay_ns = rule(launch.gap_ns), rule(launch.ready_delay_ns)
start_interval_ns = rule(launch.start_interval_ns)
lost_ns = rule(start_interference.lost_ns)


@entry
def link_plans(hardware: Records, tasks: Records, plans: Plans, first: int, last: int) -> None:
    """Link plans `first` to `last` - 1: set `succs`, and `first_succ`, `n_succs` and `gap_ns` of nodes."""
    for plan in range(first, last):
        link(hardware[0], tasks, plans.nodes[plan, : plans.tasks[plan]], plans.deps[plan], plans.succs[plan])


@jit
def link(hw: Any, tasks: Any, nodes: Any, deps: Any, succs: Any) -> None:
    """Link one plan, with the successors of a task in launch order."""
    for index in range(len(nodes)):
        nodes[index].n_succs = 0
    for index in range(len(nodes)):
        node = nodes[index]
        for place in range(node.first_dep, node.first_dep + node.n_deps):
            nodes[deps[place]].n_succs += 1
        if node.previous >= 0:
            nodes[node.previous].n_succs += 1
    first = queues = 0
    for index in range(len(nodes)):
        node = nodes[index]
        queues += 1 if node.previous < 0 else 0
        node.first_succ = first
        node.waiting = 0  # here: number of successors filled in
        first += node.n_succs
    for index in range(len(nodes)):
        node = nodes[index]
        preds = node.n_deps + (1 if node.previous >= 0 else 0)
        for number in range(preds):
            before = nodes[deps[node.first_dep + number] if number < node.n_deps else node.previous]
            succs[before.first_succ + before.waiting] = index
            before.waiting += 1
        node.gap_ns = gap_ns(hw.graph, queues > 1, preds, tasks[node.row].extra_ns)
