"""Schedules that a recipe replayed, with their times: enough for new predictions without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from gpusim.errors import MeasurementError
from gpusim.formats.measurement import Measurement
from gpusim.formats.results import ResultCase
from gpusim.formats.schedule import Partition
from gpusim.formats.trace import Trace
from gpusim.io.files import Count, Document, Nanoseconds, read_document, write_document
from gpusim.plan.schedule import Schedule
from gpusim.trace.store import bundled_traces, structure_hash

SCHEMA: Final = "gpusim-replayed/1"
SUFFIX: Final = ".schedules.json.gz"


class ReplayedSchedule(Document, frozen=True, kw_only=True):
    """One schedule and its measured time."""

    trace: str
    trace_hash: str
    policy: str
    order: tuple[Count, ...]
    """Op indices in launch order."""
    stream_of: tuple[Count, ...]
    """Stream of each op, by op index."""
    variants: tuple[Count, ...] = ()
    """Variant of each op, counted from 1; 0: as captured. Empty: all as captured."""
    partitions: tuple[Partition, ...] = ()
    measured_ns: Nanoseconds
    sequential_ns: Nanoseconds
    """Time of the sequential graph, measured in turns with it, in ns."""

    @classmethod
    def of(cls, trace: Trace, schedule: Schedule, measurement: Measurement) -> ReplayedSchedule:
        """Make a record of a schedule of `trace` with its measured time."""
        return cls(
            trace=trace.name,
            trace_hash=structure_hash(trace),
            policy=measurement.policy,
            order=schedule.order,
            stream_of=schedule.streams,
            variants=schedule.variants,
            partitions=schedule.partitions,
            measured_ns=measurement.schedule.median_ns,
            sequential_ns=measurement.sequential.median_ns,
        )

    def at(self, row: ResultCase) -> ReplayedSchedule:
        """Return it with the times of its row."""
        return msgspec.structs.replace(self, measured_ns=row.measured_ns, sequential_ns=row.sequential_ns)

    @property
    def schedule(self) -> Schedule:
        """The schedule itself."""
        return Schedule(self.order, self.stream_of, self.variants, self.partitions, self.policy)


class Replayed(Document, frozen=True, kw_only=True):
    """All schedules of one results file."""

    schema: Literal["gpusim-replayed/1"]
    schedules: tuple[ReplayedSchedule, ...]


def write_replayed(schedules: Sequence[ReplayedSchedule], results: Path) -> Path:
    """Write the schedules next to a results file. Raises `OutputError`."""
    path = results.with_name(results.stem + SUFFIX)
    write_document(path, Replayed(schema=SCHEMA, schedules=tuple(schedules)))
    return path


def read_replayed(path: Path) -> tuple[ReplayedSchedule, ...]:
    """Read a file of replayed schedules. Raises `MeasurementError`."""
    return read_document(path, Replayed, SCHEMA, MeasurementError).schedules


def wrong_trace(results: Path, name: str, taken: Path, why: str = "another step") -> MeasurementError:
    """Return the error of a trace that is not the one of a results file.

    A bundled trace is taken where a results file lies apart from its traces: then those are what is missing.
    """
    if taken != bundled_traces().get(name):
        return MeasurementError(str(taken), f"is not the step of {results.name}")
    problem = f"its own trace '{name}' is missing: the bundled one taken in its place, {taken}, is {why}"
    return MeasurementError(str(results), f"{problem}; --traces names the folder of the right one")
