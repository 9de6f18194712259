"""A memory plan for torch's own tools: a policy of selective checkpointing, and marks for its offload pass.

Both see the calls of a forward pass by operator, without the names of a trace. So the n-th call of an operator is
matched with the trace's n-th op of that operator: the model must make the same calls as when it was captured.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from gpusim.errors import PlanError
from gpusim.formats.trace import Trace
from gpusim.memplan.again import draws
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.storages import Storages
from gpusim.units import counted

PolicyFunction = Callable[..., CheckpointPolicy]


def policy_fn(trace: Trace, plan: MemoryPlan) -> PolicyFunction:
    """Return the plan as `policy_fn` for `torch.utils.checkpoint.create_selective_checkpoint_contexts`.

    Results that the backward pass needs are `MUST_SAVE`, except those that the plan recomputes. So is what changes
    tensors from before the step. All else is `PREFER_RECOMPUTE`: torch would hold each saved result until the backward
    pass, also a view, with the memory behind it, and one that nothing needs any more. Tensors that the plan moves are
    saved: torch offloads nothing here before 2.12. Make a new one for each forward pass, since it counts calls.

    Ops that change a tensor in place run again with the op that made it, or not at all, and so do all random ops: torch
    says nothing where they do not, and gradients are wrong. So a call in place that the trace does not have raises
    `PlanError`.
    """
    storages = Storages.of(trace)
    again = runs_again(storages, plan)
    wanted: dict[str, list[bool]] = defaultdict(list)
    for index, op in enumerate(trace.ops):
        if op.phase == "forward":
            wanted[op.target].append(index in again)
    calls: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name, count = str(op), calls[bool(ctx.is_recompute)]
        number = count[name]
        count[name] += 1
        known = wanted.get(name, [])
        if number >= len(known) and args and _changes(name, args[0]):
            often = f"more often than the captured step, which has {counted(len(known), 'such call')}"
            raise PlanError(f"the model calls {name} {often}: a memory plan is for the same calls")
        recompute = number < len(known) and known[number]
        return CheckpointPolicy.PREFER_RECOMPUTE if recompute else CheckpointPolicy.MUST_SAVE

    return decide


def runs_again(storages: Storages, plan: MemoryPlan) -> frozenset[int]:
    """Return the ops of the forward pass that are not saved under a plan.

    All that write one tensor are together. A random op is saved, since torch gives one that runs again the numbers of
    the first: with it, all that write what it writes, and all that read that between two changes. Where none of them is
    random and one runs again, all do.
    """
    ops = [index for index, op in enumerate(storages.trace.ops) if op.phase == "forward"]
    written = {op: storages.writes[op] - storages.states[op] for op in ops}
    writers: dict[int, list[int]] = defaultdict(list)
    for op in ops:
        for storage in written[op] - storages.initial:
            writers[storage].append(op)
    several = {storage: each for storage, each in writers.items() if len(each) > 1}
    between = {
        storage: [op for op in ops if each[0] < op < each[-1] and op not in each and storage in storages.reads[op]]
        for storage, each in several.items()
    }
    saved = {op for op in ops if draws(storages.trace.ops[op]) or written[op] & storages.initial}
    while (
        more := {op for s, each in several.items() if not saved.isdisjoint(each) for op in (*each, *between[s])} - saved
    ):
        saved |= more
    stays = frozenset(storages.saved) | storages.initial | storages.results
    again = {op for redo in plan.redos for op in redo.ops} | {op for op in ops if not written[op] & stays}
    again -= saved
    while (
        more := {op for s, each in several.items() if not again.isdisjoint((*each, *between[s])) for op in each}
        - again
        - saved
    ):
        again |= more
    return frozenset(again)


def mark_offloads(nodes: Iterable[Any], trace: Trace, plan: MemoryPlan) -> int:
    """Set `meta["should_offload"]` of the forward graph nodes whose results the plan moves; returns their number.

    `nodes` are those of the graph that torch's activation offloading gets, in order (`graph_module.graph.nodes`). Torch
    makes ops in place functional there, so both count as one operator.
    """
    moved = {offload.storage for offload in plan.offloads}
    storages = Storages.of(trace)
    marks: dict[str, list[bool]] = defaultdict(list)
    for index, op in enumerate(trace.ops):
        if op.phase == "forward":
            marks[_functional(op.target)].append(bool(moved & storages.writes[index]))
    seen: Counter[str] = Counter()
    marked = 0
    for node in nodes:
        if node.op != "call_function":
            continue
        name = _functional(str(node.target))
        number = seen[name]
        seen[name] += 1
        if number < len(marks[name]) and marks[name][number]:
            node.meta["should_offload"] = True
            marked += 1
    return marked


def _changes(operator: str, first: Any) -> bool:
    """Whether an operator changes values of its first argument in place; a counter, such as batch norm's, is none."""
    return _functional(operator) != operator and isinstance(first, torch.Tensor) and first.is_floating_point()


def _functional(operator: str) -> str:
    """Return the name of the operator that changes nothing: `aten.relu.default` for `aten.relu_.default`."""
    return re.sub(r"(?<=\w)_(?=\.\w+$)", "", operator)
