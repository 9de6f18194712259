"""The schedule file: the stream and launch position of every op of a trace, by op name."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from gpusim.errors import ScheduleError
from gpusim.io.files import Count, Document, Nanoseconds, Positive, read_document

SCHEMA: Final = "gpusim-schedule/1"


class Partition(Document, frozen=True, kw_only=True):
    """Some SMs for some streams; streams that no partition names share the SMs that are left."""

    sms: Positive
    """How many of the GPU's SMs."""
    streams: tuple[Count, ...]
    """The streams that run on them, and on no other."""


class Placement(Document, frozen=True, kw_only=True):
    """Where one op runs; its place in the list is its place in the launch order."""

    op: str
    """Name of the op."""
    stream: Count
    """Its stream, below `streams`."""
    variant: str = ""
    """Which of the op's variants runs, by name; empty: the captured kernels."""


class ScheduleDocument(Document, frozen=True, kw_only=True, omit_defaults=False):
    """A schedule of one trace, tied to it by the hash of its structure."""

    schema: Literal["gpusim-schedule/1"]
    """`gpusim-schedule/1`."""
    trace: str
    """Name of the trace, for messages."""
    trace_hash: str
    """Structure hash of the trace; it decides."""
    policy: str
    """Who made it: a policy's name, or `search`."""
    streams: Positive
    """Number of streams."""
    made_by: str
    """Version of gpusim, hardware model and seed."""
    predicted_ns: Nanoseconds
    """Predicted time of the step; 0 where it was not simulated."""
    placements: tuple[Placement, ...]
    """Every op of the trace once, in launch order."""
    partitions: tuple[Partition, ...] = ()
    """SM partitions; where there are none, all streams share the whole GPU."""


def read_schedule_document(path: Path) -> ScheduleDocument:
    """Read a schedule file. Raises `ScheduleError`."""
    return read_document(path, ScheduleDocument, SCHEMA, ScheduleError)
