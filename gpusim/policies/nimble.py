"""Nimble: maximum concurrency with the fewest synchronisations.

Source: Kwon, Yu, Jeong, Chun, "Nimble: Lightweight and Parallel GPU Task Scheduling for Deep Learning" (NeurIPS 2020),
its stream assignment and released code (`autostream.cpp`, `DAGDecomposition.cpp`; step 5 is in the code only). The
rules:

1. Compute the transitive reduction (minimum equivalent graph) of the op graph.
2. Build a bipartite graph with every op on both sides and an edge for each remaining edge.
3. Find a maximum matching in it (here Hopcroft-Karp).
4. Matched ops follow each other on one stream, so the matching cuts the graph into chains. Two ops without a path
   between them never share a chain, and the waits across chains are the unmatched edges, |E| - |M|: no assignment
   with as much concurrency has fewer.
5. Chain i may be followed by chain j on the same stream if the last op of i precedes the first op of j. A second
   maximum matching, over this relation between chains, minimises the number of streams.

Filled in: Nimble uses as many streams as step 5 yields. If there are more than the limit, the streams are folded,
longest total time first, each onto the stream with the least time so far. Folding costs concurrency, and the number of
synchronisations is no longer minimal. Nimble launches in program order, as done here. In training, Nimble's code
matches only the forward graph, and every backward op inherits the stream of its forward op; here the rules apply to the
whole step.
"""

from __future__ import annotations

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.shared.base import spread_views
from gpusim.policies.shared.dag import Dag, chains, descendants, mask_of, maximum_matching, work_dag


def nimble(graph: OpGraph, streams: int) -> Schedule:
    """Return recorded order, with streams from chains of a maximum matching in the transitive reduction."""
    ops, dag = work_dag(graph)
    lanes = pack(dag, chains_of(dag))
    time_ns = [sum(graph.solo_ns[ops[node]] for node in lane) for lane in lanes]
    stream_of: dict[int, int] = {}
    load = [0.0] * streams
    fits = len(lanes) <= streams
    for place, lane in enumerate(sorted(range(len(lanes)), key=lambda lane: (-time_ns[lane], lane))):
        stream = place if fits else min(range(streams), key=lambda s: (load[s], s))
        load[stream] += time_ns[lane]
        stream_of |= {ops[node]: stream for node in lanes[lane]}
    return spread_views(graph, ops, stream_of)


def chains_of(dag: Dag) -> list[list[int]]:
    """Return the fewest chains of nodes that put unordered nodes into different chains (steps 1 to 4)."""
    return chains(maximum_matching([mask_of(nodes) for nodes in dag.reduced.succs], len(dag)))


def pack(dag: Dag, given: list[list[int]]) -> list[list[int]]:
    """Concatenate chains that the data orders anyway (step 5) and return the nodes of each stream, in order."""
    heads = mask_of(chain[0] for chain in given)  # a chain is named by its first node
    number = {chain[0]: place for place, chain in enumerate(given)}
    behind = descendants(dag.preds)
    partner = maximum_matching([behind[chain[-1]] & heads for chain in given], len(dag))
    following = [number.get(head, -1) for head in partner]
    return [[node for chain in lane for node in given[chain]] for lane in chains(following)]
