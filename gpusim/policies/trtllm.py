"""trtllm: a list schedule by distance to the end of the step, with costs guessed by kind of op.

Source: NVIDIA TensorRT-LLM, the automatic multi-stream pass of its torch.compile backend (2025,
`tensorrt_llm/_torch/compilation/multi_stream/auto_multi_stream.py`). The rules:

1. A matrix product costs 10, a mixture of experts 20, a view 0, any other op 1.
2. Of the ops whose inputs have been scheduled, the one with the longest distance to the end goes first; the distance of
   an op is the largest sum of costs on a path from it to the end, its own included.
3. It is ready when its inputs have ended. It goes to the first stream that is free by then or, if there is none, to the
   one that becomes free first.

TensorRT-LLM uses 3 streams by default; here the number is given.

Filled in: a convolution costs as much as a matrix product, since TensorRT-LLM has no other large op of that kind. Ops
of equal distance keep recorded order. A mixture of experts is one op there and many here, so no op costs 20.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.shared.base import spread_views
from gpusim.policies.shared.dag import work_dag
from gpusim.policies.shared.op_kinds import is_attention, is_compute_intensive

PRODUCT_COST: Final = 10
OTHER_COST: Final = 1


def trtllm(graph: OpGraph, streams: int) -> Schedule:
    """Return the schedule with the longest distance first, on the first free stream."""
    ops, dag = work_dag(graph)
    costs = [_cost(graph, op) for op in ops]
    distance = list(costs)
    for node in reversed(range(len(dag))):
        distance[node] += max((distance[after] for after in dag.succs[node]), default=0)
    waiting = [len(before) for before in dag.preds]
    ready_at = [0] * len(dag)
    ready = [(-distance[node], node) for node, count in enumerate(waiting) if not count]
    heapify(ready)
    free_at = [0] * streams
    stream_of: dict[int, int] = {}
    order: list[int] = []
    while ready:
        _, node = heappop(ready)
        stream = next((s for s in range(streams) if free_at[s] <= ready_at[node]), None)
        if stream is None:
            stream = min(range(streams), key=lambda s: (free_at[s], s))
        free_at[stream] = max(free_at[stream], ready_at[node]) + costs[node]
        stream_of[ops[node]] = stream
        order.append(ops[node])
        for after in dag.succs[node]:
            ready_at[after] = max(ready_at[after], free_at[stream])
            waiting[after] -= 1
            if not waiting[after]:
                heappush(ready, (-distance[after], after))
    return spread_views(graph, order, stream_of)


def _cost(graph: OpGraph, op: int) -> int:
    product = is_compute_intensive(graph, op) and not is_attention(graph, op)
    return PRODUCT_COST if product else OTHER_COST
