"""A memory plan for torch's own tools: a policy of selective checkpointing, and marks for its offload pass.

Both see the calls of a forward pass by operator, without the names of a trace. So the n-th call of an operator is
matched with the trace's n-th op of that operator: the model must make the same calls as when it was captured. Another
order of calls shows that it does not.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, cast

import torch
from torch.utils import _pytree as pytree
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


#: Copies in another type or layout, as autocast makes them: each is read, and nothing changes it.
COPY: Final = "aten._to_copy.default"


class Wanted(NamedTuple):
    """An op of the captured step, and whether it runs again."""

    op: int
    again: bool


class PlanPolicy:
    """A plan as `policy_fn` for `torch.utils.checkpoint.create_selective_checkpoint_contexts`, and as `context_fn`.

    As `policy_fn` it counts calls, so it is for one forward pass: in a second one no call would be the trace's, and
    all would be saved. `contexts` is the `context_fn` of `torch.utils.checkpoint.checkpoint` for any number of them.
    """

    def __init__(self, wanted: Mapping[str, Sequence[Wanted]], strict: bool = True) -> None:
        """Make the policy that runs the n-th call of operator `name` again where `wanted[name][n]` says so.

        `strict`: other calls may give wrong gradients, since ops of the trace change tensors in place or are random.
        """
        self._wanted, self._strict = wanted, strict
        self._changed_again = any(
            each.again for name, calls in wanted.items() if _functional(name) != name for each in calls
        )
        self._calls: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        self._place = {False: -1, True: -1}
        """Place in the trace of the last call, in each of both passes."""
        self._warned = False

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Say whether a call's result is saved. Raises `PlanError` for a call that the trace lacks and that the plan
        cannot leave out.
        """
        name, again = str(op), bool(ctx.is_recompute)
        number = self._calls[again][name]
        self._calls[again][name] += 1
        known = self._wanted.get(name, ())
        if number < len(known):
            self._check_order(name, known[number].op, again, op)
            return CheckpointPolicy.PREFER_RECOMPUTE if known[number].again else CheckpointPolicy.MUST_SAVE
        if not known and (self._may_be_changed_again(op, args) or (args and _changes(name, args[0]))):
            raise PlanError(
                f"the model calls {name}, which the captured step does not: was it captured for another device, or in "
                "another mode?"
            )
        often = (
            f"the model calls {name} more often than the captured step, which has {counted(len(known), 'such call')}"
        )
        if args and _changes(name, args[0]):
            raise PlanError(f"{often}: {ONE_PASS}")
        if known and not self._warned:
            self._warned = True
            warnings.warn(f"{often}; all further ones are saved: {ONE_PASS}", RuntimeWarning, stacklevel=2)
        return CheckpointPolicy.MUST_SAVE

    def _check_order(self, name: str, place: int, again: bool, op: Any) -> None:
        """Raise `PlanError` for a call behind a later one of the trace: the n-th call is another one then."""
        if getattr(op, "is_view", False):
            return
        if self._strict and place < self._place[again]:
            raise PlanError(
                f"the model calls {name} where the captured step calls other operators: a memory plan is for the same "
                "calls in the same order"
            )
        self._place[again] = max(place, self._place[again])

    def _may_be_changed_again(self, op: Any, args: Sequence[Any]) -> bool:
        """Whether a call makes a tensor, which is saved, and ops that run again may change it in place once more."""
        made = [result for result in op._schema.returns if result.alias_info is None]
        given = (each for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor))
        return self._changed_again and bool(made) and str(op) != COPY and any(t.is_floating_point() for t in given)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of one forward pass, with a checkpoint around the whole model, and of its backward pass.

        Ops that change saved results in place run again, so torch need not refuse such changes.
        """
        in_place = any(_functional(name) != name for name in self._wanted)
        made = create_selective_checkpoint_contexts(
            PlanPolicy(self._wanted, self._strict), allow_cache_entry_mutation=in_place
        )
        return cast("tuple[AbstractContextManager[Any], AbstractContextManager[Any]]", made)


def policy_fn(trace: Trace, plan: MemoryPlan) -> PlanPolicy:
    """Return the plan as a policy of selective checkpointing.

    Results that the backward pass needs are `MUST_SAVE`, except those that the plan recomputes. So is what changes
    tensors from before the step. All else is `PREFER_RECOMPUTE`: torch would hold each saved result until the backward
    pass, also a view, with the memory behind it, and one that nothing needs any more. Tensors that the plan moves are
    saved: torch offloads nothing here before 2.12.

    Ops that change a tensor in place run again with the op that made it, or not at all, and so do all random ops: torch
    says nothing where they do not, and gradients are wrong. So the policy raises `PlanError` for a call in place that
    the trace does not have, for calls in another order, and for an operator that the trace lacks where its result may
    be changed in place again. A plan of another trace, or with variants, is refused at once.
    """
    storages = _checked_storages(trace, plan)
    again = runs_again(storages, plan)
    wanted: dict[str, list[Wanted]] = defaultdict(list)
    strict = False
    for index, op in enumerate(trace.ops):
        if op.phase == "forward":
            wanted[op.target].append(Wanted(index, index in again))
            strict |= draws(op) or _functional(op.target) != op.target
    return PlanPolicy(dict(wanted), strict)


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
