"""Block turnover: a GPU ends blocks and starts the next ones of their kernel at a limited rate.

A kernel of more blocks than the GPU holds at once starts its last one after

    turnover_ns x blocks

or at its end, if that comes first (`gpusim.rules.launch`). Until then the front end starts no other kernel, as blocks of kernels start in
sequence (`gpusim.rules.dispatch`, rule 1). The blocks of a smaller kernel start within 0.3 us, at once for the engines.

Source: chains of gathers, fills and additions of many small blocks, two to eight side by side, take turns at this rate;
smaller kernels do not (research/2026-11-30-block-turnover.md). Constant: `GraphCosts.turnover_ns`, also for launches
from the host.
"""

from __future__ import annotations

from gpusim.formats.hardware import GraphCosts


def time_ns(graph: GraphCosts, blocks: int, blocks_per_sm: int, sms: int) -> float:
    """Return the time until the last block of a kernel starts, in ns; `blocks_per_sm` is the number that an SM holds.

    It has no bound: the kernel may end sooner.
    """
    return graph.turnover_ns * blocks if blocks > blocks_per_sm * sms else 0.0
