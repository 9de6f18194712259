"""Ready ops in a tree by priority, to find the first one that fits without a scan.

Each node has the minimum demand for each resource of the ops below it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusim.engine.compiled import heap
from gpusim.engine.compiled.jit import int64, jit

#: Minimum demand for each resource among the ready ops below a node; infinite if there are none.
NEED = np.dtype([("threads", "f8"), ("regs", "f8"), ("smem", "f8"), ("slots", "f8")], align=True)


@jit
def plant(tasks: Any, ops: Any, priority: Any, states: Any, ready: Any, n_ready: int, held: Any, needs: Any) -> int:
    """Build the tree from the ready ops of a heap and return its number of leaves, `leaves`.

    It has a leaf per op with kernels, by priority, listed in `held`. Leaf i is node `leaves + i`; the children of node
    n are 2n and 2n + 1.
    """
    base = count = rank = int64(0)
    for op in range(len(ops)):
        if ops[op].rows > 0:
            heap.push(held, base, count, -priority[op], rank, op)
            count += 1
    # Heap sort in place: popped entries fill the end, in reverse order.
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
    """Set the demand of a leaf's op, infinite if it is not ready, and update the nodes above."""
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
    """Return the first leaf whose op is ready and gets `min_share` of its blocks from the free resources, or -1."""
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
    """Return the share of a kernel's blocks that the free resources hold."""
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
