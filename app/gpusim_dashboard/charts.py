"""Bar charts drawn as HTML tables: they fit any width and state their numbers in one unit."""

from __future__ import annotations

from collections.abc import Sequence

from gpusim.api.dashboard import Sensitivities
from gpusim.report.breakdown import Part, largest
from gpusim.report.summary import Summary
from gpusim.report.waterfall import WaterfallRow, longest_ns
from gpusim.units import counted, format_times_ns
from gpusim_dashboard import html
from gpusim_dashboard.html import Head

#: Colours of the two ends of a range, as in the style sheet.
LOW, HIGH = "light-dark(#0072B2, #56B4E9)", "#D55E00"
#: Most rows in one breakdown of kernel time.
MOST_PARTS = 10


def numbers_of(times: Sequence[str]) -> tuple[list[str], str]:
    """Split times of one unit into their numbers and the unit."""
    return [time.rpartition(" ")[0] for time in times], times[0].rpartition(" ")[2] if times else "ms"


def schedules(summary: Summary) -> None:
    """Draw the best schedule of each policy and the lower bounds on one scale."""
    best = [summary.best_of(policy) for policy in dict.fromkeys(row.policy for row in summary.rows)]
    best.sort(key=lambda row: row.makespan_ns)
    bounds = sorted(summary.bounds, reverse=True)
    times = [*(row.makespan_ns for row in best), *(time_ns for time_ns, _ in bounds)]
    numbers, unit = numbers_of(format_times_ns(times))
    longest = max(times)
    rows = []
    for row, number in zip(best, numbers, strict=False):
        name = html.text(f"{row.policy}, {counted(row.streams, 'stream')}")
        tag = html.tag("recommended") if row is summary.best else ""
        rows.append(((f"{name}{tag}{html.bar(row.makespan_ns / longest)}", number, f"{row.speedup:.2f}x"), bool(tag)))
    for (time_ns, bound), number in zip(bounds, numbers[len(best) :], strict=True):
        name = f"{html.text(f'bound: {bound}')}{html.bar(time_ns / longest, kind='bound')}"
        rows.append(((name, number, f"{summary.sequential_ns / time_ns:.2f}x" if time_ns else ""), False))
    heads = (Head("schedule"), Head(f"time, {unit}", True), Head("over one CUDA graph", True))
    html.table("The best schedule of each policy, and the bounds", heads, rows)


def waterfall(rows: Sequence[WaterfallRow], caption: str, share_of: str) -> None:
    """Draw a waterfall of totals and the differences between them."""
    numbers, unit = numbers_of(format_times_ns((row.length_ns for row in rows), signed=True))
    longest = longest_ns(rows) or 1
    cells = []
    for row, number in zip(rows, numbers, strict=True):
        total = row.share is None
        left = min(row.base_ns, row.base_ns + row.length_ns) / longest
        bar = html.bar(abs(row.length_ns) / longest, left, "" if total else row.role)
        share = "" if row.share is None else f"{row.share:+.1%}"
        cells.append(((f"{html.text(row.name)}{bar}", number.lstrip("+") if total else number, share), False))
    html.table(caption, (Head("part"), Head(f"time, {unit}", True), Head(share_of, True)), cells)


def parts(groups: Sequence[tuple[str, tuple[Part, ...]]], total_ns: int) -> None:
    """Draw kernel time broken down in several ways, one table each."""
    for name, each in groups:
        shown = largest(each, MOST_PARTS)
        numbers, unit = numbers_of(format_times_ns(part.time_ns for part in shown))
        most = max((part.time_ns for part in shown), default=0) or 1
        rows = [
            (
                (
                    f"{html.text(part.name)}{html.bar(part.time_ns / most)}",
                    number,
                    f"{part.time_ns / total_ns if total_ns else 0.0:.1%}",
                ),
                False,
            )
            for part, number in zip(shown, numbers, strict=True)
        ]
        heads = (Head(f"by {name}"), Head(f"kernel time, {unit}", True), Head("share", True))
        html.table(f"Kernel time by {name}", heads, rows)


def tornado(rows: Sensitivities, caption: str) -> None:
    """Draw a tornado chart of how the time changes over each parameter's range, the largest change first."""
    ordered = sorted(rows, key=lambda row: -abs(row[2] - row[1]))
    least = min((min(row[1:]) for row in ordered), default=0.0)
    room = max((max(row[1:]) for row in ordered), default=1.0) - least or 1.0
    numbers, unit = numbers_of(format_times_ns(time for row in ordered for time in (row[1], row[2])))

    def place(time_ns: float) -> float:
        return (time_ns - least) / room

    cells = []
    for number, (name, low, high, now) in enumerate(ordered):
        bars = html.spans(((place(now), place(low), "low"), (place(now), place(high), "high")), place(now))
        cells.append(((f"{html.text(name)}{bars}", numbers[2 * number], numbers[2 * number + 1]), False))
    html.show(html.legend((("at the low end", LOW), ("at the high end", HIGH))))
    heads = (Head("parameter, from low to high"), Head(f"at low, {unit}", True), Head(f"at high, {unit}", True))
    html.table(caption, heads, cells)
