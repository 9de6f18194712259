"""What a memory plan costs and saves on a GPU: peak memory by the allocator, step time by an engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gpusim.defaults import DEFAULT_ENGINE
from gpusim.engine.base import Engine, Timeline, engine_by_name
from gpusim.memplan.checks import check_memory_plan, check_program, check_timeline
from gpusim.memplan.lowering import lower_program
from gpusim.memplan.memory import MemoryUse, memory_of
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.program import Program, program_of
from gpusim.memplan.storages import Storages
from gpusim.plan.graph import OpGraph


@dataclass(frozen=True)
class Outcome:
    """A memory plan on a GPU, predicted."""

    plan: MemoryPlan
    program: Program
    use: MemoryUse
    step_ns: int
    exposed_copy_ns: int
    """What the step takes longer than without its copies."""
    recompute_ns: int
    """What it takes longer, copies apart, than the step that keeps all."""
    d2h_bytes: int
    h2d_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Most that is allocated at once."""
        return self.use.peak.allocated_bytes

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory of the plan."""
        return self.use.pinned_bytes


class MemoryEvaluator:
    """Evaluates memory plans of one step on one GPU."""

    def __init__(self, graph: OpGraph, engine: str | Engine = DEFAULT_ENGINE) -> None:
        """Raises `UnknownNameError` for the engine."""
        self.graph = graph
        self.storages = Storages.of(graph.trace)
        self.engine = engine_by_name(engine) if isinstance(engine, str) else engine

    @cached_property
    def keep_all_ns(self) -> int:
        """The step that keeps all."""
        return self.time(program_of(self.storages, MemoryPlan())).makespan_ns

    def program(self, plan: MemoryPlan, *, barriers_first: bool = True) -> Program:
        """The instructions of a plan, known to run; as `program_of`. Raises `PlanError`."""
        program = program_of(self.storages, check_memory_plan(self.storages, plan), barriers_first=barriers_first)
        check_program(self.storages, program)
        return program

    def time(self, program: Program, *, copies: bool = True, memory: bool = False) -> Timeline:
        """The timeline of a program."""
        lowered = lower_program(self.graph, self.storages, program, copies=copies, memory=memory)
        timeline = self.engine.run(lowered.plan, self.graph.hardware)
        check_timeline(lowered, timeline.start_ns, timeline.end_ns, self.storages)
        return timeline

    def evaluate(self, plan: MemoryPlan, *, barriers_first: bool = True) -> Outcome:
        """Memory and time of a plan; as `program_of`. Raises `PlanError` for one that cannot run."""
        program = self.program(plan, barriers_first=barriers_first)
        step_ns = self.time(program).makespan_ns
        without_ns = self.time(program, copies=False).makespan_ns if plan.has_copies else step_ns
        size = self.storages.bytes
        return Outcome(
            plan=plan,
            program=program,
            use=memory_of(self.storages, program),
            step_ns=step_ns,
            exposed_copy_ns=step_ns - without_ns,
            recompute_ns=without_ns - self.keep_all_ns,
            d2h_bytes=sum(size[i.storage] for i in program if i.kind == "out"),
            h2d_bytes=sum(size[i.storage] for i in program if i.kind == "back"),
        )
