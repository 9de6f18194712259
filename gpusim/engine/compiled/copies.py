"""Copy engines, compiled: one per direction of a GPU, first come first served.

`engines[2 * device]` copies h2d, the next one d2h.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusim.engine.compiled.jit import int64, jit, rule
from gpusim.engine.compiled.record import note_copy_start
from gpusim.rules import copies as rules

work_bytes, bytes_per_ns = rule(rules.work_bytes), rule(rules.bytes_per_ns)
sm_rate, memset_wait_ns = rule(rules.sm_rate), rule(rules.memset_wait_ns)

#: A copy engine: its active task and a linked list of waiting ones, where -1 stands for none, and the numbers of copies
#: of a CUDA graph that have yet to start, and of copies that have started.
COPY_ENGINE = np.dtype(
    [
        ("active", "i8"),
        ("head", "i8"),
        ("tail", "i8"),
        ("pending", "i8"),
        ("started", "i8"),
        ("remaining_bytes", "f8"),
        ("rate", "f8"),
    ],
    align=True,
)


@jit
def set_up(tasks: Any, nodes: Any, engines: Any, in_graph: bool) -> None:
    """Reset the copy engines for a run."""
    for place in range(len(engines)):
        engine = engines[place]
        engine.active = engine.head = engine.tail = -1
        engine.pending = engine.started = 0
        engine.remaining_bytes = engine.rate = 0.0
    if in_graph:
        for index in range(len(nodes)):
            node = nodes[index]
            if tasks[node.row].kind >= 0:  # H2D or D2H
                engines[2 * node.device + tasks[node.row].kind].pending += 1


@jit
def enqueue(nodes: Any, engine: Any, index: int) -> None:
    """Append a copy to the waiting list of its engine."""
    nodes[index].next_copy = -1
    if engine.head < 0:
        engine.head = index
    else:
        nodes[engine.tail].next_copy = index
    engine.tail = index


@jit
def advance(engines: Any, device: int, elapsed_ns: float) -> None:
    """Advance the copies of a device at their current rates."""
    for place in range(2 * device, 2 * device + 2):
        engine = engines[place]
        engine.remaining_bytes -= elapsed_ns * engine.rate


@jit
def wait_ns(hw: Any, task: Any, engines: Any, device: int) -> float:
    """Return how much longer a starting task takes because of active and pending copies, in ns."""
    if task.on_copy_engine == 0.0:
        return 0.0
    h2d, d2h = engines[2 * device], engines[2 * device + 1]
    started, pending = h2d.started + d2h.started, h2d.pending + d2h.pending
    return float(memset_wait_ns(hw.copies, d2h.active >= 0, h2d.active >= 0, started, pending))


@jit
def update(
    hw: Any,
    tasks: Any,
    nodes: Any,
    engines: Any,
    device: int,
    kernels: bool,
    now: float,
    log: Any,
    logged: int,
    record: Any,
) -> tuple[float, int, int, float]:
    """Start the next copy on each free engine and set the rates; `kernels` is True while kernels run.

    Return the time to the next end of a copy, that copy, the new length of `log`, and the rate of kernels.

    Both directions share the link (`_Device._update_copies` and `_next_end` of the reference).
    """
    h2d, d2h = engines[2 * device], engines[2 * device + 1]
    for place in range(2 * device, 2 * device + 2):
        engine = engines[place]
        if engine.active < 0 and engine.head >= 0:
            engine.active = engine.head
            engine.pending -= 1
            engine.started += 1
            node = nodes[engine.active]
            engine.head = node.next_copy
            node.start_ns = now
            if record is not None:
                note_copy_start(record, device, place == 2 * device, int64(engine.active), node.ready_ns, now)
            log[logged] = engine.active
            logged += 1
            engine.remaining_bytes = work_bytes(hw.copies, tasks[node.row].copy_bytes, place == 2 * device)
    both = h2d.active >= 0 and d2h.active >= 0
    h2d.rate = bytes_per_ns(hw.copies, True, both, kernels) if h2d.active >= 0 else 0.0
    d2h.rate = bytes_per_ns(hw.copies, False, both, kernels) if d2h.active >= 0 else 0.0
    best, index = np.inf, -1
    for place in range(2 * device, 2 * device + 2):
        engine = engines[place]
        if engine.active >= 0:
            time = max(0.0, engine.remaining_bytes / engine.rate)
            if index < 0 or time < best or (time == best and engine.active < index):
                best, index = time, engine.active
    working = (1 if h2d.active >= 0 else 0) + (1 if d2h.active >= 0 else 0)
    return best, index, logged, sm_rate(hw.copies, working)
