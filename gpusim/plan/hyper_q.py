"""Launches from the host into many streams: the experiment that shows hardware queues (Hyper-Q) and their false waits.

k streams get d kernels each. Launched *breadth first* (one kernel into each stream, then the next), queues disturb
nobody. *Depth first* (a stream's kernels, then the next stream's), a queue's head waits for its own stream and holds up
the streams behind it: q queues take (k / q)(d - 1) + 1 kernel times. How fast the host launches counts, too: it is
measured with each case, not predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta

from gpusim.errors import MeasurementError
from gpusim.files import Count, Document, Positive, read_document
from gpusim.hardware.model import HardwareModel
from gpusim.hardware.occupancy import kernel_demand, kernel_footprint, kernel_occupancy
from gpusim.plan.tasks import Plan, Task
from gpusim.trace.schema import Kernel

SCHEMA: Final = "gpusim-hyper-q/1"

#: What is measured: streams, kernels in each, and whether they are launched depth first.
SHAPES: tuple[tuple[int, int, bool], ...] = (
    (4, 1, False), (4, 4, False), (4, 4, True), (8, 4, False), (8, 4, True), (16, 1, False), (16, 4, False),
    (16, 4, True), (32, 1, False), (32, 4, False), (32, 4, True),
)  # fmt: skip
#: Values of CUDA_DEVICE_MAX_CONNECTIONS: one queue, few, as many as there are by default, as many as there can be.
CONNECTIONS = (1, 2, 8, 32)
#: Length of a kernel in us; it spins on one SM.
SPIN_US = 760.0


class HyperQCell(Document, frozen=True, kw_only=True):
    """One measured case."""

    connections: Positive
    """CUDA_DEVICE_MAX_CONNECTIONS, the number of hardware queues."""
    streams: Positive
    depth: Positive
    """Kernels in each stream."""
    depth_first: bool
    units: Annotated[float, Meta(gt=0)]
    """Time from the first launch call to the end of all, over the same of one kernel alone."""
    launch_ns: Count = 0
    """Host time from one launch to the next in the runs of this case; 0 where only the table has one."""


class HyperQ(Document, frozen=True, kw_only=True):
    """A measured table of launches into many streams."""

    schema: Literal["gpusim-hyper-q/1"]
    gpu: str
    date: str
    source: str
    """Who measured it, with what."""
    spin_ns: Count
    """Time of one kernel."""
    launch_ns: Count
    """Host time of one launch in that program, from one stream to the next."""
    first_launch_ns: Count = 0
    """Host time of a run's first launch call; 0 where it is taken to be as any other."""
    cells: tuple[HyperQCell, ...]


def read_hyper_q(path: Path) -> HyperQ:
    """Read a measured table. Raises `MeasurementError`."""
    return read_document(path, HyperQ, SCHEMA, MeasurementError)


def launch_order(streams: int, depth: int, depth_first: bool) -> Iterator[int]:
    """The stream of each launch."""
    for outer in range(streams if depth_first else depth):
        for inner in range(depth if depth_first else streams):
            yield outer if depth_first else inner


def spin_plan(
    streams: int,
    depth: int,
    depth_first: bool,
    spin_ns: float,
    hardware: HardwareModel,
    launch_ns: float = 0.0,
    first_launch_ns: float = 0.0,
) -> Plan:
    """The plan of one case: kernels of one block of one thread, like torch's spin kernel.

    The host takes `launch_ns` for a launch (0: what it takes by the hardware model), for the first `first_launch_ns`.
    """
    kernel = Kernel(name="spin", dur_ns=round(spin_ns))
    spin = Task(
        name=kernel.name,
        dur_ns=spin_ns,
        demand=kernel_demand(hardware.limits, kernel),
        blocks=1,
        blocks_per_sm=kernel_occupancy(hardware.limits, kernel).blocks,
        footprint=kernel_footprint(hardware.limits, kernel),
        host_ns=launch_ns,
    )
    first, *rest = launch_order(streams, depth, depth_first)
    tasks = (replace(spin, queue=first, host_ns=first_launch_ns or launch_ns), *(replace(spin, queue=s) for s in rest))
    return Plan(tasks=tasks, mode="stream")
