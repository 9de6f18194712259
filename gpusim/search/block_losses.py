"""Where running kernels lose time to each other, where blocks are placed SM by SM (`gpusim.engine.placement`).

The dispatcher is run again along a timeline. Alone, a kernel has as many blocks resident as the GPU holds of it, or as
it has left. Beside others fewer may be: that share of the time is lost to what they wait for, be it their turn (head of
line), a resource of the SMs, or SMs whose shared memory is set to another size. Those that are resident run slower than
alone on SMs that hold blocks of others, or more of their own, and where DRAM is short.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from gpusim.engine.base import Timeline
from gpusim.engine.placement import Placed, SmGroup, SmPlacement
from gpusim.hardware.model import HardwareModel
from gpusim.search.losses import BLOCKS, COPIES, DRAM, ISSUE, REGISTERS, SMEM, SPLIT, THREADS, Loss


class BlockLosses:
    """The SMs of one device, taken along the starts of a timeline; ends come from the rules themselves."""

    def __init__(
        self,
        timeline: Timeline,
        hardware: HardwareModel,
        changes: Mapping[int, tuple[Sequence[int], Sequence[int]]],
        found: list[list[Loss]],
    ) -> None:
        """`changes` has the tasks that end and start at each time; losses are added to `found`, by task."""
        self.timeline, self.hardware, self.changes, self.found = timeline, hardware, changes, found
        self.sms = SmPlacement(hardware)

    def run(self) -> None:
        """Note the losses of every kernel."""
        now, tasks = 0.0, self.timeline.plan.tasks
        for at in sorted(at for at, (_, started) in self.changes.items() if started):
            now = self._go_on(now, at)
            for index in self.changes[at][1]:
                if tasks[index].kind not in COPIES:
                    self.sms.start(index, tasks[index])
            self.sms.update()
        self._go_on(now, float("inf"))

    def _go_on(self, now: float, until: float) -> float:
        """From one end of a cohort to the next."""
        while (following := self.sms.next_end()) is not None and now + following[0] <= until:
            delay, index = following
            self._note(now, now + delay)
            self.sms.advance(delay)
            self.sms.finish(index)
            self.sms.update()
            now += delay
        if self.sms.kernels and until < float("inf"):
            self._note(now, until)
            self.sms.advance(until - now)
        return until

    def _note(self, now: float, until: float) -> None:
        if until <= now:
            return
        for kernel in self.sms.kernels:
            sms = kernel.task.partition_sms or self.hardware.limits.sms
            possible = max(1.0, min(float(kernel.left + kernel.on_sms), float(sms * kernel.task.blocks_per_sm)))
            alone = self._alone_rate(kernel, possible, sms)
            resident, slow, short = 0.0, 0.0, 0.0
            for cohort in self.sms.cohorts:
                if cohort.kernel is kernel:
                    blocks = cohort.blocks * cohort.group.sms
                    resident += blocks
                    shared = cohort.group.rates[kernel.task.matrix]
                    slow += blocks * max(0.0, 1.0 - shared / alone)
                    short += blocks * (shared - cohort.rate) / alone  # where DRAM is short
            by = next((other.index for other in self.sms.kernels if other is not kernel), None)
            waiting = max(0.0, possible - resident) if kernel.left else 0.0
            lost = {self._held_by(kernel): waiting} if waiting else {}
            for cause, part in (*lost.items(), (ISSUE, slow), (DRAM, short)):
                if part > 0.0:
                    self.found[kernel.index].append(Loss(cause, by, now, until, part / possible * (until - now)))

    def _alone_rate(self, kernel: Placed, possible: float, sms: int) -> float:
        """Rate of its blocks if that many were spread over the SMs, and nothing else."""
        if not kernel.load:
            return 1.0
        return float(
            (math.ceil(possible / sms) * kernel.load) ** -self.hardware.contention.exponents[kernel.task.matrix]
        )

    def _held_by(self, kernel: Placed) -> str:
        """What the blocks that are not placed wait for: on most SMs, where it differs."""
        for other in self.sms.kernels:
            if other is kernel:
                break
            if other.left and other.task.partition == kernel.task.partition:
                return BLOCKS  # head of line
        missing: Counter[str] = Counter()
        for group in self.sms.groups:
            if group.partition == kernel.task.partition:
                missing[self._missing(group, kernel)] += group.sms
        return missing.most_common(1)[0][0] if missing else BLOCKS

    def _missing(self, group: SmGroup, kernel: Placed) -> str:
        """What an SM of the group has too little of for one more block."""
        limits, need = self.hardware.limits, kernel.task.footprint
        if limits.threads_per_sm - group.threads < need.threads:
            return THREADS
        if limits.regs_per_sm - group.regs < need.regs:
            return REGISTERS
        if limits.blocks_per_sm - group.blocks < 1:
            return BLOCKS
        return SPLIT if group.split_bytes < need.split_bytes else SMEM
