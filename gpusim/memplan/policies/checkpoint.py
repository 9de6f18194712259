"""Gradient checkpointing: about sqrt(n) of n cuts are kept, and the segments between are recomputed.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), section 4, and the sqrt(n) strategy of
Checkmate's released baselines. The rules:

1. Where one tensor separates what comes before from what comes after, the network may be cut.
2. Of n such cuts, every int(sqrt(n))-th is a checkpoint.
3. The forward pass keeps checkpoints and lets go of all else once it is used. Before the backward pass of a segment,
   the segment's forward pass runs again from its checkpoint.

Filled in: the segment behind the last checkpoint is not computed again, since its backward pass follows at once. Ops
that draw random numbers are not run again: what they make stays. A cut may also have several tensors where all but one
have been there before the step.
"""

from __future__ import annotations

import math

from gpusim.memplan.plan import MemoryPlan, Redo
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.rebuild import chain
from gpusim.memplan.storages import Storages


def checkpoint(setting: Setting) -> MemoryPlan:
    """Recompute the segments between every int(sqrt(n))-th cut."""
    points = cuts(setting.storages)
    return segmented(setting.storages, points, max(1, math.isqrt(len(points))))


def cuts(storages: Storages) -> list[int]:
    """Return the ops of the forward pass after which only one tensor is needed by the rest of it."""
    turn = storages.first_backward
    last_read = [
        max((op for op in users if op < turn), default=-1) if storage not in storages.initial else -1
        for storage, users in enumerate(storages.users)
    ]
    ending: dict[int, list[int]] = {}
    for storage, op in enumerate(last_read):
        ending.setdefault(op, []).append(storage)
    crossing: set[int] = set()
    points: list[int] = []
    for op in range(turn):
        crossing.update(s for s in storages.writes[op] if last_read[s] > op)
        crossing.difference_update(ending.get(op, ()))
        if len(crossing) == 1 and storages.working[op] and storages.working[min(op + 1, turn - 1)]:
            points.append(op)
    return points


def segmented(storages: Storages, cuts: list[int], every: int) -> MemoryPlan:
    """Return the plan that keeps tensors at every `every`-th of these cuts and recomputes the rest, by segment."""
    turn = storages.first_backward
    redos: list[Redo] = []
    start = 0
    saved = storages.saved
    made_by = {storage: op for op in range(turn) for storage in storages.makes[op]}
    points = [cut for cut in cuts[every - 1 :: every] if cut != cuts[-1]]  # the backward pass begins behind it
    for point in points:
        inside = [s for s in saved if start <= made_by[s] <= point and storages.last_forward_use(s) <= point]
        start = point + 1
        wanted = [s for s in inside if alone_possible(storages, s)]
        while wanted:
            before = min(storages.first_backward_use(s) for s in wanted)
            there = {s for s in saved if storages.users[s][-1] >= before} - set(wanted)
            again = chain(storages, wanted, there.__contains__)
            if again is not None:
                redos.append(again.redo(before))
                break
            wanted.pop()  # the last of them stays, with its inputs
    return MemoryPlan(redos=tuple(redos))


def alone_possible(storages: Storages, storage: int) -> bool:
    """Whether a storage can be recomputed if all others are available."""
    return chain(storages, [storage], lambda _: True) is not None
