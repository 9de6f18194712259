"""Start interference: a kernel loses time to each other kernel that starts on its GPU while it runs.

    lost = busy_ns x n / (n + busy_starts) for n starts

Its successors become ready later by this time. A kernel that merely runs costs nothing.

Source: single starts at every moment of a kernel, and 16 steps next to chains of tiny kernels, on an H200
(research/2026-11-23-engine-rules.md, "Graph mode"). Constants: `GraphCosts.busy_ns`, `busy_starts`.
"""

from __future__ import annotations

from gpusim.formats.hardware import GraphCosts


def lost_ns(graph: GraphCosts, starts: int) -> float:
    """Return the time that a kernel loses to `starts` starts of other kernels while it runs, in ns."""
    return graph.busy_ns * starts / (starts + graph.busy_starts) if starts > 0 else 0.0
