"""The event loop, compiled: `gpusim.engine.reference` without recordings.

Plans without copies on one GPU, in graph mode, have a loop of their own, which has less to look at: see `one_gpu`.

What happens at one time happens in the reference's order: first ends, then what becomes ready, then starts; among
equals in the order in which they were scheduled. Each device has the time of its next end, with the number of that
event; everything else is in a heap. Of the times at which a front end is to be looked at, only the first one counts
where there is one device; several devices take turns in the order in which all those times were scheduled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusim.engine import budget
from gpusim.engine.compiled import copies, heap, placement, pool, rates, sm_groups, stream_mode
from gpusim.engine.compiled.arrays import ON_DEVICE, Blocks, Plans, Records, Room
from gpusim.engine.compiled.heap import not_before
from gpusim.engine.compiled.jit import END_OF_TIME, entry, int64, jit
from gpusim.engine.compiled.link import lost_ns
from gpusim.engine.compiled.one_gpu import simulate_one_gpu
from gpusim.engine.compiled.stream_mode import READY, SERVES
from gpusim.plan.tasks import MAX_TIME_NS

#: What happens to a device: a task on it ends, a copy joins a line, the front end starts a task.
ENDS, COPIES, STARTS = 0, 1, 2
#: Added to the numbers of events that come after all others of their time.
LATE = 1 << 62


def simulate_plans(
    hardware: Records,
    tasks: Records,
    plans: Plans,
    launches: Records | None,
    room: Room,
    first: int,
    last: int,
    runs: int = 1,
) -> None:
    """Simulate plans `first` to `last` - 1: sets `ready_ns`, `start_ns`, `end_ns`, `ended`, `makespan_ns` and `log`.

    `launches` is that of the plans in stream mode, else None; `runs` is how often a plan runs each of `tasks`.
    Raises `PlanError` for a plan that takes too long or too many events (`gpusim.engine.budget`).
    """
    rows = np.empty(len(tasks) if room.blocks is not None else 0, sm_groups.PLACED)
    one_gpu = launches is None and len(room.devices) == 1 and bool((tasks["kind"] == ON_DEVICE).all())
    running, blocks, events = room.running, room.blocks, budget.EVENTS * runs
    if one_gpu:
        simulate_one_gpu(hardware, tasks, rows, plans, running, blocks, room.devices, room.heaps, first, last, events)
    else:
        simulate(hardware, tasks, rows, plans, launches, running, blocks, room, first, last, events)
    if last > first:
        if plans.ended[first:last].min() < 0:
            plan = first + int(plans.ended[first:last].argmin())
            work = len(tasks) + 1 + (0 if blocks is None else int(rows["left"].sum()))
            raise budget.too_many_events(events * work, ~int(plans.ended[plan]), float(plans.makespan_ns[plan]))
        longest_ns = int(plans.makespan_ns[first:last].max())
        if longest_ns > MAX_TIME_NS:
            raise budget.too_long(longest_ns)


@entry
def simulate(
    hardware: Records,
    tasks: Records,
    rows: Records,
    plans: Plans,
    stream_launches: Records | None,
    running: Records | None,
    blocks: Blocks | None,
    room: Room,
    first: int,
    last: int,
    events_each: int,
) -> None:
    """`simulate_plans`; what can be None is an argument of its own, so that what None does not need is not compiled."""
    hw = hardware[0]
    devices, engines, heaps = room.devices, room.engines, room.heaps
    front_end_ns = hw.graph_front_end_ns if stream_launches is None else 0.0
    grids = int64(hw.limits_resident_grids)
    several = len(devices) > 1
    always, never = np.inf, -np.inf
    work = int64(len(tasks) + 1)
    if blocks is not None:
        for number in range(len(devices)):
            rates.forget_loads(devices[number])
        for number in range(len(tasks)):
            placement.prepare(hw, rows[number], tasks[number])
            work += rows[number].left
    for plan in range(first, last):
        count = plans.tasks[plan]
        nodes, deps, succs, log = plans.nodes[plan, :count], plans.deps[plan], plans.succs[plan], plans.log[plan]
        set_up(nodes, devices, engines, room.grids)
        if blocks is not None:
            for number in range(len(devices)):
                sm_groups.set_up(devices[number], on_device(blocks, number))
                devices[number].events_left = events_each * work
        events_left, index = events_each * work, int64(0)
        pending = seq = ended = logged = int64(0)
        events = len(nodes)  # where their heap begins, behind those of ready tasks
        if stream_launches is None:
            for index in range(len(nodes)):
                if nodes[index].waiting == 0:
                    heap.push(heaps, events, pending, -1.0, seq, index << 3 | READY)  # -1: before all that happens at 0
                    pending += 1
                    seq += 1
        else:
            launches = stream_launches[plan, :count]
            pending, seq = stream_mode.set_up(hw, nodes, launches, room.queues, heaps, events)
        while True:
            device = devices[first_end(devices)]
            now = heaps[events].time if pending > 0 else np.inf
            start_at = np.inf if several else device.serve_at
            seq += 1
            events_left -= 1
            if events_left < 0:
                break
            if device.end_at <= now and device.end_at <= start_at:
                now, index, what = device.end_at, device.end_index, ENDS
                if index < 0:
                    break
            elif now <= start_at:
                event = heaps[events].index
                heap.pop(heaps, events, pending)
                pending -= 1
                index, what = event >> 3, COPIES
                if event & 7 == SERVES:
                    device, what = devices[index], STARTS
                else:
                    if stream_launches is not None:
                        pending, seq = stream_mode.happen(
                            hw,
                            nodes,
                            launches,
                            deps,
                            room.queues,
                            room.waiters,
                            heaps,
                            events,
                            pending,
                            seq,
                            event,
                            now,
                        )
                        if event & 7 != READY:
                            continue
                    now = max(0.0, now)
                    node = nodes[index]
                    node.ready_ns = now
                    device = devices[node.device]
                    if tasks[node.row].kind == ON_DEVICE:
                        at_once = (  # nothing else happens before the front end would be looked at
                            not several
                            and device.ready == 0
                            and now >= device.front_end_free
                            and device.running < grids
                            and min(start_at, device.end_at) > now
                            and (pending == 0 or heaps[events].time > now)
                        )
                        heap.push(heaps, device.first_ready, device.ready, now, -node.priority, index)
                        device.ready += 1
                        if at_once:
                            what = STARTS
                        else:
                            pending = look_again(heaps, events, pending, several, device, node.device, now, seq)
                            continue
            else:
                now, what = start_at, STARTS
                device.serve_at = np.inf
            if what == STARTS:
                if device.ready == 0 or now < device.front_end_free or device.running >= grids:
                    continue
                index = heaps[device.first_ready].index
                heap.pop(heaps, device.first_ready, device.ready)
                device.ready -= 1
            # The device goes from one set of running tasks to the next.
            all_of_it = True
            elapsed_ns = now - device.updated
            device.updated = now
            device.clock_ns += elapsed_ns
            if device.copying > 0:
                copies.advance(engines, nodes[index].device, elapsed_ns)
            node = nodes[index]
            if what == STARTS:
                node.start_ns = now
                device.starts += 1
                node.started = device.starts
                log[logged] = index
                logged += 1
                if running is not None:
                    pool.start(hw, running, device.first_running + device.running, index, tasks[node.row])
                    device.running += 1
                if blocks is not None:
                    placement.start(device, on_device(blocks, node.device), index, rows[node.row])
                device.front_end_free = now + front_end_ns
            elif what == COPIES:
                copies.enqueue(nodes, engines[2 * node.device + tasks[node.row].kind], index)
                device.copying += 1
            else:
                kind = tasks[node.row].kind
                if kind != ON_DEVICE:
                    engines[2 * node.device + kind].active = -1
                    device.copying -= 1
                elif running is not None:
                    pool.finish(running, device.first_running, device.running, index)
                    device.running -= 1
                elif blocks is not None:
                    if device.all_of_it == 0:
                        all_of_it = placement.go_on(hw, device, on_device(blocks, node.device), int64(1), never)
                    device.all_of_it = 0
                if not all_of_it:
                    what = COPIES  # a part of its blocks: nothing else follows
                else:
                    node.end_ns = now
                    log[logged] = ~index
                    logged += 1
                    ended += 1
                if not all_of_it:
                    pass
                elif stream_launches is None:
                    lost = lost_ns(hw, device.starts - node.started) if kind == ON_DEVICE else 0.0
                    for place in range(node.first_succ, node.first_succ + node.n_succs):
                        after = int64(succs[place])
                        nodes[after].waiting -= 1
                        if nodes[after].waiting == 0:
                            turn_ns = hw.graph_fork_ns * max(0, min(place - node.first_succ, node.n_succs - 2))
                            ready_at = now + (nodes[after].gap_ns + lost + turn_ns)
                            heap.push(heaps, events, pending, ready_at, seq, after << 3 | READY)
                            pending += 1
                            seq += 1
                else:
                    heap.push(heaps, events, pending, now, seq, index << 3 | stream_mode.ENDED)
                    pending += 1
            if device.ready > 0 and what != COPIES:
                pending = look_again(heaps, events, pending, several, device, node.device, now, seq)
            delay_ns, index = np.inf, int64(-1)
            if running is not None:
                delay_ns, index = pool.update(hw, running, device.first_running, device.running, elapsed_ns)
            if blocks is not None:
                if all_of_it:
                    until_ns = never
                    if not several and device.copying == 0:  # nothing else happens before
                        until_ns = min(heaps[events].time if pending > 0 else always, device.serve_at)
                    ended_as_well = placement.go_on(hw, device, on_device(blocks, node.device), int64(0), until_ns)
                    device.all_of_it = 1 if ended_as_well else 0
                if device.end_place >= 0:
                    delay_ns, index = max(0.0, device.end_ns - device.clock_ns), int64(device.end_index)
            if device.copying > 0:
                copy_ns, copy, logged = copies.update(hw, tasks, nodes, engines, node.device, now, log, logged)
                if index < 0 or copy_ns < delay_ns or (copy_ns == delay_ns and copy < index):
                    delay_ns, index = copy_ns, copy
            device.end_seq = seq
            if blocks is None or device.copying > 0:
                device.end_index = index
                device.end_at = not_before(now, now + delay_ns) if index >= 0 else np.inf
        plans.ended[plan] = ended if events_left >= 0 else ~index
        end_ns = 0.0
        for index in range(len(nodes)):
            end_ns = max(end_ns, nodes[index].end_ns)
        plans.makespan_ns[plan] = int64(np.rint(min(end_ns, END_OF_TIME)))


@jit
def on_device(blocks: Any, number: int) -> Any:
    """What is on the SMs of one device."""
    return Blocks(blocks.kernels[number], blocks.line[number], blocks.groups[number], blocks.cohorts[number])


@jit
def look_again(
    heaps: Any, events: int, pending: int, several: bool, device: Any, number: int, now: float, seq: int
) -> int:
    """Have the front end of a device looked at as soon as it is free; number of events."""
    at = not_before(now, max(now, device.front_end_free))
    if several:
        heap.push(heaps, events, pending, at, seq + LATE, int64(number) << 3 | SERVES)
        pending += 1
    else:
        device.serve_at = min(device.serve_at, at)
    return pending


@jit
def set_up(nodes: Any, devices: Any, engines: Any, grids: int) -> None:
    """Bring nodes, devices and copy engines to the start of a run; each may run `grids` kernels at a time."""
    for number in range(len(devices)):
        device = devices[number]
        device.front_end_free = device.updated = 0.0
        device.end_at = device.serve_at = np.inf
        device.end_seq = 0
        device.end_index = -1
        device.running = device.starts = device.ready = device.copying = device.all_of_it = 0
        device.first_running = number * grids
        device.first_ready = 0
    for number in range(len(engines)):
        engine = engines[number]
        engine.active = engine.head = engine.tail = -1
        engine.remaining_bytes = engine.rate = 0.0
    for index in range(len(nodes)):
        node = nodes[index]
        node.ready_ns = node.start_ns = node.end_ns = -1.0
        node.waiting = node.n_deps + (1 if node.previous >= 0 else 0)
        devices[node.device].first_ready += 1  # here: how many tasks it has
    first = 0
    for number in range(len(devices)):
        device = devices[number]
        first += device.first_ready
        device.first_ready = first - device.first_ready


@jit
def first_end(devices: Any) -> int:
    """The device whose next end comes first."""
    ending = 0
    for number in range(1, len(devices)):
        device, first = devices[number], devices[ending]
        if device.end_at < first.end_at or (device.end_at == first.end_at and device.end_seq < first.end_seq):
            ending = number
    return ending
