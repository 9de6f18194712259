"""The reason why no plan keeps a budget: the smallest that works, and what decides it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpusim.memplan.memory import MemoryUse, needs_at_once
from gpusim.memplan.storages import Storages
from gpusim.units import format_bytes, format_bytes_up

#: Ops that use at least this share of the peak may decide it: a cache fills all memory, whatever the op needs.
NEAR_PEAK: Final = 0.95


def shortfall(
    storages: Storages,
    use: MemoryUse,
    order: Sequence[int],
    budget_bytes: int,
    unplanned_bytes: int = 0,
    pinned_bytes: int | None = None,
) -> str:
    """Explain why no plan keeps a budget, by memory and order of the plan that takes least.

    Of the ops near its peak, the one that needs most at once decides, with its largest tensor or its workspace. The
    named budget is rounded up, so that it works when used. `unplanned_bytes` were measured beyond the planned peak:
    workspaces that the trace does not have. `pinned_bytes` is the limit on pinned memory, if there is one.
    """
    least_bytes = use.peak.allocated_bytes + unplanned_bytes
    pinned = "" if pinned_bytes is None else f" with at most {format_bytes(pinned_bytes)} of pinned memory"
    text = f"no plan keeps {format_bytes(budget_bytes)}{pinned}; "
    text += f"the smallest budget that works for a plan found here is {format_bytes_up(least_bytes)}"
    op = deciding_op(storages, use, order)
    if op >= 0:
        text += f": op '{storages.trace.ops[op].name}' decides it, with {_largest(storages, op)}"
    if unplanned_bytes > 0:
        text += f"; {format_bytes(unplanned_bytes)} of it are workspaces of libraries"
    before = sum(storages.bytes[storage] for storage in storages.initial)
    return text + (f"; {format_bytes(before)} are there before the step" if before > budget_bytes else "")


def deciding_op(storages: Storages, use: MemoryUse, order: Sequence[int]) -> int:
    """Return the op that needs most at once of those near the peak; -1 for a step without ops."""
    needs = needs_at_once(storages, order)
    near = [op for op, level in enumerate(use.peak_by_op) if level >= NEAR_PEAK * use.peak.allocated_bytes]
    return max(near, key=needs.__getitem__, default=use.peak.op)


def _largest(storages: Storages, op: int) -> str:
    """Describe the largest of what an op needs at once: its workspace, or a tensor."""
    touched = storages.touched[op]
    moves = sorted(touched - storages.initial, key=lambda s: (-storages.bytes[s], s)) or sorted(touched)
    workspace = storages.workspace_bytes[op]
    if not moves or workspace > storages.bytes[moves[0]]:
        return f"its workspace, {format_bytes(workspace)}"
    largest = moves[0]
    maker = next((o.name for o, new in zip(storages.trace.ops, storages.makes, strict=True) if largest in new), None)
    named = next((tensor.name for tensor in storages.trace.tensors if tensor.storage == largest), "")
    what = f"'{named}'" if maker is None else f"the result of '{maker}'"
    return f"{what}, {format_bytes(storages.bytes[largest])}"
