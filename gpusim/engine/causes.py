"""Why each task of a timeline started when it did and what it lost while it ran: noted by an engine as it simulates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from gpusim.formats.hardware import HardwareModel
from gpusim.plan.tasks import Plan, Task
from gpusim.rules import copies

THREADS: Final = "threads"
REGISTERS: Final = "registers"
SMEM: Final = "shared memory"
BLOCKS: Final = "blocks"
SPLIT: Final = "shared-memory split"
ISSUE: Final = "issue and L2"
DRAM: Final = "DRAM"
COPY: Final = "copy engine"
#: In the order of `Demand.resources`. Block slots, and standing behind a kernel that is not placed, are both `BLOCKS`.
RESOURCES: Final = (THREADS, REGISTERS, SMEM, BLOCKS)
#: By their numbers in `gpusim.rules.lost_time`.
LOSSES: Final = (THREADS, REGISTERS, SMEM, BLOCKS, SPLIT, ISSUE, DRAM, COPY)

Held = Literal["", "front end", "grid slot", "copy engine"]
"""What kept a task that was ready: nothing; the front end was starting another; another had to end to make room."""
NOTHING, FRONT_END, GRID_SLOT, COPY_ENGINE = 0, 1, 2, 3
HELD: Final[tuple[Held, ...]] = ("", "front end", "grid slot", "copy engine")

COPIES: Final = ("h2d", "d2h")
#: Less is rounding.
ROUNDING_NS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Loss:
    """Time that one task lost while it ran, from one change on the device to the next."""

    cause: str
    by: int | None
    """The oldest other task that ran meanwhile; None where there was none."""
    from_ns: float
    until_ns: float
    lost_ns: float


@dataclass(frozen=True, slots=True)
class Causes:
    """Of each task of a plan; times are not rounded. -1 stands for no task.

    A task starts `held` after it is ready. In a graph it is ready once the task that ended last among its predecessors
    has ended, its gap has passed, and what that task lost to starts beside it; successors of a fork take turns.
    """

    last: tuple[int, ...]
    """The predecessor that decided when it was ready; -1 where that was the host or nothing."""
    interference_ns: tuple[float, ...]
    """What it lost to starts of other kernels beside it, which its successors wait for (graph mode)."""
    launched_ns: tuple[float, ...]
    """When the host had launched it (stream mode; 0 in a graph)."""
    held: tuple[Held, ...]
    """What kept it from its start when it was ready."""
    held_by: tuple[int, ...]
    """The task that the front end had started before, or that ended to make room."""
    losses: tuple[tuple[Loss, ...], ...]
    """What it lost while it ran; the sum is its time less its time alone, in the whole ns of a timeline."""


def alone_ns(task: Task, hardware: HardwareModel) -> float:
    """Time of a task alone on its device."""
    if task.kind not in COPIES:
        return task.dur_ns
    return copies.alone_ns(hardware.copies, task.copy_bytes, task.kind == "h2d")


def closed(
    losses: Sequence[Sequence[Loss]],
    plan: Plan,
    start_ns: Sequence[int],
    end_ns: Sequence[int],
    hardware: HardwareModel,
) -> tuple[tuple[Loss, ...], ...]:
    """Losses in proportion to those noted, whose sum is what the timeline says.

    Times in it are rounded, and the last wave of a kernel's blocks goes on faster than the others.
    """
    return tuple(
        tuple(_scaled(rows, start, end, alone_ns(task, hardware)))
        for task, rows, start, end in zip(plan.tasks, losses, start_ns, end_ns, strict=True)
    )


def _scaled(rows: Sequence[Loss], start_ns: int, end_ns: int, task_ns: float) -> Sequence[Loss]:
    lost_ns, noted_ns = end_ns - start_ns - task_ns, sum(row.lost_ns for row in rows)
    if lost_ns <= 0.0:
        return ()
    if noted_ns <= 0.0:  # blocks that came to lie unevenly, or rounding
        return [Loss(BLOCKS, None, start_ns, end_ns, lost_ns)] if lost_ns > ROUNDING_NS else ()
    return [
        Loss(row.cause, row.by, row.from_ns, row.until_ns, row.lost_ns * lost_ns / noted_ns)  # `replace` takes long
        for row in rows
    ]
