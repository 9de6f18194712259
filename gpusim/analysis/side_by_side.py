"""Modules of the user's model that a schedule runs concurrently, and that would need several streams.

Ops of one phase that overlap on different streams belong to sides of their common module: `inception3a` with its
`branch1 | branch2 | ...`. Children that depend on each other are one side. Weight gradients that overlap the chain of
data gradients, and optimizer updates that overlap other ops, are not sides of a module and have rows of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, Literal

from gpusim.engine.base import Timeline
from gpusim.plan.graph import OpGraph
from gpusim.policies.ooo_backprop import weight_gradients

Kind = Literal["modules", "weight gradients", "optimizer", "buffers"]

#: Rows with less than this share of the total overlap are left out.
LEAST_SHARE: Final = 0.005
#: Name of the root module.
WHOLE_MODEL: Final = ""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Modules that run concurrently, in one parent module or in several alike."""

    kind: Kind
    parents: tuple[str, ...]
    """Paths of the parent modules, `""` for the model itself; empty if `kind` is not `modules`."""
    sides: tuple[tuple[str, ...], ...]
    """Names of the children on each side; sides overlap, the children of one side run in sequence."""
    phases: tuple[str, ...]
    together_ns: int
    """Time in which at least two sides run, in ns."""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Overlap in a schedule, by modules."""

    makespan_ns: int
    together_ns: int
    """Time in which at least two kernels run, in ns."""
    streams: int
    rows: tuple[SideBySide, ...]
    """Rows, longest overlap first."""
    named: bool
    """True if ops have module paths; those of an imported profile may have none."""


Interval = tuple[int, int]


def side_by_side(graph: OpGraph, timeline: Timeline) -> Concurrency:
    """Return the modules that overlap in a timeline of one GPU simulated from a plan of `graph`."""
    spans = _spans(timeline)
    overlaps = list(_overlaps(timeline))
    gradients, buffers = weight_gradients(graph), _buffer_updates(graph)
    ops = graph.trace.ops
    overlapping: dict[tuple[Kind, str, str], set[int]] = defaultdict(set)
    by_kind: dict[tuple[Kind, str, str], list[Interval]] = defaultdict(list)
    for one, other, begin, end in overlaps:
        kind = _kind_of(one, other, graph, gradients, buffers)
        parent = _common(ops[one].layer, ops[other].layer) if kind == "modules" else ""
        phase: str = ops[one].phase if kind == "modules" else "backward" if kind == "weight gradients" else ""
        overlapping[kind, parent, phase] |= {one, other}
        by_kind[kind, parent, phase].append((begin, end))
    rows: list[SideBySide] = []
    for (kind, parent, phase), members in overlapping.items():
        if kind == "modules":
            rows += _modules(graph, spans, parent, phase, members)
        else:
            rows.append(SideBySide(kind, (), (), (phase,) if phase else (), _length(by_kind[kind, parent, phase])))
    together_ns = _length((begin, end) for _, _, begin, end in overlaps)
    joined = _joined(rows)
    kept = [row for row in joined if row.together_ns >= LEAST_SHARE * together_ns]
    return Concurrency(
        timeline.makespan_ns,
        together_ns,
        len({(task.device, task.queue) for task in timeline.plan.tasks}),
        tuple(sorted(kept, key=lambda row: (-row.together_ns, row.parents))),
        any(op.layer for op in ops),
    )


def _spans(timeline: Timeline) -> dict[int, list[Interval]]:
    """Return the intervals in which the kernels of each op run."""
    spans: dict[int, list[Interval]] = defaultdict(list)
    for task, start, end in zip(timeline.plan.tasks, timeline.start_ns, timeline.end_ns, strict=True):
        if task.op >= 0 and end > start:
            spans[task.op].append((start, end))
    return spans


def _overlaps(timeline: Timeline) -> Iterator[tuple[int, int, int, int]]:
    """Yield (op, op, start, end) for each pair of kernels of different ops and streams that overlap."""
    tasks = timeline.plan.tasks
    running: list[tuple[int, int]] = []
    order = sorted(range(len(tasks)), key=lambda index: (timeline.start_ns[index], index))
    for index in order:
        start, end = timeline.start_ns[index], timeline.end_ns[index]
        if tasks[index].op < 0 or end <= start:
            continue
        while running and running[0][0] <= start:
            heappop(running)
        for until, other in running:
            if tasks[other].queue != tasks[index].queue and tasks[other].op != tasks[index].op:
                yield tasks[other].op, tasks[index].op, start, min(end, until)
        heappush(running, (end, index))


def _kind_of(one: int, other: int, graph: OpGraph, gradients: frozenset[int], buffers: frozenset[int]) -> Kind:
    ops = graph.trace.ops
    phases = {ops[one].phase, ops[other].phase}
    if "optimizer" in phases:
        return "optimizer"
    if one in buffers or other in buffers:
        return "buffers"
    if one in gradients or other in gradients or len(phases) > 1:
        return "weight gradients"
    return "modules"


def _buffer_updates(graph: OpGraph) -> frozenset[int]:
    """Return the ops that only change buffers, for example BatchNorm's counters; no module waits for them."""
    tensors = graph.trace.tensors
    return frozenset(
        index
        for index, op in enumerate(graph.trace.ops)
        if op.writes and all(tensors[tensor].role == "buffer" for tensor in op.writes)
    )


def _common(one: str, other: str) -> str:
    """Return the innermost module that contains both, which may be one of them."""
    parts = []
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        parts.append(a)
    return ".".join(parts)


def _child(layer: str, parent: str) -> str:
    """Return the child of `parent` that contains `layer`; empty for `parent` itself."""
    rest = layer[len(parent) + 1 :] if parent else layer
    return rest.partition(".")[0]


def _modules(
    graph: OpGraph, spans: dict[int, list[Interval]], parent: str, phase: str, members: set[int]
) -> Iterator[SideBySide]:
    """Yield the row of a module if at least two sides of it overlap."""
    ops = graph.trace.ops
    within = [op for op in spans if not parent or f"{ops[op].layer}.".startswith(f"{parent}.")]
    children = {op: _child(ops[op].layer, parent) for op in within}
    inside = [op for op in within if ops[op].phase == phase]
    wanted = {children[op] for op in members if op in children} - {""}
    sides = _sides(graph, within, children, wanted)
    if len(sides) < 2:
        return
    running = [
        [interval for op in inside if children[op] in side for interval in spans[op]] for side in map(set, sides)
    ]
    together_ns = _together(running)
    if together_ns:
        yield SideBySide("modules", (parent,), tuple(sides), (phase,), together_ns)


def _sides(graph: OpGraph, within: Sequence[int], children: dict[int, str], wanted: set[str]) -> list[tuple[str, ...]]:
    """Return the overlapping children of a module as sides, each with the children that it is connected to.

    The first pass of a module shows the dependencies between its children: in its backward pass, sums of gradients
    connect them. If all children are connected, for example the blocks of a network with an auxiliary head, only the
    overlapping ones are considered.
    """
    ops = graph.trace.ops
    first = ops[min(within)].phase
    order: dict[str, int] = {}
    for op in sorted(within):
        order.setdefault(children[op], len(order))
    for known in (set(order) - {""}, wanted):
        shape = [op for op in within if children[op] in known and ops[op].phase == first]
        missing = known - {children[op] for op in shape}
        shape += [op for op in within if children[op] in missing]
        groups = [group for group in _connected(graph, shape, children) if group & wanted]
        if len(groups) > 1:
            break
    sides = [tuple(sorted(group, key=order.__getitem__)) for group in groups]
    return sorted(sides, key=lambda side: order[side[0]])


def _connected(graph: OpGraph, inside: Sequence[int], children: dict[int, str]) -> list[set[str]]:
    """Return groups of children connected by dependencies."""
    group = {child: {child} for child in dict.fromkeys(children[op] for op in inside)}
    preds = graph.work_preds
    known = set(inside)
    for op in inside:
        for before in preds[op]:
            if before not in known:
                continue
            one, other = group[children[before]], group[children[op]]
            if one is not other:
                one |= other
                for child in other:
                    group[child] = one
    return list({id(members): members for members in group.values()}.values())


def _joined(rows: Iterable[SideBySide]) -> list[SideBySide]:
    """Merge rows with equal sides: repeated blocks, forward and backward."""
    by_sides: dict[tuple[Kind, tuple[tuple[str, ...], ...]], list[SideBySide]] = defaultdict(list)
    for row in rows:
        by_sides[row.kind, tuple(sorted(row.sides))].append(row)
    return [
        SideBySide(
            kind,
            tuple(dict.fromkeys(parent for row in alike for parent in row.parents)),
            alike[0].sides,
            tuple(dict.fromkeys(phase for row in alike for phase in row.phases)),
            sum(row.together_ns for row in alike),
        )
        for (kind, _), alike in by_sides.items()
    ]


def _length(intervals: Iterable[Interval]) -> int:
    """Return the length of the union of the intervals, in ns."""
    total = reach = 0
    for begin, end in sorted(intervals):
        total += max(0, end - max(begin, reach))
        reach = max(reach, end)
    return total


def _together(sides: Sequence[Sequence[Interval]]) -> int:
    """Return the time in which at least two sides run, in ns."""
    changes: list[tuple[int, int]] = []
    for intervals in sides:
        reach = 0
        for begin, end in sorted(intervals):
            begin = max(begin, reach)
            if end > begin:
                changes += [(begin, 1), (end, -1)]
                reach = end
    total = level = last = 0
    for time, change in sorted(changes):
        if level >= 2:
            total += time - last
        level, last = level + change, time
    return total
