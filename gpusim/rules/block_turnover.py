"""Block turnover: a GPU ends blocks and starts the next ones of their kernel at a limited rate.

A kernel of more blocks than the GPU holds at once holds up the next kernel start for

    turnover_ns x blocks

or for its time alone, if that is less (`gpusim.rules.launch`): blocks of kernels start in sequence
(`gpusim.rules.dispatch`, rule 1), and until then some of its own wait. The blocks of a smaller kernel all start at
once. In a partition of some SMs nothing is held up, as that was not measured.

Source: chains of gathers and of additions of many small blocks, two to eight side by side, take turns at this rate
(research/2026-11-30-block-turnover.md). Constant: `GraphCosts.turnover_ns`, also for launches from the host.
"""

from __future__ import annotations

from gpusim.formats.hardware import GraphCosts


def time_ns(graph: GraphCosts, blocks: float, blocks_per_sm: float, sms: float, partition_sms: float) -> float:
    """Return the time for which a kernel's blocks hold up the next start, in ns, however long it takes.

    An SM holds `blocks_per_sm` of them; `partition_sms` is the size of the kernel's partition, 0 for the whole GPU.
    """
    apart = 0 < partition_sms < sms
    return graph.turnover_ns * blocks if blocks > blocks_per_sm * sms and not apart else 0.0
