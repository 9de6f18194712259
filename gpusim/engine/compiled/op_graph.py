"""An op graph as arrays, and its schedules as plans without Python objects: `gpusim.plan.lower` compiled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpusim.engine.compiled.arrays import Indices, Plans, Records, encode_tasks
from gpusim.engine.compiled.jit import entry, int64, jit
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower

#: An op: its tasks are `rows` records of `TASK` from `first_row` on (none for a view), its predecessors and successors
#: among ops with tasks are in `preds` and `succs`.
OP = np.dtype(
    [
        ("first_row", "i4"),
        ("rows", "i4"),
        ("first_pred", "i4"),
        ("n_preds", "i4"),
        ("first_succ", "i4"),
        ("n_succs", "i4"),
        ("host_ns", "f8"),
    ],
    align=True,
)


class OpArrays(NamedTuple):
    """An op graph. `buffers` of a row are `buffer_of[first_buffer[row] : first_buffer[row + 1]]`."""

    tasks: Records
    ops: Records
    preds: Indices
    succs: Indices
    first_buffer: Indices
    buffer_of: Indices
    buffer_bytes: npt.NDArray[np.int64]
    buffer_rows: Indices
    """How many rows use each buffer."""
    kept_bytes: int

    @classmethod
    def of(cls, graph: OpGraph) -> OpArrays:
        """The arrays of an op graph."""
        # In recorded order on one stream, the tasks of a plan are the rows, and its buffers are what rows share.
        plan = lower(graph, range(len(graph)), [0] * len(graph))
        preds_of, succs_of = graph.work_dependencies
        ops = np.zeros(len(graph), OP)
        ops["rows"] = [len(tasks) for tasks in graph.tasks]
        ops["first_row"] = np.cumsum(ops["rows"]) - ops["rows"]
        ops["host_ns"] = [op.host_ns for op in graph.trace.ops]
        ops["first_pred"], ops["n_preds"], preds = _lists(sorted(preds_of.get(op, ())) for op in range(len(graph)))
        ops["first_succ"], ops["n_succs"], succs = _lists(succs_of.get(op, ()) for op in range(len(graph)))
        buffers_of: list[list[int]] = [[] for _ in plan.tasks]
        for number, buffer in enumerate(plan.buffers):
            for row in buffer.tasks:
                buffers_of[row].append(number)
        first_buffer, _, buffer_of = _lists(buffers_of)
        return cls(
            tasks=encode_tasks(plan.tasks),
            ops=ops,
            preds=preds,
            succs=succs,
            first_buffer=np.append(first_buffer, np.int32(len(buffer_of))),
            buffer_of=buffer_of,
            buffer_bytes=np.array([buffer.bytes for buffer in plan.buffers], np.int64),
            buffer_rows=np.array([len(buffer.tasks) for buffer in plan.buffers], np.int32),
            kept_bytes=plan.kept_bytes,
        )


def _lists(lists: Iterable[Sequence[int]]) -> tuple[Indices, Indices, Indices]:
    """Lists one behind the other: where each begins, how long it is, and all of them."""
    found = [list(one) for one in lists]
    lengths = np.array([len(one) for one in found], np.int32)
    flat = np.array([item for one in found for item in one], np.int32)
    return np.cumsum(lengths, dtype=np.int32) - lengths, lengths, flat


class LoweringRoom(NamedTuple):
    """Where lowering one schedule at a time keeps its state: for each op its last task, for each stream its last task
    and its hardware queue.
    """

    last_of_op: Indices
    last_of_stream: Indices
    queue_of_stream: Indices

    @classmethod
    def of_size(cls, ops: int, streams: int) -> LoweringRoom:
        """Room for schedules of `ops` ops on up to `streams` streams."""
        return cls(np.zeros(ops, np.int32), np.zeros(streams, np.int32), np.zeros(streams, np.int32))


@entry
def lower_schedules(
    hardware: Records,
    graph: OpArrays,
    orders: Indices,
    streams: Indices,
    plans: Plans,
    room: LoweringRoom,
    first: int,
    last: int,
) -> int:
    """Lower schedules `first` to `last` - 1 to plans 0, 1, ...; number of the first that is not legal, or -1."""
    for number in range(first, last):
        plan = number - first
        legal = lower_one(
            int64(hardware[0].stream_queues),
            graph.ops,
            graph.preds,
            orders[number],
            streams[number],
            plans.nodes[plan],
            plans.launches[plan],
            plans.deps[plan],
            room.last_of_op,
            room.last_of_stream,
            room.queue_of_stream,
        )
        if not legal:
            return number
    return -1


@jit
def lower_one(
    queues: int,
    ops: Any,
    preds: Any,
    order: Any,
    stream_of: Any,
    nodes: Any,
    launches: Any,
    deps: Any,
    last_of_op: Any,
    last_of_stream: Any,
    queue_of_stream: Any,
) -> bool:
    """`gpusim.plan.lower.lower` for one schedule; whether its order is legal and its streams are in range."""
    for op in range(len(ops)):
        last_of_op[op] = -2  # not placed
    for stream in range(len(last_of_stream)):
        last_of_stream[stream] = -1
        queue_of_stream[stream] = -1
    index = dealt = filled = 0
    host_ns = 0.0
    for op in order:
        if op < 0 or op >= len(ops) or last_of_op[op] != -2:
            return False
        host_ns += ops[op].host_ns
        rows = ops[op].rows
        last_of_op[op] = -1  # a view: what depends on it depends on what it looks at, in `preds`
        if rows == 0:
            continue
        stream = stream_of[op]
        if stream < 0 or stream >= len(last_of_stream):
            return False
        first_dep = filled
        for place in range(ops[op].first_pred, ops[op].first_pred + ops[op].n_preds):
            before = preds[place]
            if last_of_op[before] < 0:
                return False
            deps[filled] = last_of_op[before]
            filled += 1 if stream_of[before] != stream else 0  # no branch: nobody can predict this one
        if queue_of_stream[stream] < 0:
            queue_of_stream[stream] = dealt % queues
            dealt += 1
        for number in range(rows):
            node = nodes[index]
            node.row = ops[op].first_row + number
            node.device = 0
            node.priority = 0
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
    return True
