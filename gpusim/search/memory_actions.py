"""Search over schedules on several streams with memory actions, within a limit on the peak.

Papers plan memory for one stream, and schedulers leave memory out. Here each candidate has both: the actions of our own
policy (`gpusim.memplan.policies.least_time`) at several budgets up to the limit, and a stream for each op.

1. *Seeds.* Each plan with the streams of the fastest schedules, and with streams given in the plan's own launch order.
2. *Moves.* Some ops that follow each other on a stream go to another one; a better candidate within the limit stays.

Candidates are compared as schedules are (`gpusim.search.events`), by the events that their ops wait for. Events of
copies do not count: the time of an event was found on schedules without memory actions.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import numpy as np

from gpusim.errors import PlanError
from gpusim.memplan.evaluate import MemoryEvaluator, Outcome
from gpusim.memplan.lowering import schedule_of
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.least_time import LeastTime
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import StepSync
from gpusim.policies.shared.list_scheduling import FastLists
from gpusim.search.events import compared_ns, events_of

#: Predicted lead that a schedule with memory actions needs where one without keeps the limit. Chosen, not measured.
ACTIONS_LEAD: Final = 0.06
#: Smaller budgets of the actions, as shares of the limit: ops that run at once may hold more than in launch order.
BUDGET_SHARES: Final = (0.97, 0.9, 0.8)
#: Fastest schedules whose streams are tried, and most ops that change streams together.
SCHEDULES_TRIED: Final = 4
MOST_MOVED: Final = 16


@dataclass(frozen=True)
class Acting:
    """The best schedule with memory actions found."""

    outcome: Outcome
    events: int
    """Events that its ops wait for, without those of copies."""
    evaluations: int
    """Number of simulated candidates."""
    interrupted: bool


def search_memory_actions(
    graph: OpGraph,
    schedules: Sequence[Schedule],
    limit_bytes: int,
    streams: int,
    *,
    budget_s: float,
    seed: int,
    evaluations: int | None = None,
    progress: Callable[[float, float], None] = lambda share, best_ns: None,
) -> Acting:
    """Return the best plan found on up to `streams` streams for ops.

    `schedules` come best first. The search ends after `budget_s` seconds or `evaluations` candidates, and tries the
    first plan on several streams in any case. Raises `PlanError` where no plan keeps the limit, and for a step without
    tensors.
    """
    if not graph.trace.tensors:
        raise PlanError(f"'{graph.trace.name}' has no tensors: memory can be planned for captured steps only")
    search = _Search(graph, limit_bytes)
    begin = perf_counter()

    def over() -> bool:
        share = (perf_counter() - begin) / budget_s if budget_s > 0 else 1.0
        if evaluations is not None:
            share = search.tried / evaluations
        progress(min(share, 1.0), search.best_ns)
        return share >= 1.0

    first = search.planner.plan_for(limit_bytes)
    search.try_plan(first)
    interrupted = False
    try:
        for plan in search.on_streams(first, schedules, streams):  # even if planning took the whole budget
            if over() and evaluations is not None:
                break
            search.try_plan(plan)
        for plan in search.seeds(schedules, streams):
            if over():
                break
            search.try_plan(plan)
        dice = random.Random(seed)
        while streams > 1 and not over():
            search.try_plan(_moved(search.best, streams, dice))
    except KeyboardInterrupt:  # the best so far
        interrupted = True
    return Acting(search.evaluator.evaluate(search.best), search.events, search.tried, interrupted)


class _Search:
    """The best plan so far."""

    def __init__(self, graph: OpGraph, limit_bytes: int) -> None:
        self.graph, self.limit_bytes = graph, limit_bytes
        self.evaluator = MemoryEvaluator(graph)
        setting = Setting(graph, self.evaluator.storages)
        self.planner = LeastTime(setting, self.evaluator)
        self.lists = FastLists(graph)
        self.sync = StepSync.of(graph.trace, graph.preds, {})
        self.best = MemoryPlan()
        self.best_ns = 0
        self.events = 0
        self.tried = 0

    def try_plan(self, plan: MemoryPlan) -> None:
        """Keep a plan if it is the first or better, and within the limit."""
        self.tried += 1
        try:
            program = self.evaluator.program(plan)
            step_ns = self.evaluator.time(program).makespan_ns
        except PlanError:  # the actions of one launch order may be impossible in another
            return
        events = events_of(self.graph, schedule_of(program), self.sync)
        if self.best_ns:
            better = compared_ns(step_ns, events) < compared_ns(self.best_ns, self.events)
            if not better or self.evaluator.evaluate(plan).peak_bytes > self.limit_bytes:
                return
        self.best, self.best_ns, self.events = plan, step_ns, events

    def seeds(self, schedules: Sequence[Schedule], streams: int) -> Iterator[MemoryPlan]:
        """Yield plans of smaller budgets on several streams."""
        for share in BUDGET_SHARES:
            try:
                plan = self.planner.plan_for(round(share * self.limit_bytes), quick=True)
            except PlanError:
                return
            yield from self.on_streams(plan, schedules, streams)

    def on_streams(self, plan: MemoryPlan, schedules: Sequence[Schedule], streams: int) -> Iterator[MemoryPlan]:
        """Yield a plan with streams by a list scheduler, and with those of the given schedules."""
        place = np.empty(len(self.graph))
        place[list(plan.order or range(len(self.graph)))] = np.arange(len(self.graph))
        for count in sorted({2, streams // 2, streams}):
            if 1 < count <= streams:
                given = self.lists.schedule(count, -place, 0.0).schedule
                yield dataclasses.replace(plan, op_streams=given.streams)
        several = [each for each in schedules if 1 < each.stream_count <= streams and not each.partitions]
        for schedule in several[:SCHEDULES_TRIED]:
            yield dataclasses.replace(plan, op_streams=schedule.streams)
            yield dataclasses.replace(plan, op_streams=schedule.streams, order=schedule.order)


def _moved(plan: MemoryPlan, streams: int, dice: random.Random) -> MemoryPlan:
    """Return the plan with some ops of one stream, in launch order, on another."""
    ops = len(plan.op_streams or plan.order)
    order = plan.order or tuple(range(ops))
    new = list(plan.op_streams or (0,) * ops)
    first = dice.randrange(ops)
    stream, to = new[order[first]], dice.randrange(streams)
    left = dice.randint(1, MOST_MOVED)
    for op in order[first:]:
        if new[op] == stream:
            new[op] = to
            left -= 1
            if not left:
                break
    return dataclasses.replace(plan, op_streams=tuple(new))
