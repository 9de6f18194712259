"""Ready ops in a tree, by priority: the first that finds room, without looking at each.

Its nodes have the least that any op below needs of each resource.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusim.engine.compiled import heap
from gpusim.engine.compiled.jit import int64, jit

#: Of the ready ops below a node of the tree, the least that any needs of each resource; infinite where there are none.
NEED = np.dtype([("threads", "f8"), ("regs", "f8"), ("smem", "f8"), ("slots", "f8")], align=True)


@jit
def plant(tasks: Any, ops: Any, priority: Any, states: Any, ready: Any, n_ready: int, held: Any, needs: Any) -> int:
    """Make the tree: a leaf for each op with kernels, by priority, listed in `held`; how many leaves it has room for.

    It has the ready ops of a heap. Leaf i is the node behind `leaves + i`, the nodes below node n are 2n and 2n + 1.
    """
    base = count = rank = int64(0)
    for op in range(len(ops)):
        if ops[op].rows > 0:
            heap.push(held, base, count, -priority[op], rank, op)
            count += 1
    # The heap shrinks from its end, where what it gives is kept: last first.
    for left in range(count, 0, -1):
        time, op = held[0].time, held[0].index
        heap.pop(held, base, left)
        held[left - 1].time = time
        held[left - 1].index = op
    for leaf in range(count // 2):
        op, other = held[leaf].index, held[count - 1 - leaf].index
        held[leaf].index = other
        held[count - 1 - leaf].index = op
    for leaf in range(count):
        states[held[leaf].index].leaf = leaf
    leaves = int64(1)
    while leaves < count:
        leaves *= 2
    for node in range(2 * leaves):
        need = needs[node]
        need.threads = need.regs = need.smem = need.slots = np.inf
    for place in range(n_ready):
        op = ready[place].index
        task = tasks[ops[op].first_row]
        set_needs(needs, leaves, states[op].leaf, task.threads, task.regs, task.smem, task.slots)
    return leaves


@jit
def set_needs(needs: Any, leaves: int, leaf: int, threads: float, regs: float, smem: float, slots: float) -> None:
    """What the op of a leaf needs; infinite where it is not ready."""
    node = leaves + leaf
    need = needs[node]
    need.threads = threads
    need.regs = regs
    need.smem = smem
    need.slots = slots
    node >>= 1
    while node > 0:
        need, one, other = needs[node], needs[2 * node], needs[2 * node + 1]
        need.threads = min(one.threads, other.threads)
        need.regs = min(one.regs, other.regs)
        need.smem = min(one.smem, other.smem)
        need.slots = min(one.slots, other.slots)
        node >>= 1


@jit
def first_that_fits(
    needs: Any, leaves: int, threads: float, regs: float, smem: float, slots: float, min_share: float
) -> int:
    """The first leaf whose op is ready and gets `min_share` of its blocks of what is left, or -1."""
    node = int64(1)
    while node > 0:
        need = needs[node]
        if need.threads < np.inf and share_of(need, threads, regs, smem, slots) >= min_share:
            if node >= leaves:
                return node - leaves
            node *= 2
        else:
            while node & 1:
                node >>= 1
            if node > 0:
                node += 1
    return -1


@jit
def share_of(task: Any, threads: float, regs: float, smem: float, slots: float) -> float:
    """Share of its blocks that a kernel would get of what is left."""
    share = 1.0
    if task.threads > 0.0:
        share = min(share, max(0.0, threads) / task.threads)
    if task.regs > 0.0:
        share = min(share, max(0.0, regs) / task.regs)
    if task.smem > 0.0:
        share = min(share, max(0.0, smem) / task.smem)
    if task.slots > 0.0:
        share = min(share, max(0.0, slots) / task.slots)
    return share
