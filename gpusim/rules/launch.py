"""Launch in a CUDA graph: the delay from the end of the predecessors to a ready kernel, and the rate of starts.

    ready = end of last predecessor + chain_ns + branch_ns + join_ns + extra_ns
            + what that predecessor lost to others + fork_ns x turn

`join_ns` counts for a kernel that waits for several others, however many.

Source: chains and forks of spin kernels on an H200 (research/2026-11-23-engine-rules.md, "Graph mode"); for joins,
which cost spin kernels nothing, replayed schedules of real steps (research/2026-11-29-joins.md).
Constants: `GraphCosts.chain_ns`, `branch_ns`, `join_ns`, `fork_ns`, `front_end_ns`, `memory_node_ns`. The gap of a
trace replaces `chain_ns` on the GPU of the trace (`gpusim.rules.anchor`). Kernels lose time to others by
`gpusim.rules.start_interference` and `gpusim.rules.products`.
"""

from __future__ import annotations

from gpusim.formats.hardware import GraphCosts


def least_gap_ns(graph: GraphCosts, extra_ns: float) -> float:
    """Return the gap from the end of a kernel to the start of its only successor, a task with this `extra_ns`."""
    return graph.chain_ns + extra_ns


def gap_ns(graph: GraphCosts, branches: bool, predecessors: int, extra_ns: float) -> float:
    """Return the gap from the end of the last of `predecessors` kernels until their successor may start, in ns.

    `branches` is True if the plan has several streams. Forks and losses to others come on top (`ready_delay_ns`).
    """
    chain_ns = graph.chain_ns + (graph.branch_ns if branches else 0.0)
    return chain_ns + (graph.join_ns if predecessors > 1 else 0.0) + extra_ns


def fork_turn(place: int, successors: int) -> int:
    """Return the turn of a successor in a fork, by its place in launch order: 0, 1, ...; the last two are equal."""
    return max(0, min(place, successors - 2))


def ready_delay_ns(graph: GraphCosts, gap_ns: float, lost_ns: float, place: int, successors: int) -> float:
    """Return the delay from the end of a kernel until the successor at this place of its fork is ready, in ns.

    `lost_ns` is what the kernel that ended lost to others.
    """
    return gap_ns + lost_ns + graph.fork_ns * fork_turn(place, successors)


def start_interval_ns(graph: GraphCosts, in_graph: bool, dur_ns: float, blocks_ns: float) -> float:
    """Return the minimum time from the start of a kernel to the next start of the front end, in ns.

    `dur_ns` is the kernel's time without misses of the L2 cache. Its blocks hold up the next start for `blocks_ns`, at
    most for that time. Without a graph the host is slower than the front end.
    """
    return max(graph.front_end_ns if in_graph else 0.0, min(blocks_ns, dur_ns))


def extra_ns(graph: GraphCosts, memory_node: bool) -> float:
    """Return the extra delay before a memset or memcpy node, in ns."""
    return graph.memory_node_ns if memory_node else 0.0
