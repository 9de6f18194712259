"""The schedule document: for every op of a trace a stream and a place in the launch order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal

from gpusim.errors import OptionError, PlanError, ScheduleError
from gpusim.files import Count, Document, Nanoseconds, Positive, read_document, write_document
from gpusim.hardware.model import HardwareModel
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.partitions import Partition, lay_out
from gpusim.plan.tasks import LaunchMode, Plan
from gpusim.trace.schema import Op, Trace
from gpusim.trace.store import structure_hash

SCHEMA: Final = "gpusim-schedule/1"

#: More streams than this are refused: a GPU of compute capability 7.5 or later runs at most 128 kernels at once
#: (CUDA C++ Programming Guide, "Maximum number of resident grids per device").
MAX_STREAMS = 128


class Placement(Document, frozen=True, kw_only=True):
    """Where one op runs; its place in the list is its place in the launch order."""

    op: str
    stream: Count
    variant: str = ""
    """Which of the op's variants runs, by name; empty: the captured kernels."""


class Schedule(Document, frozen=True, kw_only=True, omit_defaults=False):
    """A schedule of one trace, tied to it by the hash of its structure."""

    schema: Literal["gpusim-schedule/1"]
    trace: str
    trace_hash: str
    policy: str
    streams: Positive
    made_by: str
    """Version of gpusim, hardware model and seed."""
    predicted_ns: Nanoseconds
    placements: tuple[Placement, ...]
    partitions: tuple[Partition, ...] = ()
    """SM partitions; where there are none, all streams share the whole GPU."""

    @property
    def has_variants(self) -> bool:
        """Whether any op runs other kernels than the captured ones."""
        return any(placement.variant for placement in self.placements)


def make_schedule(
    trace: Trace,
    order: Sequence[int],
    streams: Sequence[int],
    *,
    policy: str,
    made_by: str,
    predicted_ns: int = 0,
    variants: Sequence[int] = (),
    partitions: Sequence[Partition] = (),
) -> Schedule:
    """A schedule from op indices in launch order and the stream of each op (by op index).

    `variants` has for each op the number of its variant, counted from 1, or 0; it may be left out.
    """
    return Schedule(
        schema=SCHEMA,
        trace=trace.name,
        trace_hash=structure_hash(trace),
        policy=policy,
        streams=max(streams, default=0) + 1,
        made_by=made_by,
        predicted_ns=predicted_ns,
        placements=tuple(
            Placement(
                op=trace.ops[op].name,
                stream=streams[op],
                variant=trace.ops[op].variants[variants[op] - 1].name if variants and variants[op] else "",
            )
            for op in order
        ),
        partitions=tuple(partitions),
    )


def read_schedule(path: Path) -> Schedule:
    """Read a schedule file. Raises `ScheduleError`; `check_schedule` then holds it against its trace."""
    return read_document(path, Schedule, SCHEMA, ScheduleError)


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Write a schedule as JSON; all or nothing. Raises `OutputError`."""
    write_document(path, schedule, indent=1)


def check_streams(streams: object) -> int:
    """`streams` if a GPU can have that many. Raises `OptionError`."""
    if not isinstance(streams, int) or not 1 <= streams <= MAX_STREAMS:
        problem = f"the number of streams lies between 1 and {MAX_STREAMS}"
        raise OptionError(problem, argument="streams", value=streams)
    return streams


def check_schedule(
    schedule: Schedule, trace: Trace, deps: Sequence[Iterable[int]], file: str = "schedule"
) -> tuple[list[int], list[int]]:
    """The launch order (op indices) and the stream of each op, once the schedule is known to be legal for `trace`.

    Raises `ScheduleError` for a schedule of another trace, an op missing, unknown or twice, a stream out of range, an
    order against the dependencies, or a variant that the op does not have. Its partitions depend on the GPU:
    `lower_schedule` checks them.
    """
    if schedule.trace_hash != structure_hash(trace):
        problem = f"is a schedule of another trace: of '{schedule.trace}', not of this '{trace.name}'"
        raise ScheduleError(file, problem, place="$.trace_hash")
    if not 1 <= schedule.streams <= MAX_STREAMS:
        problem = f"{schedule.streams} streams; the limit is {MAX_STREAMS}"
        raise ScheduleError(file, problem, place="$.streams")
    index_of = {op.name: index for index, op in enumerate(trace.ops)}
    position: dict[int, int] = {}
    streams = [0] * len(trace.ops)
    for place, placement in enumerate(schedule.placements):
        path = f"$.placements[{place}]"
        op = index_of.get(placement.op)
        if op is None:
            raise ScheduleError(file, f"the trace has no op '{placement.op}'", place=f"{path}.op")
        if op in position:
            raise ScheduleError(file, f"op '{placement.op}' is placed twice", place=f"{path}.op")
        if placement.stream >= schedule.streams:
            problem = f"stream {placement.stream}, of {schedule.streams} streams"
            raise ScheduleError(file, problem, place=f"{path}.stream")
        _variant_number(trace.ops[op], placement.variant, file, path)
        position[op] = place
        streams[op] = placement.stream
    for op in range(len(trace.ops)):
        if op not in position:
            raise ScheduleError(file, f"op '{trace.ops[op].name}' of the trace is missing", place="$.placements")
        for before in deps[op]:
            if position.get(before, -1) > position[op]:
                problem = (
                    f"order against the dependencies: op '{trace.ops[op].name}' comes before "
                    f"'{trace.ops[before].name}', whose result it needs"
                )
                raise ScheduleError(file, problem, place=f"$.placements[{position[op]}]")
    return sorted(position, key=position.__getitem__), streams


def chosen_variants(schedule: Schedule, trace: Trace, file: str = "schedule") -> tuple[int, ...]:
    """For each op of the trace the number of its variant, counted from 1, or 0; empty where none is chosen.

    Raises `ScheduleError` for one that the op does not have. The schedule must be of this trace (`check_schedule`).
    """
    if not schedule.has_variants:
        return ()
    index_of = {op.name: index for index, op in enumerate(trace.ops)}
    numbers = [0] * len(trace.ops)
    for place, placement in enumerate(schedule.placements):
        op = index_of[placement.op]
        numbers[op] = _variant_number(trace.ops[op], placement.variant, file, f"$.placements[{place}]")
    return tuple(numbers)


def _variant_number(op: Op, name: str, file: str, path: str) -> int:
    if not name:
        return 0
    names = [variant.name for variant in op.variants]
    if name not in names:
        known = f"there are: {', '.join(names)}" if names else "the trace has none of this op"
        raise ScheduleError(file, f"op '{op.name}' has no variant '{name}' ({known})", place=f"{path}.variant")
    return names.index(name) + 1


def check_partitions(schedule: Schedule, hardware: HardwareModel, file: str = "schedule") -> None:
    """Raise `ScheduleError` where the schedule's partitions are none that this GPU can have."""
    try:
        lay_out(schedule.partitions, schedule.streams, hardware.limits.sms)
    except PlanError as cause:
        raise ScheduleError(file, f"{cause} ('{hardware.name}')", place="$.partitions") from cause


def lower_schedule(schedule: Schedule, graph: OpGraph, mode: LaunchMode = "graph", file: str = "schedule") -> Plan:
    """The plan of a schedule, with its variants and partitions. Raises `ScheduleError` as the checks do."""
    order, streams = check_schedule(schedule, graph.trace, graph.preds, file)
    check_partitions(schedule, graph.hardware, file)
    variants = chosen_variants(schedule, graph.trace, file)
    return lower(graph, order, streams, mode, variants=variants, partitions=schedule.partitions)
