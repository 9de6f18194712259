"""IOS: stages of groups that run side by side, chosen by dynamic programming over endings.

Source: Ding, Zhu, Jia, Pekhimenko, Han, "IOS: Inter-Operator Scheduler for CNN Acceleration" (MLSys 2021), as its
released code has it (`python/ios/optimizer.py`). The rules:

1. A schedule is a sequence of stages. The ops of a stage form groups: ops of one group run one after another on one
   stream, groups run side by side, and a barrier ends the stage.
2. An *ending* of a set of ops S is a part of it that no edge leaves for the rest of S: it can be the last stage. The
   least time of S is the least of time(S - E) + time(E as a stage) over all its endings E, found by dynamic
   programming over sets of ops.
3. The search is pruned: at most r ops in a group (r = 3) and at most s groups in a stage (s = 8).
4. Networks are scheduled block by block (`gpusim.policies.ios_blocks` finds units and blocks).

IOS measures each stage on the GPU; here it is simulated (`stage_ns`), with the barrier: all groups wait for the ones
before, and the next stage for all groups. IOS's other choice for a stage, merging convolutions of one input into a
larger one, makes other kernels, and is left out. Groups are the connected parts of an ending; IOS's code finds only
those with a single first op (its issue 10).

A schedule here has an order and streams, and dependencies come from data alone, so **the barriers are not enforced when
it runs**: a group starts as soon as its own inputs are there, and waits for its stream and its inputs rather than for
one barrier. The simulated makespan of the schedule is therefore not the sum of the stages. A group goes to the stream
on which its inputs were made last, where that is free, since that saves an event; with IOS's barriers it makes no
difference.

Filled in: s is at most the number of streams. A block whose search is too large (`BLOCK_EFFORT`) is searched with
smaller r first and cut in two where r = 1 is too large as well: whole blocks with r = 1 gave better schedules than
half blocks with r = 3. That happens in training, where weight gradients can wait for the optimizer, and in NASNet. Even
so a call takes up to a second for inference with GoogLeNet or Inception-v3, but 30 to 45 s for NASNet-A-Large and for
training steps of hundreds of ops: this policy is marked slow in the registry.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from gpusim.engine.pool import SmPool
from gpusim.hardware.model import HardwareModel
from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import Task
from gpusim.policies.base import Assignment, spread_views
from gpusim.policies.ios_blocks import Units, blocks_of, narrowest, units_of

#: r and s: most units in a group, most groups in a stage (the values of IOS's experiments).
MAX_GROUP, MAX_GROUPS = 3, 8
#: Most units of a block. IOS's experiments had 50; the cells of NASNet-A-Large have 19 to 25.
MAX_BLOCK = 25
#: Work for one block, counted in endings looked at, and for all units of a step together.
BLOCK_EFFORT, EFFORT = 700_000, 16_000_000
#: Simulating a stage takes about as long as looking at this many endings.
STAGE_EFFORT = 100

Groups = tuple[int, ...]
"""The groups of a stage, each a bit mask of the nodes of a block."""
Stage = tuple[tuple[int, ...], ...]
"""The groups of a stage, each its units in launch order."""
StageCost = Callable[[Sequence[Sequence[Task]], HardwareModel], float]
"""Time of a stage in ns, barrier included, from the tasks of its groups."""


def ios(graph: OpGraph, streams: int) -> Assignment:
    """Stages in order; the groups of each on streams of their own."""
    if streams == 1:
        return Assignment(tuple(range(len(graph))), (0,) * len(graph))
    units = units_of(graph)
    order: list[int] = []
    stream_of: dict[int, int] = {}
    for stage in ios_stages(graph, units, min(MAX_GROUPS, streams)):
        place_stage(units, stage, streams, order, stream_of)
    return spread_views(
        graph,
        [op for unit in order for op in units.ops[unit]],
        {op: stream for unit, stream in stream_of.items() for op in units.ops[unit]},
    )


def stage_ns(groups: Sequence[Sequence[Task]], hardware: HardwareModel) -> float:
    """Time of a stage from the barrier before it to the one behind it, where the next stage may start.

    Groups start together, pass the front end and share the GPU by the engine's rules. The barrier behind costs a join
    of all groups; the gap after it belongs to the next stage.
    """
    costs = hardware.graph
    pool = SmPool(hardware)
    fork_ns = costs.fork_ns if len(groups) > 1 else 0.0
    waiting = [(costs.chain_ns + fork_ns + group[0].extra_ns, number) for number, group in enumerate(groups)]
    heapq.heapify(waiting)
    position = [0] * len(groups)
    now = front_end_free = 0.0
    while waiting or pool.running:
        end = pool.next_end()
        start = max(waiting[0][0], front_end_free) if waiting and not pool.full else None
        if start is None or (end is not None and now + end[0] <= start):
            assert end is not None, "groups left, but nothing runs"
            pool.advance(end[0])
            now += end[0]
            number = end[1]
            pool.finish(number)
            position[number] += 1
            if position[number] < len(groups[number]):
                gap_ns = costs.chain_ns + groups[number][position[number]].extra_ns
                heapq.heappush(waiting, (now + gap_ns, number))
        else:
            pool.advance(start - now)
            now = start
            front_end_free = now + costs.front_end_ns
            number = heapq.heappop(waiting)[1]
            pool.start(number, groups[number][position[number]])
        pool.update()
    return now + costs.join_ns * (len(groups) - 1)


def ios_stages(graph: OpGraph, units: Units, max_groups: int, cost: StageCost = stage_ns) -> list[Stage]:
    """The stages of a step, of at most `max_groups` groups each."""
    todo = blocks_of(units.dag, MAX_BLOCK)[::-1]
    stages: list[Stage] = []
    while todo:
        nodes = todo.pop()
        block = _Block(graph, units, nodes, cost)
        effort = max(1 + STAGE_EFFORT, min(BLOCK_EFFORT, EFFORT * len(nodes) // len(units)))  # a single unit fits
        for max_group in range(MAX_GROUP, 0, -1):
            endings = block.endings(max_group, max_groups, effort)
            if endings is not None:
                stages += block.best(endings)
                break
        else:
            todo += narrowest(units.dag, nodes, max(1, 2 * len(nodes) // 3))[::-1]
    return stages


class _Block:
    """The search in one block. Sets of its nodes are bit masks; bit 0 is its first node."""

    def __init__(self, graph: OpGraph, units: Units, nodes: range, cost: StageCost) -> None:
        self.hardware = graph.hardware
        self.first = nodes.start
        self.succs = [sum(1 << s - nodes.start for s in units.dag.succs[node] if s in nodes) for node in nodes]
        self.tasks = [[task for op in units.ops[node] for task in graph.tasks[op]] for node in nodes]
        self.cost = cost
        self.cost_ns: dict[int, float] = {}

    def endings(self, max_group: int, max_groups: int, effort: int) -> dict[int, list[Groups]] | None:
        """The endings of every set of nodes that can be left over; None where that would take more than `effort`."""
        whole = (1 << len(self.tasks)) - 1
        found: dict[int, list[Groups]] = {}
        stages: set[int] = set()
        todo = [whole]
        while todo:
            state = todo.pop()
            if state in found or not state:
                continue
            found[state] = []
            for ending, groups in self._endings_of(state, 0, (), len(self.tasks), max_group, max_groups):
                found[state].append(groups)
                effort -= 1 if ending in stages else 1 + STAGE_EFFORT
                if effort < 0:
                    return None
                stages.add(ending)
                todo.append(state & ~ending)
        return found

    def _endings_of(
        self, state: int, ending: int, groups: Groups, below: int, max_group: int, max_groups: int
    ) -> Iterator[tuple[int, Groups]]:
        """`ending` extended in every way by nodes under `below`: latest first, so each ending comes up once."""
        left = state & ~ending & ((1 << below) - 1)
        while left:
            node = left.bit_length() - 1
            left ^= 1 << node
            after = self.succs[node] & state
            if after & ~ending:
                continue  # a successor in `state` stays behind
            group = 1 << node
            apart = []
            for other in groups:
                if other & after:
                    group |= other
                else:
                    apart.append(other)
            if group.bit_count() > max_group or len(apart) >= max_groups:
                continue
            extended = ending | 1 << node, (*apart, group)
            yield extended
            yield from self._endings_of(state, *extended, node, max_group, max_groups)

    def best(self, endings: dict[int, list[Groups]]) -> list[Stage]:
        """The stages of least total time."""
        least: dict[int, tuple[float, Groups]] = {0: (0.0, ())}
        for state in sorted(endings):  # what is left over is a smaller number
            least[state] = min(
                ((least[state & ~sum(groups)][0] + self._stage_ns(groups), groups) for groups in endings[state]),
                key=lambda found: found[0],
            )
        state = (1 << len(self.tasks)) - 1
        stages: list[Stage] = []
        while state:
            groups = least[state][1]
            stages.append(tuple(tuple(self.first + node for node in _bits(group)) for group in sorted(groups)))
            state &= ~sum(groups)
        return stages[::-1]

    def _stage_ns(self, groups: Groups) -> float:
        key = sum(groups)  # the groups are the connected parts of their union
        if key not in self.cost_ns:
            tasks = [[task for node in _bits(group) for task in self.tasks[node]] for group in sorted(groups)]
            self.cost_ns[key] = self.cost(tasks, self.hardware)
        return self.cost_ns[key]


def place_stage(units: Units, stage: Stage, streams: int, order: list[int], stream_of: dict[int, int]) -> None:
    """Add a stage to the units' launch order and streams: a group follows its latest input where that is free."""
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


def _bits(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set, in ascending order."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
