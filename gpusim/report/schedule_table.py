"""A schedule as a readable table: stream, waits and predicted times of each op."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpusim.analysis.simulation import Simulated
from gpusim.plan.sync import SyncPlan, plan_sync, works
from gpusim.text import csv_cell, shortened, visible
from gpusim.units import counted, format_ns

CSV_HEADER: Final = (
    "place", "stream", "op", "operator", "layer", "phase", "waits_for", "kernels", "variant", "start_ns", "end_ns"
)  # fmt: skip
_HEADER: Final = ("place", "stream", "op", "operator", "layer", "waits for", "kernels", "variant", "start", "end")
#: Maximum length of a text in a cell of the Markdown table.
MAX_CELL: Final = 60


@dataclass(frozen=True, slots=True)
class OpRow:
    """An op with GPU work; times in ns from the start of the step, None without own kernels."""

    place: int
    """Position in the launch order, from 1, without views."""
    stream: int
    op: str
    operator: str
    layer: str
    phase: str
    waits_for: tuple[str, ...]
    """Ops on other streams whose events it waits for, as few as possible."""
    kernels: int
    variant: str
    start_ns: int | None
    end_ns: int | None


def sync_of(simulated: Simulated) -> SyncPlan:
    """Return the waits between streams of a simulated schedule, in its launch order, with the captured operators."""
    schedule, graph = simulated.schedule, simulated.graph
    return plan_sync(graph.trace, graph.preds, schedule.order, schedule.streams)


def schedule_rows(simulated: Simulated) -> list[OpRow]:
    """Return the ops with work, in launch order."""
    schedule, trace, timeline = simulated.schedule, simulated.graph.trace, simulated.timeline
    spans: dict[int, tuple[int, int]] = {}
    kernels: dict[int, int] = {}
    for task, start_ns, end_ns in zip(timeline.plan.tasks, timeline.start_ns, timeline.end_ns, strict=True):
        first_ns, last_ns = spans.get(task.op, (start_ns, end_ns))
        spans[task.op] = min(first_ns, start_ns), max(last_ns, end_ns)
        kernels[task.op] = kernels.get(task.op, 0) + 1
    sync = sync_of(simulated)
    rows: list[OpRow] = []
    for op, waits in zip(schedule.order, sync.waits, strict=True):
        recorded = trace.ops[op]
        if not works(recorded):
            continue
        number = schedule.variants[op] if schedule.variants else 0
        span = spans.get(op)
        rows.append(
            OpRow(
                place=len(rows) + 1,
                stream=schedule.streams[op],
                op=recorded.name,
                operator=recorded.target,
                layer=recorded.layer,
                phase=recorded.phase,
                waits_for=tuple(trace.ops[before].name for before in waits),
                kernels=kernels.get(op, 0),
                variant=recorded.variants[number - 1].name if number else "",
                start_ns=span[0] if span else None,
                end_ns=span[1] if span else None,
            )
        )
    return rows


def schedule_csv(simulated: Simulated) -> str:
    """Return the table as CSV; names of several ops are separated by spaces, and no cell is a formula."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEADER)
    for row in schedule_rows(simulated):
        cells = (
            row.place, row.stream, row.op, row.operator, row.layer, row.phase, " ".join(row.waits_for), row.kernels,
            row.variant, "" if row.start_ns is None else row.start_ns, "" if row.end_ns is None else row.end_ns,
        )  # fmt: skip
        writer.writerow([csv_cell(cell) for cell in cells])
    return text.getvalue()


def schedule_markdown(simulated: Simulated) -> str:
    """Return the table as Markdown, with a title line."""
    lines = [summary(simulated), "", _line(_HEADER), _line(("--:", "--:", *["---"] * 4, "--:", "---", "--:", "--:"))]
    for row in schedule_rows(simulated):
        texts = [_cell(text) for text in (row.op, row.operator, row.layer, ", ".join(row.waits_for))]
        times = ["" if time is None else format_ns(time) for time in (row.start_ns, row.end_ns)]
        lines.append(_line((str(row.place), str(row.stream), *texts, str(row.kernels), _cell(row.variant), *times)))
    return "\n".join(lines) + "\n"


def summary(simulated: Simulated) -> str:
    """Return schedule and predicted time in one line."""
    hardware = simulated.graph.hardware
    subject = f"{simulated.graph.trace.name} on {hardware.label}: schedule '{simulated.policy}'"
    takes = f"{format_ns(simulated.makespan_ns)} predicted, {simulated.speedup:.2f}x over one stream"
    return visible(f"{subject}, {counted(simulated.streams, 'stream')}, {takes}")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """Return text as a Markdown cell: one visible line with markup escaped."""
    shown = visible(shortened(text, MAX_CELL))
    return "".join(f"\\{mark}" if mark in "|\\`*_[]<>!#" else mark for mark in shown)
