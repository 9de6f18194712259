"""The event loop where all is on one GPU, in graph mode and without copies: what a search simulates.

It does what `gpusim.engine.compiled.simulate` does, with less to look at: tasks that get ready are a line by time, not
a heap, since hardly one gets ready before one that was known earlier; and nothing but the GPU's next end, the first of
that line and the front end can be next.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusim.engine.compiled import heap, placement, pool, rates, sm_groups
from gpusim.engine.compiled.arrays import Blocks, Plans, Records
from gpusim.engine.compiled.heap import not_before
from gpusim.engine.compiled.jit import END_OF_TIME, entry, int64, jit, uint32
from gpusim.engine.compiled.link import lost_ns


@entry
def simulate_one_gpu(
    hardware: Records,
    tasks: Records,
    rows: Records,
    plans: Plans,
    running: Records | None,
    blocks: Blocks | None,
    devices: Records,
    heaps: Records,
    first: int,
    last: int,
    events: int,
) -> None:
    """`gpusim.engine.compiled.simulate.simulate_plans`; `rows` is room for what all plans need of each of `tasks`.

    What runs is in `running`, or block by block in `blocks`; what the other one needs is not compiled. The budget is of
    `events` for each task and each block.
    """
    hw, device = hardware[0], devices[0]
    grids, front_end_ns = int64(hw.limits_resident_grids), hw.graph_front_end_ns
    work = int64(len(tasks) + 1)
    if blocks is not None:
        for number in range(len(tasks)):
            placement.prepare(hw, rows[number], tasks[number])
            work += rows[number].left
        rates.forget_loads(device)
    for plan in range(first, last):
        count = plans.tasks[plan]
        nodes, succs, log = plans.nodes[plan, :count], plans.succs[plan], plans.log[plan]
        waiting, known = heaps[:count], heaps[count:]  # for the front end: a heap; to become ready: by time
        head = tail = n_waiting = n_running = n_starts = logged = ended = int64(0)
        for index in range(count):
            node = nodes[index]
            node.ready_ns = node.start_ns = node.end_ns = -1.0
            node.waiting = node.n_deps + (1 if node.previous >= 0 else 0)
            if node.waiting == 0:
                tail = insert(known, head, tail, -1.0, index)  # -1: before all that happens at 0
        if blocks is not None:
            set_up(device, on_the_gpu(blocks))
        now = end_ns = front_end_free = updated = 0.0
        end_at = serve_at = np.inf
        ending, index = int64(-1), int64(0)
        device.events_left = events_left = events * work
        while True:
            events_left -= 1
            if events_left < 0:
                ended, end_ns = ~index, now
                break
            ready_at = known[uint32(head)].time if head < tail else np.inf
            if end_at <= ready_at and end_at <= serve_at:
                if end_at == np.inf:
                    break
                now = end_at
                index = int64(uint32(ending))
                if running is not None:
                    pool.finish(running, int64(0), n_running, index)
                if blocks is not None:
                    device.clock_ns += now - device.updated
                    device.updated = now
                    if device.all_of_it == 0 and not placement.go_on(hw, device, on_the_gpu(blocks), int64(1), -np.inf):
                        end_at, ending = device.end_at, int64(device.end_index)
                        continue  # a part of its blocks: nothing else follows
                n_running -= 1
                node = nodes[index]
                node.end_ns = end_ns = now
                log[uint32(logged)] = ~index
                ended += 1
                lost = lost_ns(hw, n_starts - node.started)
                first_succ, n_succs = int64(uint32(node.first_succ)), int64(node.n_succs)
                for number in range(n_succs):
                    after = int64(uint32(succs[first_succ + number]))
                    nodes[after].waiting -= 1
                    if nodes[after].waiting == 0:
                        turn_ns = hw.graph_fork_ns * max(0, min(number, n_succs - 2))
                        tail = insert(known, head, tail, now + (nodes[after].gap_ns + lost + turn_ns), after)
            else:
                if ready_at <= serve_at:
                    index = int64(uint32(known[uint32(head)].index))
                    head += 1
                    if head == tail:
                        head = tail = int64(0)
                    now = max(0.0, ready_at)
                    node = nodes[index]
                    node.ready_ns = now
                    at_once = (  # nothing else happens before the front end would be looked at
                        n_waiting == 0
                        and now >= front_end_free
                        and n_running < grids
                        and min(serve_at, end_at) > now
                        and (head == tail or known[uint32(head)].time > now)
                    )
                    if not at_once:
                        heap.push(waiting, int64(0), n_waiting, now, -node.priority, index)
                        n_waiting += 1
                        serve_at = min(serve_at, not_before(now, max(now, front_end_free)))
                        continue
                else:
                    now, serve_at = serve_at, np.inf
                    if n_waiting == 0 or now < front_end_free or n_running >= grids:
                        continue
                    index = int64(uint32(waiting[0].index))
                    heap.pop(waiting, int64(0), n_waiting)
                    n_waiting -= 1
                node = nodes[index]
                node.start_ns = now
                n_starts += 1
                node.started = n_starts
                log[uint32(logged)] = index
                front_end_free = now + front_end_ns
                if running is not None:
                    pool.start(hw, running, n_running, index, tasks[uint32(node.row)])
                if blocks is not None:
                    device.clock_ns += now - device.updated
                    device.updated = now
                    placement.start(device, on_the_gpu(blocks), index, rows[uint32(node.row)])
                n_running += 1
            logged += 1
            if n_waiting > 0:
                serve_at = min(serve_at, not_before(now, max(now, front_end_free)))
            if running is not None:
                delay_ns, ending = pool.update(hw, running, int64(0), n_running, now - updated)
                end_at = not_before(now, now + delay_ns) if ending >= 0 else np.inf
                updated = now
            if blocks is not None:
                until_ns = min(known[uint32(head)].time if head < tail else np.inf, serve_at)
                all_of_it = placement.go_on(hw, device, on_the_gpu(blocks), int64(0), until_ns)
                device.all_of_it = 1 if all_of_it else 0
                end_at, ending = device.end_at, int64(device.end_index)
        plans.ended[plan] = ended
        plans.makespan_ns[plan] = int64(np.rint(min(end_ns, END_OF_TIME)))


@jit
def insert(known: Any, head: int, tail: int, at: float, index: int) -> int:
    """Put a task that gets ready at a time into the line, behind those of the same time; the line's new tail."""
    place = tail
    while place > head and known[uint32(place - 1)].time > at:
        known[uint32(place)].time = known[uint32(place - 1)].time
        known[uint32(place)].index = known[uint32(place - 1)].index
        place -= 1
    known[uint32(place)].time = at
    known[uint32(place)].index = index
    return tail + 1


@jit
def on_the_gpu(blocks: Any) -> Any:
    """What is on the SMs."""
    return Blocks(blocks.kernels[0], blocks.line[0], blocks.groups[0], blocks.cohorts[0])


@jit
def set_up(device: Any, blocks: Any) -> None:
    """Nothing runs."""
    sm_groups.set_up(device, blocks)
    device.updated = 0.0
    device.end_at = np.inf
    device.end_index = -1
    device.running = device.all_of_it = 0
