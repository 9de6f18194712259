"""Measured times against lower bounds: gap and its parts for the fastest replayed schedule of each step.

The schedules that a recipe replayed are stored next to its results; the steps' traces name the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpusim.analysis.gap import PARTS, Gap, gap_to_bound
from gpusim.bounds.bounds import bounds
from gpusim.engine.fast import FastEngine
from gpusim.errors import MeasurementError
from gpusim.formats.hardware import default_hardware
from gpusim.plan.graph import OpGraph
from gpusim.trace.store import read_trace, structure_hash
from gpusim.validation.replayed import SUFFIX, ReplayedSchedule, read_replayed

#: Ratio of measured time to bound above which a step gets a column in the table of parts.
NAMED_ABOVE = 1.25
#: Least share of the gap for a part to be named in the first table.
_NAMED_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class MeasuredGap:
    """Fastest replayed schedule of a step, with the parts of its gap to the bound."""

    trace: str
    policy: str
    gap: Gap


def search_files(folder: Path) -> list[Path]:
    """Return the files of schedules that the search recipes replayed, repeated measurements last."""
    return sorted(folder.glob(f"search_*{SUFFIX}"), key=lambda path: (path.name.startswith("search_again"), path.name))


def newest_of_each_step(files: Sequence[Path]) -> dict[Path, list[ReplayedSchedule]]:
    """Return each step's schedules from the newest file that has it.

    Files are ordered by date, the end of a file's name as written by `gpusim validate`, and those of one day as given.
    Raises `MeasurementError`.
    """
    of_step: dict[str, tuple[Path, list[ReplayedSchedule]]] = {}
    dated = sorted(files, key=lambda path: path.name.removesuffix(SUFFIX).rpartition("_")[2])
    for path in dated:
        mine: dict[str, list[ReplayedSchedule]] = {}
        for schedule in read_replayed(path):
            mine.setdefault(schedule.trace, []).append(schedule)
        of_step |= {step: (path, schedules) for step, schedules in mine.items()}
    return {
        path: [schedule for source, schedules in of_step.values() if source == path for schedule in schedules]
        for path in dated
    }


def measured_gaps(schedules: Sequence[ReplayedSchedule], traces: Mapping[str, Path]) -> list[MeasuredGap]:
    """Return one gap per step, in the order of the schedules, without schedules on SM partitions.

    `traces` has the trace file of each step. Raises `MeasurementError` where a step has no trace, or another step was
    replayed.
    """
    gaps = []
    for name in dict.fromkeys(schedule.trace for schedule in schedules):
        # Bounds are for the whole GPU: a partition has its own oldest kernel.
        whole = [each for each in schedules if each.trace == name and not each.partitions]
        if not whole:
            continue
        best = min(whole, key=lambda each: each.measured_ns)
        if name not in traces:
            raise MeasurementError(name, "there is no trace of this step")
        trace = read_trace(traces[name])
        if structure_hash(trace) != best.trace_hash:
            raise MeasurementError(str(traces[name]), f"is not the step '{name}' that was replayed")
        hardware = default_hardware(trace.provenance.gpu.name)
        graph = OpGraph.build(trace, hardware).choosing(best.variants)
        # The graph runs the chosen kernels as if they had been captured.
        schedule = replace(best.schedule, variants=())
        gap = gap_to_bound(graph, schedule, bounds(graph), FastEngine(), best.measured_ns)
        gaps.append(MeasuredGap(name, best.policy, gap))
    return gaps


def gaps_markdown(gaps: Sequence[MeasuredGap]) -> list[str]:
    """Return two tables: every step against its largest bound, and the parts of large gaps."""
    lines = [
        "| step | fastest | measured | largest bound | | measured / bound | most of the gap |",
        "|---|---|--:|--:|---|--:|---|",
    ]
    for each in gaps:
        gap = each.gap
        ratio = f"**{gap.ratio:.2f}**" if gap.ratio > NAMED_ABOVE else f"{gap.ratio:.2f}"
        lines.append(
            f"| {each.trace} | {each.policy} | {gap.time_ns / 1e3:,.0f} | {gap.bound_ns / 1e3:,.0f} | {gap.bound} | "
            f"{ratio} | {_most_of(gap)} |"
        )
    large = [each for each in gaps if each.gap.ratio > NAMED_ABOVE]
    if not large:
        return [*lines, "", f"No step is above {NAMED_ABOVE}."]
    lines += ["", "| us | " + " | ".join(each.trace for each in large) + " |", "|---" + "|--:" * len(large) + "|"]
    lines.append("| largest bound | " + " | ".join(f"{each.gap.bound_ns / 1e3:,.0f}" for each in large) + " |")
    for name in PARTS:
        if any(name in dict(each.gap.parts) for each in large):
            lines.append(f"| {name} | " + " | ".join(_cell(each.gap, name) for each in large) + " |")
    lines.append("| **measured** | " + " | ".join(f"**{each.gap.time_ns / 1e3:,.0f}**" for each in large) + " |")
    return lines


def _most_of(gap: Gap) -> str:
    """Name the parts that make up most of the gap, largest first; empty where schedule and bound agree."""
    whole_ns = gap.time_ns - gap.bound_ns
    if gap.ratio < 1.01:
        return ""
    parts = sorted(gap.parts, key=lambda part: -part[1])
    return ", ".join(f"{name} {time_ns / whole_ns:.0%}" for name, time_ns in parts if time_ns > _NAMED_SHARE * whole_ns)


def _cell(gap: Gap, name: str) -> str:
    time_ns = gap.part_ns(name)
    return f"{time_ns / 1e3:+,.0f} ({time_ns / (gap.time_ns - gap.bound_ns):.0%})" if name in dict(gap.parts) else ""
