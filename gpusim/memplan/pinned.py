"""Plans within a budget of pinned host memory."""

from __future__ import annotations

from dataclasses import replace

from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.storages import Storages


def within_pinned(storages: Storages, plan: MemoryPlan, limit_bytes: int | None) -> tuple[MemoryPlan, int]:
    """Limit a plan to the storages that pinned memory has room for; also returns how many then stay on the GPU.

    Storages that leave first have priority, since they are away for longest. None is no limit.
    """
    if limit_bytes is None:
        return plan, 0
    room = limit_bytes
    moving: set[int] = set()
    for storage in dict.fromkeys(each.storage for each in sorted(plan.offloads, key=lambda each: each.after)):
        if storages.bytes[storage] <= room:
            room -= storages.bytes[storage]
            moving.add(storage)
    kept = {each.storage for each in plan.offloads} - moving
    if not kept:
        return plan, 0
    return replace(plan, offloads=tuple(each for each in plan.offloads if each.storage in moving)), len(kept)
