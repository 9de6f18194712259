"""Stream mode, compiled: the host launches in order into hardware queues, whose heads block what is behind them.

`_Host` of the reference is a few processes; here each of their steps is an event, numbered when it is scheduled, so
that what happens at one time keeps their order.
"""

from __future__ import annotations

from typing import Any

from gpusim.engine.compiled import heap
from gpusim.engine.compiled.jit import int64, jit

#: What an event is for, in the lowest three bits of its index: a task is ready; those that wait for its end learn of
#: it; the head of a queue has nothing to wait for any more; the host has launched; a front end is to be looked at.
READY, ENDED, RESUMED, LAUNCHED, SERVES = 0, 1, 2, 3, 4


@jit
def set_up(hw: Any, nodes: Any, launches: Any, queues: Any, heaps: Any, events: int) -> tuple[int, int]:
    """Bring queues to the start of a run and let the host begin; number of events, and the next event's number."""
    for number in range(len(queues)):
        queue = queues[number]
        queue.head = queue.tail = -1
        queue.busy = 0
    for index in range(len(launches)):
        launch = launches[index]
        launch.first_waiter = launch.last_waiter = -1
    if len(nodes) == 0:
        return 0, 0
    none, first = int64(0), int64(LAUNCHED)
    heap.push(heaps, events, none, host_ns(hw, launches[0]), none, first)
    return 1, 1


@jit
def host_ns(hw: Any, launch: Any) -> float:
    """Host time of one launch and of the events it waits for."""
    call_ns = launch.host_ns if launch.host_ns > 0.0 else hw.stream_launch_ns
    return float(call_ns + hw.stream_event_host_ns * launch.events)


@jit
def happen(
    hw: Any,
    nodes: Any,
    launches: Any,
    deps: Any,
    queues: Any,
    waiters: Any,
    heaps: Any,
    events: int,
    pending: int,
    seq: int,
    event: int,
    now: float,
) -> tuple[int, int]:
    """One step of the host or of a queue; number of events, and the next event's number."""
    index, what = event >> 3, event & 7
    launch = launches[index]
    queue = queues[launch.queue]
    if what == ENDED:
        waiter = launch.first_waiter
        while waiter >= 0:
            after = waiters[waiter].node
            nodes[after].waiting -= 1
            if nodes[after].waiting == 0:
                heap.push(heaps, events, pending, now, seq, after << 3 | RESUMED)
                pending += 1
                seq += 1
            waiter = waiters[waiter].next
    elif what == LAUNCHED:
        launch.launched_ns = now
        launch.behind = -1
        if index + 1 < len(nodes):
            at = now + host_ns(hw, launches[index + 1])
            heap.push(heaps, events, pending, at, seq, (index + 1) << 3 | LAUNCHED)
            pending += 1
            seq += 1
        if queue.head < 0:
            queue.head = index
        else:
            launches[queue.tail].behind = index
        queue.tail = index
    resumed = index if what == RESUMED else -1
    if what == READY or (what == LAUNCHED and queue.busy == 0):  # the queue turns to its next entry
        head = int64(queue.head)
        queue.busy = 1 if head >= 0 else 0
        if head >= 0:
            queue.head = launches[head].behind
            if not must_wait(nodes, launches, deps, waiters, head):
                resumed = head
    if resumed >= 0:
        at = start_at(hw, nodes, launches, deps, resumed)
        heap.push(heaps, events, pending, now + max(0.0, at - now), seq, resumed << 3 | READY)
        pending += 1
        seq += 1
    return pending, seq


@jit
def must_wait(nodes: Any, launches: Any, deps: Any, waiters: Any, index: int) -> bool:
    """Whether what a task needs has yet to end; if so, it is put down with each that has not ended."""
    node = nodes[index]
    found = node.previous >= 0 and nodes[node.previous].end_ns < 0.0
    for place in range(node.first_dep, node.first_dep + node.n_deps):
        found = found or nodes[deps[place]].end_ns < 0.0
    if not found:
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
def start_at(hw: Any, nodes: Any, launches: Any, deps: Any, index: int) -> float:
    """When a task may start whose predecessors have ended: after its launch, and after them."""
    node = nodes[index]
    at = launches[index].launched_ns + hw.stream_start_ns
    for place in range(node.first_dep, node.first_dep + node.n_deps):
        at = max(at, nodes[deps[place]].end_ns + hw.stream_event_ns)
    if node.previous >= 0:
        at = max(at, nodes[node.previous].end_ns + hw.stream_chain_ns)
    return float(at)
