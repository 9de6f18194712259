"""Plans that exceed a budget at a few ops: tensors that these do not need move out for the time between two uses.

Source: this project. Ops wait for such copies where the ops between do not last as long. Of all storages in memory
that nothing uses around the op that needs most, the one that costs the least time for what it frees there moves, until
every op keeps the budget. It comes back as early as the budget allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gpusim.memplan.plan import MemoryPlan, Offload
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.program import Program, needed, program_of
from gpusim.memplan.times import OpTimes
from gpusim.plan.allocator import rounded

#: Most storages that move so: beyond, another plan is faster.
MOST_MOVED = 64
#: Corrections by the allocator's simulation.
CORRECTIONS = 4


@dataclass(frozen=True, slots=True)
class _Gap:
    """A storage in memory between two places that use it."""

    storage: int
    before: int
    """Place of the use before."""
    after: int


@dataclass(frozen=True, slots=True)
class _Move:
    """A copy out and back within a gap."""

    gap: _Gap
    free: int
    """Place before which memory is freed."""
    back: int
    """Place before which the copy back begins."""
    bytes: int
    """Memory that it frees."""
    cost_ns: float
    """What ops wait for both copies, in ns."""


def within(setting: Setting, plan: MemoryPlan, budget_bytes: int) -> MemoryPlan | None:
    """Return a plan on one stream with copies added so that it keeps a budget; None where they cannot.

    The allocator's blocks may take more than they hold, so what its simulation says is corrected for.
    """
    program = program_of(setting.storages, plan)
    order = plan.order or tuple(range(len(setting.storages.trace.ops)))
    level = _level(setting, program, len(order))
    gaps = tuple(_gaps(setting, program))
    times = OpTimes.of(setting.graph, order, plan.redos)
    target_bytes = budget_bytes
    for _ in range(CORRECTIONS):
        moves = _chosen(setting, times, gaps, level, target_bytes)
        if moves is None:
            return None
        added = (
            Offload(each.gap.storage, after=order[each.gap.before], free=order[each.free], back=order[each.back])
            for each in moves
        )
        changed = replace(plan, offloads=(*plan.offloads, *added))
        over_bytes = setting.peak_bytes(changed) - budget_bytes
        if over_bytes <= 0:
            return changed
        target_bytes -= over_bytes
    return None


def _level(setting: Setting, program: Program, count: int) -> npt.NDArray[np.int64]:
    """Return the most bytes allocated at each place, recomputation before its op included."""
    level = np.zeros(count, dtype=np.int64)
    place = 0
    for instruction, level_bytes in zip(program, setting.levels_bytes(program), strict=True):
        if instruction.kind in ("run", "again", "back"):
            level[place] = max(level[place], level_bytes)
        place += instruction.kind == "run"
    return level


def _gaps(setting: Setting, program: Program) -> Iterator[_Gap]:
    """Yield where a storage stays in memory between two uses that are more than one place apart."""
    storages = setting.storages
    stays = storages.initial | storages.results
    used: dict[int, int] = {}
    place = 0
    for instruction in program:
        if instruction.kind in ("run", "again"):
            for storage in filter(storages.bytes.__getitem__, needed(storages, instruction) - stays):
                before = used.get(storage, place)
                if place > before + 1:
                    yield _Gap(storage, before, place)
                used[storage] = place
        else:
            used.pop(instruction.storage, None)
        place += instruction.kind == "run"


def _chosen(
    setting: Setting, times: OpTimes, gaps: Sequence[_Gap], level: npt.NDArray[np.int64], budget_bytes: int
) -> list[_Move] | None:
    """Return the moves that bring the bytes at each place below the budget; None where there are none."""
    moves: list[_Move] = []
    left, level = list(gaps), level.copy()
    while True:
        worst = int(level.argmax())
        over_bytes = int(level[worst]) - budget_bytes
        if over_bytes <= 0:
            return moves
        if len(moves) == MOST_MOVED:
            return None
        around = (gap for gap in left if gap.before < worst < gap.after)
        possible = [_move(setting, times, gap, level, budget_bytes) for gap in around]
        if not possible:
            return None
        best = min(possible, key=lambda each: each.cost_ns / min(each.bytes, over_bytes))
        moves.append(best)
        left.remove(best.gap)
        level[best.free : best.back] -= best.bytes


def _move(setting: Setting, times: OpTimes, gap: _Gap, level: npt.NDArray[np.int64], budget_bytes: int) -> _Move:
    """Return the move of a gap around a place that exceeds the budget."""
    size, link = setting.storages.bytes[gap.storage], setting.link
    over = np.flatnonzero(level[gap.before + 1 : gap.after] > budget_bytes) + gap.before + 1
    free, back = int(over[0]), int(over[-1]) + 1
    out_ns = max(0.0, link.out_ns(size) - (times.start_ns[free] - times.end_ns[gap.before]))
    back_ns = max(0.0, link.back_ns(size) - (times.start_ns[gap.after] - times.start_ns[back]))
    return _Move(gap, free, back, rounded(size), out_ns + back_ns + link.wait_ns)
