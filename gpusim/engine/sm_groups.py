"""State of the block dispatcher (`gpusim.engine.placement`): groups of equally filled SMs, kernels and cohorts.

Blocks placed on a group at the same time form a cohort: they progress alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gpusim.plan.tasks import Task


@dataclass(slots=True, eq=False)
class SmGroup:
    """SMs of one partition with equal contents, the resources in use on each, and the cohorts on them."""

    partition: int
    sms: int
    threads: int = 0
    regs: int = 0
    smem_bytes: int = 0
    blocks: int = 0
    carveout_bytes: int = 0
    cohorts: list[Cohort] = field(default_factory=list)
    """Cohorts in the order of their placement."""
    rates: tuple[float, float] = (1.0, 1.0)
    """Rates under contention of the SMs: of other kernels, and of GEMM-like ones."""
    dram_bytes_per_ns: float = 0.0
    """DRAM traffic of the cohorts at these rates."""
    updated_ns: float = 0.0
    """Clock for which the remaining times hold."""
    end_ns: float = math.inf
    """End of the first cohort at the current rates."""
    ending: Cohort | None = None
    """The cohort that ends first; of several, the one placed first."""
    changed: bool = False
    """True if its rates must be recomputed."""


@dataclass(slots=True, eq=False)
class Placed:
    """A kernel on the GPU."""

    index: int
    task: Task
    left: int
    """Blocks not yet placed."""
    block_ns: float
    """Time of a block on an SM full of the kernel's blocks, in ns."""
    load: float
    """Load that a block adds to its SM."""
    dram_bytes_per_ns: float
    """DRAM traffic of a block on an SM full of the kernel's blocks."""
    on_sms: int = 0
    """Running blocks."""
    crowds: bool = False
    """True if it has to wait for SMs to empty."""


@dataclass(slots=True, eq=False)
class Cohort:
    """Blocks of a kernel that progress alike: `blocks` on each SM of a group."""

    kernel: Placed
    group: SmGroup
    number: int
    """Sequence number of the placement."""
    blocks: int
    remaining_ns: float
    rate: float = 0.0


def put(group: SmGroup, task: Task, blocks: int) -> None:
    """Add blocks of a task to each SM of a group; a negative number removes them."""
    group.threads += blocks * task.footprint.threads
    group.regs += blocks * task.footprint.regs
    group.smem_bytes += blocks * task.footprint.smem_bytes
    group.blocks += blocks
