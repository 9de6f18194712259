"""What `gpusim explore` prints of an imported trace without data dependencies."""

from __future__ import annotations

from collections.abc import Iterator

from gpusim.analysis.as_imported import AsImported
from gpusim.units import format_ns


def as_imported_lines(found: AsImported) -> Iterator[str]:
    """The answers, a line at a time."""
    yield f"{found.trace} on {found.hardware}: {found.kernels} kernels, dependencies: {found.dependency_quality}"
    if found.observed_ns is not None and found.idle_ns is not None and found.busy_ns is not None:
        share = found.idle_ns / max(1, found.observed_ns)
        yield f"  observed          {format_ns(found.observed_ns)}"
        yield f"  GPU idle          {format_ns(found.idle_ns)} ({share:.1%} of it)"
        yield f"  two or more ran   {format_ns(found.concurrent_ns or 0)}"
        gain = found.observed_ns / max(1, found.graph_ns)
        yield f"  from a CUDA graph {format_ns(found.graph_ns)} predicted, same order and streams ({gain:.2f}x)"
    else:
        yield f"  from a CUDA graph {format_ns(found.graph_ns)} predicted, in the file's order"
    yield f"  on one stream     {format_ns(found.chain_ns)} predicted, from a CUDA graph"
    yield f"  no less than      {format_ns(found.bound_ns)} with the file's edges"
    yield f"                    {format_ns(found.no_edges_bound_ns)} whatever the dependencies are"
    yield f"No schedule is searched: {found.more}."
