"""Output of `gpusim explain`: tables, and documents for `--json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpusim.analysis.explain import Delay, Explained, totals_ns
from gpusim.analysis.explain_pair import Pair, merged
from gpusim.report.fit import print_table
from gpusim.report.terminal import Table, console, styled
from gpusim.text import visible
from gpusim.units import format_ns, format_times_ns

ROWS = 12
#: Source of traffic and instructions without counters.
ESTIMATED = "estimated from tensor sizes and kernel family"
#: Heading of a window's causes.
WINDOW_LOST = "Time that ops lost, all together, and those that decided the end:"


def step_document(explained: Explained) -> dict[str, Any]:
    """Return the document of a step: totals by cause, which add up to the gap, and the longest delays on the path."""
    gap = explained.step()
    return {
        "makespan_ns": gap.makespan_ns,
        "critical_path_ns": gap.makespan_ns - round(gap.gap_ns),
        "gap_ns": round(gap.gap_ns),
        "causes": _whole_ns(totals_ns(gap.delays), round(gap.gap_ns)),
        "delays": [_row(explained, delay) for delay in merged(gap.delays)],
    }


def window_document(explained: Explained, begin_ns: int, end_ns: int) -> dict[str, Any]:
    """Return the document of a window: all delays, summed over ops, and those on the path among them."""
    inside = explained.window(begin_ns, end_ns)
    path = [part for delay in explained.step().delays if (part := delay.within(begin_ns, end_ns)) is not None]
    timeline = explained.timeline
    busy = sum(
        max(0, min(end, end_ns) - max(start, begin_ns))
        for start, end in zip(timeline.start_ns, timeline.end_ns, strict=True)
    )
    return {
        "from_ns": begin_ns,
        "until_ns": end_ns,
        "running": busy / (end_ns - begin_ns),
        "causes": {cause: round(lost) for cause, lost in totals_ns(inside).items()},
        "path_causes": {cause: round(lost) for cause, lost in totals_ns(path).items()},
        "delays": [_row(explained, delay) for delay in merged(inside)],
    }


def pair_document(explained: Explained, pair: Pair) -> dict[str, Any]:
    """Return the document of two ops: their times, mutual losses, and the causes that kept them apart."""
    ops = explained.graph.trace.ops
    return {
        "first": ops[pair.first].name,
        "second": ops[pair.second].name,
        "first_layer": ops[pair.first].layer,
        "second_layer": ops[pair.second].layer,
        "first_ns": pair.first_ns,
        "second_ns": pair.second_ns,
        "together_ns": pair.together_ns,
        "slowed": [_row(explained, delay) for delay in merged(pair.slowed)],
        "apart": [_row(explained, delay) for delay in pair.apart],
        "chain": [ops[op].name for op in pair.chain],
        "needs": {name: {"first": first, "second": second} for name, first, second in pair.needs},
        "traffic": explained.graph.trace.provenance.counters or ESTIMATED,
    }


def print_step(document: Mapping[str, Any]) -> None:
    """Print totals by cause and the longest delays."""
    out = console()
    out.print(
        f"makespan {format_ns(document['makespan_ns'])}, critical path {format_ns(document['critical_path_ns'])}, "
        f"between them {format_ns(document['gap_ns'])}{':' if document['delays'] else ''}"
    )
    if not document["delays"]:
        out.print("no op on the way to the end is delayed: the schedule takes as long as its critical path")
        return
    print_table(out, _causes(document["causes"], document["gap_ns"]))
    out.print("\nLongest delays on the way to the end:")
    print_table(out, _delays(document["delays"]), drop=("when",), fold=("by", "layer"))


def print_window(document: Mapping[str, Any]) -> None:
    """Print the delays of all ops in the window."""
    out = console()
    out.print(
        f"{format_ns(document['from_ns'])} to {format_ns(document['until_ns'])}: {document['running']:.2f} kernels "
        f"running on average. {WINDOW_LOST if document['delays'] else 'No op is delayed.'}"
    )
    if not document["delays"]:
        return
    print_table(out, _causes(document["causes"], sum(document["causes"].values()), document["path_causes"]))
    out.print("\nLongest delays:")
    print_table(out, _delays(document["delays"]), drop=("when",), fold=("by", "layer"))


def print_pair(document: Mapping[str, Any]) -> None:
    """Print overlap and delays of two ops."""
    out = console()
    for which in ("first", "second"):
        begin, end = document[f"{which}_ns"]
        layer = f" ({visible(document[f'{which}_layer'])})" if document[f"{which}_layer"] else ""
        out.print(styled((visible(document[which]), "bold"), f"{layer}  {format_ns(begin)} to {format_ns(end)}"))
    together = document["together_ns"]
    out.print(f"side by side for {format_ns(together)}" if together else "never side by side")
    if document["chain"]:
        out.print(f"the second depends on the first: {' > '.join(map(visible, document['chain']))}")
    elif document["apart"]:
        out.print("\nWhat kept the second from starting with the first:")
    if document["apart"]:
        print_table(out, _delays(document["apart"]), drop=("when", "layer"), fold=("by",))
    if document["slowed"]:
        out.print("\nWhat they lost while both ran:")
        print_table(out, _delays(document["slowed"]), drop=("when", "layer"), fold=("by",))
    needs = document["needs"]
    short = [name for name, need in needs.items() if need["first"] + need["second"] > 1.0]
    parts = [f"{name} {need['first']:.0%} + {need['second']:.0%}" for name, need in needs.items()]
    verdict = f"too much of {', '.join(short)}" if short else "both fit"
    out.print(
        f"\nof the whole GPU they ask for {', '.join(parts)}: {verdict} (traffic: {visible(document['traffic'])})"
    )


def _causes(causes: Mapping[str, int], whole_ns: int, path: Mapping[str, int] | None = None) -> Table:
    table = Table(box=None, pad_edge=False)
    for name, justify in (("cause", "left"), ("time", "right"), ("share", "right")):
        table.add_column(name, justify=justify)
    if path is not None:
        table.add_column("decided the end", justify="right")
    rows = sorted(causes.items(), key=lambda item: -item[1])
    times = format_times_ns(lost_ns for _, lost_ns in rows)
    ends = format_times_ns((path or {}).get(cause, 0) for cause, _ in rows)
    for (cause, lost_ns), time, end in zip(rows, times, ends, strict=True):
        row = [cause, time, f"{lost_ns / whole_ns:.1%}" if whole_ns else ""]
        table.add_row(*row, *([end] if path is not None else []))
    return table


def _delays(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("op", "layer", "lost", "to", "by", "when"):
        table.add_column(name, justify="right" if name in ("lost", "when") else "left")
    shown = rows[:ROWS]
    lost = format_times_ns(row["lost_ns"] for row in shown)
    ends = format_times_ns(row[end] for row in shown for end in ("from_ns", "until_ns"))
    for row, time, begin, end in zip(shown, lost, ends[::2], ends[1::2], strict=True):
        when = f"{begin.partition(' ')[0]} to {end}"
        table.add_row(row["op"], row["layer"], time, row["cause"], row["by"] or "", when)
    return table


def _row(explained: Explained, delay: Delay) -> dict[str, Any]:
    return {
        "op": _name(explained, delay.task),
        "layer": _layer(explained, delay.task),
        "cause": delay.cause,
        "by": None if delay.by is None else _name(explained, delay.by),
        "by_layer": None if delay.by is None else _layer(explained, delay.by),
        "lost_ns": round(delay.lost_ns),
        "from_ns": round(delay.from_ns),
        "until_ns": round(delay.until_ns),
    }


def _name(explained: Explained, task: int) -> str:
    op = explained.timeline.plan.tasks[task].op
    return explained.graph.trace.ops[op].name if op >= 0 else explained.timeline.plan.tasks[task].name


def _layer(explained: Explained, task: int) -> str:
    op = explained.timeline.plan.tasks[task].op
    return explained.graph.trace.ops[op].layer if op >= 0 else ""


def _whole_ns(causes: Mapping[str, float], total_ns: int) -> dict[str, int]:
    """Round times to whole ns that add up to `total_ns`; the largest remainders are rounded up."""
    whole_ns = {cause: int(lost_ns) for cause, lost_ns in causes.items()}
    short = total_ns - sum(whole_ns.values())
    for cause in sorted(causes, key=lambda name: whole_ns[name] - causes[name])[: max(0, short)]:
        whole_ns[cause] += 1
    return whole_ns
