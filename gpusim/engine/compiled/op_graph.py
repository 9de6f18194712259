"""An op graph as arrays, and its schedules lowered without Python objects: `gpusim.plan.lower` compiled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpusim.engine.compiled.arrays import Indices, Plans, Records, encode_tasks
from gpusim.engine.compiled.jit import entry, int64, jit, rule
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import OpBuffers
from gpusim.plan.partitions import Layout, in_partition
from gpusim.plan.tasks import Task
from gpusim.rules import queues as rules

hardware_queue = rule(rules.hardware_queue)
#: An op. Its tasks are `rows` records of `TASK` from `first_row` on (none for a view); its predecessors and successors
#: with tasks are in `preds` and `succs`. Its variants are in `variants` from `first_variant` on, the captured kernels
#: first.
OP = np.dtype(
    [
        ("first_row", "i4"),
        ("rows", "i4"),
        ("first_pred", "i4"),
        ("n_preds", "i4"),
        ("first_succ", "i4"),
        ("n_succs", "i4"),
        ("first_variant", "i4"),
        ("n_variants", "i4"),
        ("host_ns", "f8"),
    ],
    align=True,
)
#: A variant. Its tasks are `rows` records of `TASK` from `first_row` on; the ops fused into it are in `covers` from
#: `first_cover` on.
VARIANT = np.dtype([("first_row", "i4"), ("rows", "i4"), ("first_cover", "i4"), ("n_covers", "i4")], align=True)


class OpArrays(NamedTuple):
    """An op graph as arrays. The buffers of a row are `buffer_of[first_buffer[row] : first_buffer[row + 1]]`.

    Partition p has copies of the rows of partition 0, `rows_of_partition` x p later: a kernel takes longer on fewer
    SMs.
    """

    tasks: Records
    ops: Records
    preds: Indices
    succs: Indices
    first_buffer: Indices
    buffer_of: Indices
    buffer_bytes: npt.NDArray[np.int64]
    kept_bytes: int
    variants: Records
    covers: Indices
    partition_of: Indices
    """Partition of each stream; later streams are in the first one."""
    rows_of_partition: int
    most_tasks: int
    """Maximum number of tasks of a plan, for any variants."""

    @classmethod
    def of(cls, graph: OpGraph, layout: Layout | None = None) -> OpArrays:
        """Return the arrays of an op graph, with SMs split by `layout`; those of a whole GPU are cached."""
        if layout is not None:
            return cls._made(graph, layout)
        kept: OpArrays | None = graph.encoded.get("arrays")
        if kept is None:
            alike: OpGraph | None = graph.encoded.get("alike")
            kept = cls._made(graph, None) if alike is None else cls.of(alike)._for(graph, alike)
            kept = graph.encoded.setdefault("arrays", kept)
        return kept

    def _for(self, graph: OpGraph, alike: OpGraph) -> OpArrays:
        """Return the arrays of a graph that differs from `alike`, their own graph, only in tasks or dependencies."""
        arrays = self
        if graph.tasks is not alike.tasks:
            arrays = arrays._replace(tasks=encode_tasks(_rows(graph)))
        if graph.preds is not alike.preds:
            ops = arrays.ops.copy()
            preds, succs = _depend(ops, graph)
            arrays = arrays._replace(ops=ops, preds=preds, succs=succs)
        return arrays

    @classmethod
    def _made(cls, graph: OpGraph, layout: Layout | None) -> OpArrays:
        ops = np.zeros(len(graph), OP)
        ops["rows"] = np.fromiter(map(len, graph.tasks), np.int32, len(graph))
        ops["first_row"] = np.cumsum(ops["rows"]) - ops["rows"]
        ops["host_ns"] = np.fromiter(map(attrgetter("host_ns"), graph.trace.ops), np.float64, len(graph))
        preds, succs = _depend(ops, graph)
        buffers = OpBuffers.of(graph)
        ways = _Ways.of(graph, ops)
        rows, ops["first_variant"], ops["n_variants"] = ways.rows, ways.first_of_op, ways.number_of_op
        sms = layout.sms if layout is not None else (graph.hardware.limits.sms,)
        tasks = (
            rows
            if layout is None
            else [in_partition(row, number, size, graph.hardware) for number, size in enumerate(sms) for row in rows]
        )
        n_buffers, buffer_of = _buffers_of_rows(buffers, np.repeat(np.arange(len(graph)), ops["rows"]), ways.work_of)
        return cls(
            tasks=encode_tasks(tasks),
            ops=ops,
            preds=preds,
            succs=succs,
            first_buffer=np.concatenate(([0], np.cumsum(np.tile(n_buffers, len(sms)))), dtype=np.int32),
            buffer_of=np.tile(buffer_of, len(sms)).astype(np.int32),
            buffer_bytes=np.array(buffers.sizes, np.int64),
            kept_bytes=buffers.kept_bytes,
            variants=ways.variants,
            covers=np.array(ways.covers, np.int32),
            partition_of=np.array(layout.of_stream if layout is not None else (0,), np.int32),
            rows_of_partition=len(rows),
            most_tasks=int(np.maximum.reduceat(ways.variants["rows"], ways.first_of_op).sum()),
        )


class _Ways(NamedTuple):
    """All ways to run the ops of a graph, captured kernels first."""

    rows: list[Task]
    """Tasks of all variants, captured ones first."""
    captured: int
    """Number of captured tasks, which do the work of their op."""
    work_of: list[tuple[int, ...]]
    """Ops whose work each other task does."""
    first_of_op: Indices
    """First variant of each op in `variants`."""
    number_of_op: Indices
    """Number of variants of each op."""
    variants: Records
    covers: list[int]
    """Ops fused into variants, concatenated."""

    @classmethod
    def of(cls, graph: OpGraph, ops: Records) -> _Ways:
        """Return the variants of a graph; `ops` has the captured rows of each op."""
        rows = _rows(graph)
        captured = int(ops["rows"].sum())
        number = np.ones(len(graph), np.int32)
        if graph.variants:
            number += np.fromiter(map(len, graph.variants), np.int32, len(graph))
        first = np.cumsum(number, dtype=np.int32) - number
        variants = np.zeros(int(number.sum()), VARIANT)
        for field in ("first_row", "rows"):
            variants[field][first] = ops[field]
        work_of: list[tuple[int, ...]] = []
        covers: list[int] = []
        for op in np.flatnonzero(number > 1).tolist():
            others = zip(graph.trace.ops[op].variants, graph.variants[op], strict=True)
            for place, (variant, tasks) in enumerate(others, first[op] + 1):
                variants[place] = (captured + len(work_of), len(tasks), len(covers), len(variant.covers))
                covers.extend(variant.covers)
                work_of.extend([(op, *variant.covers)] * len(tasks))
        return cls(rows, captured, work_of, first, number, variants, covers)


def _rows(graph: OpGraph) -> list[Task]:
    """Return the tasks of all variants, captured ones first."""
    captured = chain.from_iterable(graph.tasks)
    return [*captured, *(task for variants in graph.variants for tasks in variants for task in tasks)]


def _buffers_of_rows(
    buffers: OpBuffers, op_of: npt.NDArray[np.int64], work_of: Sequence[tuple[int, ...]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the number of buffers of each row, and the buffers of all rows, concatenated.

    A captured row does the work of its op in `op_of`, a later row that of its ops in `work_of`.
    """
    counts, numbers = buffers.of_ops(op_of)
    others = [list(dict.fromkeys(buffers.of_ops(np.array(work))[1].tolist())) for work in work_of]
    return (
        np.concatenate((counts, np.fromiter(map(len, others), np.int64, len(others)))),
        np.concatenate((numbers, np.array([*chain.from_iterable(others)], np.int64))),
    )


def _depend(ops: Records, graph: OpGraph) -> tuple[Indices, Indices]:
    """Return predecessors and successors of all ops, concatenated; set the range of each op in `ops`."""
    works = np.fromiter(graph.work_preds, np.int64, len(graph.work_preds))
    n_preds = np.zeros(len(ops), np.int32)
    n_preds[works] = np.fromiter(map(len, graph.work_preds.values()), np.int32, len(works))
    preds = np.fromiter(chain.from_iterable(graph.work_preds.values()), np.int32, int(n_preds.sum()))
    succs = np.repeat(np.arange(len(ops), dtype=np.int32), n_preds)[np.argsort(preds, kind="stable")]
    n_succs = np.bincount(preds, minlength=len(ops)).astype(np.int32)
    for name, counts in (("pred", n_preds), ("succ", n_succs)):
        ops[f"n_{name}s"] = counts
        ops[f"first_{name}"] = np.cumsum(counts) - counts
    return preds, succs


class LoweringRoom(NamedTuple):
    """State of lowering one schedule at a time: last task, executing op and variant of each op; last task and hardware
    queue of each stream.
    """

    last_of_op: Indices
    done_by: Indices
    choice: Indices
    last_of_stream: Indices
    queue_of_stream: Indices

    @classmethod
    def of_size(cls, ops: int, streams: int) -> LoweringRoom:
        """Return the state for schedules of `ops` ops on up to `streams` streams."""
        return cls(*(np.zeros(size, np.int32) for size in (ops, ops, ops, streams, streams)))


@entry
def lower_schedules(
    hardware: Records,
    graph: OpArrays,
    orders: Indices,
    streams: Indices,
    chosen: Indices | None,
    plans: Plans,
    room: LoweringRoom,
    first: int,
    last: int,
) -> int:
    """Lower schedules `first` to `last` - 1 to plans 0, 1, ...; return the number of the first illegal one, or -1.

    `chosen` has the number of each op's variant, 0 for the captured kernels; None stands for zeros.
    """
    for number in range(first, last):
        plan = number - first
        task_count = lower_one(
            hardware[0],
            int64(graph.rows_of_partition),
            graph.ops,
            graph.preds,
            graph.variants,
            graph.covers,
            graph.partition_of,
            orders[number],
            streams[number],
            None if chosen is None else chosen[number],
            plans.nodes[plan],
            plans.launches[plan],
            plans.deps[plan],
            room.last_of_op,
            room.done_by,
            room.choice,
            room.last_of_stream,
            room.queue_of_stream,
        )
        if task_count < 0:
            return number
        plans.tasks[plan] = task_count
    return -1


@jit
def lower_one(
    hw: Any,
    rows_of_partition: int,
    ops: Any,
    preds: Any,
    variants: Any,
    covers: Any,
    partition_of: Any,
    order: Any,
    stream_of: Any,
    chosen: Any,
    nodes: Any,
    launches: Any,
    deps: Any,
    last_of_op: Any,
    done_by: Any,
    choice: Any,
    last_of_stream: Any,
    queue_of_stream: Any,
) -> int:
    """`gpusim.plan.lower.lower` for one schedule: return its number of tasks, or -1 if its order is illegal, or a
    stream or variant is out of range.
    """
    for op in range(len(ops)):
        last_of_op[op] = -2  # not placed
        done_by[op] = op
    for stream in range(len(last_of_stream)):
        last_of_stream[stream] = -1
        queue_of_stream[stream] = -1
    if chosen is not None and not choose(ops, variants, covers, chosen, choice, done_by):
        return -1
    index = dealt = filled = 0
    host_ns = 0.0
    for op in order:
        if op < 0 or op >= len(ops) or last_of_op[op] != -2:
            return -1
        host_ns += ops[op].host_ns
        rows = ops[op].rows
        first_row = ops[op].first_row
        first_cover = n_covers = 0
        if chosen is not None:
            variant = variants[ops[op].first_variant + choice[op]]
            rows = variant.rows
            first_row = variant.first_row
            first_cover = variant.first_cover
            n_covers = variant.n_covers
            if done_by[op] != op:
                if done_by[op] < op and last_of_op[done_by[op]] < 0:
                    return -1
                rows = 0
        last_of_op[op] = -1  # a view: in `preds`, its dependents depend on its source
        if rows == 0:
            continue
        stream = stream_of[op]
        if stream < 0 or stream >= len(last_of_stream):
            return -1
        if stream < len(partition_of):
            first_row += partition_of[stream] * rows_of_partition
        first_dep = filled
        for number in range(-1, n_covers):
            needing = op if number < 0 else covers[first_cover + number]
            if needing > op:
                continue  # its predecessors end before this op starts
            for place in range(ops[needing].first_pred, ops[needing].first_pred + ops[needing].n_preds):
                before = preds[place]
                if last_of_op[before] == -2:
                    return -1
                before = done_by[before]
                if before == op:
                    continue
                if last_of_op[before] < 0:
                    return -1
                deps[filled] = last_of_op[before]
                filled += 1 if stream_of[before] != stream else 0  # no branch: this one is unpredictable
        if len(covers) > 0:  # an op and the ops fused into it are one task
            filled = first_dep + distinct(deps[first_dep:filled])
        if queue_of_stream[stream] < 0:
            queue_of_stream[stream] = hardware_queue(hw.stream, int64(dealt))
            dealt += 1
        for number in range(rows):
            node = nodes[index]
            node.row = first_row + number
            node.device = 0
            node.previous = last_of_stream[stream]
            node.first_dep = first_dep if number == 0 else filled
            node.n_deps = filled - node.first_dep
            if len(launches) > 0:
                launch = launches[index]
                launch.queue = queue_of_stream[stream]
                launch.events = node.n_deps
                launch.host_ns = host_ns / rows
            last_of_stream[stream] = index
            index += 1
        last_of_op[op] = index - 1
        host_ns = 0.0
    return index


@jit
def distinct(numbers: Any) -> int:
    """Move the distinct numbers to the front, in order, and return their count."""
    kept = 0
    for index in range(len(numbers)):
        new = True
        for earlier in range(kept):
            new = new and numbers[earlier] != numbers[index]
        if new:
            numbers[kept] = numbers[index]
            kept += 1
    return kept


@jit
def choose(ops: Any, variants: Any, covers: Any, chosen: Any, choice: Any, done_by: Any) -> bool:
    """`gpusim.trace.fusion.canonical_variants`: fill `choice` and `done_by`; return False for an unknown variant."""
    for op in range(len(ops)):
        if chosen[op] < 0 or chosen[op] >= ops[op].n_variants:
            return False
        choice[op] = chosen[op]
        variant = variants[ops[op].first_variant + chosen[op]]
        if variant.n_covers > 0:
            free = done_by[op] == op
            for place in range(variant.first_cover, variant.first_cover + variant.n_covers):
                other = covers[place]
                doing = other < op and variants[ops[other].first_variant + choice[other]].n_covers > 0
                free = free and done_by[other] == other and not doing
            if free:
                for place in range(variant.first_cover, variant.first_cover + variant.n_covers):
                    done_by[covers[place]] = op
            else:
                choice[op] = 0
    return True
