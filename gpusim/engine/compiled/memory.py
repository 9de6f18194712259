"""Peak memory of simulated plans of an op graph, compiled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpusim.engine.compiled.arrays import Indices, Plans
from gpusim.engine.compiled.jit import entry
from gpusim.engine.compiled.op_graph import OpArrays


@entry
def find_peaks(graph: OpArrays, plans: Plans, left: Indices, peaks: npt.NDArray[np.int64]) -> None:
    """Fill `peaks` with `Timeline.peak_bytes` of the first plans; `left` has room for a count per buffer."""
    for plan in range(len(peaks)):
        for buffer in range(len(left)):
            left[buffer] = 0
        for index in range(plans.tasks[plan]):  # number of tasks per buffer
            row = plans.nodes[plan, index].row
            for place in range(graph.first_buffer[row], graph.first_buffer[row + 1]):
                left[graph.buffer_of[place]] += 1
        level = peak = graph.kept_bytes
        time_ns = 0.0
        for event in plans.log[plan, : 2 * plans.tasks[plan]]:
            # Starts and ends in simulated order. Only the level after all events of a (rounded) time counts.
            node = plans.nodes[plan, event if event >= 0 else ~event]
            at = np.rint(node.start_ns if event >= 0 else node.end_ns)
            if at != time_ns:
                peak = max(peak, level)
                time_ns = at
            for place in range(graph.first_buffer[node.row], graph.first_buffer[node.row + 1]):
                buffer = graph.buffer_of[place]
                if event >= 0:
                    if left[buffer] > 0:
                        level += graph.buffer_bytes[buffer]
                        left[buffer] = -left[buffer]  # allocated
                else:
                    left[buffer] += 1
                    if left[buffer] == 0:
                        level -= graph.buffer_bytes[buffer]
        peaks[plan] = max(peak, level)
