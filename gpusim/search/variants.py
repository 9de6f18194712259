"""Searches with kernel variants and SM partitions, and their gain over order and streams alone.

Both start from the schedules found without them and are compared with the continuation of that search for the same
time; otherwise their gain would include that of a longer search.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from gpusim.engine.evaluate import Evaluator
from gpusim.errors import OptionError, PlanError
from gpusim.formats.schedule import Partition
from gpusim.plan.graph import OpGraph
from gpusim.plan.partitions import GROUP_SMS, lay_out
from gpusim.plan.ranking import is_slower, ranked_variants
from gpusim.plan.schedule import Schedule
from gpusim.policies.registry import POLICIES, stream_counts
from gpusim.search.interrupt import STOPS
from gpusim.search.neighbourhood import Refined, refine
from gpusim.search.priorities import local_search
from gpusim.text import short_value
from gpusim.trace.merging import plain_variants

#: Default shares of the SMs and of the streams for the first of two partitions.
SPLITS = ((0.5, 0.5), (0.75, 0.5), (0.75, 0.75), (0.85, 0.5))

#: Weights of SM area against time alone for ranking an op's kernels when a schedule is planned for other kernels. For
#: concurrent kernels, a smaller share of the GPU may be worth more.
AREA_WEIGHTS = (0.0, 0.4, 0.6)
#: Share of the search with variants for list schedules of the step with such kernels, over all weights.
PLANNED_SHARE = 0.2

Progress = Callable[[float, float], None]


@dataclass(frozen=True)
class VariantsTried:
    """Result of the search with variants."""

    ops: int
    """Number of ops with variants."""
    used: int
    """Number of ops with another kernel in the best schedule with variants."""
    without_ns: int
    """Time of the best schedule of the captured kernels, searched for as long."""
    with_ns: int
    fastest_ns: int
    """Time of the best schedule of the captured kernels with each op's fastest variant."""
    slower: int
    """Number of ops whose other kernel is slower alone than the captured one."""

    @property
    def gain(self) -> float:
        """Share of time saved over the best schedule of the captured kernels; never negative."""
        return max(0.0, 1.0 - self.with_ns / self.without_ns)


@dataclass(frozen=True)
class PartitionsTried:
    """Best schedule found on one split of the SMs."""

    partitions: tuple[Partition, ...]
    makespan_ns: int
    without_ns: int
    """Time of the best schedule on the whole GPU, searched for as long."""

    @property
    def text(self) -> str:
        """Split in words: `64+68 SMs, 4+4 streams`."""
        sms = "+".join(str(partition.sms) for partition in self.partitions)
        return f"{sms} SMs, {'+'.join(str(len(partition.streams)) for partition in self.partitions)} streams"

    @property
    def gain(self) -> float:
        """Share of time saved over the whole GPU; negative for a loss."""
        return 1.0 - self.makespan_ns / self.without_ns


def search_variants(
    graph: OpGraph,
    seeds: Sequence[Schedule],
    streams: int,
    *,
    budget_s: float,
    seed: int,
    evaluations: int | None,
    memory_limit_bytes: int | None,
    progress: Progress,
) -> Refined:
    """Search schedules with other kernels, from these seeds and from policies and list schedules for other kernels.

    Those kernels are ranked op by op (`AREA_WEIGHTS`), and the schedules are made for them.
    """
    starts, tried, interrupted = list(seeds), 0, False
    quick = [name for name, policy in POLICIES.items() if not policy.slow]
    try:
        choices = list(dict.fromkeys(ranked_variants(graph, weight) for weight in AREA_WEIGHTS))
        for choice in choices:
            share = PLANNED_SHARE / len(choices)
            limit = None if evaluations is None else max(1, round(share * evaluations))
            chosen = graph.choosing(choice)
            lists = local_search(chosen, streams, budget_s=share * budget_s, seed=seed, evaluations=limit)
            tried += lists.evaluations
            lists_schedules = (candidate.schedule for candidate in lists.candidates)
            planned = [*seeds, *lists_schedules, *_planned(chosen, streams, quick)]
            starts += [dataclasses.replace(schedule, variants=choice) for schedule in planned]
            if lists.interrupted:
                interrupted = True
                break
    except STOPS:
        interrupted = True
    if interrupted:
        budget_s = 0.0
    refined = refine(
        graph,
        starts,
        streams,
        budget_s=(1.0 - PLANNED_SHARE) * budget_s,
        seed=seed,
        evaluations=None if evaluations is None else max(1, evaluations - tried),
        memory_limit_bytes=memory_limit_bytes,
        variants=True,
        progress=lambda share, best_ns: progress(PLANNED_SHARE + (1.0 - PLANNED_SHARE) * share, best_ns),
    )
    return dataclasses.replace(
        refined, evaluations=refined.evaluations + tried, interrupted=refined.interrupted or interrupted
    )


def policies_on_fastest(graph: OpGraph, streams: int, policies: Collection[str]) -> Iterator[Schedule]:
    """Yield the schedules of these policies for each op's fastest kernels, for each number of streams."""
    choice = ranked_variants(graph, 0.0)
    for schedule in _planned(graph.choosing(choice), streams, policies):
        yield dataclasses.replace(schedule, variants=choice)


def _planned(graph: OpGraph, streams: int, policies: Collection[str]) -> Iterator[Schedule]:
    """Yield the schedules of these policies, for each number of streams."""
    for policy in (POLICIES[name] for name in policies):
        for count in policy.stream_counts(stream_counts(streams)):
            yield policy(graph, count)


def tried_variants(evaluator: Evaluator, plain: Refined, varied: Refined) -> VariantsTried:
    """Compare the search with variants with the equally long one without, by the times that rows have."""
    graph = evaluator.graph
    best, captured = varied.schedules[0], plain.schedules[0]
    changed = [op for op, number in enumerate(best.variants) if number]
    return VariantsTried(
        ops=sum(map(bool, map(plain_variants, graph.trace.ops))),
        used=len(changed),
        without_ns=evaluator.makespan_ns(captured),
        with_ns=evaluator.makespan_ns(best),
        fastest_ns=evaluator.makespan_ns(dataclasses.replace(captured, variants=ranked_variants(graph, 0.0))),
        slower=sum(is_slower(graph, op, best.variants[op]) for op in changed),
    )


def usual_splits(streams: int, gpu_sms: int) -> list[tuple[Partition, ...]]:
    """Return a few splits of the SMs and of `streams` streams in two; none for fewer than two streams."""
    splits: dict[tuple[Partition, ...], None] = {}
    for sm_share, stream_share in SPLITS:
        sms = max(GROUP_SMS, round(sm_share * gpu_sms / GROUP_SMS) * GROUP_SMS)
        first = min(streams - 1, max(1, round(stream_share * streams)))
        if streams > 1 and sms < gpu_sms:
            splits[split((sms, gpu_sms - sms), (first, streams - first))] = None
    return list(splits)


def split(sms: Sequence[int], streams: Sequence[int]) -> tuple[Partition, ...]:
    """Return partitions of these sizes with these numbers of streams, numbered consecutively."""
    first = 0
    partitions = []
    for size, count in zip(sms, streams, strict=True):
        partitions.append(Partition(sms=size, streams=tuple(range(first, first + count))))
        first += count
    return tuple(partitions)


#: Maximum number of characters for the SMs of a partition, within what Python parses as a number.
_SIZE_DIGITS = 20


def parse_splits(text: str, streams: int, gpu_sms: int) -> list[tuple[Partition, ...]]:
    """Parse `auto`, or splits such as `64+68,96+36`; streams are distributed in proportion, at least one each.

    Raises `OptionError` for an impossible split.
    """
    said = f"partitions '{short_value(text)}'"
    if streams < 2:
        raise OptionError(f"{said}: {streams} stream has nothing to be parted from; allow more streams")
    if text == "auto":
        return usual_splits(streams, gpu_sms)
    splits = []
    for part in text.split(","):
        sizes = part.split("+")
        if not all(size.strip().isdecimal() and len(size) <= _SIZE_DIGITS for size in sizes):
            raise OptionError(f"{said}: '{short_value(part)}' is not a split such as 64+68 (or: auto)")
        sms = [int(size) for size in sizes]
        if len(sms) > streams:
            raise OptionError(f"{said}: '{short_value(part)}' has {len(sms)} partitions for {streams} streams")
        partitions = split(sms, _dealt(streams, sms))
        try:
            lay_out(partitions, streams, gpu_sms)
        except PlanError as cause:
            raise OptionError(f"{said}: '{short_value(part)}': {cause}") from cause
        splits.append(partitions)
    return splits


def _dealt(streams: int, sms: Sequence[int]) -> list[int]:
    """Return the streams of each partition: one each, further ones where there are the most SMs per stream."""
    counts = [1] * len(sms)
    for _ in range(streams - len(sms)):
        counts[max(range(len(sms)), key=lambda number: sms[number] / (counts[number] + 1))] += 1
    return counts


def search_partitions(
    graph: OpGraph,
    seeds: Sequence[Schedule],
    splits: Sequence[tuple[Partition, ...]],
    *,
    budget_s: float,
    seed: int,
    evaluations: int | None,
    memory_limit_bytes: int | None,
    progress: Progress,
) -> list[Refined]:
    """Search schedules on each of these splits with equal shares of the budget; Ctrl-C keeps the results so far."""
    refinements: list[Refined] = []
    for number, partitions in enumerate(splits):

        def within(share: float, best_ns: float, done: int = number) -> None:
            progress((done + share) / len(splits), best_ns)

        refinements.append(
            refine(
                graph,
                seeds,
                sum(len(partition.streams) for partition in partitions),
                budget_s=budget_s / len(splits),
                seed=seed,
                evaluations=None if evaluations is None else max(1, evaluations // len(splits)),
                memory_limit_bytes=memory_limit_bytes,
                partitions=partitions,
                progress=within,
            )
        )
        if refinements[-1].interrupted:
            break
    return refinements
