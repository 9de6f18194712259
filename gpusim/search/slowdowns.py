"""Where running kernels lose time to each other: the device's sharing rules run again along a timeline.

At every start and end the GPU is shared out anew. A kernel that runs at rate r for t ns loses (1 - r) t, and three
simulations of the same moment tell by what: on a GPU without contention and bandwidth limit only room on the SMs is
missing; what contention takes off further is issue slots and the L2 cache; what the bandwidth takes off is DRAM.

That is so where SMs are one pool (`gpusim.engine.pool`); where blocks are placed SM by SM, `gpusim.search.block_losses`
does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gpusim.engine.base import Timeline
from gpusim.engine.pool import Running, SmPool
from gpusim.hardware.model import HardwareModel
from gpusim.plan.tasks import Task
from gpusim.search.block_losses import BlockLosses
from gpusim.search.losses import BLOCKS, COPIES, COPY, DRAM, ISSUE, RESOURCES, Loss
from gpusim.search.relaxed import without_bandwidth_limit, without_contention

#: Less is rounding.
ROUNDING_NS: Final = 1.0


def losses(timeline: Timeline, hardware: HardwareModel) -> list[list[Loss]]:
    """For each task what it lost while it ran; the sum is its run time less its time alone, but for rounding."""
    found: list[list[Loss]] = [[] for _ in timeline.plan.tasks]
    for device in sorted({task.device for task in timeline.plan.tasks}):
        if hardware.contention.sharing_exponent > 0:
            BlockLosses(timeline, hardware, _changes(timeline, device), found).run()
        else:
            _Pools(timeline, hardware, device, found).run()
        _copy_losses(timeline, device, found)
    return [
        _scaled(rows, timeline.start_ns[index], timeline.end_ns[index], alone_ns(task, hardware))
        for index, (task, rows) in enumerate(zip(timeline.plan.tasks, found, strict=True))
    ]


def alone_ns(task: Task, hardware: HardwareModel) -> float:
    """Time of a task alone on its device."""
    if task.kind not in COPIES:
        return task.dur_ns
    rates = hardware.copies
    rate = rates.h2d_bytes_per_ns if task.kind == "h2d" else rates.d2h_bytes_per_ns
    return rates.latency_ns + task.copy_bytes / rate


def _changes(timeline: Timeline, device: int) -> dict[int, tuple[list[int], list[int]]]:
    """Tasks that end and that start at each time, the latter in the order in which they became ready."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for index, task in enumerate(timeline.plan.tasks):
        if task.device == device and timeline.end_ns[index] > timeline.start_ns[index]:
            found.setdefault(timeline.end_ns[index], ([], []))[0].append(index)
            found.setdefault(timeline.start_ns[index], ([], []))[1].append(index)
    for _, started in found.values():
        started.sort(key=lambda index: (timeline.ready_ns[index], index))
    return found


def _copy_losses(timeline: Timeline, device: int, found: list[list[Loss]]) -> None:
    """Copies in one direction while there is one in the other: both are slower."""
    tasks = timeline.plan.tasks
    copies = [i for i, task in enumerate(tasks) if task.device == device and task.kind in COPIES]
    for index in copies:
        for other in copies:
            begin = max(timeline.start_ns[index], timeline.start_ns[other])
            until = min(timeline.end_ns[index], timeline.end_ns[other])
            if tasks[other].kind != tasks[index].kind and begin < until:
                found[index].append(Loss(COPY, other, begin, until, float(until - begin)))


class _Pools:
    """The pools of one device, taken along the starts and ends of a timeline."""

    def __init__(self, timeline: Timeline, hardware: HardwareModel, device: int, found: list[list[Loss]]) -> None:
        self.timeline, self.device, self.found = timeline, device, found
        calm = without_bandwidth_limit(hardware)
        # All limits, no limit on bandwidth, and only room on the SMs.
        self.pools = [SmPool(model) for model in (hardware, calm, without_contention(calm))]

    def run(self) -> None:
        """Note the losses of every kernel."""
        changes, tasks = _changes(self.timeline, self.device), self.timeline.plan.tasks
        times = sorted(changes)
        for now, until in zip(times, [*times[1:], *times[-1:]], strict=True):
            ended, started = changes[now]
            for pool in self.pools:
                for index in ended:
                    pool.finish(index)
                for index in started:
                    if tasks[index].kind not in COPIES:
                        pool.start(index, tasks[index])
                pool.update()
            if until > now:
                self._note(now, until)

    def _note(self, now: int, until: int) -> None:
        whole, calm, room = (pool.running for pool in self.pools)
        for place, kernel in enumerate(whole):
            by = next((other.index for other in whole if other.index != kernel.index), None)
            rates = (1.0, room[place].rate, calm[place].rate, kernel.rate)
            causes = (_scarce(room, room[place], self.timeline.plan.tasks), ISSUE, DRAM)
            for cause, before, after in zip(causes, rates[:-1], rates[1:], strict=True):
                if before > after:
                    self.found[kernel.index].append(Loss(cause, by, now, until, (before - after) * (until - now)))


def _scarce(running: Sequence[Running], kernel: Running, tasks: Sequence[Task]) -> str:
    """The resource that a kernel's blocks do not get enough of; `BLOCKS` where they stand behind another kernel's."""
    left = [1.0, 1.0, 1.0, 1.0]
    for other in running:
        if other.partition != kernel.partition:
            continue
        needs = tasks[other.index].demand.resources
        if other.index == kernel.index:
            short = {
                resource: room / need
                for resource, room, need in zip(RESOURCES, left, needs, strict=True)
                if need > room
            }
            return min(short, key=lambda resource: short[resource]) if kernel.share > 0.0 and short else BLOCKS
        left = [room - other.share * need for room, need in zip(left, needs, strict=True)]
    return BLOCKS


def _scaled(rows: Sequence[Loss], start_ns: int, end_ns: int, task_ns: float) -> list[Loss]:
    """The same losses, which sum to what the timeline says; times in it are rounded to whole ns."""
    lost_ns, noted_ns = end_ns - start_ns - task_ns, sum(row.lost_ns for row in rows)
    if lost_ns <= 0.0:
        return []
    if noted_ns <= 0.0:  # blocks that came to lie unevenly, or rounding
        return [Loss(BLOCKS, None, start_ns, end_ns, lost_ns)] if lost_ns > ROUNDING_NS else []
    return [replace(row, lost_ns=row.lost_ns * lost_ns / noted_ns) for row in rows]
