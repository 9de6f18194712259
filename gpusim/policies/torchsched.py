"""torchsched: the longest path on the first stream, all other ops on side streams.

Source: NVIDIA apex, `apex.contrib.torchsched` (2025; NVIDIA/apex pull request 1886 and its code), a backend of
torch.compile. The rules:

1. The critical path is the longest path by number of ops, independent of their times.
2. Its ops go to the default stream.
3. Ops that only unpack a result (`getitem`) go to the stream of the op that made it.
4. All others are assigned round-robin to the side streams (7 of 8 there), in the compiler's order.

An op waits only for the last event that it needs of each other stream; `gpusim.plan.sync` does this for every policy.

Filled in: of several longest paths, the one whose ops come first in recorded order counts. Rule 3 is the rule for
views. With one stream, all ops are on the default stream.
"""

from __future__ import annotations

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.shared.base import spread_views
from gpusim.policies.shared.dag import Dag, work_dag


def torchsched(graph: OpGraph, streams: int) -> Schedule:
    """Return recorded order with the deepest path on stream 0 and the other ops round-robin on the other streams."""
    ops, dag = work_dag(graph)
    critical = deepest_path(dag)
    stream_of: dict[int, int] = {}
    turn = 0
    for node, op in enumerate(ops):
        if node in critical or streams == 1:
            stream_of[op] = 0
        else:
            stream_of[op] = 1 + turn % (streams - 1)
            turn += 1
    return spread_views(graph, ops, stream_of)


def deepest_path(dag: Dag) -> set[int]:
    """Return the nodes of the longest path by number of nodes; of several, the first by node numbers."""
    depth = [1] * len(dag)
    for node in reversed(range(len(dag))):
        depth[node] += max((depth[after] for after in dag.succs[node]), default=0)
    path: set[int] = set()
    choices: range | tuple[int, ...] = range(len(dag))
    while choices:
        node = min(choices, key=lambda node: (-depth[node], node))
        path.add(node)
        choices = dag.succs[node]
    return path
