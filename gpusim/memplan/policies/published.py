"""Plans of the published policies within a budget, from which our own policy takes the fastest or goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpusim.errors import PlanError
from gpusim.memplan.memory import needs_at_once
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.capuchin import capuchin
from gpusim.memplan.policies.checkpoint import checkpoint, cuts, segmented
from gpusim.memplan.policies.layrub import layrub, layrub_inter, layrub_intra
from gpusim.memplan.policies.layup import layup
from gpusim.memplan.policies.olla import olla
from gpusim.memplan.policies.superneurons import superneurons, superneurons_release
from gpusim.memplan.policies.torch_budget import at_share, shares
from gpusim.memplan.policies.torch_offload import torch_offload
from gpusim.memplan.policies.vdnn import vdnn_all, vdnn_conv
from gpusim.memplan.storages import Storages

#: Cuts between two checkpoints.
CHECKPOINT_STEPS = (2, 4, 8, 16, 32)
#: Shares of the budget for SuperNeurons' cache, which knows nothing of the allocator's blocks.
CACHE_SHARES = (1.0, 0.98, 0.95)


def unchanging(setting: Setting) -> Iterator[MemoryPlan]:
    """Yield the plans that are the same for all budgets: those of policies without one, and torch's at each share."""
    unlimited = replace(setting, budget_bytes=None)
    points = cuts(setting.storages)
    yield olla(unlimited)
    yield from (segmented(setting.storages, points, k) for k in CHECKPOINT_STEPS if k <= len(points))
    yield from (at_share(unlimited, share) for share in shares())
    for policy in (
        checkpoint,
        vdnn_all,
        vdnn_conv,
        layrub_intra,
        layrub_inter,
        layrub,
        layup,
        superneurons,
        torch_offload,
    ):
        yield policy(unlimited)
    yield capuchin(unlimited)
    least = superneurons_release(replace(setting, budget_bytes=max(needs_at_once(setting.storages), default=0)))
    yield from (least, from_last_use(setting.storages, least))


def within(setting: Setting, most_again_ns: float) -> Iterator[MemoryPlan]:
    """Yield the plans that depend on the budget; of no interest is what takes `most_again_ns` to recompute."""
    yield capuchin(setting, most_again_ns)
    for share in CACHE_SHARES:
        try:
            plan = superneurons_release(replace(setting, budget_bytes=int(share * setting.budget_or_half)))
        except PlanError:  # one op needs more
            return
        yield from (plan, from_last_use(setting.storages, plan))


def from_last_use(storages: Storages, plan: MemoryPlan) -> MemoryPlan:
    """Return a plan in recorded order whose copies out begin after the last use before, not when memory is needed."""
    offloads = (
        replace(each, after=max(op for op in storages.users[each.storage] if op < each.free)) for each in plan.offloads
    )
    return replace(plan, offloads=tuple(offloads))
