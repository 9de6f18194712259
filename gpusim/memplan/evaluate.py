"""Costs and savings of a memory plan on a GPU: peak memory by the allocator, step time by an engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import msgspec

from gpusim.defaults import DEFAULT_ENGINE
from gpusim.engine.base import Engine, Timeline, engine_by_name
from gpusim.memplan.checks import check_memory_plan, check_program, check_timeline
from gpusim.memplan.lowering import lower_program
from gpusim.memplan.memory import MemoryUse, memory_of
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.program import Program, op_streams_of, program_of
from gpusim.memplan.storages import Storages
from gpusim.notebook import ShortRepr
from gpusim.plan.graph import OpGraph
from gpusim.rules.copies import NONE_IN_CHAIN
from gpusim.trace.store import structure_hash


@dataclass(frozen=True, repr=False)
class Outcome(ShortRepr):
    """Predictions for a memory plan on a GPU."""

    plan: MemoryPlan
    program: Program
    use: MemoryUse
    step_ns: int
    exposed_copy_ns: int
    """Extra time of the step through its copies, in ns."""
    recompute_ns: int
    """Extra time over the step that keeps all on the same streams, by the same variants and without copies, in ns."""
    variants_ns: int
    """Extra time of the step that keeps all on the same streams through the plan's variants, in ns; negative for faster
    ones.
    """
    d2h_bytes: int
    h2d_bytes: int
    live_bytes: int = 0
    """Peak of the simulated timeline on several streams, where ops that run at once are out of launch order, in bytes;
    0 for one stream.
    """

    @property
    def peak_bytes(self) -> int:
        """Peak of the allocated memory, in bytes."""
        return max(self.use.peak.allocated_bytes, self.live_bytes)

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory of the plan, in bytes."""
        return self.use.pinned_bytes


class MemoryEvaluator:
    """Evaluator of memory plans for one step on one GPU."""

    def __init__(self, graph: OpGraph, engine: str | Engine = DEFAULT_ENGINE, storages: Storages | None = None) -> None:
        """Prepare the evaluator; `storages` are the graph's. Raises `UnknownNameError` for the engine."""
        self.graph = graph
        self.storages = Storages.of(graph.trace) if storages is None else storages
        self.engine = engine_by_name(engine) if isinstance(engine, str) else engine
        self._choosing: dict[tuple[int, ...], MemoryEvaluator] = {}

    def choosing(self, plan: MemoryPlan) -> MemoryEvaluator:
        """Return the evaluator of the step with the kernels and workspaces of a checked plan's variants."""
        if not plan.has_variants:
            return self
        if plan.variants not in self._choosing:
            graph = self.graph.choosing(plan.variants)
            self._choosing[plan.variants] = MemoryEvaluator(graph, self.engine, self.storages.running(graph))
        return self._choosing[plan.variants]

    @cached_property
    def keep_all_ns(self) -> int:
        """Time of the step that keeps all, in ns."""
        return self.time(program_of(self.storages, MemoryPlan())).makespan_ns

    @cached_property
    def trace_hash(self) -> str:
        """Hash of the trace, to which its plans are tied."""
        return structure_hash(self.graph.trace)

    def program(self, plan: MemoryPlan, *, barriers_first: bool = True) -> Program:
        """Return the checked instructions of a plan, as `program_of`. Raises `PlanError`."""
        program = program_of(self.storages, check_memory_plan(self.storages, plan), barriers_first=barriers_first)
        check_program(self.storages, program)
        return program

    def time(self, program: Program, *, copies: bool = True, memory: bool = False) -> Timeline:
        """Return the timeline of a program of the captured kernels; that of a plan is `choosing`'s."""
        lowered = lower_program(self.graph, self.storages, program, copies=copies, memory=memory)
        hardware = self.graph.hardware
        if lowered.is_chain:
            copies_alone = msgspec.structs.replace(hardware.copies, **dict.fromkeys(NONE_IN_CHAIN, 0.0))
            hardware = msgspec.structs.replace(hardware, copies=copies_alone)
        timeline = self.engine.run(lowered.plan, hardware)
        check_timeline(lowered, timeline.start_ns, timeline.end_ns, self.storages)
        return timeline

    def evaluate(self, plan: MemoryPlan, *, barriers_first: bool = True) -> Outcome:
        """Return memory and time of a plan, as `program_of`. Raises `PlanError` for one that cannot run."""
        program = self.program(plan, barriers_first=barriers_first)
        step = self.choosing(plan)
        several = op_streams_of(program) > 1
        timeline = step.time(program, memory=several)
        step_ns = timeline.makespan_ns
        without_ns = step.time(program, copies=False).makespan_ns if plan.has_copies else step_ns
        keeps_ns = step._keeping_all_ns(plan)
        size = self.storages.bytes
        return Outcome(
            plan=plan,
            program=program,
            use=memory_of(step.storages, program),
            step_ns=step_ns,
            exposed_copy_ns=step_ns - without_ns,
            recompute_ns=without_ns - keeps_ns,
            variants_ns=keeps_ns - self._keeping_all_ns(plan) if plan.has_variants else 0,
            d2h_bytes=sum(size[i.storage] for i in program if i.kind == "out"),
            h2d_bytes=sum(size[i.storage] for i in program if i.kind == "back"),
            live_bytes=timeline.peak_bytes if several else 0,
        )

    def _keeping_all_ns(self, plan: MemoryPlan) -> int:
        """Return the time of the captured kernels on a plan's streams if all is kept, in ns."""
        if not any(plan.op_streams):
            return self.keep_all_ns
        return self.time(self.program(MemoryPlan(order=plan.order, op_streams=plan.op_streams))).makespan_ns
