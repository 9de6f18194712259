"""A dense neighbourhood of the best schedule: many whose times differ little, to test which model chooses best.

Half of the schedules are near the best as predicted block by block, half near the best as predicted with the SMs as one
pool, so that neither model alone decides what is compared. The best policy and the best searched schedule come first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from gpusim.defaults import SEARCH, SEARCHED
from gpusim.formats.recipe import Recipe
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.ios import one_pool
from gpusim.search.explore import explore
from gpusim.search.near_best import near_best

#: Names of the rows near the best by each model.
BY_BLOCKS, BY_POOL = "near the best by blocks", "near the best by the pool"


def neighbour_schedules(graph: OpGraph, recipe: Recipe) -> Iterator[tuple[str, Schedule]]:
    """Yield the best policy's schedule, the searched one, and `recipe.neighbours` others, on captured kernels."""
    by_blocks = dataclasses.replace(graph, variants=())
    by_pool = by_blocks.with_tasks(one_pool(graph.hardware), graph.tasks)
    known: set[Schedule] = set()
    counts = (recipe.neighbours - recipe.neighbours // 2, recipe.neighbours // 2)
    for name, planned_on, count in zip((BY_BLOCKS, BY_POOL), (by_blocks, by_pool), counts, strict=True):
        explored = explore(planned_on, streams=recipe.streams, budget_s=recipe.budget_s, seed=recipe.seed)
        if not known:
            planned = min((row for row in explored.rows if row.policy not in SEARCHED), key=lambda row: row.compared_ns)
            for policy, row in ((planned.policy, planned), (SEARCH, explored.best_of(SEARCH))):
                known.add(row.schedule)
                yield policy, row.schedule
        seeds = [row.schedule for row in explored.rows]
        for each in near_best(planned_on, seeds, recipe.streams, count, recipe.seed):
            if each not in known:
                known.add(each)
                yield name, each
