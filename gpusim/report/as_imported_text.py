"""Output of `gpusim explore` for an imported trace without data dependencies."""

from __future__ import annotations

from collections.abc import Iterator

from gpusim.analysis.as_imported import AsImported
from gpusim.units import format_ns


def as_imported_lines(imported: AsImported) -> Iterator[str]:
    """Yield the lines of the report."""
    kernels = f"{imported.kernels} kernels, dependencies: {imported.dependency_quality}"
    yield f"{imported.trace} on {imported.hardware}: {kernels}"
    if imported.observed_ns is not None and imported.idle_ns is not None and imported.busy_ns is not None:
        share = imported.idle_ns / max(1, imported.observed_ns)
        yield f"  observed          {format_ns(imported.observed_ns)}"
        yield f"  GPU idle          {format_ns(imported.idle_ns)} ({share:.1%} of it)"
        yield f"  two or more ran   {format_ns(imported.concurrent_ns or 0)}"
        gain = imported.observed_ns / max(1, imported.graph_ns)
        yield f"  from a CUDA graph {format_ns(imported.graph_ns)} predicted, same order and streams ({gain:.2f}x)"
    else:
        yield f"  from a CUDA graph {format_ns(imported.graph_ns)} predicted, in the file's order"
    yield f"  on one stream     {format_ns(imported.chain_ns)} predicted, from a CUDA graph"
    yield f"  no less than      {format_ns(imported.bound_ns)} with the file's edges"
    yield f"                    {format_ns(imported.no_edges_bound_ns)} whatever the dependencies are"
    yield f"No schedule is searched: {imported.more}."
