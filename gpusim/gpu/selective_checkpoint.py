"""A memory plan for torch's own tools: a policy of selective checkpointing, and marks for its offload pass.

Both see the calls of a forward pass by operator, without the names of a trace. So the n-th call of an operator is
matched with the trace's n-th op of that operator: the model must make the same calls as when it was captured.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, cast

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from gpusim.errors import PlanError
from gpusim.formats.trace import Trace
from gpusim.memplan.again import draws
from gpusim.memplan.checks import check_memory_plan
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.storages import Storages
from gpusim.units import counted

ONE_PASS: Final = (
    "a memory plan is for the same calls, and a policy for one forward pass (`contexts` is for any number)"
)


class PlanPolicy:
    """A plan as `policy_fn` for `torch.utils.checkpoint.create_selective_checkpoint_contexts`, and as `context_fn`.

    As `policy_fn` it counts calls, so it is for one forward pass: in a second one no call would be the trace's, and
    all would be saved. `contexts` is the `context_fn` of `torch.utils.checkpoint.checkpoint` for any number of them.
    """

    def __init__(self, wanted: Mapping[str, Sequence[bool]]) -> None:
        """Make the policy that runs the n-th call of operator `name` again where `wanted[name][n]` says so."""
        self._wanted = wanted
        self._calls: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        self._warned = False

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Say whether a call's result is saved. Raises `PlanError` for a change in place that the trace lacks."""
        name, count = str(op), self._calls[bool(ctx.is_recompute)]
        number = count[name]
        count[name] += 1
        known = self._wanted.get(name, ())
        if number < len(known):
            return CheckpointPolicy.PREFER_RECOMPUTE if known[number] else CheckpointPolicy.MUST_SAVE
        often = (
            f"the model calls {name} more often than the captured step, which has {counted(len(known), 'such call')}"
        )
        if args and _changes(name, args[0]):
            raise PlanError(f"{often}: {ONE_PASS}")
        if known and not self._warned:
            self._warned = True
            warnings.warn(f"{often}; all further ones are saved: {ONE_PASS}", RuntimeWarning, stacklevel=2)
        return CheckpointPolicy.MUST_SAVE

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of one forward pass, with a checkpoint around the whole model, and of its backward pass.

        Ops that change saved results in place run again, so torch need not refuse such changes.
        """
        in_place = any(_functional(name) != name for name in self._wanted)
        made = create_selective_checkpoint_contexts(PlanPolicy(self._wanted), allow_cache_entry_mutation=in_place)
        return cast("tuple[AbstractContextManager[Any], AbstractContextManager[Any]]", made)


def policy_fn(trace: Trace, plan: MemoryPlan) -> PlanPolicy:
    """Return the plan as a policy of selective checkpointing.

    Results that the backward pass needs are `MUST_SAVE`, except those that the plan recomputes. So is what changes
    tensors from before the step. All else is `PREFER_RECOMPUTE`: torch would hold each saved result until the backward
    pass, also a view, with the memory behind it, and one that nothing needs any more. Tensors that the plan moves are
    saved: torch offloads nothing here before 2.12.

    Ops that change a tensor in place run again with the op that made it, or not at all, and so do all random ops: torch
    says nothing where they do not, and gradients are wrong. So a call in place that the trace does not have raises
    `PlanError`. So does a plan of another trace, at once, and one with variants.
    """
    storages = _checked_storages(trace, plan)
    again = runs_again(storages, plan)
    wanted: dict[str, list[bool]] = defaultdict(list)
    for index, op in enumerate(trace.ops):
        if op.phase == "forward":
            wanted[op.target].append(index in again)
    return PlanPolicy(dict(wanted))


def _checked_storages(trace: Trace, plan: MemoryPlan) -> Storages:
    """Return the storages of a plan that torch's tools can run. Raises `PlanError`."""
    storages = Storages.of(trace)
    check_memory_plan(storages, plan)
    if plan.has_variants:
        raise PlanError("the memory plan runs variants of ops, which torch's own tools cannot; `gpusim.replay` runs it")
    return storages


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
    makes ops in place functional there, so both count as one operator. Where the graph calls an operator more or less
    often than the step, the n-th call may be another one: none of its results is marked, and a warning says so. Torch
    itself moves no views, and no results of ops that have several. Raises `PlanError` for a plan of another trace, or
    with variants.
    """
    moved = {offload.storage for offload in plan.offloads}
    storages = _checked_storages(trace, plan)
    marks: dict[str, list[bool]] = defaultdict(list)
    for index, op in enumerate(trace.ops):
        if op.phase == "forward":
            marks[_functional(op.target)].append(bool(moved & storages.writes[index]))
    calls: dict[str, list[Any]] = defaultdict(list)
    for node in nodes:
        if node.op == "call_function":
            calls[_functional(str(node.target))].append(node)
    moving = [name for name, wanted in marks.items() if any(wanted)]
    others = [name for name in moving if len(calls[name]) != len(marks[name])]
    if others:
        often = ", ".join(f"{name} {len(calls[name])} times, not {len(marks[name])}" for name in others)
        problem = f"the graph makes other calls than the captured step: {often}; none of these is marked"
        warnings.warn(problem, RuntimeWarning, stacklevel=2)
    chosen = [
        node
        for name in moving
        if name not in others
        for node, wanted in zip(calls[name], marks[name], strict=True)
        if wanted
    ]
    for node in chosen:
        node.meta["should_offload"] = True
    return len(chosen)


def _changes(operator: str, first: Any) -> bool:
    """Whether an operator changes values of its first argument in place; a counter, such as batch norm's, is none."""
    return _functional(operator) != operator and isinstance(first, torch.Tensor) and first.is_floating_point()


def _functional(operator: str) -> str:
    """Return the name of the operator that changes nothing: `aten.relu.default` for `aten.relu_.default`."""
    return re.sub(r"(?<=\w)_(?=\.\w+$)", "", operator)
