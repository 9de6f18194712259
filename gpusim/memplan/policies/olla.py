"""OLLA: the order of ops and the addresses of tensors, and nothing else.

Source: Steiner et al., "OLLA: Optimizing the Lifetime and Location of Arrays to Reduce the Memory Usage of Neural
Networks" (2022), and its released code. The rules:

1. Among the orders that the dependencies allow, the one of least peak memory.
2. Tensors at addresses such that the arena is no larger than the peak.

Filled in: OLLA solves rule 1 as an integer program; here three orders are compared by the allocator's simulation and
the best is taken: as recorded, each convolution's gradient of its weights before that of its input, and a greedy one,
in which of all ops that could be next the one goes first that leaves least memory in use. Rule 2 is PyTorch's caching
allocator, whose fragmentation shows as what is reserved beyond the peak.
"""

from __future__ import annotations

import heapq

from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.layrub import weights_first
from gpusim.memplan.storages import Storages
from gpusim.trace.dependencies import dependencies


def olla(setting: Setting) -> MemoryPlan:
    """Return the order of least peak among three."""
    orders = ((), weights_first(setting.storages), greedy_order(setting.storages))
    plans = [MemoryPlan(order=order) for order in orders]
    return min(plans, key=setting.peak_bytes)


def greedy_order(storages: Storages) -> tuple[int, ...]:
    """Order ops greedily by least memory left in use; views follow their base."""
    preds = dependencies(storages.trace)
    waiting = [len(before) for before in preds]
    succs: list[list[int]] = [[] for _ in preds]
    for op, before in enumerate(preds):
        for other in before:
            succs[other].append(op)
    remaining = [len(users) for users in storages.users]
    stays = storages.initial | storages.results
    ready = {op for op, count in enumerate(waiting) if not count}
    soonest = [op for op in ready if not storages.working[op]]
    heapq.heapify(soonest)
    order: list[int] = []

    def left_in_use(op: int) -> int:
        allocated = sum(storages.bytes[s] for s in storages.makes[op])
        freed = sum(storages.bytes[s] for s in storages.touched[op] if remaining[s] == 1 and s not in stays)
        return allocated - freed

    while ready:
        op = heapq.heappop(soonest) if soonest else min(ready, key=lambda each: (left_in_use(each), each))
        ready.discard(op)
        order.append(op)
        for storage in storages.touched[op]:
            remaining[storage] -= 1
        for after in succs[op]:
            waiting[after] -= 1
            if not waiting[after]:
                ready.add(after)
                if not storages.working[after]:
                    heapq.heappush(soonest, after)
    return tuple(order)
