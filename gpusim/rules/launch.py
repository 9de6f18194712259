"""Launch in a CUDA graph: when a kernel whose predecessors have ended is ready, and how fast kernels start.

    ready = end of last predecessor + chain_ns + branch_ns + join_ns x (predecessors - 1) + extra_ns
            + lost to starts beside that predecessor + fork_ns x turn

Source: chains, forks and joins of spin kernels on an H200 (research/2026-11-23-engine-rules.md, "Graph mode").
Constants: `GraphCosts.chain_ns`, `branch_ns`, `join_ns`, `fork_ns`, `front_end_ns`, `memory_node_ns`. The gap of a
trace replaces `chain_ns` on the GPU of the trace (`gpusim.rules.anchor`); what is lost to starts beside a kernel is in
`gpusim.rules.start_interference`.
"""

from __future__ import annotations

from gpusim.formats.hardware import GraphCosts


def least_gap_ns(graph: GraphCosts, extra_ns: float) -> float:
    """From the end of a kernel to the start of its only successor; `extra_ns` is `extra_ns` of that task."""
    return graph.chain_ns + extra_ns


def gap_ns(graph: GraphCosts, branches: bool, predecessors: int, extra_ns: float) -> float:
    """From the end of the last of so many predecessors until a kernel may start.

    `branches`: the plan has several streams. Neither forks nor start interference are in it: see `ready_delay_ns`.
    """
    chain_ns = graph.chain_ns + (graph.branch_ns if branches else 0.0)
    return chain_ns + graph.join_ns * (predecessors - 1) + extra_ns


def fork_turn(place: int, successors: int) -> int:
    """Turn of a successor in a fork, by its place in launch order: 0, 1, ...; the last two are ready together."""
    return max(0, min(place, successors - 2))


def ready_delay_ns(graph: GraphCosts, gap_ns: float, lost_ns: float, place: int, successors: int) -> float:
    """From the end of a kernel until the successor in this place of its fork is ready, where it waits for no other.

    `lost_ns` is what the kernel that ended has lost to starts beside it.
    """
    return gap_ns + lost_ns + graph.fork_ns * fork_turn(place, successors)


def start_interval_ns(graph: GraphCosts, in_graph: bool) -> float:
    """Least time between two kernel starts of a GPU's front end; the host is slower where there is no graph."""
    return graph.front_end_ns if in_graph else 0.0


def extra_ns(graph: GraphCosts, memory_node: bool) -> float:
    """Delay before a memset or memcpy node over that before a kernel."""
    return graph.memory_node_ns if memory_node else 0.0
