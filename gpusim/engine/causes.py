"""Causes of waits and lost time of the tasks of a timeline, recorded by an engine during the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from gpusim.formats.hardware import HardwareModel
from gpusim.notebook import ShortRepr
from gpusim.plan.tasks import Plan, Task
from gpusim.rules import copies

THREADS: Final = "threads"
REGISTERS: Final = "registers"
SMEM: Final = "shared memory"
BLOCKS: Final = "blocks"
CARVEOUT: Final = "shared memory carve-out"
ISSUE: Final = "issue and L2"
DRAM: Final = "DRAM"
COPY: Final = "copy engine"
#: In the order of `Demand.resources`. `BLOCKS` stands for block slots and for waiting behind an unplaced kernel.
RESOURCES: Final = (THREADS, REGISTERS, SMEM, BLOCKS)
#: Indexed by the constants of `gpusim.rules.lost_time`.
LOSSES: Final = (THREADS, REGISTERS, SMEM, BLOCKS, CARVEOUT, ISSUE, DRAM, COPY)

Held = Literal["", "front end", "grid slot", "copy engine"]
"""Resource that a ready task waited for: none, the busy front end, a free grid slot, or its copy engine."""
NOTHING, FRONT_END, GRID_SLOT, COPY_ENGINE = 0, 1, 2, 3
HELD: Final[tuple[Held, ...]] = ("", "front end", "grid slot", "copy engine")

COPIES: Final = ("h2d", "d2h")
#: Smaller losses are rounding errors.
ROUNDING_NS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Loss:
    """Time that a running task lost between two changes on its device."""

    cause: str
    by: int | None
    """Oldest other task running at that time; None if there was none."""
    from_ns: float
    until_ns: float
    lost_ns: float


@dataclass(frozen=True, slots=True, repr=False)
class Causes(ShortRepr):
    """Causes by task of a plan; times are in ns, not rounded, and -1 stands for no task.

    A ready task may be `held` before it starts. In a graph, a task is ready after the end of its last predecessor, plus
    its gap and what that predecessor lost to other kernels; successors of a fork take turns.
    """

    last: tuple[int, ...]
    """Predecessor that determined the ready time; -1 if the host did, or nothing."""
    interference_ns: tuple[float, ...]
    """Time lost to start interference, which delays its successors (graph mode)."""
    product_ns: tuple[float, ...]
    """Time that a product lost beside other kernels, which delays its successors (graph mode)."""
    launched_ns: tuple[float, ...]
    """Time of the host launch (stream mode; 0 in a graph)."""
    held: tuple[Held, ...]
    """Resource that the ready task waited for."""
    held_by: tuple[int, ...]
    """Task started just before by the front end, or whose end made room."""
    losses: tuple[tuple[Loss, ...], ...]
    """Losses while it ran; they sum to its time in the timeline minus its time alone."""


def alone_ns(task: Task, hardware: HardwareModel) -> float:
    """Return the time of a task alone on its device, in ns."""
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
    """Scale the recorded losses of each task so that their sum agrees with the timeline.

    The sums differ because the timeline is rounded and the last wave of a kernel's blocks runs faster than the others.
    """
    return tuple(
        tuple(_scaled(rows, start, end, alone_ns(task, hardware)))
        for task, rows, start, end in zip(plan.tasks, losses, start_ns, end_ns, strict=True)
    )


def _scaled(rows: Sequence[Loss], start_ns: int, end_ns: int, task_ns: float) -> Sequence[Loss]:
    lost_ns, noted_ns = end_ns - start_ns - task_ns, sum(row.lost_ns for row in rows)
    if lost_ns <= 0.0:
        return ()
    if noted_ns <= 0.0:  # blocks placed unevenly, or rounding
        return [Loss(BLOCKS, None, start_ns, end_ns, lost_ns)] if lost_ns > ROUNDING_NS else ()
    return [
        Loss(row.cause, row.by, row.from_ns, row.until_ns, row.lost_ns * lost_ns / noted_ns)  # `replace` is slow
        for row in rows
    ]
