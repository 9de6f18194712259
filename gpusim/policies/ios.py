"""IOS: stages of concurrent groups, chosen by dynamic programming over endings.

Source: Ding, Zhu, Jia, Pekhimenko, Han, "IOS: Inter-Operator Scheduler for CNN Acceleration" (MLSys 2021), and its
released code (`python/ios/optimizer.py`). The rules:

1. A schedule is a sequence of stages. The ops of a stage form groups: the ops of a group run in sequence on one stream,
   groups run concurrently, and a barrier ends the stage.
2. An *ending* of a set of ops S is a subset without edges to the rest of S, so it can be the last stage. The least time
   of S is the minimum of time(S - E) + time(E as a stage) over all its endings E, found by dynamic programming over
   sets of ops.
3. The search is pruned: at most r ops in a group (r = 3) and at most s groups in a stage (s = 8).
4. Networks are scheduled block by block (`gpusim.policies.shared.ios_blocks` finds units and blocks).

IOS measures each stage on the GPU. Here it is simulated (`stage_ns`) with its barriers, unless its cost is given: all
groups wait for the previous stage, and the next stage waits for all groups. IOS's alternative for a stage, convolutions
of one input merged into a larger one, needs other kernels: a stage may be merged where the caller says that this is
faster (`Merges`). It then runs on one stream, the merged convolution first. Groups are the connected components of an
ending; IOS's code finds only those with a single first op (its issue 10).

A schedule here has an order and streams, and dependencies come from data alone, so **the barriers are not enforced when
it runs**: a group starts once its stream and its own inputs are ready. The simulated makespan of the schedule is
therefore not the sum of the stages. A group goes to the stream that made its latest input, if that is free: this saves
an event; with IOS's barriers the choice makes no difference.

Filled in: s is at most the number of streams. If the search of a block is too large (`BLOCK_EFFORT`), smaller r are
tried, and the block is cut in two if r = 1 is too large as well. Whole blocks with r = 1 gave better schedules than
half blocks with r = 3. This happens only in training, where weight gradients can wait for the optimizer. The search is
compiled (`gpusim.engine.compiled.stages`), and so is the cost of a stage, defined by `stage_ns`. Stages are simulated
with SMs as one pool, as in the list scheduler: about twenty times as fast as block by block. A call takes seconds for a
large step (research/2026-11-23-policies.md), so this policy is marked slow in the registry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from gpusim.engine.compiled.arrays import Plans, Room, encode_hardware, encode_tasks
from gpusim.engine.compiled.link import link_plans
from gpusim.engine.compiled.simulate import simulate_plans
from gpusim.engine.compiled.stages import (
    MOST_NODES,
    NO_ROOM,
    TOO_MUCH,
    Sets,
    Walk,
    choose_stages,
    find_stages,
    groups_of,
    lower_stages,
)
from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import HardwareModel
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import Plan, Task
from gpusim.policies.shared.base import spread_views
from gpusim.policies.shared.dag import bits
from gpusim.policies.shared.ios_blocks import MAX_GROUPS, Units, blocks_of, narrowest, units_of
from gpusim.rules.launch import gap_ns, ready_delay_ns

#: r: maximum number of units in a group, as in IOS's experiments; s is `MAX_GROUPS`.
MAX_GROUP = 3
#: Maximum number of units in a block. IOS's experiments had 50; the cells of NASNet-A-Large have 19 to 25.
MAX_BLOCK = 25
#: Search effort per block and per step, in visited endings.
BLOCK_EFFORT, EFFORT = 6_000_000, 150_000_000
#: Cost of simulating a stage, in visited endings.
STAGE_EFFORT = 50
#: Initial room for sets of nodes; it grows on demand.
FEWEST_SETS = 1 << 12
#: Stages simulated at a time, so that their plans stay in a core's cache.
PLANS = 64

Groups = tuple[int, ...]
"""The groups of a stage, each a bit mask of the nodes of a block."""
Stage = tuple[tuple[int, ...], ...]
"""The groups of a stage, each with its units in launch order."""
StageCost = Callable[[Sequence[Sequence[Task]], HardwareModel], float]
"""Function from the tasks of a stage's groups to its time in ns, barriers included."""
OpStage = tuple[tuple[int, ...], ...]
"""The groups of a stage, each with its ops in launch order."""
Merges = Mapping[OpStage, tuple[int, int]]
"""Stages that are faster merged, with the op and the number of its variant that merges their convolutions; `cost` has
the times of merged stages.
"""


def ios(graph: OpGraph, streams: int, cost: StageCost | None = None, merges: Merges | None = None) -> Schedule:
    """Return the schedule with stages in order, each group of a stage on its own stream; `cost` as for `ios_stages`.

    A stage of `merges` runs on one stream, with that variant.
    """
    if streams == 1:
        return Schedule.in_recorded_order(len(graph))
    units = units_of(graph)
    order: list[int] = []
    stream_of: dict[int, int] = {}
    variants = [0] * len(graph)
    for stage in ios_stages(graph, units, min(MAX_GROUPS, streams), cost):
        merge = (merges or {}).get(tuple(tuple(op for unit in group for op in units.ops[unit]) for group in stage))
        if merge is not None:
            op, variants[op] = merge
            stage = (tuple(sorted(unit for group in stage for unit in group)),)
        place_stage(units, stage, streams, order, stream_of)
    schedule = spread_views(
        graph,
        [op for unit in order for op in units.ops[unit]],
        {op: stream for unit, stream in stream_of.items() for op in units.ops[unit]},
    )
    return dataclasses.replace(schedule, variants=tuple(variants)) if any(variants) else schedule


def stage_ns(groups: Sequence[Sequence[Task]], hardware: HardwareModel) -> float:
    """Return the time of a stage in ns, from the barrier before it to the one after it.

    Groups start together and are simulated by the engine. The barrier before costs a fork and a gap, the one after a
    join of all groups.
    """
    tasks = [
        msgspec.structs.replace(task, queue=queue, deps=()) for queue, group in enumerate(groups) for task in group
    ]
    makespan_ns = FastEngine().run(Plan(tuple(tasks)), hardware).makespan_ns
    return makespan_ns + barriers_ns(len(groups), max(group[0].extra_ns for group in groups), hardware)


def as_in_stages(hardware: HardwareModel) -> HardwareModel:
    """Return the GPU for simulating stages: one pool of SMs, and gaps as in a graph with branches.

    The whole graph will have branches, but a stage of a single group would count as a graph without them.
    """
    costs = hardware.graph
    costs = msgspec.structs.replace(costs, chain_ns=costs.chain_ns + costs.branch_ns, branch_ns=0.0)
    return msgspec.structs.replace(one_pool(hardware), graph=costs)


def one_pool(hardware: HardwareModel) -> HardwareModel:
    """Return the same GPU with its SMs as one pool (`gpusim.engine.pool`)."""
    contention = msgspec.structs.replace(hardware.contention, sharing_exponent=0.0)
    return msgspec.structs.replace(hardware, contention=contention)


def barriers_ns(groups: int, extra_ns: float, hardware: HardwareModel) -> float:
    """Return the cost of a stage's barriers in ns; `extra_ns` is the longest extra gap before a first kernel."""
    return ready_delay_ns(hardware.graph, gap_ns(hardware.graph, False, groups, extra_ns), 0.0, groups - 1, groups)


def ios_stages(graph: OpGraph, units: Units, max_groups: int, cost: StageCost | None = None) -> list[Stage]:
    """Return the stages of a step, of at most `max_groups` groups each; `cost` defaults to the compiled `stage_ns`."""
    todo = blocks_of(units.dag, MAX_BLOCK)[::-1]
    stages: list[Stage] = []
    while todo:
        nodes = todo.pop()
        block = _Block(graph, units, nodes, cost)
        effort = max(1 + STAGE_EFFORT, min(BLOCK_EFFORT, EFFORT * len(nodes) // len(units)))  # a single unit fits
        found = block.within(max_groups, effort)
        if found is None:
            todo += narrowest(units.dag, nodes, max(1, 2 * len(nodes) // 3))[::-1]
        else:
            stages += block.choose(found)
    return stages


class _Found(NamedTuple):
    """Sets of nodes that can remain in a block, and its stages, within these limits."""

    max_group: int
    max_groups: int
    states: Sets
    stages: Sets


class _Block:
    """Search in one block; sets of its nodes are bit masks, with bit 0 for its first node."""

    def __init__(self, graph: OpGraph, units: Units, nodes: range, cost: StageCost | None) -> None:
        assert len(nodes) <= MOST_NODES
        self.hardware = as_in_stages(graph.hardware)
        self.first = nodes.start
        succs = [sum(1 << s - nodes.start for s in units.dag.succs[node] if s in nodes) for node in nodes]
        self.succs = np.array(succs, np.int64)
        self.tasks = [[task for op in units.ops[node] for task in graph.tasks[op]] for node in nodes]
        self.cost = cost
        self.walk = Walk.of_size(len(nodes))

    def within(self, max_groups: int, effort: int) -> _Found | None:
        """Return what a search finds with the largest r that does not exceed `effort`, or None if r = 1 does.

        A larger r only adds endings, so one that exceeds it rules out those above: the least is tried first.
        """
        largest = None
        for max_group in range(1, MAX_GROUP + 1):
            found = self._find(max_group, max_groups, effort)
            if found is None:
                break
            largest = found
        return largest

    def _find(self, max_group: int, max_groups: int, effort: int) -> _Found | None:
        size = FEWEST_SETS
        limits = (self.succs, max_group, max_groups)
        while True:
            found = _Found(max_group, max_groups, Sets.of_size(size), Sets.of_size(size))
            left = find_stages(*limits, effort, STAGE_EFFORT, found.states, found.stages, self.walk)
            if left != NO_ROOM:
                return None if left == TOO_MUCH else found
            size *= 4

    def choose(self, found: _Found) -> list[Stage]:
        """Return the stages with the least total time."""
        max_group, max_groups, states, stages = found
        limits = (self.succs, max_group, max_groups)
        count = int(states.used[0])
        least_ns, last = np.zeros(count), np.zeros(count, np.int64)
        ascending = np.argsort(states.values[:count])
        cost_ns = self._times_ns(stages.values[: int(stages.used[0])])
        choose_stages(*limits, states, ascending, stages, cost_ns, least_ns, last, self.walk)
        ends = dict(zip(states.values[:count].tolist(), last.tolist(), strict=True))
        backwards: list[Stage] = []
        state = (1 << len(self.tasks)) - 1
        while state:
            groups = self._groups(ends[state])
            backwards.append(tuple(tuple(self.first + node for node in bits(group)) for group in groups))
            state &= ~ends[state]
        return backwards[::-1]

    def _groups(self, stage: int) -> Groups:
        """Return the groups of a stage, its connected components, in ascending order."""
        groups = np.zeros(len(self.tasks) + 1, np.int64)
        return tuple(groups[: groups_of(self.succs, stage, groups)].tolist())

    def _tasks_of(self, group: int) -> list[Task]:
        return [task for node in bits(group) for task in self.tasks[node]]

    def _times_ns(self, stages: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the time of each stage, in ns."""
        if self.cost is not None:
            of_groups = (list(map(self._tasks_of, self._groups(stage))) for stage in stages.tolist())
            return np.array([self.cost(groups, self.hardware) for groups in of_groups])
        first = np.cumsum([0, *map(len, self.tasks)])
        tasks = encode_tasks([task for tasks in self.tasks for task in tasks])
        record = encode_hardware(self.hardware)
        plans = Plans.of_size(min(PLANS, len(stages)), int(first[-1]), 0, False)
        room = Room.for_plans(plans, 1, 1, self.hardware)
        n_groups, extra_ns = np.zeros(len(stages), np.int64), np.zeros(len(stages))
        makespan_ns = np.zeros(len(stages))
        for begin in range(0, len(stages), PLANS):
            count = min(PLANS, len(stages) - begin)
            lower_stages(tasks, first, self.succs, stages, begin, plans, self.walk, n_groups, extra_ns)
            link_plans(record, tasks, plans, 0, count)
            simulate_plans(record, tasks, plans, None, room, 0, count)
            makespan_ns[begin : begin + count] = plans.makespan_ns[:count]
        ends = zip(makespan_ns.tolist(), n_groups.tolist(), extra_ns.tolist(), strict=True)
        return np.array([time_ns + barriers_ns(groups, extra, self.hardware) for time_ns, groups, extra in ends])


def place_stage(units: Units, stage: Stage, streams: int, order: list[int], stream_of: dict[int, int]) -> None:
    """Append a stage to the order and streams; a group takes the stream of its latest input if that is free."""
    place = {unit: number for number, unit in enumerate(order)}
    free = set(range(streams))
    homeless = []
    for group in stage:
        inputs = [p for unit in group for p in units.dag.preds[unit] if p in place]
        wish = stream_of[max(inputs, key=lambda unit: place[unit])] if inputs else -1
        if wish in free:
            free.discard(wish)
            stream_of |= dict.fromkeys(group, wish)
        else:
            homeless.append(group)
    for group in homeless:
        stream = min(free)
        free.discard(stream)
        stream_of |= dict.fromkeys(group, stream)
    order += [unit for group in stage for unit in group]
