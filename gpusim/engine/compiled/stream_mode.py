"""Stream mode, compiled: the host launches in order into hardware queues, whose heads block later entries.

`_Host` of the reference consists of a few processes. Here each of their steps is an event in the event queue, which
keeps the order of events at equal times.
"""

from __future__ import annotations

from typing import Any

from gpusim.engine.compiled import line
from gpusim.engine.compiled.jit import int64, jit, rule
from gpusim.engine.compiled.line import IN_TURN
from gpusim.rules import queues as rules

host_launch_ns, launched_start_ns = rule(rules.host_launch_ns), rule(rules.launched_start_ns)
stream_start_ns, event_start_ns = rule(rules.stream_start_ns), rule(rules.event_start_ns)

#: Kind of an event, in the lowest three bits of its index: a task is ready; waiters learn of an end; the head of a
#: queue need not wait any more; the host has launched; a front end is to be checked.
READY, ENDED, RESUMED, LAUNCHED, SERVES = 0, 1, 2, 3, 4


@jit
def set_up(hw: Any, launches: Any, queues: Any, known: Any) -> int:
    """Reset the hardware queues, schedule the first launch and return the tail of the event queue."""
    for number in range(len(queues)):
        queue = queues[number]
        queue.head = queue.tail = -1
        queue.busy = 0
    for index in range(len(launches)):
        launch = launches[index]
        launch.first_waiter = launch.last_waiter = -1
    none = int64(0)
    if len(launches) == 0:
        return none
    return line.insert(known, none, none, host_ns(hw, launches[0]), IN_TURN, int64(LAUNCHED))


@jit
def host_ns(hw: Any, launch: Any) -> float:
    """Return the host time of one launch, waits for events included, in ns."""
    return float(host_launch_ns(hw.stream, launch.host_ns, launch.events))


@jit
def happen(
    hw: Any,
    nodes: Any,
    launches: Any,
    deps: Any,
    queues: Any,
    waiters: Any,
    known: Any,
    head: int,
    tail: int,
    event: int,
    now: float,
    record: Any,
) -> int:
    """Process one event of the host or of a hardware queue and return the new tail of the event queue."""
    index, event_kind = event >> 3, event & 7
    launch = launches[index]
    queue = queues[launch.queue]
    if event_kind == ENDED:
        waiter = launch.first_waiter
        while waiter >= 0:
            after = waiters[waiter].node
            nodes[after].waiting -= 1
            if nodes[after].waiting == 0:
                tail = line.insert(known, head, tail, now, IN_TURN, int64(after) << 3 | RESUMED)
            waiter = waiters[waiter].next
    elif event_kind == LAUNCHED:
        launch.launched_ns = now
        launch.behind = -1
        if index + 1 < len(nodes):
            at = now + host_ns(hw, launches[index + 1])
            tail = line.insert(known, head, tail, at, IN_TURN, (index + 1) << 3 | LAUNCHED)
        if queue.head < 0:
            queue.head = index
        else:
            launches[queue.tail].behind = index
        queue.tail = index
    resumed = index if event_kind == RESUMED else -1
    if event_kind == READY or (event_kind == LAUNCHED and queue.busy == 0):  # the queue turns to its next entry
        entry = int64(queue.head)
        queue.busy = 1 if entry >= 0 else 0
        if entry >= 0:
            queue.head = launches[entry].behind
            if not must_wait(nodes, launches, deps, waiters, entry):
                resumed = entry
    if resumed >= 0:
        at = start_at(hw, nodes, launches, deps, resumed)
        if record is not None:
            note_last(hw, nodes, launches, deps, resumed, now, record)
        tail = line.insert(known, head, tail, now + max(0.0, at - now), IN_TURN, resumed << 3 | READY)
    return tail


@jit
def must_wait(nodes: Any, launches: Any, deps: Any, waiters: Any, index: int) -> bool:
    """Return True if a predecessor of a task has not ended, after registering the task with each such predecessor."""
    node = nodes[index]
    waits = node.previous >= 0 and nodes[node.previous].end_ns < 0.0
    for place in range(node.first_dep, node.first_dep + node.n_deps):
        waits = waits or nodes[deps[place]].end_ns < 0.0
    if not waits:
        return False
    node.waiting = 0
    for number in range(node.n_deps + 1):
        before = int64(deps[node.first_dep + number] if number < node.n_deps else node.previous)
        if before < 0 or nodes[before].end_ns >= 0.0:
            continue
        node.waiting += 1
        place = node.first_dep + index + number  # each task has room for its dependencies and one more
        waiters[place].node = index
        waiters[place].next = -1
        if launches[before].first_waiter < 0:
            launches[before].first_waiter = place
        else:
            waiters[launches[before].last_waiter].next = place
        launches[before].last_waiter = place
    return True


@jit
def note_last(hw: Any, nodes: Any, launches: Any, deps: Any, index: int, now: float, record: Any) -> None:
    """Record the predecessor that determines the start of a task; -1 if its launch or its queue does."""
    node = nodes[index]
    last, last_ns = int64(-1), max(now, launched_start_ns(hw.stream, launches[index].launched_ns))
    for place in range(node.first_dep, node.first_dep + node.n_deps):
        may_start_ns = event_start_ns(hw.stream, nodes[deps[place]].end_ns)
        earlier = last >= 0 and may_start_ns == last_ns and deps[place] > last
        if may_start_ns >= last_ns and not earlier:
            last, last_ns = int64(deps[place]), may_start_ns
    if node.previous >= 0 and stream_start_ns(hw.stream, nodes[node.previous].end_ns) >= last_ns:
        last = int64(node.previous)
    record.tasks[index].last = last


@jit
def start_at(hw: Any, nodes: Any, launches: Any, deps: Any, index: int) -> float:
    """Return the earliest start of a task after its launch and its predecessors, which have ended."""
    node = nodes[index]
    at = launched_start_ns(hw.stream, launches[index].launched_ns)
    for place in range(node.first_dep, node.first_dep + node.n_deps):
        at = max(at, event_start_ns(hw.stream, nodes[deps[place]].end_ns))
    if node.previous >= 0:
        at = max(at, stream_start_ns(hw.stream, nodes[node.previous].end_ns))
    return float(at)
