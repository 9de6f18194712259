"""The search of `gpusim.policies.ios` within one block, compiled: enumerate stages, lower them, choose the best.

It is in this package because the cache of compiled functions depends on its sources (see `jit`). Sets of a block's
nodes are bit masks of at most `MOST_NODES` nodes. `succs` has the successors of each node within the block. The rules
and terms of the policy are in `gpusim.policies.ios`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpusim.engine.compiled.arrays import Plans, Records
from gpusim.engine.compiled.jit import entry, int64, jit

Masks = npt.NDArray[np.int64]

MOST_NODES: Final = 60
#: Results of `find_stages` in place of the remaining effort: effort exhausted, or a table is full.
TOO_MUCH, NO_ROOM = -1, -2
#: An odd number near 2^64 over the golden ratio, as a signed one: Fibonacci hashing (Knuth, TAOCP 3, section 6.4).
_SPREAD: Final = -7046029254386353131


class Sets(NamedTuple):
    """Sets in order of discovery, with a hash table of their positions, counted from 1."""

    values: Masks
    table: Masks
    used: Masks
    """Number of sets, as an array of one element."""

    @classmethod
    def of_size(cls, size: int) -> Sets:
        """Room for `size` sets, a power of two."""
        return cls(np.zeros(size, np.int64), np.zeros(2 * size, np.int64), np.zeros(1, np.int64))


class Walk(NamedTuple):
    """State of the walk through the endings of a set: each depth adds one node to the ending."""

    ending: Masks
    below: Masks
    """Node visited last at each depth; higher ones are done."""
    n_groups: Masks
    groups: Masks

    @classmethod
    def of_size(cls, nodes: int) -> Walk:
        """Room for sets of `nodes` nodes."""
        sizes = np.zeros(nodes + 2, np.int64)
        return cls(sizes, sizes.copy(), sizes.copy(), np.zeros((nodes + 2, nodes + 1), np.int64))


@entry
def find_stages(
    succs: Masks,
    max_group: int,
    max_groups: int,
    effort: int,
    stage_effort: int,
    states: Sets,
    stages: Sets,
    walk: Walk,
) -> int:
    """Fill `states` with all sets that can remain and `stages` with all stages; return the remaining effort.

    An ending costs an effort of 1, and a new stage `stage_effort` more.
    """
    nodes = len(succs)
    add(states, (int64(1) << nodes) - 1)
    if max_group == 1:
        left = count_single(succs, max_groups, effort, states)
        if left < 0:
            return left
    at = int64(0)
    while at < states.used[0]:
        state = states.values[at]
        at += 1
        depth = begin_walk(walk, nodes)
        while True:
            depth = next_ending(succs, state, max_group, max_groups, walk, depth)
            if depth < 0:
                break
            ending = walk.ending[depth]
            known = stages.table[slot_of(stages, ending)] > 0
            effort -= 1 if known else 1 + stage_effort
            if effort < 0:
                return int64(TOO_MUCH)
            if not known and not add(stages, ending):
                return int64(NO_ROOM)
            rest = state & ~ending
            if rest != 0 and not add(states, rest):
                return int64(NO_ROOM)
    return effort


@entry
def choose_stages(
    succs: Masks,
    max_group: int,
    max_groups: int,
    states: Sets,
    ascending: Masks,
    stages: Sets,
    cost_ns: npt.NDArray[np.float64],
    least_ns: npt.NDArray[np.float64],
    last: Masks,
    walk: Walk,
) -> None:
    """Find the least time of each set as a sequence of stages, and its last stage; of equal ones the first found.

    `ascending` has the positions of the sets by value: removing an ending gives a smaller value.
    """
    for number in range(len(ascending)):
        at = ascending[number]
        state = states.values[at]
        least_ns[at] = np.inf
        depth = begin_walk(walk, len(succs))
        while True:
            depth = next_ending(succs, state, max_group, max_groups, walk, depth)
            if depth < 0:
                break
            ending = walk.ending[depth]
            rest = state & ~ending
            time_ns = 0.0 if rest == 0 else least_ns[states.table[slot_of(states, rest)] - 1]
            time_ns += cost_ns[stages.table[slot_of(stages, ending)] - 1]
            if time_ns < least_ns[at]:
                least_ns[at] = time_ns
                last[at] = ending


@entry
def lower_stages(
    tasks: Records,
    first_task: Masks,
    succs: Masks,
    stages: Masks,
    first: int,
    plans: Plans,
    walk: Walk,
    n_groups: Masks,
    extra_ns: npt.NDArray[np.float64],
) -> None:
    """Lower as many stages as there are plans, from `first` on, each to a plan with one queue per group.

    The tasks of node i are `first_task[i]` to `first_task[i + 1]` - 1. Also set the number of groups of each stage, and
    the largest extra gap before the first task of a group.
    """
    nodes = len(succs)
    groups = walk.groups[0]
    for plan in range(min(len(plans.nodes), len(stages) - first)):
        index = int64(0)
        count = connected(succs, stages[first + plan], nodes, groups)
        n_groups[first + plan] = count
        extra_ns[first + plan] = 0.0
        for group in range(count):
            previous = int64(-1)
            for node in range(nodes):
                if groups[group] >> node & 1 == 0:
                    continue
                for row in range(first_task[node], first_task[node + 1]):
                    if previous < 0:
                        extra_ns[first + plan] = max(extra_ns[first + plan], tasks[row].extra_ns)
                    lowered = plans.nodes[plan, index]
                    lowered.row = row
                    lowered.device = lowered.n_deps = lowered.first_dep = 0
                    lowered.previous = previous
                    previous = index
                    index += 1
        plans.tasks[plan] = index


@entry
def groups_of(succs: Masks, stage: int, groups: Masks) -> int:
    """Return the number of groups of one stage (`connected`)."""
    return connected(succs, int64(stage), len(succs), groups)


@jit
def count_single(succs: Any, max_groups: int, effort: int, states: Any) -> int:
    """Fill `states`, and return what the endings of single nodes leave of the effort, or as `find_stages` does.

    Such an ending is any of the nodes without a successor in the state, up to `max_groups` of them: so many are counted
    at once, and a block that is too large is found without its walks.
    """
    at = int64(0)
    while at < states.used[0]:
        state = states.values[at]
        at += 1
        last = int64(0)
        for node in range(len(succs)):
            bit = int64(1) << node
            if state & bit != 0 and succs[node] & state == 0:
                last += 1
                rest = state & ~bit
                if rest != 0 and not add(states, rest):
                    return int64(NO_ROOM)
        of_size = int64(1)
        for size in range(1, min(last, max_groups) + 1):
            of_size = of_size * (last - size + 1) // size
            effort -= of_size
        if effort < 0:
            return int64(TOO_MUCH)
    return effort


@jit
def begin_walk(walk: Any, nodes: int) -> int:
    """Start the walk before the first ending of a set and return its depth."""
    walk.ending[0] = 0
    walk.below[0] = nodes
    walk.n_groups[0] = 0
    return int64(0)


@jit
def next_ending(succs: Any, state: int, max_group: int, max_groups: int, walk: Any, depth: int) -> int:
    """Advance to the next ending of `state`, `walk.ending[depth]`, and return its depth, or -1 after the last.

    An ending is extended in every way by nodes below its lowest, highest first, so each ending occurs once.
    """
    while depth >= 0:
        walk.below[depth] -= 1
        node = walk.below[depth]
        if node < 0:
            depth -= 1
            continue
        bit = int64(1) << node
        ending = walk.ending[depth]
        after = succs[node] & state
        if state & bit == 0 or after & ~ending != 0:  # a successor would remain in `state`
            continue
        group, apart = bit, int64(0)
        for number in range(walk.n_groups[depth]):
            other = walk.groups[depth, number]
            if other & after != 0:
                group |= other
            else:
                walk.groups[depth + 1, apart] = other
                apart += 1
        if apart >= max_groups or members(group) > max_group:
            continue
        depth += 1
        walk.groups[depth, apart] = group
        walk.n_groups[depth] = apart + 1
        walk.ending[depth] = ending | bit
        walk.below[depth] = node
        return depth
    return int64(-1)


@jit
def connected(succs: Any, stage: int, nodes: int, groups: Any) -> int:
    """Fill `groups` with the connected components of a stage, as ascending masks, and return their number."""
    count = int64(0)
    for node in range(nodes - 1, -1, -1):
        bit = int64(1) << node
        if stage & bit == 0:
            continue
        group, apart = bit, int64(0)
        for number in range(count):
            other = groups[number]
            if other & succs[node] != 0:
                group |= other
            else:
                groups[apart] = other
                apart += 1
        place = apart
        while place > 0 and groups[place - 1] > group:
            groups[place] = groups[place - 1]
            place -= 1
        groups[place] = group
        count = apart + 1
    return count


@jit
def members(mask: int) -> int:
    """Return the number of nodes in a set."""
    count = int64(0)
    while mask != 0:
        mask &= mask - 1
        count += 1
    return count


@jit
def slot_of(sets: Any, value: int) -> int:
    """Return the slot of a set in the table, or its free slot."""
    last = len(sets.table) - 1
    slot = (value * int64(_SPREAD)) >> 20 & last
    while sets.table[slot] > 0 and sets.values[sets.table[slot] - 1] != value:
        slot = slot + 1 & last
    return slot


@jit
def add(sets: Any, value: int) -> bool:
    """Add a set unless present; return False if there is no room."""
    slot = slot_of(sets, value)
    if sets.table[slot] == 0:
        if sets.used[0] == len(sets.values):
            return False
        sets.values[sets.used[0]] = value
        sets.used[0] += 1
        sets.table[slot] = sets.used[0]
    return True
