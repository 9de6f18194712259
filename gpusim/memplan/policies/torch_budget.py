"""torch's activation memory budget: a knapsack of what to save between forward and backward pass.

Source: PyTorch's AOTAutograd (`torch/_functorch/partitioners.py`, `torch._functorch.config.activation_memory_budget`).
The rules:

1. A budget is a share of what is saved where nothing is computed again that is expensive.
2. A knapsack decides what stays: most recomputation time avoided within that share of the bytes; sizes are quantised
   (`dp_knapsack`).
3. What does not stay is computed again in the backward pass, each op once, where it is first needed.

Filled in: recomputation times are those of the captured kernels (torch: FLOPs, by default), and the unit is a saved
storage instead of a node of the compiled graph: the kernels here are eager ones, so that recomputing pointwise ops is
not hidden in fusion. The share is 0.5; with a byte budget, the largest share in steps of 0.05 whose simulated peak
keeps it.
"""

from __future__ import annotations

import numpy as np

from gpusim.errors import PlanError
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.rebuild import grouped_redos
from gpusim.units import format_bytes, format_bytes_up

#: Resolution of the knapsack's sizes, as in torch's `dp_knapsack`: a thousandth of the total.
BUCKETS = 1000
SHARE = 0.5
STEP = 0.05


def torch_budget(setting: Setting) -> MemoryPlan:
    """Recompute what a knapsack leaves out. Raises `PlanError` for a budget that no share keeps."""
    if setting.budget_bytes is None:
        return at_share(setting, SHARE)
    least = 0
    for share in shares():
        plan = at_share(setting, share)
        least = setting.peak_bytes(plan)
        if least <= setting.budget_bytes:
            return plan
    problem = f"no share keeps {format_bytes(setting.budget_bytes)}; saving nothing takes {format_bytes_up(least)}"
    raise PlanError(f"torch_budget: {problem}")


def shares() -> tuple[float, ...]:
    """Return the shares that are tried, from all down to nothing."""
    return tuple(number * STEP for number in range(round(1 / STEP), -1, -1))


def at_share(setting: Setting, share: float) -> MemoryPlan:
    """Return the plan that saves at most this share of the recomputable bytes."""
    size = setting.storages.bytes
    items = [s for s in setting.storages.saved if s in setting.chains]
    saved = knapsack([size[s] for s in items], [setting.recompute_ns(s) for s in items], share)
    dropped = [s for s, keep in zip(items, saved, strict=True) if not keep]
    while True:
        redos = grouped_redos(setting.storages, dropped, setting.times.place, setting.uses)
        if redos is not None:
            return MemoryPlan(redos=redos)
        dropped.pop()  # its input has itself been freed for good


def knapsack(sizes: list[int], values: list[float], share: float) -> list[bool]:
    """Select items: the most value within this share of all bytes, sizes rounded to `BUCKETS` parts."""
    total = sum(sizes)
    if not total:
        return [True] * len(sizes)
    weights = [max(0, round(size * BUCKETS / total)) for size in sizes]
    room = int(share * BUCKETS)
    best = np.zeros(room + 1)
    taken = np.zeros((len(sizes), room + 1), dtype=bool)
    for item, (weight, value) in enumerate(zip(weights, values, strict=True)):
        if weight > room:
            continue
        with_it = best[: room + 1 - weight] + value
        better = with_it > best[weight:]
        taken[item, weight:] = better
        best[weight:] = np.where(better, with_it, best[weight:])
    chosen = [False] * len(sizes)
    for item in reversed(range(len(sizes))):
        if taken[item, room]:
            chosen[item] = True
            room -= weights[item]
    return chosen
