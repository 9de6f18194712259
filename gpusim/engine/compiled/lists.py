"""List scheduling against a running simulation, compiled: the loop of `gpusim.policies.shared.list_scheduling`.

It is in this package because the cache of compiled functions depends on its sources (see `jit`).

Ready ops wait in a heap. If more than `WIDE` wait, checking again and again those that do not fit would be slow; they
then wait in a tree (`gpusim.engine.compiled.ready_tree`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpusim.engine.compiled import heap, pool
from gpusim.engine.compiled.arrays import Indices, Records
from gpusim.engine.compiled.heap import ENTRY
from gpusim.engine.compiled.jit import entry, int64, jit
from gpusim.engine.compiled.link import gap_ns, lost_ns, task_interval_ns
from gpusim.engine.compiled.op_graph import OpArrays
from gpusim.engine.compiled.pool import RUNNING
from gpusim.engine.compiled.ready_tree import NEED, first_that_fits, plant, set_needs, share_of

#: A stream: its op, the index of the op's next kernel, the earliest start of that kernel (-1: running, or none), and
#: the number of starts up to its own.
LANE = np.dtype(
    [
        ("op", "i8"),
        ("kernel", "i8"),
        ("start_at", "f8"),
        ("started", "i8"),
        ("ended_at", "f8"),
        ("used", "i8"),
        ("idle", "i8"),
    ],
    align=True,
)
#: State of an op: number of predecessors that have not ended, end of the last one, stream, position in the order, and
#: leaf of the tree.
STATE = np.dtype([("waiting", "i8"), ("ready_at", "f8"), ("stream", "i8"), ("place", "i8"), ("leaf", "i8")], align=True)
#: Number of ready ops above which they wait in a tree.
WIDE = 64


class ListRoom(NamedTuple):
    """State of one list scheduling at a time, one per thread."""

    lanes: Records
    states: Records
    running: Records
    ready: Records
    held: Records
    needs: Records

    @classmethod
    def of_size(cls, ops: int, streams: int) -> ListRoom:
        """Return the state for `ops` ops on up to `streams` streams; each stream runs one kernel at a time."""
        return cls(
            lanes=np.zeros(streams, LANE),
            states=np.zeros(ops, STATE),
            running=np.zeros(streams, RUNNING),
            ready=np.zeros(ops, ENTRY),
            held=np.zeros(ops, ENTRY),
            needs=np.zeros(2 << max(0, ops - 1).bit_length(), NEED),
        )


@entry
def schedule_lists(
    hardware: Records,
    graph: OpArrays,
    priorities: npt.NDArray[np.float64],
    streams: npt.NDArray[np.int64],
    min_shares: npt.NDArray[np.float64],
    room: ListRoom,
    makespan_ns: npt.NDArray[np.float64],
    orders: Indices,
    placed: Indices,
    first: int,
    last: int,
    events: int,
) -> None:
    """Fill makespans, orders of ops with kernels and streams of ops for list schedules `first` to `last` - 1.

    If `orders` and `placed` have only one row, each schedule overwrites it. A makespan of -1 marks a schedule that
    deadlocked with ops left, one of -2 a schedule that took more than `events` events.
    """
    for number in range(first, last):
        row = number if len(orders) > 1 else 0
        makespan_ns[number] = schedule_one(
            hardware[0],
            graph.tasks,
            graph.ops,
            graph.preds,
            graph.succs,
            priorities[number],
            min_shares[number],
            room.lanes[: streams[number]],
            room.states,
            room.running,
            room.ready,
            room.held,
            room.needs,
            orders[row],
            events,
        )
        for op in range(len(graph.ops)):
            placed[row, op] = room.states[op].stream


@jit
def schedule_one(
    hw: Any,
    tasks: Any,
    ops: Any,
    preds: Any,
    succs: Any,
    priority: Any,
    min_share: float,
    lanes: Any,
    states: Any,
    running: Any,
    ready: Any,
    held: Any,
    needs: Any,
    order: Any,
    events: int,
) -> float:
    """`_Scheduler.run`."""
    leaves = int64(0)  # of the tree; 0 before it is built
    base = n_ready = n_running = n_starts = n_order = int64(0)
    rank = int64(0)  # equal priorities are ordered by op
    for number in range(len(lanes)):
        lane = lanes[number]
        lane.op = -1
        lane.start_at = -1.0
        lane.ended_at = 0.0
        lane.used = 0
        lane.idle = 1
    n_idle = len(lanes)
    n_work = 0
    for op in range(len(ops)):
        state = states[op]
        state.waiting = ops[op].n_preds
        state.ready_at = 0.0
        state.stream = 0
        if ops[op].rows > 0:
            n_work += 1
            if state.waiting == 0:
                heap.push(ready, base, n_ready, -priority[op], rank, op)
                n_ready += 1
    now = front_end_free = 0.0
    branches, one = len(lanes) > 1, int64(1)
    grids = int64(hw.limits.resident_grids)
    delay_ns, ending = np.inf, int64(-1)  # until the next end
    while n_order < n_work or n_idle < len(lanes):
        events -= 1
        if events < 0:
            return -2.0
        # `_fill`: give idle streams their next ops
        n_held = 0
        urgent_from, known = 0.0, False
        threads = regs = smem = slots = 0.0
        if min_share > 0.0 and n_ready > WIDE and leaves == 0:
            leaves = plant(tasks, ops, priority, states, ready, n_ready, held, needs)
        while n_idle > 0 and n_ready > 0:
            op = ready[0].index
            if leaves > 0:
                if not known:
                    known = True
                    urgent_from, threads, regs, smem, slots = room_left(tasks, ops, priority, lanes, running, n_running)
                leaf = first_that_fits(needs, leaves, np.inf, np.inf, np.inf, np.inf, 0.0)
                if priority[held[leaf].index] < urgent_from:
                    leaf = first_that_fits(needs, leaves, threads, regs, smem, slots, min_share)
                    if leaf < 0:
                        break
                op = held[leaf].index
            elif min_share > 0.0:
                if not known:  # valid until the next op is put on a stream
                    known = True
                    urgent_from, threads, regs, smem, slots = room_left(tasks, ops, priority, lanes, running, n_running)
                task = tasks[ops[op].first_row]
                if priority[op] < urgent_from and share_of(task, threads, regs, smem, slots) < min_share:
                    held[n_held].time = ready[0].time
                    held[n_held].index = op
                    n_held += 1
                    heap.pop(ready, base, n_ready)
                    n_ready -= 1
                    continue
            if leaves > 0:
                set_needs(needs, leaves, states[op].leaf, np.inf, np.inf, np.inf, np.inf)
            else:
                heap.pop(ready, base, n_ready)
            n_ready -= 1
            # `_launch`: on the idle stream of a predecessor, or the first idle one
            number = -1
            for place in range(ops[op].first_pred, ops[op].first_pred + ops[op].n_preds):
                if lanes[states[preds[place]].stream].idle:
                    number = states[preds[place]].stream
            if number < 0:
                number = 0
                while not lanes[number].idle:
                    number += 1
            lane = lanes[number]
            edges = lane.used
            for place in range(ops[op].first_pred, ops[op].first_pred + ops[op].n_preds):
                if states[preds[place]].stream != number:
                    edges += 1
            start_at = now
            if edges > 0:
                begin = max(lane.ended_at, states[op].ready_at)
                gap = gap_ns(hw.graph, branches, int64(edges), tasks[ops[op].first_row].extra_ns)
                start_at = max(now, begin + gap)
            lane.op = op
            lane.kernel = 0
            lane.start_at = start_at
            lane.used = 1
            lane.idle = 0
            n_idle -= 1
            states[op].stream = number
            states[op].place = n_order
            order[n_order] = op
            n_order += 1
            known = False
        for place in range(n_held):
            heap.push(ready, base, n_ready, held[place].time, rank, held[place].index)
            n_ready += 1
        # `_next_start`: the stream that has been ready for longest
        starting = -1
        at = ready_at = np.inf
        if n_running < grids:
            for number in range(len(lanes)):
                lane = lanes[number]
                if lane.start_at >= 0.0:
                    begin = max(lane.start_at, front_end_free)
                    if (
                        starting < 0
                        or begin < at
                        or (
                            begin == at
                            and (
                                lane.start_at < ready_at
                                or (
                                    lane.start_at == ready_at
                                    and states[lane.op].place < states[lanes[starting].op].place
                                )
                            )
                        )
                    ):
                        starting, at, ready_at = number, begin, lane.start_at
        if ending >= 0 and (starting < 0 or now + delay_ns <= at):
            elapsed_ns = delay_ns
            now += elapsed_ns
            # `_end`
            pool.finish(running, base, n_running, ending)
            n_running -= 1
            lane = lanes[states[ending].stream]
            lane.kernel += 1
            seen_at = now + lost_ns(hw.graph, n_starts - lane.started)
            if lane.kernel < ops[ending].rows:
                extra_ns = tasks[ops[ending].first_row + lane.kernel].extra_ns
                lane.start_at = seen_at + gap_ns(hw.graph, branches, one, extra_ns)
            else:
                lane.ended_at = seen_at
                lane.idle = 1
                n_idle += 1
                for place in range(ops[ending].first_succ, ops[ending].first_succ + ops[ending].n_succs):
                    after = int64(succs[place])
                    states[after].waiting -= 1
                    if states[after].waiting == 0:
                        states[after].ready_at = seen_at
                        if leaves > 0:
                            task = tasks[ops[after].first_row]
                            leaf = states[after].leaf
                            set_needs(needs, leaves, leaf, task.threads, task.regs, task.smem, task.slots)
                        else:
                            heap.push(ready, base, n_ready, -priority[after], rank, after)
                        n_ready += 1
        elif starting >= 0:
            elapsed_ns = at - now
            now += elapsed_ns
            # `_start`
            lane = lanes[starting]
            task = tasks[ops[lane.op].first_row + lane.kernel]
            front_end_free = now + task_interval_ns(hw, task, True)
            pool.start(hw, running, n_running, lane.op, task, 0.0)
            n_running += 1
            n_starts += 1
            lane.started = n_starts
            lane.start_at = -1.0
        else:
            return -1.0
        delay_ns, ending = pool.update(hw, running, base, n_running, elapsed_ns)
    return now


@jit
def room_left(
    tasks: Any, ops: Any, priority: Any, lanes: Any, running: Any, n_running: int
) -> tuple[float, float, float, float, float]:
    """Return the highest priority of the ops on streams (`_urgent`) and the free share of each resource (`_room`)."""
    urgent_from = -np.inf
    threads = regs = smem = slots = 1.0
    for number in range(n_running):
        kernel = running[number]
        threads -= kernel.threads * kernel.share
        regs -= kernel.regs * kernel.share
        smem -= kernel.smem * kernel.share
        slots -= kernel.slots * kernel.share
    for number in range(len(lanes)):
        lane = lanes[number]
        if not lane.idle:
            urgent_from = max(urgent_from, priority[lane.op])
            if lane.start_at >= 0.0:
                task = tasks[ops[lane.op].first_row + lane.kernel]
                threads -= task.threads
                regs -= task.regs
                smem -= task.smem
                slots -= task.slots
    return urgent_from, threads, regs, smem, slots
