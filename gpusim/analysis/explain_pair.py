"""Overlap of two ops in a simulated schedule, its cost, and the causes that kept the ops apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpusim.analysis.explain import CAUSES, DEPENDENCY, Delay, Explained
from gpusim.engine.causes import DRAM, RESOURCES
from gpusim.errors import OptionError
from gpusim.plan.graph import OpGraph
from gpusim.plan.traffic import MEASURED_ON, op_counters, peak_shares
from gpusim.trace.op_names import find_one_op

#: Resources of the cause "issue and L2"; the demands of both ops tell which one is scarce.
L2, ISSUE_SLOTS = "L2 bandwidth", "issue slots"
#: Maximum number of digits of an op number.
MOST_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Pair:
    """Two ops and their overlap; `first` started first."""

    first: int
    second: int
    first_ns: tuple[int, int]
    """Start of the op's first kernel and end of its last."""
    second_ns: tuple[int, int]
    together_ns: int
    """Time in which kernels of both ops ran."""
    slowed: tuple[Delay, ...]
    """Losses of either op to other kernels while both ran."""
    apart: tuple[Delay, ...]
    """Delays of the second op from the start of the first; `dependency` while its data were missing."""
    chain: tuple[int, ...]
    """Chain of dependent ops from the first to the second; empty if the second does not depend on the first."""
    needs: tuple[tuple[str, float, float], ...]
    """Resource and the largest demand of each op as share of the GPU; a sum above 1 means taking turns."""


def find_op(graph: OpGraph, text: str) -> int:
    """Find an op as `gpusim.trace.op_names.find_one_op` does. Raises also `OptionError` for a view."""
    op = find_one_op(graph.trace, text)
    if not graph.tasks[op]:
        raise OptionError(f"op '{graph.trace.ops[op].name}' launches no kernel, so there is nothing to overlap")
    return op


def explain_pair(explained: Explained, one: int, other: int) -> Pair:
    """Return the overlap of two ops with kernels. Raises `OptionError` if both are the same."""
    if one == other:
        raise OptionError("an op cannot overlap itself: name two different ones")
    timeline = explained.timeline
    tasks: dict[int, list[int]] = {one: [], other: []}
    for index, task in enumerate(timeline.plan.tasks):
        if task.op in tasks:
            tasks[task.op].append(index)
    spans = {
        op: (min(timeline.start_ns[t] for t in mine), max(timeline.end_ns[t] for t in mine))
        for op, mine in tasks.items()
    }
    first, second = sorted((one, other), key=lambda op: (spans[op], op))
    common = [
        (max(timeline.start_ns[a], timeline.start_ns[b]), min(timeline.end_ns[a], timeline.end_ns[b]))
        for a in tasks[first]
        for b in tasks[second]
    ]
    common = [(begin, end) for begin, end in common if end > begin]
    running = {*tasks[first], *tasks[second]}
    slowed = [
        part
        for task in sorted(running)
        for delay in explained.delays[task]
        if delay.from_ns >= timeline.start_ns[task]
        for begin, end in common
        if (part := delay.within(begin, end)) is not None
    ]
    return Pair(
        first=first,
        second=second,
        first_ns=spans[first],
        second_ns=spans[second],
        together_ns=sum(end - begin for begin, end in common),
        slowed=tuple(slowed),
        apart=tuple(_apart(explained, min(tasks[second]), spans[first][0])),
        chain=_chain(explained.graph, first, second),
        needs=_needs(explained, tasks[first], tasks[second]),
    )


def _apart(explained: Explained, task: int, begin_ns: int) -> list[Delay]:
    """Return the delays of a task's start from `begin_ns` on."""
    start_ns = explained.timeline.start_ns[task]
    data_ns = min(explained.data_ns[task], start_ns)
    rows = (
        [Delay(task, DEPENDENCY, explained.last[task], 0.0, data_ns, data_ns)]
        if explained.last[task] is not None
        else []
    )
    rows += [delay for delay in explained.delays[task] if delay.until_ns <= start_ns]
    parts = (delay.within(begin_ns, start_ns) for delay in rows)
    return [part for part in parts if part is not None]


def _chain(graph: OpGraph, first: int, second: int) -> tuple[int, ...]:
    """Return a shortest chain of dependent ops with kernels from the first to the second, or ()."""
    preds = graph.work_preds
    towards: dict[int, int] = {}
    reached = [second]
    for op in reached:
        for before in preds[op]:
            if before not in towards:
                towards[before] = op
                reached.append(before)
    if first not in towards:
        return ()
    chain = [first]
    while chain[-1] != second:
        chain.append(towards[chain[-1]])
    return tuple(chain)


def _needs(explained: Explained, first: Sequence[int], second: Sequence[int]) -> tuple[tuple[str, float, float], ...]:
    tasks, bandwidth = explained.timeline.plan.tasks, explained.hardware.memory.dram_bytes_per_ns

    def most(indices: Sequence[int], resource: int) -> float:
        return max(tasks[index].demand.resources[resource] for index in indices)

    def traffic(indices: Sequence[int]) -> float:
        rates = (tasks[i].dram_bytes / tasks[i].dur_ns for i in indices if tasks[i].dur_ns)
        return min(1.0, max(rates, default=0.0) / bandwidth)

    needs = [(name, most(first, i), most(second, i)) for i, name in enumerate(RESOURCES)]
    needs.append((DRAM, traffic(first), traffic(second)))
    if explained.graph.trace.provenance.gpu.name == explained.hardware.gpu == MEASURED_ON:
        shares = [_peak_shares(explained, indices) for indices in (first, second)]
        needs += [(name, one, other) for name, one, other in zip((L2, ISSUE_SLOTS), *shares, strict=True)]
    return tuple(needs)


def _peak_shares(explained: Explained, indices: Sequence[int]) -> tuple[float, float]:
    """Return the largest shares of L2 bandwidth and issue slots that a kernel of an op uses."""
    tasks = [explained.timeline.plan.tasks[index] for index in indices]
    op = explained.graph.trace.ops[tasks[0].op]
    names = {task.kernel: task.name for task in tasks}
    ways = (op.kernels, *(variant.kernels for variant in op.variants))
    kernels = next(way for way in ways if dict(enumerate(kernel.name for kernel in way)) == names)
    counted = op_counters(explained.graph.trace, op, kernels)
    shares = [peak_shares(counted[task.kernel], task.dur_ns) for task in tasks]
    return max(l2 for l2, _ in shares), max(issue for _, issue in shares)


def merged(delays: Sequence[Delay]) -> list[Delay]:
    """Add up delays of the same task, cause and causing task, and return them longest first."""
    rows: dict[tuple[int, str, int | None], Delay] = {}
    for delay in delays:
        key = (delay.task, delay.cause, delay.by)
        before = rows.get(key)
        if before is None:
            rows[key] = delay
        else:
            rows[key] = replace(
                before,
                from_ns=min(before.from_ns, delay.from_ns),
                until_ns=max(before.until_ns, delay.until_ns),
                lost_ns=before.lost_ns + delay.lost_ns,
            )
    return sorted(rows.values(), key=lambda row: (-row.lost_ns, row.task, CAUSES.index(row.cause)))


__all__ = ["Pair", "explain_pair", "find_op", "merged"]
