"""Live storages at a time of a simulated step, by the engine's rule."""

from __future__ import annotations

from dataclasses import dataclass

from gpusim.engine.base import Timeline
from gpusim.formats.trace import Role, Trace


@dataclass(frozen=True, slots=True)
class Live:
    """A live storage."""

    bytes: int
    role: Role
    """Role of its first tensor."""
    name: str
    """Name of the parameter or buffer, or of the op that wrote it first."""
    layer: str
    phase: str
    """Phase of the op that used it first."""
    from_ns: int
    """Time of its allocation; 0 for storages that live throughout."""
    until_ns: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The time of peak memory, with the live storages, largest first."""

    time_ns: int
    bytes: int
    live: tuple[Live, ...]


def peak(timeline: Timeline, trace: Trace) -> Peak:
    """Return the first time of peak memory with its live storages; sizes add up to `timeline.peak_bytes`."""
    peak_bytes = timeline.peak_bytes
    time_ns = next((time for time, level in timeline.memory if level == peak_bytes), 0)
    return Peak(time_ns, peak_bytes, live_at(timeline, trace, time_ns))


def live_at(timeline: Timeline, trace: Trace, time_ns: int) -> tuple[Live, ...]:
    """Return the live storages at a time, largest first."""
    spans: dict[int, tuple[int, int]] = {}
    for task, start, end in zip(timeline.plan.tasks, timeline.start_ns, timeline.end_ns, strict=True):
        if task.op < 0:
            continue
        op = trace.ops[task.op]
        for storage in {trace.tensors[t].storage for t in (*op.reads, *op.writes)}:
            first, last = spans.get(storage, (start, end))
            spans[storage] = min(first, start), max(last, end)
    kept = {t.storage for t in trace.tensors if t.init is not None or t.role in ("output", "gradient")}
    spans |= dict.fromkeys(kept, (0, timeline.makespan_ns))
    tensor_of: dict[int, int] = {}
    for index, tensor in enumerate(trace.tensors):
        tensor_of.setdefault(tensor.storage, index)
    owner: dict[int, int] = {}
    for number, op in enumerate(trace.ops):
        for t in (*op.writes, *op.reads):
            owner.setdefault(trace.tensors[t].storage, number)
    alive = []
    for storage, (begin, end) in spans.items():
        if not (storage in kept or begin <= time_ns < end) or not trace.storages[storage].bytes:
            continue
        tensor = trace.tensors[tensor_of[storage]]
        op_of = trace.ops[owner[storage]] if storage in owner else None
        alive.append(
            Live(
                bytes=trace.storages[storage].bytes,
                role=tensor.role,
                name=tensor.name or (op_of.name if op_of else ""),
                layer=op_of.layer if op_of else "",
                phase=op_of.phase if op_of else "",
                from_ns=begin,
                until_ns=end,
            )
        )
    return tuple(sorted(alive, key=lambda live: (-live.bytes, live.from_ns, live.name)))


def by_role(live: tuple[Live, ...]) -> dict[str, int]:
    """Return bytes by role, largest first."""
    bytes_of: dict[str, int] = {}
    for storage in live:
        bytes_of[storage.role] = bytes_of.get(storage.role, 0) + storage.bytes
    return dict(sorted(bytes_of.items(), key=lambda item: -item[1]))
