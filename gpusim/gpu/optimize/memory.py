"""A step that runs a memory plan on the user's own tensors, where no schedule keeps a memory limit.

The plan is a searched one, or that of our own policy. As a CUDA graph it has the plan's streams for ops and one for
each direction of its copies; on the CPU its instructions run in sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from gpusim.formats.trace import Trace
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.optimize.executors import Ready
from gpusim.gpu.replay.memory_replay import ProgramRecorder, RecordedProgram, with_buffers
from gpusim.gpu.replay.memory_run import HostBuffers, Inline, MemoryRunner, ProgramRunner
from gpusim.memplan.compare import LEAST_TIME, compare_policies
from gpusim.memplan.evaluate import MemoryEvaluator, Outcome
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.least_time import LeastTime
from gpusim.memplan.program import needed
from gpusim.memplan.shortfall import shortfall
from gpusim.memplan.storages import Storages
from gpusim.plan.graph import OpGraph
from gpusim.units import format_bytes

Say = Callable[[str], None]

#: Most plans per limit. A step's trace has no workspaces, so the first plan may take more than predicted; each further
#: one has a budget reduced by the excess.
ATTEMPTS: Final = 3


@dataclass(frozen=True)
class Planned:
    """A memory plan, ready to run within a limit."""

    outcome: Outcome
    ready: Ready


class MemoryReady:
    """A memory plan's program, run instruction by instruction on the CPU; results have fixed memory."""

    copies = None

    def __init__(self, captured: Captured, trace: Trace, outcome: Outcome) -> None:
        self._runner = _runner(captured, trace, torch.device("cpu"))
        self._programs = ProgramRunner(self._runner, HostBuffers(pinned=False), Inline())
        self._programs.prepare(outcome.program)
        self._runner.choose(outcome.plan.variants)
        self._program = outcome.program
        storages = Storages.of(trace)
        self._needs = [needed(storages, instruction) for instruction in outcome.program]
        self._tensors: list[torch.Tensor | None] | None = None
        self._peak_bytes = outcome.peak_bytes

    @property
    def tensors(self) -> Sequence[torch.Tensor | None]:
        """Where its results lie after each run, by tensor id."""
        return [] if self._tensors is None else self._tensors

    @property
    def peak_bytes(self) -> int:
        """Predicted peak memory of the step, in bytes."""
        return self._peak_bytes

    def run(self) -> None:
        """Run the step once on the user's tensors."""
        with torch.autocast("cpu", enabled=False):  # recorded calls are below it
            self._programs.run(self._program, self._needs)
        if self._tensors is None:
            self._tensors = list(self._runner.tensors)
        for fixed, new in zip(self._tensors, self._runner.tensors, strict=True):
            if fixed is not None and new is not None and fixed is not new:
                fixed.copy_(new)
        self._runner.drop_temporaries()


@dataclass(frozen=True)
class MemoryGraph:
    """A memory plan's program as a CUDA graph. The recorder holds its streams and pinned buffers."""

    recorded: RecordedProgram
    recorder: ProgramRecorder
    copies: None = None

    @property
    def tensors(self) -> Sequence[torch.Tensor | None]:
        """Where its results lie after each run, by tensor id."""
        return self.recorded.tensors

    @property
    def peak_bytes(self) -> int:
        """Measured peak memory of the step, in bytes."""
        return self.recorded.peak_bytes

    def run(self) -> None:
        """Run the step once on the user's tensors."""
        self.recorded.replay()


def _runner(captured: Captured, trace: Trace, device: torch.device) -> MemoryRunner:
    runner = MemoryRunner(trace, device, own=True, functions=captured.functions)
    runner.bind(captured.live)
    return runner


def prepare_memory(
    captured: Captured, evaluator: MemoryEvaluator, outcome: Outcome, device: torch.device, say: Say
) -> Planned:
    """Prepare a memory plan. May change the user's tensors.

    Where the host has too little pinned memory, storages stay on the GPU, and `say` is told.
    """
    trace = evaluator.graph.trace
    if device.type != "cuda":
        ready = MemoryReady(captured, trace, outcome)
        ready.run()  # results get their memory
        return Planned(outcome, ready)
    runner = _runner(captured, trace, device)
    recorder = ProgramRecorder(evaluator, runner, runner.initial_bytes, own_workspaces=True)
    outcome = with_buffers(recorder, evaluator, outcome, say)
    recorded = recorder.record(outcome.program, outcome.plan.variants, warm=True)
    return Planned(outcome, MemoryGraph(recorded, recorder))


def within_limit(
    captured: Captured,
    graph: OpGraph,
    limit_bytes: int,
    device: torch.device,
    say: Say,
    searched: MemoryPlan | None = None,
) -> tuple[Planned | None, str]:
    """Return a plan that keeps a limit, ready to run; else None, and why none does.

    It is the `searched` one, on several streams, unless that takes more than predicted; then that of our own policy:
    the fastest, or if all `ATTEMPTS` take too much, the one that takes least. It may change the user's tensors.
    """
    if captured.frontend != "aten":
        return None, "memory plans run ATen's kernels"
    evaluator = MemoryEvaluator(graph)
    if searched is not None and searched.op_streams:
        planned = prepare_memory(captured, evaluator, evaluator.evaluate(searched), device, say)
        if planned.ready.peak_bytes <= limit_bytes:
            return planned, ""
        say(f"the searched memory plan takes {format_bytes(planned.ready.peak_bytes)}")
        del planned  # its graph has memory

    def for_budget(budget_bytes: int) -> Planned | None:
        best = compare_policies(graph, policies=[LEAST_TIME], budget_bytes=budget_bytes).best
        if best is None or best.outcome is None:
            return None
        return prepare_memory(captured, evaluator, best.outcome, device, say)

    budget_bytes = limit_bytes
    for _ in range(ATTEMPTS):
        within = for_budget(budget_bytes) if budget_bytes > 0 else None
        if within is None:
            break
        taken_bytes = within.ready.peak_bytes
        if taken_bytes <= limit_bytes:
            return within, ""
        say(f"a memory plan for {format_bytes(budget_bytes)} takes {format_bytes(taken_bytes)}")
        # From what the plan was to take: a budget that it leaves room in would have to be reduced by that room first.
        budget_bytes = min(budget_bytes, within.outcome.peak_bytes) - (taken_bytes - limit_bytes)
        del within
    planner = LeastTime(Setting(graph, evaluator.storages), evaluator)
    least_bytes = planner.smallest.peak_bytes
    try:
        least = for_budget(least_bytes)
    except torch.cuda.OutOfMemoryError:
        if least_bytes <= limit_bytes:
            raise
        least = None  # more than the GPU has
    if least is None:
        return None, planner.shortfall(limit_bytes)
    if least.ready.peak_bytes <= limit_bytes:
        return least, ""
    use, order = least.outcome.use, least.outcome.plan.order
    unplanned_bytes = least.ready.peak_bytes - use.peak.allocated_bytes
    return None, shortfall(evaluator.storages, use, order, limit_bytes, unplanned_bytes)
