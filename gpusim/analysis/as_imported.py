"""Report on an imported step without data dependencies: observed times, and predictions for the observed order.

Each stream keeps its kernels in the observed order, with the edges of the file; nothing is reordered.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from gpusim.bounds.bounds import bounds
from gpusim.defaults import AS_OBSERVED
from gpusim.engine.base import Engine
from gpusim.engine.fast import FastEngine
from gpusim.errors import OptionError
from gpusim.formats.trace import ImportedFrom, Quality, Trace
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule

#: Qualities of edges that come from the program, so a search may reorder ops that they leave unordered.
SEARCHABLE: Final[tuple[Quality, ...]] = ("data", "graph")
MORE: Final = (
    "to search other orders and streams, import it again with the run's execution trace "
    "(torch.profiler's ExecutionTraceObserver) or a dump of its CUDA graph"
)


@dataclass(frozen=True, slots=True)
class AsImported:
    """Times of an imported step, in ns; None if the file has no times."""

    trace: str
    hardware: str
    dependency_quality: Quality
    kernels: int
    streams: int
    observed_ns: int | None
    busy_ns: int | None
    idle_ns: int | None
    """Time in which no kernel, copy or memset ran."""
    concurrent_ns: int | None
    """Time in which at least two ran."""
    resimulated_ns: int | None
    graph_ns: int
    """Predicted time of a CUDA graph with the same order and streams, that is, without launch overhead."""
    chain_ns: int
    """Predicted time of a CUDA graph on one stream, that is, without overlap."""
    bound_ns: int
    """Lower bound on schedules that keep the edges of the file, on this GPU."""
    no_edges_bound_ns: int
    """Lower bound on all schedules, for any dependencies."""
    more: str = MORE

    def document(self) -> dict[str, Any]:
        """Return the fields as a dict, for `gpusim explore --json`."""
        return asdict(self)


def searchable(trace: Trace) -> bool:
    """Return True if the trace has the dependencies that a search for schedules needs."""
    source = trace.provenance.imported_from
    return source is None or source.dependency_quality in SEARCHABLE


def check_searchable(trace: Trace) -> None:
    """Raise `OptionError` for a trace whose dependencies are not those of its program."""
    if not searchable(trace):
        raise OptionError(f"{trace.name}: no schedule is searched without data dependencies; {MORE}")


def source_of(trace: Trace) -> ImportedFrom:
    """Return the origin of an imported trace. Raises `OptionError` for a captured one."""
    source = trace.provenance.imported_from
    if source is None:
        raise OptionError(f"{trace.name} was captured, not imported")
    return source


def as_imported(graph: OpGraph, engine: Engine | None = None) -> AsImported:
    """Return the report on an imported step. Raises `OptionError` for a captured one."""
    trace = graph.trace
    source = source_of(trace)
    engine = engine or FastEngine()
    kept = observed_schedule(graph)
    alone = Schedule.in_recorded_order(len(trace.ops))
    kept_ns, alone_ns = (
        engine.run(lower(graph, schedule, memory=False), graph.hardware).makespan_ns for schedule in (kept, alone)
    )
    lowest = bounds(graph)
    longest = max((round(task.dur_ns) for tasks in graph.tasks for task in tasks), default=0)
    timed = source.observed_ns > 0
    return AsImported(
        trace=trace.name,
        hardware=graph.hardware.label,
        dependency_quality=source.dependency_quality,
        kernels=sum(kernel.kind == "kernel" for op in trace.ops for kernel in op.kernels),
        streams=kept.stream_count,
        observed_ns=source.observed_ns if timed else None,
        busy_ns=source.busy_ns if timed else None,
        idle_ns=source.observed_ns - source.busy_ns if timed else None,
        concurrent_ns=source.concurrent_ns if timed else None,
        resimulated_ns=source.resimulated_ns if timed else None,
        graph_ns=kept_ns,
        chain_ns=alone_ns,
        bound_ns=lowest.largest[0],
        no_edges_bound_ns=max(longest, lowest.area_ns, lowest.bandwidth_ns),
    )


def observed_schedule(graph: OpGraph) -> Schedule:
    """Return the observed streams and order of an imported step. Raises `OptionError` for a captured one."""
    source_of(graph.trace)
    ops = graph.trace.ops
    numbers: dict[int, int] = {}
    streams = tuple(numbers.setdefault(op.observed.stream if op.observed else 0, len(numbers)) for op in ops)
    return replace(Schedule.in_recorded_order(len(ops)), streams=streams, policy=AS_OBSERVED)
