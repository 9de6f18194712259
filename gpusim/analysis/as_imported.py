"""What can be said of an imported step without data dependencies: what it took, and what keeping its order would take.

Nothing here reorders: each stream keeps its kernels in the observed order, with the edges that the file has.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from gpusim.bounds.bounds import bounds
from gpusim.engine.base import Engine
from gpusim.engine.fast import FastEngine
from gpusim.errors import OptionError
from gpusim.formats.trace import ImportedFrom, Quality, Trace
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule

#: Edges of these kinds are the program's own: a search may reorder what they leave free.
SEARCHABLE: Final[tuple[Quality, ...]] = ("data", "graph")
#: In place of a policy's name: the streams and the order of the profile.
AS_OBSERVED: Final = "as observed"
MORE: Final = (
    "to search other orders and streams, import it again with the run's execution trace "
    "(torch.profiler's ExecutionTraceObserver) or a dump of its CUDA graph"
)


@dataclass(frozen=True, slots=True)
class AsImported:
    """Times of an imported step, in ns; a time that the file has no base for is None."""

    trace: str
    hardware: str
    dependency_quality: Quality
    kernels: int
    streams: int
    observed_ns: int | None
    busy_ns: int | None
    idle_ns: int | None
    """No kernel, copy or memset ran."""
    concurrent_ns: int | None
    """At least two ran."""
    resimulated_ns: int | None
    graph_ns: int
    """Predicted from a CUDA graph, same order on the same streams: without the launches."""
    chain_ns: int
    """Predicted likewise on one stream: without the overlap that is there."""
    bound_ns: int
    """No schedule that keeps the file's edges is faster, on this GPU."""
    no_edges_bound_ns: int
    """... nor any other one, whatever the dependencies are."""
    more: str = MORE

    def document(self) -> dict[str, Any]:
        """As `gpusim explore --json` prints it."""
        return asdict(self)


def searchable(trace: Trace) -> bool:
    """Whether a search for other schedules has the dependencies that it needs."""
    source = trace.provenance.imported_from
    return source is None or source.dependency_quality in SEARCHABLE


def check_searchable(trace: Trace) -> None:
    """Raises `OptionError` for a trace whose dependencies are not those of its program."""
    if not searchable(trace):
        raise OptionError(f"{trace.name}: no schedule is searched without data dependencies; {MORE}")


def source_of(trace: Trace) -> ImportedFrom:
    """Where an imported trace comes from. Raises `OptionError` for a captured one."""
    source = trace.provenance.imported_from
    if source is None:
        raise OptionError(f"{trace.name} was captured, not imported")
    return source


def as_imported(graph: OpGraph, engine: Engine | None = None) -> AsImported:
    """The answers for an imported step. Raises `OptionError` for a captured one."""
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
    """The streams and the order that an imported step was observed with. Raises `OptionError` for a captured one."""
    source_of(graph.trace)
    ops = graph.trace.ops
    numbers: dict[int, int] = {}
    streams = tuple(numbers.setdefault(op.observed.stream if op.observed else 0, len(numbers)) for op in ops)
    return replace(Schedule.in_recorded_order(len(ops)), streams=streams, policy=AS_OBSERVED)
