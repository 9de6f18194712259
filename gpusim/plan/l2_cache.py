"""Detection of steps that may lose the L2 cache on several streams.

The kernels of a trace were timed on one stream, in repeated replays. If all memory of the step fits the cache, its
parameters stay there between replays. On several streams the step uses more memory, since the allocator serves each
stream from its own blocks: the memory may no longer fit, and kernels that read parameters then wait for DRAM.
`gpusim.plan.cache_misses` predicts that on GPUs with a measured cache; this module only tells where to expect it.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpusim.formats.hardware import Memory
from gpusim.formats.trace import Trace
from gpusim.rules.l2_cache import may_lose
from gpusim.trace.dependencies import reads_writes_storages


@dataclass(frozen=True, slots=True)
class Touched:
    """Memory that one replay of a step reads or writes, in bytes."""

    lasting_bytes: int
    """Bytes read that exist before the step: parameters, states, inputs."""
    one_stream_bytes: int
    """All bytes, with memory reused as on one stream."""
    at_most_bytes: int
    """All bytes, without reuse of memory."""

    def may_lose_cache(self, memory: Memory) -> bool:
        """Return True if the step fits the cache on one stream and may not on several."""
        return may_lose(memory, self.one_stream_bytes, self.at_most_bytes)


def touched(trace: Trace) -> Touched:
    """Return the memory that a replay of a step touches in recorded order."""
    sizes = [storage.bytes for storage in trace.storages]
    there_before = {tensor.storage for tensor in trace.tensors if tensor.init is not None}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    lasting: set[int] = set()
    for op, (reads, writes) in enumerate(reads_writes_storages(trace)):
        lasting |= reads & there_before
        for storage in (reads | writes) - there_before:
            first.setdefault(storage, op)
            last[storage] = op
    changes = [0] * (len(trace.ops) + 1)
    for storage, op in first.items():
        changes[op] += sizes[storage]
        changes[last[storage] + 1] -= sizes[storage]
    level = peak = 0
    for change in changes:
        level += change
        peak = max(peak, level)
    lasting_bytes = sum(sizes[storage] for storage in lasting)
    return Touched(lasting_bytes, lasting_bytes + peak, lasting_bytes + sum(sizes[storage] for storage in first))
