"""Result of an exploration: its rows, the recommended one, and what follows from that choice."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from gpusim.arguments import file_path
from gpusim.bounds.bounds import Bounds, bounds
from gpusim.engine.base import Timeline
from gpusim.engine.evaluate import Evaluator
from gpusim.engine.reference import ReferenceEngine
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Trace
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.plan import MemoryPlan, write_memory_plan
from gpusim.notebook import ShortRepr, html_table, short_name, short_repr
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule, write_schedule
from gpusim.policies.shared.list_scheduling import FastLists
from gpusim.search.events import compared_ns
from gpusim.search.memory_actions import ACTIONS_LEAD
from gpusim.search.variants import PartitionsTried, VariantsTried
from gpusim.search.verdict import Verdict, verdict, verdict_rows
from gpusim.trace.kernel_doubts import slowed_frac, unsized_frac
from gpusim.units import counted, format_ns


@dataclass(frozen=True, repr=False)
class Row(ShortRepr):
    """One simulated schedule."""

    policy: str
    streams: int
    makespan_ns: int
    speedup: float
    """Speed-up over the sequential graph."""
    peak_bytes: int
    schedule: Schedule
    """Streams, order and kernels, without memory actions."""
    plan: MemoryPlan | None = None
    """Memory actions of the schedule, with its streams and order; None if it has none."""
    events: int = 0
    """Events that its streams wait for."""

    @property
    def compared_ns(self) -> int:
        """Predicted makespan, with a time for each event: by it schedules are compared."""
        return compared_ns(self.makespan_ns, self.events)


@dataclass(frozen=True, repr=False)
class Attribution(ShortRepr):
    """Attribution of the gain from eager to the best schedule, in ns saved."""

    eager_ns: int | None
    """Eager time measured at capture; None if not measured, or on another GPU."""
    launch_ns: int | None
    """Time saved by launching the same kernels from a CUDA graph."""
    concurrency_ns: int
    """Time saved by streams alone, with ops in recorded order."""
    kernels_ns: int
    """Time saved by other kernels; 0 if the best schedule runs the captured ones."""
    order_ns: int
    """Time saved by a better order and placement on as many streams."""
    memory_ns: int = 0
    """Time saved by memory actions, negative as they cost time; 0 if the best schedule has none."""


@dataclass(frozen=True, repr=False)
class Explored:
    """Result of `gpusim explore`."""

    graph: OpGraph
    rows: tuple[Row, ...]
    best: Row
    sequential_ns: int
    bounds: Bounds
    attribution: Attribution
    verdict: Verdict
    evaluations: int
    """Number of simulations in the search, also of copies of the step with perturbed times."""
    interrupted: bool
    seed: int
    variants: VariantsTried | None = None
    """Gain of variants; None if the trace has none."""
    partitions: tuple[PartitionsTried, ...] = ()
    """Gains of the tried splits of the SMs."""
    memory_limit_bytes: int | None = None
    """Memory limit of the best schedule."""
    left_out: tuple[str, ...] = ()
    """Policies left out as too slow on a large step, and the search."""

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the recommended schedule, recorded by the reference engine on first use."""
        if self.best.plan is not None:
            evaluator = MemoryEvaluator(self.graph, ReferenceEngine())
            return evaluator.time(evaluator.program(self.best.plan), memory=True)
        return ReferenceEngine().run(lower(self.graph, self.best.schedule), self.graph.hardware)

    @property
    def trace(self) -> Trace:
        """Trace of the explored step."""
        return self.graph.trace

    @property
    def hardware(self) -> HardwareModel:
        """Hardware model, anchored to the trace."""
        return self.graph.hardware

    @property
    def schedule(self) -> Schedule | MemoryPlan:
        """Recommended schedule for `gpusim.replay` and `gpusim.simulate`; with memory actions it is a `MemoryPlan`."""
        return self.best.schedule if self.best.plan is None else self.best.plan

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """Recommended schedule with its memory actions; None if it has none."""
        return self.best.plan

    def best_of(self, policy: str) -> Row:
        """Return the best row of a policy, as rows are compared."""
        return min((row for row in self.rows if row.policy == policy), key=lambda row: row.compared_ns)

    @property
    def allowed(self) -> list[Row]:
        """Return the rows that keep the memory limit."""
        limit = self.memory_limit_bytes
        return [row for row in self.rows if limit is None or row.peak_bytes <= limit]

    @property
    def passed_over(self) -> Row | None:
        """Schedule predicted faster than the recommended one; None if there is none.

        Where the sequential one is recommended, that is a searched one.
        """
        faster = [row for row in self.allowed if row.makespan_ns < self.best.makespan_ns]
        if self.best.policy == "sequential":
            faster = [row for row in faster if row.schedule.searched]
        return min(faster, key=lambda row: row.makespan_ns, default=None)

    @property
    def passed_over_reason(self) -> str:
        """Reason why `passed_over` is not recommended, as a clause; empty if there is none."""
        passed = self.passed_over
        if passed is None:
            return ""
        if self.best.policy == "sequential":
            return "its gain is within the model's uncertainty"
        if passed.compared_ns >= self.best.compared_ns:
            more = counted(passed.events - self.best.events, "more event")
            return f"it has {more}, which may cost its lead"
        if passed.plan is not None and self.best.plan is None:
            return f"its lead is smaller than memory actions need ({ACTIONS_LEAD:.0%})"
        optimism = self.hardware.uncertainty.further_frac(
            other_kernels=passed.schedule.has_variants, searched=passed.schedule.searched
        )
        if not optimism:
            return "its interval ends later"
        return f"its lead is smaller than the model's known optimism ({optimism:.1%})"

    def with_best(self, row: Row) -> Explored:
        """Return the same exploration with another row as the best, as found by a trial on the GPU."""
        concluded = conclude(self.graph, row, self.sequential_ns, bounds(self.graph), self.memory_limit_bytes)
        return dataclasses.replace(
            self, best=row, bounds=concluded.bounds, attribution=concluded.attribution, verdict=concluded.verdict
        )

    def save(self, path: str | Path) -> None:
        """Write the recommended schedule as a file for `gpusim.replay` and `gpusim.simulate`. Raises `OutputError`.

        A schedule with memory actions is written as a memory plan.
        """
        file = file_path("path", path)
        if self.best.plan is not None:
            write_memory_plan(self.best.plan, self.trace, file)
            return
        write_schedule(self.best.schedule, self.trace, file)

    def __repr__(self) -> str:
        where = f"{short_name(self.trace.name)} on {short_name(self.hardware.label)}"
        worth = "worth it" if self.verdict.worth_it else "not worth it"
        return short_repr(
            "Explored", f"{where}: {self.best.speedup:.2f}x with {counted(self.best.streams, 'stream')}, {worth}"
        )

    def _repr_html_(self) -> str:
        rows = [
            (row.label, format_ns(row.time_ns), "measured" if row.measured else "predicted", row.advice)
            for row in self.verdict.rows
        ]
        title = f"{short_name(self.trace.name)} on {short_name(self.hardware.label)}: {self.verdict.sentence}"
        return html_table(title, ("way", "time", "", "advice"), rows)


@dataclass(frozen=True, slots=True)
class Conclusion:
    """Values that depend on the choice of the best row."""

    bounds: Bounds
    attribution: Attribution
    verdict: Verdict


def conclude(
    graph: OpGraph, best: Row, sequential_ns: int, bound: Bounds, memory_limit_bytes: int | None
) -> Conclusion:
    """Return attribution and verdict for the best row; `bound` holds for the captured kernels on the whole GPU."""
    trace, hardware, schedule = graph.trace, graph.hardware, best.schedule
    if schedule.variants or schedule.partitions:
        bound = bounds(graph.choosing(schedule.variants), partitioned=bool(schedule.partitions))
    streams = schedule.stream_count if best.plan else best.streams
    program_ns = min(_recorded_order_ns(graph, streams), sequential_ns)
    chosen_ns = _recorded_order_ns(graph.choosing(schedule.variants), streams) if schedule.variants else None
    kernels_ns = 0 if chosen_ns is None else program_ns - chosen_ns
    plain_ns = Evaluator(graph).makespan_ns(schedule) if best.plan else best.makespan_ns
    truth = trace.ground_truth if trace.provenance.gpu.name == hardware.gpu else None
    return Conclusion(
        bounds=bound,
        attribution=Attribution(
            eager_ns=truth.eager.median_ns if truth else None,
            launch_ns=truth.eager.median_ns - sequential_ns if truth else None,
            concurrency_ns=sequential_ns - program_ns,
            kernels_ns=kernels_ns,
            order_ns=program_ns - kernels_ns - plain_ns,
            memory_ns=plain_ns - best.makespan_ns,
        ),
        verdict=verdict(
            hardware,
            sequential_ns,
            best.makespan_ns,
            best.policy,
            best.streams,
            bound,
            graph.may_lose_cache and not graph.predicts_misses,
            schedule.has_variants,
            schedule.searched,
            verdict_rows(
                graph,
                schedule,
                sequential_ns,
                best.makespan_ns,
                truth.eager.median_ns if truth else None,
                best.streams if best.plan else None,
            ),
            estimated=bool(trace.provenance.estimated),
            less_known=graph.less_known,
            slowed_frac=slowed_frac(trace),
            unsized_frac=unsized_frac(trace),
            within_bytes=memory_limit_bytes if best.plan else None,
        ),
    )


def _recorded_order_ns(graph: OpGraph, streams: int) -> int:
    """Return the predicted time with ops in recorded order, each on the stream that becomes free first."""
    program = FastLists(graph).schedule(streams, -np.arange(len(graph), dtype=np.float64), 0.0).schedule
    return Evaluator(graph).makespan_ns(program)
