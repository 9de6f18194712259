"""Launch orders from keys, compiled: of the ops with launched predecessors, the one with the smallest key is next."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpusim.engine.compiled import heap
from gpusim.engine.compiled.arrays import Indices, Records
from gpusim.engine.compiled.jit import entry, int64
from gpusim.engine.compiled.op_graph import OpArrays


@entry
def orders_by_keys(
    hardware: Records,
    graph: OpArrays,
    keys: npt.NDArray[np.float64],
    ready: Records,
    waiting: Indices,
    orders: Indices,
    first: int,
    last: int,
) -> None:
    """Fill `orders` (schedules x ops) for schedules `first` to `last` - 1; ops without kernels come last.

    `ready` (heap entries) and `waiting` are scratch space for one schedule. `hardware` is not read.
    """
    ops = graph.ops
    base = rank = int64(0)
    for number in range(first, last):
        count = placed = int64(0)
        for op in range(len(ops)):
            waiting[op] = ops[op].n_preds
            if ops[op].rows > 0 and waiting[op] == 0:
                heap.push(ready, base, count, keys[number, op], rank, op)
                count += 1
        while count > 0:
            op = ready[0].index
            heap.pop(ready, base, count)
            count -= 1
            orders[number, placed] = op
            placed += 1
            for place in range(ops[op].first_succ, ops[op].first_succ + ops[op].n_succs):
                after = int64(graph.succs[place])
                waiting[after] -= 1
                if waiting[after] == 0:
                    heap.push(ready, base, count, keys[number, after], rank, after)
                    count += 1
        for op in range(len(ops)):
            if ops[op].rows == 0:
                orders[number, placed] = op
                placed += 1
