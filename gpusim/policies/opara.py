"""Opara: streams by a greedy pass over the graph, launch order by resource demand.

Source: Chen et al., "Opara: Exploiting Operator Parallelism for Expediting DNN Inference on GPUs" (IEEE Transactions on
Computers, 2025), algorithms 1 and 2, and its released code. The rules:

1. *Streams* (algorithm 1). In topological order, an op takes over the stream of its first predecessor that has not
   passed its stream on yet; if there is none, the op opens a new stream.
2. *Launch order* (algorithm 2). Ready ops wait in two lists, memory-intensive and compute-intensive ones. The lists
   take turns, so that unlike ops overlap, and the op with the least resource demand in a list goes first, so that many
   ops fit on the GPU together.

Filled in: the paper defines the demand by shared memory, threads and registers, and its code counts only shared memory.
Here it is the largest of the three as a share of the GPU, for the most demanding kernel of the op. The code
distinguishes the two classes by names of ops: here convolutions, matrix products and attention are compute-intensive,
all other ops memory-intensive. The memory-intensive list starts. Opara has as many streams as rule 1 opens; above the
limit, stream k becomes stream k modulo the limit.
"""

from __future__ import annotations

import heapq

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.shared.base import spread_views
from gpusim.policies.shared.dag import Dag, work_dag
from gpusim.policies.shared.op_kinds import is_compute_intensive


def opara(graph: OpGraph, streams: int) -> Schedule:
    """Return streams by passing on, and a launch order that alternates between classes, smallest demand first."""
    ops, dag = work_dag(graph)
    order = launch_order(dag, [demand(graph, op) for op in ops], [is_compute_intensive(graph, op) for op in ops])
    stream_of = {ops[node]: stream % streams for node, stream in enumerate(handed_on(dag))}
    return spread_views(graph, [ops[node] for node in order], stream_of)


def handed_on(dag: Dag) -> list[int]:
    """Return the stream of each node by algorithm 1, without a limit."""
    stream_of: list[int] = []
    claimed: set[int] = set()
    opened = 0
    for before in dag.preds:
        giver = next((p for p in before if p not in claimed), None)
        if giver is None:
            stream_of.append(opened)
            opened += 1
        else:
            claimed.add(giver)
            stream_of.append(stream_of[giver])
    return stream_of


def launch_order(dag: Dag, demands: list[float], compute: list[bool]) -> list[int]:
    """Return the nodes in launch order by algorithm 2."""
    waiting = [len(before) for before in dag.preds]
    ready: tuple[list[tuple[float, int]], list[tuple[float, int]]] = ([], [])  # memory-intensive, compute-intensive
    for node, count in enumerate(waiting):
        if not count:
            heapq.heappush(ready[compute[node]], (demands[node], node))
    order: list[int] = []
    turn = 0
    while ready[0] or ready[1]:
        node = heapq.heappop(ready[turn] or ready[1 - turn])[1]
        turn = 1 - compute[node]
        order.append(node)
        for after in dag.succs[node]:
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(ready[compute[after]], (demands[after], after))
    return order


def demand(graph: OpGraph, op: int) -> float:
    """Return the resource demand of an op: its largest share of the GPU's threads, registers or shared memory."""
    demands = [task.demand for task in graph.tasks[op]]
    return max(max(need.threads, need.regs, need.smem) for need in demands)
