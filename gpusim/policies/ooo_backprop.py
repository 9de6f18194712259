"""Out-of-order backprop: weight gradients leave the backward chain and run on a second stream.

Source: Oh, Lee, Kim, Seo, "Out-of-Order BackProp: An Effective Scheduling Technique for Deep Learning" (EuroSys 2022),
its part on one GPU, and its released code. The rules:

1. Only the optimizer needs a weight gradient, while the previous layer needs a data gradient. So the chain of data
   gradients stays on the main stream, in order, without the weight gradients.
2. Weight gradients run on a second stream, out of order: each overlaps a data gradient that leaves room for it on the
   GPU.

Filled in: the authors' code lists by hand, for each network, which data gradient each weight gradient overlaps. Here a
planned clock decides, on which the main stream's ops take their times alone. Whenever the second stream is free, it
takes the ready weight gradient that fits the largest share of its blocks next to the main stream's current op, the
oldest of equal ones. Their code may also overlap some with the next iteration's forward pass; a trace has one
iteration, so the remaining ones run alone, before the optimizer. Deferring costs memory, which the authors limit and
this policy does not. A step without weight gradients stays sequential.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.shared.base import spread_views

#: A smaller share of its blocks counts as none: the op then runs after the other has ended.
LEAST_SHARE = 0.05


def ooo_backprop(graph: OpGraph, streams: int) -> Schedule:
    """Return recorded order on stream 0 and the weight gradients on stream 1, chosen by the room they find."""
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

    def take(best: int, now: float, running: int | None) -> None:
        """Put a ready gradient on the second stream at `now`, while op `running` runs until `main_ns`."""
        nonlocal side_ns
        share = resident_share(graph, best, running)
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
    """Ready weight gradients, oldest first, grouped by demand: ops with equal demands fit alike."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.age: dict[int, int] = {}
        self.alike: dict[tuple[float, ...], dict[int, None]] = {}
        self.seen = 0

    def __len__(self) -> int:
        return len(self.age)

    def add(self, op: int) -> None:
        """Add `op` as the youngest."""
        self.age[op] = self.seen
        self.seen += 1
        self.alike.setdefault(self.graph.tasks[op][0].demand.resources, {})[op] = None

    def remove(self, op: int) -> None:
        """Remove `op`."""
        del self.age[op]
        demand = self.graph.tasks[op][0].demand.resources
        del self.alike[demand][op]
        if not self.alike[demand]:
            del self.alike[demand]

    def among(self, ops: Iterable[int]) -> list[int]:
        """Return the ready ops among `ops`, oldest first."""
        return sorted((op for op in ops if op in self.age), key=lambda op: self.age[op])

    def best(self, running: int | None) -> int:
        """Return the op that fits the largest share of its blocks next to `running`, the oldest of equal ones."""
        oldest = (next(iter(ops)) for ops in self.alike.values())
        return min(oldest, key=lambda op: (-resident_share(self.graph, op, running), self.age[op]))


def weight_gradients(graph: OpGraph) -> frozenset[int]:
    """Return the ops of the backward phase with results that only the optimizer needs."""
    phases = [op.phase for op in graph.trace.ops]
    succs = graph.work_succs
    return frozenset(
        op for op, after in succs.items() if phases[op] == "backward" and all(phases[s] == "optimizer" for s in after)
    )


def resident_share(graph: OpGraph, op: int, other: int | None) -> float:
    """Return the share of its blocks that `op` can have resident next to `other` (None: alone), by first kernels."""
    if other is None:
        return 1.0
    room = [1.0 - need for need in graph.tasks[other][0].demand.resources]
    needs = graph.tasks[op][0].demand.resources
    return min([1.0, *(max(0.0, left) / need for left, need in zip(room, needs, strict=True) if need > 0.0)])
