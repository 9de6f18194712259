"""A schedule of a step: a value by op index, made by policies and run by engines, and a file by op name.

policy, search, file --> Schedule --> `gpusim.plan.lower.lower`, replay, file
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpusim.arguments import whole
from gpusim.defaults import MEMORY_ACTIONS, SEARCHED
from gpusim.errors import PlanError, ScheduleError
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.schedule import SCHEMA, Partition, Placement, ScheduleDocument, read_schedule_document
from gpusim.formats.trace import Op, Trace
from gpusim.io.file_limits import MAX_STREAMS
from gpusim.io.files import write_document
from gpusim.notebook import html_table, short_name, short_repr
from gpusim.plan.graph import OpGraph
from gpusim.plan.partitions import lay_out
from gpusim.trace.store import of_another_step, structure_hash
from gpusim.units import counted


@dataclass(frozen=True, slots=True, repr=False)
class Schedule:
    """The launch order of a step's ops, with stream and kernels of each op.

    Two schedules are equal if they run the same, whatever their origin.
    """

    order: tuple[int, ...]
    """Op indices in launch order."""
    streams: tuple[int, ...]
    """Stream of each op, by op index."""
    variants: tuple[int, ...] = ()
    """Variant of each op, counted from 1, or 0 for the captured kernels; empty if all are captured."""
    partitions: tuple[Partition, ...] = ()
    """SM partitions of the streams; if empty, all streams share the whole GPU."""
    policy: str = field(default="", compare=False)
    """The policy or search that made it."""
    made_by: str = field(default="", compare=False)
    """Version of gpusim, hardware model and seed."""
    predicted_ns: int = field(default=0, compare=False)
    """Predicted makespan; 0 if not simulated."""
    searched: bool = field(default=False, compare=False)
    """True if a search found it, whatever `policy` calls it since."""

    def __post_init__(self) -> None:
        if self.policy in (*SEARCHED, MEMORY_ACTIONS):
            object.__setattr__(self, "searched", True)

    @classmethod
    def in_recorded_order(cls, ops: int, variants: Sequence[int] = ()) -> Schedule:
        """Return the schedule of `ops` ops on one stream, in recorded order."""
        return cls(tuple(range(ops)), (0,) * ops, tuple(variants), policy="sequential")

    @property
    def stream_count(self) -> int:
        """Number of streams: one more than the highest stream in use."""
        return max(self.streams, default=0) + 1

    @property
    def laid_out_streams(self) -> int:
        """Number of streams for the layout of partitions: those in use and those named by a partition."""
        return laid_out_streams(self.streams, self.partitions)

    @property
    def has_variants(self) -> bool:
        """True if any op runs other than its captured kernels."""
        return any(self.variants)

    def made(self, policy: str, by: str, predicted_ns: int = 0) -> Schedule:
        """Return the same schedule with its origin: policy, version and seed, and predicted makespan."""
        return dataclasses.replace(self, policy=policy, made_by=by, predicted_ns=predicted_ns)

    def interval_ns(self, graph: OpGraph, predicted_ns: int) -> tuple[int, int]:
        """Return the prediction interval of its time in ns, as `OpGraph.interval_ns`."""
        return graph.interval_ns(
            predicted_ns, self.stream_count, other_kernels=self.has_variants, searched=self.searched
        )

    def check(self, graph: OpGraph, name: str = "schedule") -> Schedule:
        """Check that the schedule is legal for a step, and return it.

        Raises `ScheduleError` for a missing, unknown or repeated op, a stream out of range, an order against the
        dependencies, an unknown variant, or impossible partitions.
        """
        ops = graph.trace.ops
        if len(self.order) == len(self.streams) != len(ops):
            size = counted(len(self.order), "op")
            raise ScheduleError(name, f"is of another trace, of {size}: '{graph.trace.name}' has {len(ops)}")
        if sorted(self.order) != list(range(len(ops))):
            raise ScheduleError(name, f"its order does not have each of the {len(ops)} ops once")
        if len(self.streams) != len(ops) or len(self.variants) not in (0, len(ops)):
            raise ScheduleError(name, f"it needs a stream, and a variant or none, for each of the {len(ops)} ops")
        for op, stream in enumerate(self.streams):
            if not 0 <= stream < MAX_STREAMS:
                raise ScheduleError(name, f"op '{ops[op].name}' is on stream {stream}; the limit is {MAX_STREAMS}")
        for op, number in enumerate(self.variants):
            if not 0 <= number <= len(ops[op].variants):
                raise ScheduleError(name, f"op '{ops[op].name}' has no variant {number}, of {len(ops[op].variants)}")
        for op, before in _disordered(self.order, graph.choosing(self.variants).preds):
            raise ScheduleError(name, _against_dependencies(ops, op, before))
        _check_partitions(self.partitions, self.streams, graph.hardware, name)
        return self

    def to_document(self, trace: Trace) -> ScheduleDocument:
        """Return the document of a schedule of `trace`."""
        return ScheduleDocument(
            schema=SCHEMA,
            trace=trace.name,
            trace_hash=structure_hash(trace),
            policy=self.policy,
            streams=self.laid_out_streams,
            made_by=self.made_by,
            predicted_ns=self.predicted_ns,
            placements=tuple(
                Placement(
                    op=trace.ops[op].name,
                    stream=self.streams[op],
                    variant=trace.ops[op].variants[self.variants[op] - 1].name
                    if self.variants and self.variants[op]
                    else "",
                )
                for op in self.order
            ),
            partitions=self.partitions,
        )

    @classmethod
    def from_document(cls, document: ScheduleDocument, graph: OpGraph, file: str = "schedule") -> Schedule:
        """Return the schedule of a document, checked to be legal for a step.

        Raises `ScheduleError` for a schedule of another trace, a missing, unknown or repeated op, a stream out of
        range, an order against the dependencies, an unknown variant, or impossible partitions.
        """
        trace = graph.trace
        if document.trace_hash != structure_hash(trace):
            problem = of_another_step("a schedule", document.trace, trace)
            raise ScheduleError(file, problem, place="$.trace_hash")
        if not 1 <= document.streams <= MAX_STREAMS:
            problem = f"{document.streams} streams; the limit is {MAX_STREAMS}"
            raise ScheduleError(file, problem, place="$.streams")
        index_of = {op.name: index for index, op in enumerate(trace.ops)}
        position: dict[int, int] = {}
        streams, variants = [0] * len(trace.ops), [0] * len(trace.ops)
        for place, placement in enumerate(document.placements):
            path = f"$.placements[{place}]"
            op = index_of.get(placement.op)
            if op is None:
                raise ScheduleError(file, f"the trace has no op '{placement.op}'", place=f"{path}.op")
            if op in position:
                raise ScheduleError(file, f"op '{placement.op}' is placed twice", place=f"{path}.op")
            if placement.stream >= document.streams:
                problem = f"stream {placement.stream}, of {document.streams} streams"
                raise ScheduleError(file, problem, place=f"{path}.stream")
            variants[op] = variant_number(trace.ops[op], placement.variant, file, f"{path}.variant")
            position[op] = place
            streams[op] = placement.stream
        for index, each in enumerate(trace.ops):
            if index not in position:
                raise ScheduleError(file, f"op '{each.name}' of the trace is missing", place="$.placements")
        order = tuple(position)
        for op, before in _disordered(order, graph.choosing(variants).preds):
            problem = _against_dependencies(trace.ops, op, before)
            raise ScheduleError(file, problem, place=f"$.placements[{position[op]}]")
        for number, partition in enumerate(document.partitions):
            for stream in partition.streams:
                if stream >= document.streams:
                    problem = f"partition {number} has stream {stream}, of {document.streams} streams"
                    raise ScheduleError(file, problem, place="$.partitions")
        _check_partitions(document.partitions, streams, graph.hardware, file, "$.partitions")
        return cls(
            order,
            tuple(streams),
            tuple(variants) if any(variants) else (),
            document.partitions,
            document.policy,
            document.made_by,
            document.predicted_ns,
        )

    def __repr__(self) -> str:
        size = f"{counted(len(self.order), 'op')} on {counted(self.stream_count, 'stream')}"
        return short_repr("Schedule", f"{short_name(self.policy)}: {size}" if self.policy else size)

    def _repr_html_(self) -> str:
        ops = Counter(self.streams)
        title = f"Schedule {self.policy or 'without a name'}, made by {self.made_by or 'hand'}"
        return html_table(title, ("stream", "ops"), sorted(ops.items()))


def read_schedule(path: Path, graph: OpGraph) -> Schedule:
    """Read a schedule file of a step and check it. Raises `ScheduleError`."""
    return Schedule.from_document(read_schedule_document(path), graph, str(path))


def write_schedule(schedule: Schedule, trace: Trace, path: Path) -> None:
    """Write a schedule of `trace` as JSON, atomically. Raises `OutputError`."""
    write_document(path, schedule.to_document(trace), indent=1)


def check_streams(streams: object) -> int:
    """Return `streams` if it is a possible number of streams. Raises `OptionError`."""
    return whole("streams", streams, 1, MAX_STREAMS, f"the number of streams lies between 1 and {MAX_STREAMS}")


def _disordered(order: Sequence[int], preds: Sequence[Iterable[int]]) -> Iterator[tuple[int, int]]:
    """Yield each op that an order puts before one of its predecessors, with that predecessor."""
    position = {op: place for place, op in enumerate(order)}
    for op, before in enumerate(preds):
        for other in before:
            if position[other] > position[op]:
                yield op, other


def _against_dependencies(ops: Sequence[Op], op: int, before: int) -> str:
    return (
        f"order against the dependencies: op '{ops[op].name}' comes before '{ops[before].name}', whose result it needs"
    )


def variant_number(op: Op, name: str, file: str, place: str) -> int:
    """Return the number of an op's variant, from 1; 0 for an empty name. Raises `ScheduleError` for one it lacks."""
    if not name:
        return 0
    names = [variant.name for variant in op.variants]
    if name not in names:
        known = f"there are: {', '.join(names)}" if names else "the trace has none of this op"
        raise ScheduleError(file, f"op '{op.name}' has no variant '{name}' ({known})", place=place)
    return names.index(name) + 1


def laid_out_streams(streams: Sequence[int], partitions: Sequence[Partition]) -> int:
    """Return the number of streams of ops and partitions: one more than the highest."""
    named = (stream for partition in partitions for stream in partition.streams)
    return max((*streams, *named), default=0) + 1


def _check_partitions(
    partitions: Sequence[Partition], streams: Sequence[int], hardware: HardwareModel, file: str, place: str = ""
) -> None:
    count = laid_out_streams(streams, partitions)
    if count > MAX_STREAMS:
        raise ScheduleError(file, f"a partition has stream {count - 1}; the limit is {MAX_STREAMS}", place=place)
    try:
        lay_out(partitions, count, hardware.limits.sms)
    except PlanError as cause:
        raise ScheduleError(file, f"{cause} ('{hardware.name}')", place=place) from cause
