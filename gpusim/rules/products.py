"""Products beside others: a matrix product loses a share of the time in which other kernels run on its GPU.

    lost = product_frac x time alone x (time beside others / time)

Its successors become ready later by this time, as by start interference, in a CUDA graph. Products are GEMM-like
kernels, attention included, but no convolutions, and no kernels of unknown operators.

Source: a fit without a known cause. 1,023 replayed schedules of 62 steps choose the share; those of six more, on which
an earlier form had been tried, agree. It helps trainings most. Most chains of products alone contradict it
(research/2026-11-24-small-products.md, "A rule without a cause"). Constant: `GraphCosts.product_frac`.
"""

from __future__ import annotations

from gpusim.formats.hardware import GraphCosts


def lost_ns(graph: GraphCosts, dur_ns: float, beside_ns: float, ran_ns: float) -> float:
    """Return the time that a product loses to other kernels, in ns.

    It takes `dur_ns` alone, and ran for `ran_ns`, of which others ran for `beside_ns`.
    """
    return graph.product_frac * dur_ns * (beside_ns / ran_ns) if beside_ns > 0.0 else 0.0
