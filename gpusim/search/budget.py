"""The searches of an exploration and their shares of its budget.

List schedules come first, then changes of the best ones; also on half as many streams, and with variants and partitions
if there are any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpusim.bounds.bounds import Bounds
from gpusim.defaults import PARTITIONS, SEARCH, SEARCHED, VARIANTS
from gpusim.formats.schedule import Partition
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.search.neighbourhood import Refined, refine
from gpusim.search.priorities import local_search
from gpusim.search.variants import search_partitions, search_variants
from gpusim.trace.merging import plain_variants

#: Name of rows of policies' schedules for the variants that are fastest alone.
POLICIES_WITH_VARIANTS = "policies with variants"
#: Names of rows that come after the search. They come last among equals.
WITH_SEARCH = (*SEARCHED, POLICIES_WITH_VARIANTS)
#: Share of the budget for the search over list schedules; the rest refines the best schedules.
LISTS_SHARE = 0.2
#: Share of the budget before the searches with variants or partitions branch off. Each then gets an equal part of the
#: rest, as does the search without them, their baseline.
COMMON_SHARE = 0.5
#: Share of a search that uses half as many streams, from `LEAST_HALVED` on. Its schedules are predicted slower, but
#: they reuse memory sooner and have fewer joins, which predictions count only in part: a trial on the GPU can tell.
NARROW_SHARE, LEAST_HALVED = 0.3, 4

Report = Callable[[str, float, int], None]
"""Callback for progress: stage, share done in [0, 1], and best makespan so far in ns (0: none yet)."""


@dataclass(frozen=True)
class Found:
    """Results of the searches, each with an equal share of the budget."""

    plain: Refined
    variants: Refined | None
    partitions: Sequence[Refined]
    narrow: Sequence[tuple[str, Refined]]
    """Results on half as many streams, with the names of their rows."""
    evaluations: int
    interrupted: bool

    @property
    def rows(self) -> list[tuple[str, Refined]]:
        """Return the row name and the result of each search."""
        named = [(SEARCH, self.plain), *self.narrow]
        if self.variants is not None:
            named.append((VARIANTS, self.variants))
        return [*named, *((PARTITIONS, refined) for refined in self.partitions)]


#: Result for a step without search.
NOTHING_FOUND = Found(Refined((), (), (), (), 0, False), None, (), (), 0, False)


@dataclass(frozen=True, slots=True)
class _Part:
    """Budget and progress of one of the searches."""

    budget_s: float
    evaluations: int | None
    progress: Callable[[float, float], None]


def search_all(
    graph: OpGraph,
    policy_schedules: list[Schedule],
    streams: int,
    budget_s: float,
    seed: int,
    evaluations: int | None,
    bound: Bounds,
    splits: Sequence[tuple[Partition, ...]],
    memory_limit_bytes: int | None,
    report: Report,
) -> Found:
    """Search over list schedules, then over changes of the best ones and of `policy_schedules`."""
    best_so_far_ns = math.inf

    def tell(share: float, best_ns: float) -> None:
        nonlocal best_so_far_ns
        best_so_far_ns = min(best_so_far_ns, best_ns or math.inf)
        report("search", share, round(best_so_far_ns) if best_so_far_ns < math.inf else 0)

    def part(begin: float, share: float) -> _Part:
        count = None if evaluations is None else max(1, round(share * evaluations))
        return _Part(share * budget_s, count, lambda done, best_ns: tell(begin + share * done, best_ns))

    def refined(seeds: Sequence[Schedule], most_streams: int, part: _Part) -> Refined:
        return refine(
            graph,
            seeds,
            most_streams,
            budget_s=part.budget_s,
            seed=seed,
            evaluations=part.evaluations,
            lower_bound_ns=lower_ns,
            memory_limit_bytes=memory_limit_bytes,
            progress=part.progress,
        )

    def varied(seeds: Sequence[Schedule], most_streams: int, part: _Part) -> Refined:
        return search_variants(
            graph,
            seeds,
            most_streams,
            budget_s=part.budget_s,
            seed=seed,
            evaluations=part.evaluations,
            memory_limit_bytes=memory_limit_bytes,
            progress=part.progress,
        )

    lower_ns = bound.largest[0]
    whole = part(0.0, LISTS_SHARE)
    lists = local_search(
        graph,
        streams,
        budget_s=whole.budget_s,
        seed=seed,
        evaluations=whole.evaluations,
        lower_bound_ns=lower_ns,
        progress=whole.progress,
    )
    seeds = [*policy_schedules, *(candidate.schedule for candidate in lists.candidates)]
    half = streams // 2 if streams >= LEAST_HALVED else 0
    few = [seed_schedule for seed_schedule in seeds if max(seed_schedule.streams, default=0) < half]
    wide = 1.0 - NARROW_SHARE if half else 1.0
    has_variants = any(graph.variants) and any(map(plain_variants, graph.trace.ops))
    kinds = 1 + has_variants + bool(splits)
    share = 1.0 - LISTS_SHARE if kinds == 1 else COMMON_SHARE - LISTS_SHARE
    first = part(LISTS_SHARE, share * wide)
    second = part(LISTS_SHARE + share * wide, share * (1.0 - wide))
    if lists.interrupted:
        first, second = replace(first, budget_s=0.0), replace(second, budget_s=0.0)
    if evaluations is not None and kinds == 1:
        rest = evaluations - lists.evaluations
        few_evaluations = max(1, round(rest * (1.0 - wide)))
        second = replace(second, evaluations=few_evaluations)
        first = replace(first, evaluations=max(1, rest - few_evaluations if half else rest))
    common = refined(seeds, streams, first)
    spent, interrupted = lists.evaluations + common.evaluations, lists.interrupted or common.interrupted
    narrow: list[tuple[str, Refined]] = []
    few_found: Sequence[Schedule] = ()
    if half and not interrupted:
        narrow.append((SEARCH, refined(few, half, second)))
        few_found = narrow[0][1].schedules
        spent, interrupted = spent + narrow[0][1].evaluations, narrow[0][1].interrupted
    if kinds == 1 or interrupted or not common.schedules:
        return Found(common, None, (), narrow, spent, interrupted)
    share = (1.0 - COMMON_SHARE) / kinds
    plain = refined(common.schedules, streams, part(COMMON_SHARE, share))
    refinements: list[Refined] = [plain]
    variants = None
    if has_variants and not plain.interrupted:
        begin = COMMON_SHARE + share
        variants = varied(common.schedules, streams, part(begin, share * wide))
        refinements.append(variants)
        if few_found and not variants.interrupted:
            refinements.append(varied(few_found, half, part(begin + share * wide, share * (1.0 - wide))))
            narrow.append((VARIANTS, refinements[-1]))
    parted: list[Refined] = []
    if splits and not any(refinement.interrupted for refinement in refinements):
        last = part(1.0 - share, share)
        parted = search_partitions(
            graph,
            common.schedules,
            splits,
            budget_s=last.budget_s,
            seed=seed,
            evaluations=last.evaluations,
            memory_limit_bytes=memory_limit_bytes,
            progress=last.progress,
        )
        refinements += parted
    spent += sum(refinement.evaluations for refinement in refinements)
    return Found(plain, variants, parted, narrow, spent, any(refinement.interrupted for refinement in refinements))
