"""Successors of each task and launch gaps (graph mode), compiled."""

from __future__ import annotations

from typing import Any

from gpusim.engine.compiled.arrays import ON_DEVICE, Plans, Records
from gpusim.engine.compiled.jit import entry, jit, rule
from gpusim.rules import block_turnover, copies, launch, products, start_interference

gap_ns, ready_delay_ns = rule(launch.gap_ns), rule(launch.ready_delay_ns)
start_interval_ns, turnover_ns = rule(launch.start_interval_ns), rule(block_turnover.time_ns)
lost_ns, product_lost_ns = rule(start_interference.lost_ns), rule(products.lost_ns)
switch_ns = rule(copies.switch_ns)


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


@jit
def task_interval_ns(hw: Any, task: Any, in_graph: bool) -> float:
    """Return the minimum time from the start of a task to the next start of the front end, in ns."""
    blocks_ns = turnover_ns(hw.graph, task.blocks, task.blocks_per_sm, hw.limits.sms, task.partition_sms)
    return float(start_interval_ns(hw.graph, in_graph, task.dur_ns - task.missed_ns, max(task.idle_ns, blocks_ns)))


@jit
def switch_delay_ns(hw: Any, tasks: Any, nodes: Any, deps: Any, index: int, last: int) -> float:
    """Return the extra delay of a node between copies and kernels, in ns; `last` is the predecessor that ended last."""
    node = nodes[index]
    waits_for_copy = node.previous >= 0 and tasks[nodes[node.previous].row].kind != ON_DEVICE
    for place in range(node.first_dep, node.first_dep + node.n_deps):
        waits_for_copy = waits_for_copy or tasks[nodes[deps[place]].row].kind != ON_DEVICE
    copying, after_copy = tasks[node.row].kind != ON_DEVICE, tasks[nodes[last].row].kind != ON_DEVICE
    return float(switch_ns(hw.copies, copying, after_copy, waits_for_copy))
