"""The input of IOS: a step cut into blocks of units, where a unit is a convolution or product with its followers.

IOS was published on its own representation of networks, in which a node is a convolution with its activation, or a
whole separable convolution, and a network is a list of blocks written by hand. Here both are found in the op graph:

- *Units.* Ops that follow each other without a branch (in the transitive reduction) form one unit with at most one
  convolution or product; a depthwise convolution does not count, since its pointwise one follows. So the last block of
  Inception-v3 has 11 units, of which 6 can run concurrently, the same numbers as in IOS.
- *Blocks.* A new block begins after every articulation, a unit ordered before or after every other one; nothing can
  overlap across it anyway. A block of more than `limit` units is cut further, at the positions in recorded order that
  the fewest results cross: a training step, or a network like NASNet whose cells read the two previous ones, has hardly
  any articulation. IOS also cuts large blocks into parts, and overlap ends at a cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpusim.plan.graph import OpGraph
from gpusim.policies.shared.dag import Dag, descendants, work_dag
from gpusim.policies.shared.op_kinds import is_compute_intensive, is_depthwise

#: s: maximum number of groups in a stage, as in IOS's experiments, and so of streams.
MAX_GROUPS = 8


@dataclass(frozen=True)
class Units:
    """Units in a legal order, with their ops in launch order and their dependencies, transitively reduced."""

    ops: tuple[tuple[int, ...], ...]
    dag: Dag

    def __len__(self) -> int:
        return len(self.ops)


def units_of(graph: OpGraph) -> Units:
    """Return the units of a step; every op with kernels is in one of them."""
    ops, dag = work_dag(graph)
    reduced = dag.reduced
    unit_of: list[int] = []
    members: list[list[int]] = []
    full: list[bool] = []
    for node, op in enumerate(ops):
        heavy = is_compute_intensive(graph, op)
        before = reduced.preds[node]
        if len(before) == 1 and len(reduced.succs[before[0]]) == 1 and not (heavy and full[unit_of[before[0]]]):
            unit = unit_of[before[0]]
        else:
            unit = len(members)
            members.append([])
            full.append(False)
        unit_of.append(unit)
        members[unit].append(op)
        full[unit] |= heavy and not is_depthwise(graph, op)
    preds: list[set[int]] = [set() for _ in members]
    for node, before in enumerate(reduced.preds):
        preds[unit_of[node]].update(unit_of[p] for p in before if unit_of[p] != unit_of[node])
    return Units(tuple(map(tuple, members)), Dag(tuple(tuple(sorted(unit_preds)) for unit_preds in preds)))


def blocks_of(dag: Dag, limit: int) -> list[range]:
    """Cut the nodes into blocks of at most `limit`, in order."""
    blocks: list[range] = []
    begin = 0
    for end in [node + 1 for node in articulations(dag)] + [len(dag)]:
        if begin < end:
            blocks += narrowest(dag, range(begin, end), limit)
            begin = end
    return blocks


def articulations(dag: Dag) -> list[int]:
    """Return the nodes ordered before or after every other node."""
    after = descendants(dag.preds)
    everything = (1 << len(dag)) - 1
    return [node for node in range(len(dag)) if dag.ancestors[node] | after[node] | 1 << node == everything]


def narrowest(dag: Dag, block: range, limit: int) -> list[range]:
    """Cut `block` into ranges of at most `limit` nodes, with the fewest results across cuts, then the fewest cuts."""
    if len(block) <= limit:
        return [block]
    crossing = dict.fromkeys(range(block.start + 1, block.stop), 0)
    for node in block:
        last = max(dag.succs[node], default=node)
        for cut in range(node + 1, min(last + 1, block.stop)):
            crossing[cut] += 1
    best: dict[int, tuple[int, int, int]] = {block.start: (0, 0, -1)}  # cut -> crossings, cuts, previous cut
    for cut in (*crossing, block.stop):
        best[cut] = min(
            (best[other][0] + crossing.get(cut, 0), best[other][1] + 1, other)
            for other in range(max(block.start, cut - limit), cut)
        )
    pieces: list[range] = []
    end = block.stop
    while end > block.start:
        begin = best[end][2]
        pieces.append(range(begin, end))
        end = begin
    return pieces[::-1]
