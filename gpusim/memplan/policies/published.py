"""Plans of the published policies within a budget, from which our own policy takes the fastest or goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpusim.errors import PlanError
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.capuchin import capuchin
from gpusim.memplan.policies.checkpoint import cuts, segmented
from gpusim.memplan.policies.layrub import layrub, layrub_inter, layrub_intra
from gpusim.memplan.policies.layup import layup
from gpusim.memplan.policies.olla import olla
from gpusim.memplan.policies.superneurons import cache_needs, superneurons, superneurons_release
from gpusim.memplan.policies.torch_budget import at_share, shares
from gpusim.memplan.policies.torch_offload import torch_offload
from gpusim.memplan.policies.vdnn import vdnn_all, vdnn_conv

#: Cuts between two checkpoints.
CHECKPOINT_STEPS = (2, 4, 8, 16, 32)


def unchanging(setting: Setting) -> Iterator[MemoryPlan]:
    """Yield the plans that are the same for all budgets: those of policies without one, and torch's at each share."""
    unlimited = replace(setting, budget_bytes=None)
    points = cuts(setting.storages)
    yield olla(unlimited)
    yield from (segmented(setting.storages, points, k) for k in CHECKPOINT_STEPS if k <= len(points))
    yield from (at_share(unlimited, share) for share in shares())
    for policy in (vdnn_all, vdnn_conv, layrub_intra, layrub_inter, layrub, layup, superneurons, torch_offload):
        yield policy(unlimited)
    yield capuchin(unlimited)
    yield superneurons_release(replace(setting, budget_bytes=cache_needs(setting.storages)))


def within(setting: Setting) -> Iterator[MemoryPlan]:
    """Yield the plans that depend on the budget."""
    yield capuchin(setting)
    try:
        yield superneurons_release(setting)
    except PlanError:  # one op needs more
        return
