"""Lower bounds on the makespan of any schedule of a step, under the engine's own rules."""

from __future__ import annotations

from dataclasses import dataclass

from gpusim.plan.graph import OpGraph


@dataclass(frozen=True, slots=True)
class Bounds:
    """No schedule is faster than any of these, in ns."""

    critical_path_ns: int
    """The longest chain of dependent kernels with the gaps between them, each at its time alone."""
    area_ns: int
    """SM-time: for the scarcest of threads, registers, shared memory and block slots, what the kernels need."""
    bandwidth_ns: int
    """DRAM traffic over bandwidth."""
    front_end_ns: int
    """Kernel starts at the rate the front end manages."""

    @property
    def largest(self) -> tuple[int, str]:
        """The bound that binds, and its name in words."""
        return max(
            (self.critical_path_ns, "critical path"),
            (self.area_ns, "SM area"),
            (self.bandwidth_ns, "DRAM bandwidth"),
            (self.front_end_ns, "front end"),
        )


def bounds(graph: OpGraph) -> Bounds:
    """Bounds of a step on its GPU.

    Area: a kernel that holds the share s of its demand d runs at rate s at most, so it takes d x its time alone of each
    resource, whenever and beside whatever it runs. Bandwidth likewise.
    """
    hardware = graph.hardware
    tasks = [task for op in graph.tasks for task in op]
    demands = [task.demand.resources for task in tasks]
    area = max(
        (sum(d[resource] * t.dur_ns for d, t in zip(demands, tasks, strict=True)) for resource in range(4)), default=0.0
    )
    bandwidth = hardware.memory.dram_bytes_per_ns
    moved = sum(min(t.dram_bytes, t.dur_ns * bandwidth) for t in tasks)
    return Bounds(
        critical_path_ns=int(critical_path_ns(graph)),
        area_ns=int(area),
        bandwidth_ns=int(moved / bandwidth),
        front_end_ns=int(hardware.graph.front_end_ns * max(0, len(tasks) - 1)),
    )


def critical_path_ns(graph: OpGraph) -> float:
    """Longest chain from start to end; its first kernel has no gap before it."""
    chains = [(level, tasks[0]) for level, tasks in zip(graph.bottom_ns, graph.tasks, strict=True) if tasks]
    return max((level - graph.chain_ns - first.extra_ns for level, first in chains), default=0.0)
