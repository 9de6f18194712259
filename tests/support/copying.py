"""Schedules on the CPU that copy the inputs and results of a call themselves, as CUDA graphs do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpusim.formats.trace import Trace
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.optimize.copies import Copies, fresh
from gpusim.gpu.optimize.executors import CpuExecutor, Ready
from gpusim.plan.schedule import Schedule


@dataclass
class CopiesOfRun:
    """Copies that a run makes itself, on the CPU."""

    ready: Ready
    inputs: Sequence[torch.Tensor]
    results: Sequence[int]
    calls: int = 0

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.calls += 1
        Copies(self.inputs)(tensors)
        self.ready.run()
        tensors_of_step = [self.ready.tensors[number] for number in self.results]
        return fresh([tensor for tensor in tensors_of_step if tensor is not None])


class Copying(CpuExecutor):
    """Executor whose schedules copy a call's inputs and results themselves; `made` has these copies."""

    recordings = 2

    def __init__(self) -> None:
        self.made: list[CopiesOfRun] = []

    def prepare_call(
        self, captured: Captured, trace: Trace, schedule: Schedule, results: Sequence[int]
    ) -> Ready | None:
        ready: Any = self.prepare(captured, trace, schedule)
        ready.copies = CopiesOfRun(ready, captured.inputs, results)
        self.made.append(ready.copies)
        return ready  # type: ignore[no-any-return]
