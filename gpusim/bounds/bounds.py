"""Lower bounds on the makespan of any schedule of a step, under the rules of the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import chain

import msgspec

from gpusim.bounds.energetic import Kernels, area_ns, contention_ns
from gpusim.bounds.names import AREA, BANDWIDTH, CONTENTION, CRITICAL_PATH, FRONT_END
from gpusim.formats.hardware import HardwareModel
from gpusim.notebook import html_table, short_repr
from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import Task, start_interval_ns
from gpusim.rules.dram import time_ns
from gpusim.rules.launch import least_gap_ns
from gpusim.units import format_ns


@dataclass(frozen=True, slots=True, repr=False)
class Bounds:
    """Lower bounds on the time of any schedule of a step, in ns."""

    critical_path_ns: int
    """Longest chain of dependent kernels, each at its time alone, with the gaps between them."""
    area_ns: int
    """SM time that the kernels need of the scarcest resource: threads, registers, shared memory or block slots."""
    bandwidth_ns: int
    """DRAM traffic over bandwidth; without counters, of a lower limit on traffic."""
    front_end_ns: int
    """Intervals between kernel starts of the front end."""
    contention_ns: int = 0
    """SM time with contention, between the chains before and after (`gpusim.bounds.energetic`)."""

    @property
    def named(self) -> tuple[tuple[int, str], ...]:
        """Each bound with its name."""
        return (
            (self.critical_path_ns, CRITICAL_PATH),
            (self.area_ns, AREA),
            (self.contention_ns, CONTENTION),
            (self.bandwidth_ns, BANDWIDTH),
            (self.front_end_ns, FRONT_END),
        )

    @property
    def largest(self) -> tuple[int, str]:
        """Largest bound with its name; the simplest of equal ones."""
        return max(self.named, key=lambda bound: bound[0])

    def document(self) -> dict[str, int]:
        """Return the bounds by field name, for `--json`."""
        return asdict(self)

    def __repr__(self) -> str:
        time_ns, name = self.largest
        return short_repr("Bounds", f"no schedule below {format_ns(time_ns)} ({name})")

    def _repr_html_(self) -> str:
        return html_table("No schedule is faster than", ("bound", "time"), [(n, format_ns(t)) for t, n in self.named])


def bounds(graph: OpGraph, partitioned: bool = False) -> Bounds:
    """Return the lower bounds of a step on its GPU; `partitioned`: of its schedules on SM partitions.

    Each partition has its own oldest kernel, unknown to the bound of contention, and nothing waits there for block
    turnover (`gpusim.rules.block_turnover`).

    Area: a kernel with share s of its demand d runs at a rate of at most s, so it takes at least d x its time alone of
    each resource, in any schedule. The same holds for a block and its SM, except for the gain when kernels of two kinds
    share an SM (`gpusim.bounds.cross_load`). Bandwidth likewise.
    """
    hardware = graph.hardware
    kernels = Kernels.of(graph)
    starting = hardware
    if partitioned:
        starting = msgspec.structs.replace(hardware, graph=msgspec.structs.replace(hardware.graph, turnover_ns=0.0))
    return Bounds(
        critical_path_ns=int(critical_path_ns(graph)),
        area_ns=int(area_ns(kernels)),
        bandwidth_ns=int(time_ns(hardware.memory, float(kernels.traffic_bytes.sum()))),
        front_end_ns=int(front_end_ns(graph.tasks, starting)),
        contention_ns=0 if partitioned else int(contention_ns(kernels)),
    )


def front_end_ns(tasks: Iterable[Iterable[Task]], hardware: HardwareModel) -> float:
    """Return the least time from the first kernel start of the front end to the last, of the tasks of each op, in ns.

    The longest interval may be the one after the last.
    """
    intervals_ns = [start_interval_ns(task, hardware, in_graph=True) for task in chain.from_iterable(tasks)]
    return sum(intervals_ns) - max(intervals_ns, default=0.0)


def critical_path_ns(graph: OpGraph) -> float:
    """Return the longest chain from start to end, in ns; its first kernel has no gap before it."""
    costs, chains = graph.hardware.graph, zip(graph.bottom_ns, graph.tasks, strict=True)
    return max((level - least_gap_ns(costs, tasks[0].extra_ns) for level, tasks in chains if tasks), default=0.0)
