"""Out-of-order backprop: weight gradients leave the backward chain and run beside it on a second stream.

Source: Oh, Lee, Kim, Seo, "Out-of-Order BackProp: An Effective Scheduling Technique for Deep Learning" (EuroSys 2022),
its part on one GPU, and its released code. The rules:

1. A weight gradient is needed by nobody before the optimizer; a data gradient is needed by the layer before. So the
   chain of data gradients stays on the main stream, in order, without the weight gradients between.
2. Weight gradients run on a second stream, out of order: each is placed beside a data gradient that leaves the GPU
   room for it.

Filled in: the authors' code names by hand, for each network, beside which data gradient each weight gradient runs. Here
it is chosen on a planned clock, on which the main stream's ops take their times alone: whenever the second stream is
free, of the weight gradients that are ready it takes the one that finds room for the largest share of its blocks
beside the main stream's current op, and of equals the oldest. Their code may also run some beside the next iteration's
forward pass; a trace has one iteration, so what is left at the end runs alone, before the optimizer. Deferring costs
memory, which the authors bound and this policy does not. A step without weight gradients stays sequential.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.shared.base import spread_views

#: A share of its blocks below this is taken for none: the op would run once the other has ended.
LEAST_SHARE = 0.05


def ooo_backprop(graph: OpGraph, streams: int) -> Schedule:
    """Stream 0 in recorded order without the weight gradients; those on stream 1, chosen by the room they find."""
    gradients = weight_gradients(graph) if streams > 1 else frozenset()
    preds, succs = graph.work_preds, graph.work_succs
    order: list[int] = []
    waiting = {op: len(preds[op]) for op in gradients}
    ready = _Ready(graph)
    for op in sorted(gradients):
        if not waiting[op]:
            ready.add(op)
    end_ns = {}
    main_ns = side_ns = 0.0

    def take(best: int, now: float, beside: int | None) -> None:
        """Put a ready gradient on the second stream at `now`, beside an op that runs until `main_ns`."""
        nonlocal side_ns
        share = share_beside(graph, best, beside)
        solo = graph.solo_ns[best]
        side_ns = end_ns[best] = now + solo / share if share >= LEAST_SHARE else main_ns + solo
        ready.remove(best)
        order.append(best)

    for op in preds:
        if op in gradients:
            continue
        for late in ready.among(preds[op]):
            take(late, max(main_ns, side_ns), None)
        begin = max([main_ns, *(end_ns[p] for p in preds[op] if p in gradients)])
        main_ns = begin + graph.solo_ns[op]
        order.append(op)
        while ready and (now := max(begin, side_ns)) < main_ns:
            take(ready.best(op), now, op)
        for after in succs[op]:
            if after in gradients:
                waiting[after] -= 1
                if not waiting[after]:
                    ready.add(after)
    while ready:
        take(ready.best(None), max(main_ns, side_ns), None)
    return spread_views(graph, order, {op: int(op in gradients) for op in preds})


class _Ready:
    """Weight gradients that are ready, oldest first; those that demand the same find room together or not at all."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.age: dict[int, int] = {}
        self.alike: dict[tuple[float, ...], dict[int, None]] = {}
        self.seen = 0

    def __len__(self) -> int:
        return len(self.age)

    def add(self, op: int) -> None:
        """`op` is the youngest."""
        self.age[op] = self.seen
        self.seen += 1
        self.alike.setdefault(self.graph.tasks[op][0].demand.resources, {})[op] = None

    def remove(self, op: int) -> None:
        """`op` is no longer ready."""
        del self.age[op]
        demand = self.graph.tasks[op][0].demand.resources
        del self.alike[demand][op]
        if not self.alike[demand]:
            del self.alike[demand]

    def among(self, ops: Iterable[int]) -> list[int]:
        """Those of `ops` that are ready, oldest first."""
        return sorted((op for op in ops if op in self.age), key=lambda op: self.age[op])

    def best(self, beside: int | None) -> int:
        """The one that finds room for the largest share of its blocks, and of equals the oldest."""
        oldest = (next(iter(ops)) for ops in self.alike.values())
        return min(oldest, key=lambda op: (-share_beside(self.graph, op, beside), self.age[op]))


def weight_gradients(graph: OpGraph) -> frozenset[int]:
    """Ops of the backward phase whose results nobody needs before the optimizer."""
    phases = [op.phase for op in graph.trace.ops]
    succs = graph.work_succs
    return frozenset(
        op for op, after in succs.items() if phases[op] == "backward" and all(phases[s] == "optimizer" for s in after)
    )


def share_beside(graph: OpGraph, op: int, other: int | None) -> float:
    """The share of its blocks that `op` can have resident beside `other` (None: alone), by its first kernel."""
    if other is None:
        return 1.0
    room = [1.0 - need for need in graph.tasks[other][0].demand.resources]
    needs = graph.tasks[op][0].demand.resources
    return min([1.0, *(max(0.0, left) / need for left, need in zip(room, needs, strict=True) if need > 0.0)])
