"""Concurrent chains of calls between two kernels that record the time: predicted from the time of each chain alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gpusim.engine.base import Engine
from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import HardwareModel
from gpusim.plan.tasks import Plan, Task


@dataclass(frozen=True)
class Chain:
    """Calls in sequence, each with the same kernels."""

    tasks: tuple[Task, ...]
    """Kernels of one call; of their times alone only the ratios count."""
    call_ns: float
    """Measured time of a call in the chain alone, with its gaps."""
    calls: int = 1

    def alone(self, gap_ns: float) -> tuple[Task, ...]:
        """Return the kernels of a call with the times that add up to its own, after their gaps."""
        delays_ns = len(self.tasks) * gap_ns + sum(task.extra_ns for task in self.tasks)
        kernels_ns = max(0.0, self.call_ns - delays_ns)
        total_ns = sum(task.dur_ns for task in self.tasks) or 1.0
        return tuple(msgspec.structs.replace(task, dur_ns=kernels_ns * (task.dur_ns / total_ns)) for task in self.tasks)


def predict(chains: Sequence[Chain], empty_ns: float, hardware: HardwareModel, engine: Engine | None = None) -> float:
    """Predict the time between two stamps with these chains concurrent, in ns.

    `empty_ns` is the time between two stamps with nothing between them. A stamp takes that less one gap.
    """
    gap_ns = hardware.graph.chain_ns
    stamp_ns = max(0.0, empty_ns - gap_ns)
    stamp = Task(name="stamp", dur_ns=stamp_ns)
    tasks, ends = [stamp], []
    for queue, chain in enumerate(chains):
        first, *rest = chain.alone(gap_ns) * chain.calls
        tasks.append(msgspec.structs.replace(first, queue=queue, deps=(0,) if queue else ()))
        tasks += [msgspec.structs.replace(task, queue=queue, deps=()) for task in rest]
        ends.append(len(tasks) - 1)
    last = msgspec.structs.replace(stamp, deps=tuple(ends[1:]))
    timeline = (engine or FastEngine()).run(Plan(tasks=(*tasks, last)), hardware)
    return timeline.makespan_ns - stamp_ns
