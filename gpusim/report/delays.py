"""Delays in words: the worst delay of a schedule, and the meaning of each cause for a user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpusim.analysis.explain import (
    DEPENDENCY,
    FRONT_END,
    GRAPH_GAPS,
    GRID_SLOT,
    LAUNCH,
    MISSES,
    PRODUCTS,
    QUEUE,
    START_INTERFERENCE,
    Delay,
    Explained,
)
from gpusim.analysis.explain_pair import merged
from gpusim.engine.causes import BLOCKS, CARVEOUT, COPY, DRAM, ISSUE, REGISTERS, SMEM, THREADS
from gpusim.text import shortened, visible
from gpusim.trace.op_names import op_label
from gpusim.units import format_ns

#: A smaller share of the step is not given.
LEAST_NAMED: Final = 0.001
#: Further causes are named if they take at least this share of the step.
LEAST_SHARE: Final = 0.01


@dataclass(frozen=True, slots=True)
class Cause:
    """Meaning of a cause of delays: `why` continues "time was lost because", `helps` starts a sentence."""

    why: str
    helps: str


CAUSES: Final = {
    QUEUE: Cause("the kernel before in the stream was still running", "More streams, or another order, would help."),
    LAUNCH: Cause("the host launched too late", "A CUDA graph would help."),
    START_INTERFERENCE: Cause("other kernels started meanwhile", "Fewer, larger kernels would help: operator fusion."),
    PRODUCTS: Cause("matrix products ran beside other kernels", "Fewer streams, or batched products, would help."),
    GRAPH_GAPS: Cause("the CUDA graph forks and joins there", "Fewer branches would help."),
    FRONT_END: Cause("the GPU was starting another kernel", "Fewer kernels would help: operator fusion."),
    GRID_SLOT: Cause("as many kernels ran as the GPU holds", "Fewer streams would help."),
    COPY: Cause("another copy used the engine", "Copies at another time would help."),
    BLOCKS: Cause("other kernels held the SMs' block slots", "Larger blocks, or another order, would help."),
    THREADS: Cause("other kernels held the SMs' threads", "Smaller kernels, or another order, would help."),
    REGISTERS: Cause("other kernels held the SMs' registers", "Kernels with smaller tiles would help."),
    SMEM: Cause("other kernels held the SMs' shared memory", "Kernels with smaller tiles would help."),
    CARVEOUT: Cause("the SMs' shared memory was set up for another kernel", "Another order would help."),
    ISSUE: Cause("other kernels shared the SMs and the L2 cache", "Nothing but fewer kernels at once would help."),
    DRAM: Cause("all kernels together exceeded the memory's bandwidth", "Operator fusion would help: it moves less."),
    MISSES: Cause("data had left the L2 cache", "Fewer streams would help: they touch less memory."),
    DEPENDENCY: Cause("data were not there", "No schedule changes that."),
}


@dataclass(frozen=True, slots=True)
class WorstDelay:
    """The largest delay on the path to the end."""

    delay: Delay
    text: str
    """Loser, lost time, cause and remedy, in plain text."""


def worst_delay(explained: Explained) -> WorstDelay | None:
    """Return the largest delay, or None if the schedule is as fast as its critical path."""
    gap = explained.step()
    rows = merged(gap.delays)
    if not rows:
        return None
    worst = rows[0]
    cause = CAUSES[worst.cause]
    by = "" if worst.by is None else f", most of all {task_label(explained, worst.by)}"
    lost = worst.lost_ns / gap.makespan_ns if gap.makespan_ns else 0.0
    share = f", {lost:.1%} of the step" if lost >= LEAST_NAMED else ""
    return WorstDelay(
        worst,
        f"{task_label(explained, worst.task)} lost {format_ns(worst.lost_ns)}{share}, because {cause.why}{by}. "
        f"{cause.helps}",
    )


def causes_sentence(explained: Explained, named: int = 2) -> str:
    """Return a sentence on the time above the critical path with its largest causes; empty if there is none."""
    gap = explained.step()
    causes = list(explained.causes_ns().items())[:named]
    if gap.gap_ns <= 0.0 or not causes:
        return ""
    parts = [
        f"{lost_ns / gap.makespan_ns:.0%} because {CAUSES[cause].why}"
        for cause, lost_ns in causes
        if lost_ns >= LEAST_SHARE * gap.makespan_ns or cause == causes[0][0]
    ]
    return (
        f"Of this schedule's time, {gap.gap_ns / gap.makespan_ns:.0%} lies above its critical path: "
        f"{'; '.join(parts)}. {CAUSES[causes[0][0]].helps}"
    )


def task_label(explained: Explained, task: int) -> str:
    """Return layer and operator of a task, with control characters made visible."""
    op = explained.timeline.plan.tasks[task].op
    name = op_label(explained.graph.trace.ops[op]) if op >= 0 else explained.timeline.plan.tasks[task].name
    return shortened(visible(name), 80)
