"""Copy engines, compiled: one for each direction of a GPU, first come first served.

`engines[2 * device]` is the one for h2d, the one after it that for d2h.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusim.engine.compiled.jit import jit

#: One engine: the task it works on, and the line behind it. -1 stands for none.
COPY_ENGINE = np.dtype(
    [("active", "i8"), ("head", "i8"), ("tail", "i8"), ("remaining_bytes", "f8"), ("rate", "f8")], align=True
)


@jit
def enqueue(nodes: Any, engine: Any, index: int) -> None:
    """Put a copy at the end of its engine's line."""
    nodes[index].next_copy = -1
    if engine.head < 0:
        engine.head = index
    else:
        nodes[engine.tail].next_copy = index
    engine.tail = index


@jit
def advance(engines: Any, device: int, elapsed_ns: float) -> None:
    """Let time pass at the current rates."""
    for place in range(2 * device, 2 * device + 2):
        engine = engines[place]
        engine.remaining_bytes -= elapsed_ns * engine.rate


@jit
def update(
    hw: Any, tasks: Any, nodes: Any, engines: Any, device: int, now: float, log: Any, logged: int
) -> tuple[float, int, int]:
    """Give each free engine its next copy and share the link; time until the next copy ends, which, length of `log`.

    Two directions at once share the link (`_Device._update_copies` and `_next_copy_end` of the reference).
    """
    h2d, d2h = engines[2 * device], engines[2 * device + 1]
    for place in range(2 * device, 2 * device + 2):
        engine = engines[place]
        if engine.active < 0 and engine.head >= 0:
            engine.active = engine.head
            node = nodes[engine.active]
            engine.head = node.next_copy
            node.start_ns = now
            log[logged] = engine.active
            logged += 1
            full = hw.copies_h2d_bytes_per_ns if place == 2 * device else hw.copies_d2h_bytes_per_ns
            engine.remaining_bytes = tasks[node.row].copy_bytes + hw.copies_latency_ns * full
    shared = 1.0
    if h2d.active >= 0 and d2h.active >= 0:
        shared = min(1.0, hw.copies_both_bytes_per_ns / (hw.copies_h2d_bytes_per_ns + hw.copies_d2h_bytes_per_ns))
    h2d.rate = hw.copies_h2d_bytes_per_ns * shared if h2d.active >= 0 else 0.0
    d2h.rate = hw.copies_d2h_bytes_per_ns * shared if d2h.active >= 0 else 0.0
    best, index = np.inf, -1
    for place in range(2 * device, 2 * device + 2):
        engine = engines[place]
        if engine.active >= 0:
            time = max(0.0, engine.remaining_bytes / engine.rate)
            if index < 0 or time < best or (time == best and engine.active < index):
                best, index = time, engine.active
    return best, index, logged
