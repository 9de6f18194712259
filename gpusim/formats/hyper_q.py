"""Table of host launches into many streams, an experiment that shows hardware queues (Hyper-Q) and false waits.

Each of k streams gets d kernels. Launched *breadth first* (one kernel into each stream in turn), no stream waits for
another. Launched *depth first* (all kernels of a stream, then the next stream), the head of a queue waits for its own
stream and holds up the streams behind it. q queues then take (k / q)(d - 1) + 1 kernel times. The host's launch rate
matters too; it is measured with each case, not predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta

from gpusim.errors import MeasurementError
from gpusim.io.files import Count, Document, Positive, read_document

SCHEMA: Final = "gpusim-hyper-q/1"

#: Measured cases: streams, kernels per stream, and depth first or not.
SHAPES: tuple[tuple[int, int, bool], ...] = (
    (4, 1, False), (4, 4, False), (4, 4, True), (8, 4, False), (8, 4, True), (16, 1, False), (16, 4, False),
    (16, 4, True), (32, 1, False), (32, 4, False), (32, 4, True),
)  # fmt: skip
#: Values of CUDA_DEVICE_MAX_CONNECTIONS: one queue, two, the default and the maximum.
CONNECTIONS = (1, 2, 8, 32)
#: Duration of a kernel, in us; it spins on one SM.
SPIN_US = 760.0


class HyperQCell(Document, frozen=True, kw_only=True):
    """One measured case."""

    connections: Positive
    """CUDA_DEVICE_MAX_CONNECTIONS, the number of hardware queues."""
    streams: Positive
    depth: Positive
    """Kernels per stream."""
    depth_first: bool
    units: Annotated[float, Meta(gt=0)]
    """Time from the first launch call to the end of the last kernel, in units of the same time for one kernel alone."""
    launch_ns: Count = 0
    """Host time between launches in this case, in ns; 0 if only the table has one."""


class HyperQ(Document, frozen=True, kw_only=True):
    """A measured table of launches into many streams."""

    schema: Literal["gpusim-hyper-q/1"]
    gpu: str
    date: str
    source: str
    """Author and program of the measurement."""
    spin_ns: Count
    """Duration of one kernel, in ns."""
    launch_ns: Count
    """Host time between launches into successive streams, in ns."""
    first_launch_ns: Count = 0
    """Host time of a run's first launch, in ns; 0 if it equals `launch_ns`."""
    cells: tuple[HyperQCell, ...]


def read_hyper_q(path: Path) -> HyperQ:
    """Read a measured table. Raises `MeasurementError`."""
    return read_document(path, HyperQ, SCHEMA, MeasurementError)


def launch_order(streams: int, depth: int, depth_first: bool) -> Iterator[int]:
    """Yield the stream of each launch, in launch order."""
    for outer in range(streams if depth_first else depth):
        for inner in range(depth if depth_first else streams):
            yield outer if depth_first else inner
