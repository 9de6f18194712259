"""Critical path: list scheduling by bottom level that asks the resource model, not durations alone.

Whenever a stream is free, the ready op with the longest chain behind it starts there, and runs at the pace that the
GPU's block dispatcher and contention rules (`gpusim.engine.pool`) give it beside what runs already. An op that would
find little room is held back while others run, unless it is the most urgent one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpusim.engine.pool import SmPool
from gpusim.plan.graph import OpGraph
from gpusim.policies.base import Assignment, spread_views, work_order

#: An op other than the most urgent starts only if it gets at least this share of the blocks it could have resident:
#: less would put it at the tail of the block dispatcher, in front of ops that become urgent meanwhile.
MIN_SHARE = 0.05


def critical_path(graph: OpGraph, streams: int) -> Assignment:
    """List schedule with bottom levels as priorities."""
    return list_schedule(graph, streams, graph.bottom_ns).assignment


@dataclass(frozen=True, slots=True)
class ListSchedule:
    """A list schedule and the makespan its own simulation saw, in ns."""

    assignment: Assignment
    makespan_ns: float


@dataclass(slots=True)
class _Lane:
    """A stream: what it runs, which of its kernels is next, when the gap before it ends."""

    op: int = -1
    kernel: int = 0
    start_at: float = -1.0


@dataclass(slots=True)
class _State:
    ready: list[tuple[float, int]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    stream_of: dict[int, int] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)


def list_schedule(
    graph: OpGraph, streams: int, priority: Sequence[float], min_share: float = MIN_SHARE
) -> ListSchedule:
    """Schedule ready ops by descending `priority` (by op index) while simulating the GPU they share."""
    work = work_order(graph)
    preds, succs = work_dependencies(graph)
    waiting = {op: len(preds[op]) for op in work}
    state = _State([(-priority[op], op) for op in work if not waiting[op]])
    heapq.heapify(state.ready)
    lanes = [_Lane() for _ in range(streams)]
    pool = SmPool(graph.hardware)
    costs = graph.hardware.graph
    now, front_end_free = 0.0, 0.0
    idle = set(range(streams))
    lane_of: dict[int, int] = {}
    launched: dict[int, int] = {}
    while len(state.order) < len(work) or len(idle) < streams:
        _fill(state, lanes, idle, lane_of, graph, pool, now, min_share, preds)
        for place in range(len(launched), len(state.order)):
            launched[state.order[place]] = place
        starts = [
            (max(lane.start_at, front_end_free), launched[lane.op], n)
            for n, lane in enumerate(lanes)
            if lane.start_at >= 0
        ]
        next_start = min(starts, default=None) if not pool.full else None
        next_end = pool.next_end()
        if next_end is not None and (next_start is None or now + next_end[0] <= next_start[0]):
            pool.advance(next_end[0])
            now += next_end[0]
            lane_number = lane_of[next_end[1]]
            pool.finish(next_end[1])
            pool.update()
            lane = lanes[lane_number]
            lane.kernel += 1
            tasks = graph.tasks[lane.op]
            if lane.kernel < len(tasks):
                lane.start_at = now + costs.chain_ns + tasks[lane.kernel].extra_ns
            else:
                for after in succs[lane.op]:
                    waiting[after] -= 1
                    if not waiting[after]:
                        heapq.heappush(state.ready, (-priority[after], after))
                idle.add(lane_number)
        else:
            assert next_start is not None, "ops left, but nothing runs"
            start, _, number = next_start
            pool.advance(start - now)
            now = start
            front_end_free = now + costs.front_end_ns
            lane = lanes[number]
            pool.start(lane.op, graph.tasks[lane.op][lane.kernel])
            pool.update()
            lane.start_at = -1.0
    return ListSchedule(spread_views(graph, state.order, state.stream_of), now)


def _fill(
    state: _State,
    lanes: list[_Lane],
    idle: set[int],
    lane_of: dict[int, int],
    graph: OpGraph,
    pool: SmPool,
    now: float,
    min_share: float,
    preds: dict[int, set[int]],
) -> None:
    """Give idle streams their next ops: the most urgent, or a less urgent one that still finds room."""
    held: list[tuple[float, int]] = []
    costs = graph.hardware.graph
    first = True
    while idle and state.ready:
        entry = heapq.heappop(state.ready)
        op = entry[1]
        if not first and _room(graph, op, pool, lanes) < min_share:
            held.append(entry)
            continue
        first = False
        number = _stream_for(graph, op, idle, state.stream_of)
        idle.discard(number)
        lane_of[op] = number
        lanes[number].op, lanes[number].kernel = op, 0
        # Waits on other streams, and the stream's own last op where no wait implies it.
        edges = len({state.stream_of[p] for p in preds[op]} | ({number} if number in state.used else set()))
        delay = costs.chain_ns + costs.join_ns * (edges - 1) + graph.tasks[op][0].extra_ns if edges else 0.0
        lanes[number].start_at = now + delay
        state.order.append(op)
        state.stream_of[op] = number
        state.used.add(number)
    for entry in held:
        heapq.heappush(state.ready, entry)


def _stream_for(graph: OpGraph, op: int, idle: set[int], stream_of: dict[int, int]) -> int:
    """An idle stream that one of its predecessors ran on, if there is one: that saves an event."""
    near = [stream_of[p] for p in graph.preds[op] if p in stream_of and stream_of[p] in idle]
    return near[-1] if near else min(idle)


def _room(graph: OpGraph, op: int, pool: SmPool, lanes: list[_Lane]) -> float:
    """Share of its blocks that the first kernel of `op` would get beside what runs or is about to."""
    taken = [0.0, 0.0, 0.0, 0.0]
    for kernel in pool.running:
        for resource, need in enumerate(kernel.demand):
            taken[resource] += need * kernel.share
    for lane in lanes:
        if lane.start_at >= 0:
            demand = graph.tasks[lane.op][lane.kernel].demand
            for resource, need in enumerate((demand.threads, demand.regs, demand.smem, demand.slots)):
                taken[resource] += need
    demand = graph.tasks[op][0].demand
    shares = [
        max(0.0, 1.0 - used) / need
        for used, need in zip(taken, (demand.threads, demand.regs, demand.smem, demand.slots), strict=True)
        if need > 0.0
    ]
    return min(1.0, *shares) if shares else 1.0


def work_dependencies(graph: OpGraph) -> tuple[dict[int, set[int]], dict[int, list[int]]]:
    """Predecessors and successors among the ops that have kernels; views hand theirs on."""
    reach: list[set[int]] = []
    preds: dict[int, set[int]] = {}
    succs: dict[int, list[int]] = {op: [] for op in work_order(graph)}
    for op, before in enumerate(graph.preds):
        found: set[int] = set()
        for p in before:
            found |= {p} if graph.tasks[p] else reach[p]
        reach.append(found)
        if graph.tasks[op]:
            preds[op] = found
            for p in found:
                succs[p].append(op)
    return preds, succs
