"""The schedule file: the stream and launch position of every op of a trace, by op name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta

from gpusim.errors import ScheduleError
from gpusim.io.file_limits import MAX_STREAMS
from gpusim.io.files import Count, Document, Nanoseconds, Positive, read_document

SCHEMA: Final = "gpusim-schedule/1"

StreamCount = Annotated[int, Meta(ge=1, le=MAX_STREAMS)]


class Partition(Document, frozen=True, kw_only=True):
    """SMs reserved for some streams; streams outside all partitions share the remaining SMs."""

    sms: Positive
    """Number of SMs."""
    streams: tuple[Count, ...]
    """Streams confined to these SMs."""


class Placement(Document, frozen=True, kw_only=True):
    """Stream and variant of one op; its list index is its position in the launch order."""

    op: str
    """Name of the op."""
    stream: Count
    """Stream, below `streams`."""
    variant: str = ""
    """Name of the op's variant that runs; empty for the captured kernels."""


class ScheduleDocument(Document, frozen=True, kw_only=True, omit_defaults=False):
    """A schedule of one trace, tied to it by the hash of its structure."""

    schema: Literal["gpusim-schedule/1"]
    """`gpusim-schedule/1`."""
    trace: str
    """Name of the trace, for messages."""
    trace_hash: str
    """Structure hash of the trace, which decides."""
    policy: str
    """Policy that made the schedule, or `search`."""
    streams: Positive
    """Number of streams."""
    made_by: str
    """Version of gpusim, hardware model, seed."""
    predicted_ns: Nanoseconds
    """Predicted time of the step; 0 if not simulated."""
    placements: tuple[Placement, ...]
    """Each op of the trace once, in launch order."""
    partitions: tuple[Partition, ...] = ()
    """SM partitions; if empty, all streams share the GPU."""


def read_schedule_document(path: Path) -> ScheduleDocument:
    """Read a schedule file. Raises `ScheduleError`."""
    return read_document(path, ScheduleDocument, SCHEMA, ScheduleError)
