"""The block dispatcher with one pool of SMs: the share of the GPU that each running kernel holds, and its rate.

The rules (research/2026-11-23-engine-rules.md has the evidence for each):

1. *Leftover.* Kernels take SM resources in start order. A kernel demands a share of the GPU's threads, registers,
   shared memory and block slots; it gets the largest part of its demand that still fits.
2. *Head of line.* While a kernel has unplaced blocks, no later kernel gets any placed: the dispatcher serves one
   kernel at a time (Amert et al., "GPU Scheduling on the NVIDIA TX2", RTSS 2017, rule X1).
3. *Oldest first.* The oldest running kernel runs undisturbed. Later ones run at 1 / (1 + a) of the rate of their
   share: they wait for issue slots, caches and memory. Kernels of a few warps are alone on their SMs and lose less.
4. *DRAM.* If the total traffic would exceed the bandwidth, all kernels with traffic slow down by one factor.

Rules 1 to 3 hold within each SM partition, as if it were the GPU; rule 4 holds for all partitions together.

The pool is independent of SimPy, streams and events: the engines and the list scheduler drive it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpusim.formats.hardware import HardwareModel
from gpusim.plan.tasks import Task
from gpusim.rules import dram, lost_time, oldest_first

#: Smaller shares are rounding errors, not free room.
EPSILON = 1e-9


@dataclass(slots=True)
class Running:
    """A task on the GPU: its remaining work, as ns of time alone, and its rate."""

    index: int
    demand: tuple[float, float, float, float]
    cover: float
    dram_bytes_per_ns: float
    residency: float
    remaining_ns: float
    partition: int = 0
    rate: float = 0.0
    share: float = 0.0
    """Satisfied part of its demand."""
    shared_rate: float = 0.0
    """Rate without the DRAM limit."""


class SmPool:
    """The running kernels of one GPU, in start order. Call `advance` before any change, and `update` after it."""

    def __init__(self, hardware: HardwareModel) -> None:
        self.running: list[Running] = []
        self._hardware = hardware

    @property
    def full(self) -> bool:
        """True if the GPU has no free grid slot for another kernel."""
        return len(self.running) >= self._hardware.limits.resident_grids

    @property
    def indices(self) -> list[int]:
        """Running tasks in start order."""
        return [kernel.index for kernel in self.running]

    def start(self, index: int, task: Task, wait_ns: float = 0.0) -> None:
        """Put a task on the GPU; a memory operation takes `wait_ns` longer than alone."""
        demand = task.demand
        self.running.append(
            Running(
                index=index,
                demand=demand.resources,
                cover=demand.cover,
                dram_bytes_per_ns=dram.bytes_per_ns(self._hardware.memory, task.dram_bytes, task.dur_ns),
                residency=demand.residency,
                remaining_ns=task.dur_ns + wait_ns,
                partition=task.partition,
            )
        )

    def advance(self, elapsed_ns: float) -> None:
        """Advance all kernels by `elapsed_ns` at their current rates."""
        for kernel in self.running:
            kernel.remaining_ns -= elapsed_ns * kernel.rate

    def finish(self, index: int) -> bool:
        """Remove a finished task; return True, since a pool runs each task as a whole."""
        self.running = [kernel for kernel in self.running if kernel.index != index]
        return True

    def update(self) -> None:
        """Recompute `share` and `rate` of every running kernel."""
        for partition in sorted({kernel.partition for kernel in self.running}):
            self._share_out([kernel for kernel in self.running if kernel.partition == partition])
        self._limit_traffic()

    def _share_out(self, running: list[Running]) -> None:
        """Apply rules 1 to 3 to the kernels of one partition."""
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
        """Apply rule 4 to all running kernels."""
        traffic = 0.0
        for kernel in self.running:
            traffic += kernel.rate * kernel.dram_bytes_per_ns
        slow = dram.slowed_frac(self._hardware.memory, traffic)
        if slow < 1.0:
            for kernel in self.running:
                if kernel.dram_bytes_per_ns > 0.0:
                    kernel.rate *= slow

    def next_end(self) -> tuple[float, int] | None:
        """Return the time to the next end at the current rates, and the task: of several, the oldest."""
        best: tuple[float, int] | None = None
        for kernel in self.running:
            if kernel.rate > 0.0:
                time = max(0.0, kernel.remaining_ns / kernel.rate)
                if best is None or time < best[0]:
                    best = (time, kernel.index)
        return best

    def losses(self) -> Iterator[tuple[int, int, int, float]]:
        """Yield (task, cause, oldest other task or -1, lost share of the time) for each kernel that loses time now."""
        for kernel in self.running:
            by = next((other.index for other in self.running if other is not kernel), -1)
            rates = (1.0, kernel.share, kernel.shared_rate, kernel.rate)
            causes = (self._scarce(kernel), lost_time.ISSUE, lost_time.DRAM)
            for cause, before, after in zip(causes, rates[:-1], rates[1:], strict=True):
                if before > after:
                    yield kernel.index, cause, by, before - after

    def _scarce(self, kernel: Running) -> int:
        """Return the scarcest resource of a kernel; `BLOCKS` if it waits behind another kernel."""
        left = [1.0, 1.0, 1.0, 1.0]
        for other in self.running:
            if other is kernel:
                break
            if other.partition == kernel.partition:
                # Rounding could leave less than nothing, which even a kernel without that need would lack.
                left = [max(0.0, room - other.share * need) for room, need in zip(left, other.demand, strict=True)]
        scarcest, least = lost_time.BLOCKS, 1.0
        for resource, (room, need) in enumerate(zip(left, kernel.demand, strict=True)):
            if kernel.share > 0.0 and need > room and room / need < least:
                scarcest, least = resource, room / need
        return scarcest

    @property
    def occupied(self) -> float:
        """Occupied share of the GPU."""
        return min(1.0, sum(kernel.share * kernel.residency for kernel in self.running))

    @property
    def traffic_bytes_per_ns(self) -> float:
        """DRAM traffic at the current rates, in bytes per ns."""
        return sum(kernel.rate * kernel.dram_bytes_per_ns for kernel in self.running)
