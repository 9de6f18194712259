"""What the block dispatcher (`gpusim.engine.placement`) keeps: groups of SMs that hold the same, kernels, and cohorts.

Blocks placed on a group at one time are one cohort: they go on alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gpusim.plan.tasks import Task


@dataclass(slots=True, eq=False)
class SmGroup:
    """SMs of one partition that hold the same, what each of them holds, and the cohorts on them."""

    partition: int
    sms: int
    threads: int = 0
    regs: int = 0
    smem_bytes: int = 0
    blocks: int = 0
    split_bytes: int = 0
    cohorts: list[Cohort] = field(default_factory=list)
    """In the order in which they were placed."""
    rates: tuple[float, float] = (1.0, 1.0)
    """Of its cohorts, as far as they share SMs: of kernels that do not multiply matrices, and of those that do."""
    dram_bytes_per_ns: float = 0.0
    """Their traffic at these rates."""
    updated_ns: float = 0.0
    """Up to when their remaining times are."""
    end_ns: float = math.inf
    """When the first of them ends at the current rates."""
    ending: Cohort | None = None
    """Which that is: of those that end together, the one that was placed first."""
    changed: bool = False
    """Whether its rates are to be set anew."""


@dataclass(slots=True, eq=False)
class Placed:
    """A kernel that is on the GPU."""

    index: int
    task: Task
    left: int
    """Blocks to be placed."""
    block_ns: float
    """Time of a block on an SM that is full of them."""
    load: float
    """What a block adds to the load of its SM."""
    dram_bytes_per_ns: float
    """Traffic of a block, on such an SM."""
    on_sms: int = 0
    """Blocks that run."""
    crowds: bool = False
    """Whether it has to wait for SMs to empty."""


@dataclass(slots=True, eq=False)
class Cohort:
    """Blocks of a kernel that go on alike: `blocks` on each SM of a group."""

    kernel: Placed
    group: SmGroup
    number: int
    """It is the number-th that was placed."""
    blocks: int
    remaining_ns: float
    rate: float = 0.0


def put(group: SmGroup, task: Task, blocks: int) -> None:
    """Add blocks of a task to each SM of a group, or take them off."""
    group.threads += blocks * task.footprint.threads
    group.regs += blocks * task.footprint.regs
    group.smem_bytes += blocks * task.footprint.smem_bytes
    group.blocks += blocks
