"""Random legal schedules, unlike those of any policy, for testing predictions."""

from __future__ import annotations

import random

from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule

RANDOM = "random"
STREAMS = (2, 3, 4, 6, 8)
#: Probabilities that an op stays on the stream of a predecessor, from 0 to long chains.
STICKINESS = (0.0, 0.6, 0.9)


def random_schedule(graph: OpGraph, number: int, seed: int) -> Schedule:
    """Return the `number`-th random schedule of a seed: a random legal order with random streams, 2 to 8."""
    rng = random.Random(f"{seed}:{number}")
    streams, sticky = STREAMS[number % len(STREAMS)], STICKINESS[number % len(STICKINESS)]
    waiting = [len(before) for before in graph.preds]
    ready = [op for op, count in enumerate(waiting) if not count]
    order: list[int] = []
    stream_of = [0] * len(graph)
    while ready:
        op = ready.pop(rng.randrange(len(ready)))
        order.append(op)
        near = graph.preds[op]
        stays = bool(near) and rng.random() < sticky
        stream_of[op] = stream_of[near[-1]] if stays else rng.randrange(streams)
        for after in graph.succs[op]:
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    return Schedule(tuple(order), tuple(stream_of), policy=RANDOM)
