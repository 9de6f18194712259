"""Launches from the host into many streams: the experiment that shows hardware queues (Hyper-Q) and their false waits.

k streams get d kernels each. Launched *breadth first* (one kernel into each stream, then the next), queues disturb
nobody. *Depth first* (a stream's kernels, then the next stream's), a queue's head waits for its own stream and holds up
the streams behind it: q queues take (k / q)(d - 1) + 1 kernel times. How fast the host launches counts, too: it is
measured with each case, not predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta

from gpusim.errors import MeasurementError
from gpusim.io.files import Count, Document, Positive, read_document

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
