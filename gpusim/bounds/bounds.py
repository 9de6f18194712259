"""Lower bounds on the makespan of any schedule of a step, under the engine's own rules."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gpusim.bounds.energetic import Kernels, area_ns, contention_ns
from gpusim.bounds.names import AREA, BANDWIDTH, CONTENTION, CRITICAL_PATH, FRONT_END
from gpusim.notebook import html_table, short_repr
from gpusim.plan.graph import OpGraph
from gpusim.rules.dram import time_ns
from gpusim.rules.launch import least_gap_ns, start_interval_ns
from gpusim.units import format_ns


@dataclass(frozen=True, slots=True, repr=False)
class Bounds:
    """No schedule is faster than any of these, in ns."""

    critical_path_ns: int
    """The longest chain of dependent kernels with the gaps between them, each at its time alone."""
    area_ns: int
    """SM-time: for the scarcest of threads, registers, shared memory and block slots, what the kernels need."""
    bandwidth_ns: int
    """DRAM traffic over bandwidth; a lower limit of it where the trace has no counters."""
    front_end_ns: int
    """Kernel starts at the rate the front end manages."""
    contention_ns: int = 0
    """SM-time with what kernels do to each other, between the chains before and behind (`gpusim.bounds.energetic`)."""

    @property
    def named(self) -> tuple[tuple[int, str], ...]:
        """Each bound and its name in words."""
        return (
            (self.critical_path_ns, CRITICAL_PATH),
            (self.area_ns, AREA),
            (self.contention_ns, CONTENTION),
            (self.bandwidth_ns, BANDWIDTH),
            (self.front_end_ns, FRONT_END),
        )

    @property
    def largest(self) -> tuple[int, str]:
        """The bound that binds, and its name in words; the simplest of those that are equal."""
        return max(self.named, key=lambda bound: bound[0])

    def document(self) -> dict[str, int]:
        """The bounds by field name, for `--json`."""
        return asdict(self)

    def __repr__(self) -> str:
        time_ns, name = self.largest
        return short_repr("Bounds", f"no schedule below {format_ns(time_ns)} ({name})")

    def _repr_html_(self) -> str:
        return html_table("No schedule is faster than", ("bound", "time"), [(n, format_ns(t)) for t, n in self.named])


def bounds(graph: OpGraph) -> Bounds:
    """Bounds of a step on its GPU.

    Area: a kernel that holds the share s of its demand d runs at rate s at most, so it takes d x its time alone of each
    resource, whenever and beside whatever it runs; so does a block of its SM, but for what kernels of two kinds do more
    side by side (`gpusim.bounds.cross_load`). Bandwidth likewise.
    """
    hardware = graph.hardware
    kernels = Kernels.of(graph)
    return Bounds(
        critical_path_ns=int(critical_path_ns(graph)),
        area_ns=int(area_ns(kernels)),
        bandwidth_ns=int(time_ns(hardware.memory, float(kernels.traffic_bytes.sum()))),
        front_end_ns=int(start_interval_ns(hardware.graph, True) * max(0, len(kernels) - 1)),
        contention_ns=int(contention_ns(kernels)),
    )


def critical_path_ns(graph: OpGraph) -> float:
    """Longest chain from start to end; its first kernel has no gap before it."""
    costs, chains = graph.hardware.graph, zip(graph.bottom_ns, graph.tasks, strict=True)
    return max((level - least_gap_ns(costs, tasks[0].extra_ns) for level, tasks in chains if tasks), default=0.0)
