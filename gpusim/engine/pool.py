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

from collections.abc import Iterator
from dataclasses import dataclass

from gpusim.formats.hardware import HardwareModel
from gpusim.plan.tasks import Task
from gpusim.rules import dram, lost_time, oldest_first

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
    shared_rate: float = 0.0
    """Its rate where DRAM is not short."""


class SmPool:
    """The running kernels of one GPU, in start order. Call `advance` before any change, and `update` after it."""

    def __init__(self, hardware: HardwareModel) -> None:
        self.running: list[Running] = []
        self._hardware = hardware

    @property
    def full(self) -> bool:
        """Whether no further kernel may start: the GPU has no more grid slots."""
        return len(self.running) >= self._hardware.limits.resident_grids

    @property
    def indices(self) -> list[int]:
        """The tasks that run, in the order of their starts."""
        return [kernel.index for kernel in self.running]

    def start(self, index: int, task: Task) -> None:
        """Put a task on the GPU."""
        demand = task.demand
        self.running.append(
            Running(
                index=index,
                demand=demand.resources,
                cover=demand.cover,
                dram_bytes_per_ns=dram.bytes_per_ns(self._hardware.memory, task.dram_bytes, task.dur_ns),
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
            kernel.rate = kernel.shared_rate = share if elder else share / self._later_slowdown(kernel)
            elder = elder and not any(kernel.demand)

    def _later_slowdown(self, kernel: Running) -> float:
        return oldest_first.later_slowdown(self._hardware.contention, kernel.cover)

    def _limit_traffic(self) -> None:
        """Rule 4, among all running kernels."""
        traffic = 0.0
        for kernel in self.running:
            traffic += kernel.rate * kernel.dram_bytes_per_ns
        slow = dram.slowed_frac(self._hardware.memory, traffic)
        if slow < 1.0:
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

    def losses(self) -> Iterator[tuple[int, int, int, float]]:
        """For each kernel that loses time now: which, the cause, the oldest other kernel (or -1), what part of it."""
        for kernel in self.running:
            by = next((other.index for other in self.running if other is not kernel), -1)
            rates = (1.0, kernel.share, kernel.shared_rate, kernel.rate)
            causes = (self._scarce(kernel), lost_time.ISSUE, lost_time.DRAM)
            for cause, before, after in zip(causes, rates[:-1], rates[1:], strict=True):
                if before > after:
                    yield kernel.index, cause, by, before - after

    def _scarce(self, kernel: Running) -> int:
        """The resource that its blocks do not get enough of; `BLOCKS` where they stand behind another kernel's."""
        left = [1.0, 1.0, 1.0, 1.0]
        for other in self.running:
            if other is kernel:
                break
            if other.partition == kernel.partition:
                left = [room - other.share * need for room, need in zip(left, other.demand, strict=True)]
        scarcest, least = lost_time.BLOCKS, 1.0
        for resource, (room, need) in enumerate(zip(left, kernel.demand, strict=True)):
            if kernel.share > 0.0 and need > room and room / need < least:
                scarcest, least = resource, room / need
        return scarcest

    @property
    def occupied(self) -> float:
        """Share of the GPU's residency in use."""
        return min(1.0, sum(kernel.share * kernel.residency for kernel in self.running))

    @property
    def traffic_bytes_per_ns(self) -> float:
        """DRAM traffic at the current rates."""
        return sum(kernel.rate * kernel.dram_bytes_per_ns for kernel in self.running)
