"""The event loop, compiled: `gpusim.engine.reference` without series over time.

Events at equal times follow the reference's order: ends, then arrivals, then starts; equal ones in the order in which
they were scheduled. Each device keeps the time of its next end. All other events are in a time-ordered queue, not a
heap, since few are scheduled before earlier ones. With one device, only the first scheduled check of the front end
counts; several devices take turns in the order in which their checks were scheduled.

Features that a search does not need (copies, several devices, stream mode) are in optional arguments: if these are
None, numba leaves their code out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusim.engine import budget
from gpusim.engine.compiled import copies, heap, line, placement, pool, rates, sm_groups, stream_mode
from gpusim.engine.compiled.arrays import ON_DEVICE, Blocks, Plans, Records, Room
from gpusim.engine.compiled.heap import not_before
from gpusim.engine.compiled.jit import END_OF_TIME, entry, int64, jit, uint32
from gpusim.engine.compiled.line import IN_TURN, LATE
from gpusim.engine.compiled.link import lost_ns, product_lost_ns, ready_delay_ns, switch_delay_ns, task_interval_ns
from gpusim.engine.compiled.record import (
    Recording,
    note_block_losses,
    note_copy_losses,
    note_end,
    note_pool_losses,
    note_start,
    note_wait,
)
from gpusim.engine.compiled.stream_mode import READY, SERVES
from gpusim.plan.tasks import MAX_TIME_NS

#: Event on a device: a task ends, part of its blocks ends, a copy arrives, its front end may start a task.
ENDS, PARTS, ARRIVES, STARTS = 0, 1, 2, 3


def simulate_plans(
    hardware: Records,
    tasks: Records,
    plans: Plans,
    launches: Records | None,
    room: Room,
    first: int,
    last: int,
    runs: int = 1,
    record: Recording | None = None,
) -> None:
    """Simulate plans `first` to `last` - 1: set `ready_ns`, `start_ns`, `end_ns`, `ended`, `makespan_ns` and `log`.

    `launches` belongs to the plans in stream mode, else it is None. A plan runs each of `tasks` up to `runs` times.
    `record` gets the causes of a single plan; that is rare, so no recording loop is compiled for one GPU alone.
    Raises `PlanError` for a plan that takes too long or too many events (`gpusim.engine.budget`).
    """
    rows = np.empty(len(tasks) if room.blocks is not None else 0, sm_groups.PLACED)
    one_gpu = launches is None and len(room.devices) == 1 and bool((tasks["kind"] == ON_DEVICE).all())
    if record is not None:
        record = record._replace(rows=rows, nodes=plans.nodes[first])
    more, events = None if one_gpu and record is None else room.more, budget.EVENTS * runs
    simulate(
        hardware,
        tasks,
        rows,
        plans,
        launches,
        room.running,
        room.blocks,
        more,
        room.devices,
        room.heaps,
        first,
        last,
        events,
        record,
    )
    if last > first:
        if plans.ended[first:last].min() < 0:
            plan = first + int(plans.ended[first:last].argmin())
            work = len(tasks) + 1 + (0 if room.blocks is None else int(rows["left"].sum()))
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
    more: Any,
    devices: Records,
    heaps: Records,
    first: int,
    last: int,
    events: int,
    record: Any,
) -> None:
    """`simulate_plans`; `rows` is scratch space for the placement data of each of `tasks`.

    Running kernels are in `running` or, block by block, in `blocks`. `more` is a `More`, or None if no plan has copies,
    several devices or stream mode. The budget is `events` per task and per block.
    """
    hw, device, number = hardware[0], devices[0], int64(0)
    grids = int64(hw.limits.resident_grids)
    one_device = more is None or len(devices) == 1
    work = int64(len(tasks) + 1)
    if blocks is not None:
        for device_index in range(len(devices)):
            rates.forget_loads(devices[device_index])
        for row in range(len(tasks)):
            placement.prepare(hw, rows[row], tasks[row])
            work += rows[row].left
    for plan in range(first, last):
        count = plans.tasks[plan]
        nodes, succs, log = plans.nodes[plan, :count], plans.succs[plan], plans.log[plan]
        waiting, known = heaps[:count], heaps[count:]  # ready tasks: a heap per device; other events: a queue
        head = tail = seq = logged = ended = index = int64(0)
        set_up(nodes, devices, blocks, more, events * work)
        if more is not None:
            copies.set_up(tasks, nodes, more.engines, stream_launches is None)
        if stream_launches is not None:
            launches, deps = stream_launches[plan, :count], plans.deps[plan]
            tail = stream_mode.set_up(hw, launches, more.queues, known)
        else:
            for node_index in range(count):
                if nodes[node_index].waiting == 0:  # -1: before all events at 0
                    tail = line.insert(known, head, tail, -1.0, IN_TURN, int64(node_index) << 3 | READY)
        now, events_left = 0.0, events * work
        while True:
            events_left -= 1
            if events_left < 0:
                break
            if more is not None:
                seq += 1
                number = first_end(devices)
                device = devices[number]
            known_at = known[uint32(head)].time if head < tail else np.inf
            event_kind, queued = STARTS, True
            if device.end_at <= known_at and device.end_at <= device.serve_at:
                if device.end_at == np.inf:
                    break
                now, index, event_kind = device.end_at, int64(uint32(device.end_index)), ENDS
            elif known_at <= device.serve_at:
                now, event = known_at, known[uint32(head)].index
                head += 1
                if head == tail:
                    head = tail = int64(0)
                index = event >> 3
                if stream_launches is not None and event & 7 != SERVES:
                    tail = stream_mode.happen(
                        hw, nodes, launches, deps, more.queues, more.waiters, known, head, tail, event, now, record
                    )
                    if event & 7 != READY:
                        continue
                if more is not None:
                    number = index if event & 7 == SERVES else int64(nodes[index].device)
                    device = devices[number]
                if more is None or event & 7 == READY:
                    now = max(0.0, now)
                    node = nodes[index]
                    node.ready_ns = now
                    if more is not None and tasks[node.row].kind != ON_DEVICE:
                        event_kind = ARRIVES
                    else:
                        at_once = (  # no other event precedes the check of the front end
                            one_device
                            and device.ready == 0
                            and now >= device.front_end_free
                            and device.running < grids
                            and min(device.serve_at, device.end_at) > now
                            and (head == tail or known[uint32(head)].time > now)
                        )
                        queued = not at_once
                        if queued:
                            heap.push(waiting, device.first_ready, device.ready, now, int64(0), index)
                            device.ready += 1
                            tail = look_again(known, head, tail, device, number, one_device, now)
                            continue
            else:
                now, device.serve_at = device.serve_at, np.inf
            if event_kind == STARTS and queued:
                if device.ready == 0 or now < device.front_end_free or device.running >= grids:
                    continue
                index = int64(uint32(waiting[device.first_ready].index))
                heap.pop(waiting, device.first_ready, device.ready)
                device.ready -= 1
            # The device goes from one set of running tasks to the next.
            node = nodes[index]
            elapsed_ns = now - device.updated
            if record is not None and elapsed_ns > 0.0:
                note_losses(hw, device, number, running, blocks, more, record, now)
            device.updated = now
            sm_elapsed_ns = elapsed_ns if more is None else elapsed_ns * device.sm_rate
            device.clock_ns += sm_elapsed_ns
            if more is not None and device.copying > 0:
                copies.advance(more.engines, number, elapsed_ns)
            if event_kind == STARTS:
                node.start_ns = now
                if record is not None:
                    note_start(record, number, device, index, node.ready_ns, now)
                device.starts += 1
                node.started = device.starts
                count_several(device, 1, now)
                node.several_ns = device.several_ns
                log[uint32(logged)] = index
                logged += 1
                interval_ns = task_interval_ns(hw, tasks[uint32(node.row)], stream_launches is None)
                device.front_end_free = now + interval_ns
                longer_ns = 0.0
                if more is not None:
                    longer_ns = copies.wait_ns(hw, tasks[node.row], more.engines, number)
                    if record is not None and longer_ns > 0.0:
                        note_wait(more.engines, number, record, index, now, longer_ns)
                if running is not None:
                    place = device.first_running + device.running
                    pool.start(hw, running, place, index, tasks[uint32(node.row)], longer_ns)
                    device.running += 1
                if blocks is not None:
                    placement.start(device, of_device(blocks, number), index, rows[uint32(node.row)], longer_ns)
            elif more is not None and event_kind == ARRIVES:
                copies.enqueue(nodes, more.engines[2 * number + tasks[node.row].kind], index)
                device.copying += 1
            else:
                other_starts = device.starts - node.started
                if more is not None and tasks[node.row].kind != ON_DEVICE:
                    more.engines[2 * number + tasks[node.row].kind].active = -1
                    device.copying -= 1
                    other_starts = int64(0)
                elif running is not None:
                    pool.finish(running, device.first_running, device.running, index)
                    device.running -= 1
                elif blocks is not None:
                    if device.all_of_it == 0 and not placement.go_on(
                        hw, device, of_device(blocks, number), int64(1), -np.inf, record
                    ):
                        event_kind = PARTS
                        if more is None:
                            continue
                    device.all_of_it = 0
                if event_kind == ENDS:
                    if record is not None:
                        kind, was_full = int64(tasks[node.row].kind), device.running + 1 >= grids
                        note_end(record, number, index, kind, now, was_full)
                    node.end_ns = now
                    if more is None or tasks[node.row].kind == ON_DEVICE:
                        count_several(device, -1, now)
                        node.several_ns = device.several_ns - node.several_ns
                    log[uint32(logged)] = ~index
                    logged += 1
                    ended += 1
                    if stream_launches is not None:
                        tail = line.insert(known, head, tail, now, IN_TURN, index << 3 | stream_mode.ENDED)
                    else:
                        lost = lost_ns(hw.graph, other_starts)
                        if record is not None:
                            record.tasks[index].interference_ns = lost
                        task = tasks[uint32(node.row)]
                        if task.product == 1:
                            more_ns = product_lost_ns(hw.graph, task.dur_ns, node.several_ns, now - node.start_ns)
                            if record is not None:
                                record.tasks[index].product_ns = more_ns
                            lost += more_ns
                        first_succ, n_succs = int64(uint32(node.first_succ)), int64(node.n_succs)
                        for turn in range(n_succs):
                            after = int64(uint32(succs[first_succ + turn]))
                            nodes[after].waiting -= 1
                            if nodes[after].waiting == 0:
                                if record is not None:
                                    record.tasks[after].last = index
                                wait_ns = ready_delay_ns(hw.graph, nodes[after].gap_ns, lost, turn, n_succs)
                                if more is not None:
                                    wait_ns += switch_delay_ns(hw, tasks, nodes, plans.deps[plan], after, index)
                                tail = line.insert(known, head, tail, now + wait_ns, IN_TURN, after << 3 | READY)
            if device.ready > 0 and event_kind in (STARTS, ENDS):
                tail = look_again(known, head, tail, device, number, one_device, now)
            if running is not None:
                delay_ns, ending = pool.update(hw, running, device.first_running, device.running, sm_elapsed_ns)
                device.end_index = ending
                device.end_at = not_before(now, now + delay_ns) if ending >= 0 else np.inf
            if blocks is not None and event_kind != PARTS:
                until_ns = -np.inf
                if more is None or (one_device and device.copying == 0):  # until the next other event
                    until_ns = min(known[uint32(head)].time if head < tail else np.inf, device.serve_at)
                all_of_it = placement.go_on(hw, device, of_device(blocks, number), int64(0), until_ns, record)
                device.all_of_it = 1 if all_of_it else 0
            if more is not None:
                device.end_seq = seq
                device.sm_rate = 1.0
                if device.copying > 0:
                    if blocks is not None:
                        delay_ns, ending = max(0.0, device.end_ns - device.clock_ns), int64(device.end_index)
                        if device.end_place < 0:
                            ending = int64(-1)
                    copy_ns, copy, logged, sm_rate = copies.update(
                        hw, tasks, nodes, more.engines, number, device.running > 0, now, log, logged, record
                    )
                    device.sm_rate = sm_rate
                    delay_ns /= sm_rate
                    if ending < 0 or copy_ns < delay_ns or (copy_ns == delay_ns and copy < ending):
                        device.end_index = copy
                        device.end_at = not_before(now, now + copy_ns)
                    else:
                        device.end_index = ending
                        device.end_at = not_before(now, now + delay_ns)
        plans.ended[plan] = ended if events_left >= 0 else ~index
        plans.makespan_ns[plan] = int64(np.rint(min(now, END_OF_TIME)))


@jit
def count_several(device: Any, change: int, now: float) -> None:
    """Count the time with several running kernels up to now, when one starts (1) or ends (-1)."""
    if device.unended > 1:
        device.several_ns += now - device.several_at
    device.several_at = now
    device.unended += change


@jit
def of_device(blocks: Any, number: int) -> Any:
    """Return the blocks on the SMs of one device."""
    return Blocks(blocks.kernels[number], blocks.line[number], blocks.groups[number], blocks.cohorts[number])


@jit
def note_losses(
    hw: Any,
    device: Any,
    number: int,
    running: Any,
    blocks: Any,
    more: Any,
    record: Any,
    until: float,
) -> None:
    """Record the losses of the tasks on a device since its last update."""
    sm_rate = 1.0 if more is None else float(device.sm_rate)
    if blocks is not None:
        note_block_losses(hw, device, of_device(blocks, number), record, until, sm_rate)
    if running is not None:
        note_pool_losses(hw, device, running, record, until, sm_rate)
    if more is not None and device.copying > 0:
        if blocks is not None:
            note_copy_losses(hw, device, of_device(blocks, number), None, more.engines, number, record, until)
        if running is not None:
            note_copy_losses(hw, device, None, running, more.engines, number, record, until)


@jit
def look_again(known: Any, head: int, tail: int, device: Any, number: int, one_device: bool, now: float) -> int:
    """Schedule a check of a device's front end once it is free, and return the new tail of the event queue."""
    at = not_before(now, max(now, device.front_end_free))
    if one_device:
        device.serve_at = min(device.serve_at, at)
        return tail
    return line.insert(known, head, tail, at, LATE, number << 3 | SERVES)


@jit
def set_up(nodes: Any, devices: Any, blocks: Any, more: Any, events: int) -> None:
    """Reset nodes and devices for a run."""
    for number in range(len(devices)):
        device = devices[number]
        device.front_end_free = device.updated = device.several_ns = device.several_at = 0.0
        device.end_at = device.serve_at = np.inf
        device.end_seq = 0
        device.end_index = -1
        device.sm_rate = 1.0
        device.running = device.starts = device.ready = device.copying = device.all_of_it = device.unended = 0
        device.first_running = device.first_ready = 0
        device.events_left = events
        if blocks is not None:
            sm_groups.set_up(device, of_device(blocks, number))
    for index in range(len(nodes)):
        node = nodes[index]
        node.ready_ns = node.start_ns = node.end_ns = -1.0
        node.waiting = node.n_deps + (1 if node.previous >= 0 else 0)
    if more is not None:
        for index in range(len(nodes)):
            devices[nodes[index].device].first_ready += 1  # here: number of its tasks
        first = 0
        for number in range(len(devices)):
            device = devices[number]
            first += device.first_ready
            device.first_ready = first - device.first_ready
            device.first_running = number * more.grids


@jit
def first_end(devices: Any) -> int:
    """Return the device with the earliest next end."""
    ending = 0
    for number in range(1, len(devices)):
        device, first = devices[number], devices[ending]
        if device.end_at < first.end_at or (device.end_at == first.end_at and device.end_seq < first.end_seq):
            ending = number
    return ending
