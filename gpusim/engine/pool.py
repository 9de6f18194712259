"""The block dispatcher and the shared rates: which share of the GPU each running kernel holds, and how fast it runs.

The rules, in one place (research/2026-11-23-engine-rules.md has the evidence for each):

1. *Leftover.* Kernels take SM resources in the order in which they started. A kernel's demand is a share of the GPU's
   threads, registers, shared memory and block slots; it gets the largest part of it that fits into what is left.
2. *Head of line.* Behind a kernel that did not get all its blocks placed, nobody gets any: the dispatcher serves one
   kernel at a time (Amert et al., "GPU Scheduling on the NVIDIA TX2", RTSS 2017, rule X1).
3. *Elder first.* The oldest running kernel is undisturbed. The others run at 1 / (1 + a) of what their blocks would
   give: they wait for issue slots, caches and memory behind it. Kernels of a few warps are alone on their SMs and
   lose less.
4. *DRAM.* Where the traffic of all would exceed the bandwidth, those who use it slow down alike.

Rules 1 to 3 hold in each SM partition by itself, as if it were the GPU; rule 4 holds for all partitions together.

Nothing here knows about SimPy, streams or events: both the engines and the list scheduler drive it.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpusim.hardware.model import HardwareModel
from gpusim.plan.tasks import Task

#: Shares below this are rounding, not room.
EPSILON = 1e-9


@dataclass(slots=True)
class Running:
    """A task that is on the GPU: what it still has to do, in ns alone, and how fast it does it."""

    index: int
    demand: tuple[float, float, float, float]
    cover: float
    dram_bytes_per_ns: float
    residency: float
    remaining_ns: float
    partition: int = 0
    rate: float = 0.0
    share: float = 0.0
    """Part of its demand that it holds."""


class SmPool:
    """The running kernels of one GPU, in start order. Call `advance` before any change, and `update` after it."""

    def __init__(self, hardware: HardwareModel) -> None:
        self.running: list[Running] = []
        self._slowdown = hardware.contention.younger_slowdown
        self._bandwidth = hardware.memory.dram_bytes_per_ns
        self._limit = hardware.limits.resident_grids

    @property
    def full(self) -> bool:
        """Whether no further kernel may start: the GPU has no more grid slots."""
        return len(self.running) >= self._limit

    @property
    def busy(self) -> bool:
        """Whether anything runs."""
        return bool(self.running)

    def start(self, index: int, task: Task) -> None:
        """Put a task on the GPU."""
        demand = task.demand
        rate = task.dram_bytes / task.dur_ns if task.dur_ns else 0.0
        self.running.append(
            Running(
                index=index,
                demand=demand.resources,
                cover=demand.cover,
                dram_bytes_per_ns=min(rate, self._bandwidth),
                residency=demand.residency,
                remaining_ns=task.dur_ns,
                partition=task.partition,
            )
        )

    def advance(self, elapsed_ns: float) -> None:
        """Let time pass at the current rates."""
        for kernel in self.running:
            kernel.remaining_ns -= elapsed_ns * kernel.rate

    def finish(self, index: int) -> bool:
        """Take a finished task off the GPU; whether that was all of it, which it is here."""
        self.running = [kernel for kernel in self.running if kernel.index != index]
        return True

    def update(self) -> None:
        """Share out the GPU again: sets `share` and `rate` of every running kernel."""
        for partition in sorted({kernel.partition for kernel in self.running}):
            self._share_out([kernel for kernel in self.running if kernel.partition == partition])
        self._limit_traffic()

    def _share_out(self, running: list[Running]) -> None:
        """Rules 1 to 3, among the kernels of one partition."""
        left = [1.0, 1.0, 1.0, 1.0]
        blocked = False
        elder = True
        for kernel in running:
            share = 0.0 if blocked else 1.0
            if not blocked:
                for room, need in zip(left, kernel.demand, strict=True):
                    if need > room:
                        share = min(share, room / need)
            if any(kernel.demand):
                for resource, need in enumerate(kernel.demand):
                    room = left[resource] - share * need
                    left[resource] = room if room > EPSILON else 0.0
                blocked = blocked or share < 1.0
            else:
                share = 1.0  # memory operations need no SM
            kernel.share = share
            kernel.rate = share if elder else share / (1.0 + self._slowdown * kernel.cover)
            elder = elder and not any(kernel.demand)

    def _limit_traffic(self) -> None:
        """Rule 4, among all running kernels."""
        traffic = 0.0
        for kernel in self.running:
            traffic += kernel.rate * kernel.dram_bytes_per_ns
        if traffic > self._bandwidth:
            slow = self._bandwidth / traffic
            for kernel in self.running:
                if kernel.dram_bytes_per_ns > 0.0:
                    kernel.rate *= slow

    def next_end(self) -> tuple[float, int] | None:
        """Time until the next task ends at the current rates, and which: the oldest of those that end together."""
        best: tuple[float, int] | None = None
        for kernel in self.running:
            if kernel.rate > 0.0:
                time = max(0.0, kernel.remaining_ns / kernel.rate)
                if best is None or time < best[0]:
                    best = (time, kernel.index)
        return best

    @property
    def occupied(self) -> float:
        """Share of the GPU's residency in use."""
        return min(1.0, sum(kernel.share * kernel.residency for kernel in self.running))

    @property
    def traffic_bytes_per_ns(self) -> float:
        """DRAM traffic at the current rates."""
        return sum(kernel.rate * kernel.dram_bytes_per_ns for kernel in self.running)
