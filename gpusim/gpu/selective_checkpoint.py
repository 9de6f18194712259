"""A memory plan for torch's own tools: a policy of selective checkpointing, and marks for its offload pass.

Both see the calls of a forward pass by operator, without the names of a trace. So the n-th call of an operator is
matched with the trace's n-th op of that operator: the model must make the same calls as when it was captured.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from gpusim.formats.trace import Trace
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.storages import Storages

PolicyFunction = Callable[..., CheckpointPolicy]


def policy_fn(trace: Trace, plan: MemoryPlan) -> PolicyFunction:
    """Return the plan as `policy_fn` for `torch.utils.checkpoint.create_selective_checkpoint_contexts`.

    Results that the backward pass needs are `MUST_SAVE`, except those that the plan recomputes. So is what changes
    tensors from before the step. All else is `PREFER_RECOMPUTE`: torch would hold each saved result until the backward
    pass, also a view, with the memory behind it, and one that nothing needs any more. Tensors that the plan moves are
    saved: torch offloads nothing here before 2.12. Make a new one for each forward pass, since it counts calls.
    """
    storages = Storages.of(trace)
    again = {op for redo in plan.redos for op in redo.ops}
    stays = frozenset(storages.saved) | storages.initial | storages.results
    wanted: dict[str, list[bool]] = defaultdict(list)
    for index, op in enumerate(trace.ops):
        if op.phase == "forward":
            written = storages.writes[index] - storages.states[index]
            wanted[op.target].append(index in again or not written & stays)
    calls: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name, count = str(op), calls[bool(ctx.is_recompute)]
        number = count[name]
        count[name] += 1
        known = wanted.get(name, [])
        recompute = number < len(known) and known[number]
        return CheckpointPolicy.PREFER_RECOMPUTE if recompute else CheckpointPolicy.MUST_SAVE

    return decide


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


def _functional(operator: str) -> str:
    """Return the name of the operator that changes nothing: `aten.relu.default` for `aten.relu_.default`."""
    return re.sub(r"(?<=\w)_(?=\.\w+$)", "", operator)
