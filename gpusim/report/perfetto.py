"""Timelines as Chrome-trace JSON: for Perfetto, chrome://tracing, TensorBoard and Holistic Trace Analysis (HTA).

GPU slices have the form of Kineto (PyTorch's profiler): the same categories and argument names, in microseconds.
gpusim's own arguments follow. Each run is a process and each stream a thread; overlapping slices of a stream move to
further threads ("lanes"), because viewers drop a slice that partly overlaps another one on its track. HTA treats a file
as one rank (write one run per file for it) and shortens slices to whole us.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf, nextafter, prod
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from gpusim.engine.base import Timeline
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.measurement import Measurement
from gpusim.formats.trace import Kernel, Trace
from gpusim.io.files import compress, write_bytes
from gpusim.plan.kernels import fit_to
from gpusim.plan.tasks import Kind, Task
from gpusim.rules.occupancy import kernel_occupancy
from gpusim.text import visible
from gpusim.units import MIB, NS_PER_US, us_to_ns

Category = Literal["kernel", "gpu_memcpy", "gpu_memset"]
Event = dict[str, Any]

SCHEMA_VERSION = 1
"""Schema version of Kineto's files."""

PRODUCER, MEASUREMENT = "gpusim", "measurement"
"""Values in `otherData`: the producer, and the key of a replay's measurement, as text."""

MAX_EXACT_INT = 2**53
"""Viewers in JavaScript store numbers as doubles: larger integers lose digits."""

_CATEGORIES: dict[Kind, Category] = {
    "kernel": "kernel",
    "memset": "gpu_memset",
    "memcpy": "gpu_memcpy",
    "h2d": "gpu_memcpy",
    "d2h": "gpu_memcpy",
}
_CONTEXT = 1  # CUPTI counts contexts from 1, and PyTorch has one per GPU


@dataclass(frozen=True)
class Slice:
    """One unit of GPU work on a stream; times in ns from the start of the run."""

    name: str
    stream: int
    start_ns: int
    dur_ns: int
    args: Mapping[str, Any] = field(default_factory=dict)
    category: Category = "kernel"
    device: int = 0

    @property
    def end_ns(self) -> int:
        """End time, in ns from the start of the run."""
        return self.start_ns + self.dur_ns


@dataclass(frozen=True)
class Counter:
    """A quantity over time as steps (ns, value)."""

    name: str
    samples: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Run:
    """One simulated or measured step, for a viewer."""

    title: str
    slices: tuple[Slice, ...]
    counters: tuple[Counter, ...] = ()
    dependencies: tuple[tuple[int, int], ...] = ()
    """Pairs of indices into `slices`, drawn as arrows: the first must end before the second starts."""
    trace: str = ""
    """Name of the trace, if known."""
    hardware: str = ""
    """Label of the hardware model, if simulated."""


def run_from_timeline(timeline: Timeline, trace: Trace, title: str, hardware: HardwareModel) -> Run:
    """Return a simulated run; its title is marked `uncalibrated` if the hardware model is.

    Raises `PlanError` if a kernel breaks a limit of the GPU.
    """
    tasks = timeline.plan.tasks
    if not hardware.calibrated and "uncalibrated" not in title:
        title = f"{title} (uncalibrated)"
    times = zip(timeline.start_ns, timeline.end_ns, timeline.ready_ns, strict=True)
    slices = tuple(
        _slice_of(task, index, trace, hardware, start, end, ready)
        for index, (task, (start, end, ready)) in enumerate(zip(tasks, times, strict=True))
    )
    counters = (
        Counter("SM residency", timeline.occupied),
        Counter("DRAM GB/s", timeline.bandwidth),  # 1 byte per ns = 1 GB/s
        Counter("memory MiB", tuple((time, level / MIB) for time, level in timeline.memory)),
    )
    return Run(
        title=title,
        slices=slices,
        counters=tuple(counter for counter in counters if counter.samples),
        dependencies=tuple(
            (before, index)
            for index, task in enumerate(tasks)
            for before in task.deps
            if (tasks[before].device, tasks[before].queue) != (task.device, task.queue)
        ),
        trace=trace.name,
        hardware=hardware.label,
    )


def run_from_kineto(events: Iterable[Mapping[str, Any]], title: str) -> Run:
    """Return a measured run from events of a Kineto trace (times in us), with the first GPU slice shifted to 0.

    Everything except GPU work (host calls, synchronization, annotations, metadata) is left out.
    """
    work = [event for event in events if event.get("ph") == "X" and event.get("cat") in get_args(Category)]
    starts = [us_to_ns(event["ts"]) for event in work]
    origin = min(starts, default=0)
    return Run(title=title, slices=tuple(_measured(e, start - origin) for e, start in zip(work, starts, strict=True)))


def write_perfetto(path: Path, runs: Sequence[Run], measurement: Measurement | None = None) -> None:
    """Write runs side by side to one file, gzipped if the name ends in `.gz`, atomically.

    `measurement`, of a measured run, is stored in the file. Raises `OutputError`.
    """
    data = msgspec.json.encode(chrome_trace(runs, measurement))
    write_bytes(path, compress(data) if path.name.endswith(".gz") else data + b"\n")


def chrome_trace(runs: Sequence[Run], measurement: Measurement | None = None) -> dict[str, Any]:
    """Return the Chrome-trace document of the runs; process ids count from 1 in their order."""
    # Viewers treat a thread with its process's id as the main thread, and Perfetto has named threads by id alone, so
    # thread ids are unique in the file and above all process ids.
    tids, flows = count(len(runs) + 1), count(1)
    kept = {} if measurement is None else {MEASUREMENT: msgspec.json.encode(measurement).decode()}
    return {
        "schemaVersion": SCHEMA_VERSION,
        "displayTimeUnit": "ns",
        "otherData": {
            "producer": PRODUCER,
            "runs": "; ".join(visible(run.title) for run in runs),
            "trace": _joined(run.trace for run in runs),
            "hardware": _joined(run.hardware for run in runs),
            **kept,
        },
        "traceEvents": [event for pid, run in enumerate(runs, 1) for event in _run_events(run, pid, tids, flows)],
    }


def pack_lanes(intervals: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Pack intervals into the fewest lanes without overlap and return indices per lane, in start order.

    An interval is (start, end), half open. An empty one counts as 1 ns, so that it is never inside another one.
    """
    lanes: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(intervals)), key=intervals.__getitem__):
        start, end = intervals[index]
        lane = next((number for number, time in enumerate(free) if time <= start), len(free))
        if lane == len(free):
            lanes.append([])
            free.append(0)
        lanes[lane].append(index)
        free[lane] = max(end, start + 1)
    return lanes


def ns_to_trace_us(time_ns: int) -> float:
    """Convert ns to us such that 1000 times the result gives the same ns again, rounded or truncated.

    That is `time_ns / 1000`, or the next double if the product is too small: 1.001 * 1000 < 1001, and Perfetto
    truncates.
    """
    time_us = time_ns / NS_PER_US
    return time_us if int(time_us * NS_PER_US) == time_ns else nextafter(time_us, inf)


def _slice_of(
    task: Task, index: int, trace: Trace, hardware: HardwareModel, start_ns: int, end_ns: int, ready_ns: int
) -> Slice:
    args: dict[str, Any] = {} if task.op < 0 else {"External id": task.op}
    args |= {"device": task.device, "context": _CONTEXT, "stream": task.queue, "correlation": index + 1}
    if task.kind != "kernel":
        dur_ns = end_ns - start_ns
        args |= {"bytes": task.copy_bytes, "memory bandwidth (GB/s)": task.copy_bytes / dur_ns if dur_ns else "N/A"}
    elif task.op >= 0 and task.kernel >= 0:
        args |= _kernel_args(trace.ops[task.op].kernels[task.kernel], trace, hardware)
    if task.op >= 0:
        op = trace.ops[task.op]
        args |= {"op": op.name, "layer": op.layer, "phase": op.phase, "target": op.target}
    args["ready (us)"] = ns_to_trace_us(ready_ns)
    return Slice(task.name, task.queue, start_ns, end_ns - start_ns, args, _CATEGORIES[task.kind], task.device)


def _kernel_args(kernel: Kernel, trace: Trace, hardware: HardwareModel) -> dict[str, Any]:
    """Return the launch configuration as in Kineto: `blocks per SM` refers to the grid, not to resident blocks."""
    limits = hardware.limits
    if trace.provenance.gpu.name != hardware.gpu:
        kernel = fit_to(kernel, hardware)
    resident = kernel_occupancy(limits, kernel)
    block_threads = prod(kernel.block)
    blocks_per_sm = prod(kernel.grid) / limits.sms
    occupancy = min(resident.blocks, blocks_per_sm) * block_threads / limits.threads_per_sm
    return {
        "registers per thread": kernel.regs_per_thread,
        "shared memory": kernel.smem_bytes,
        "blocks per SM": blocks_per_sm,
        "warps per SM": blocks_per_sm * block_threads / limits.warp_threads,
        "grid": list(kernel.grid),
        "block": list(kernel.block),
        "est. achieved occupancy %": int(0.5 + 100 * occupancy),  # half up, as Kineto rounds
        "limited by": resident.limiter,
    }


def _measured(event: Mapping[str, Any], start_ns: int) -> Slice:
    args = event.get("args") or {}
    return Slice(
        name=str(event.get("name", "")),
        stream=int(args.get("stream", event.get("tid", 0))),
        start_ns=start_ns,
        # CUPTI writes ends before starts when its buffers overflow.
        dur_ns=max(0, us_to_ns(event["dur"])),
        args=args,
        category=event["cat"],
        device=int(args.get("device", 0)),
    )


def _run_events(run: Run, pid: int, tids: Iterator[int], flows: Iterator[int]) -> list[Event]:
    """Return all events of a run: metadata, then the others by time."""
    metadata = [
        _metadata("process_name", pid, 0, name=visible(run.title)),
        _metadata("process_labels", pid, 0, labels=visible(run.hardware)),
        _metadata("process_sort_index", pid, 0, sort_index=pid),
    ]
    timed: list[tuple[int, int, Event]] = []
    placed: dict[int, Event] = {}
    several_devices = len({piece.device for piece in run.slices}) > 1
    for (device, stream), members in _tracks(run.slices):
        name = f"GPU {device} stream {stream}" if several_devices else f"stream {stream}"
        intervals = [(run.slices[index].start_ns, run.slices[index].end_ns) for index in members]
        for number, lane in enumerate(pack_lanes(intervals), 1):
            tid = next(tids)
            metadata.append(_metadata("thread_name", pid, tid, name=name if number == 1 else f"{name} (lane {number})"))
            metadata.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
            free_us = 0.0
            for index in (members[place] for place in lane):
                event = _slice_event(run.slices[index], pid, tid, free_us)
                free_us = event["ts"] + event["dur"]
                placed[index] = event
                timed.append((run.slices[index].start_ns, 0, event))
    timed += _flow_events(run, placed, flows)
    timed += [
        (time, 0, {"ph": "C", "name": counter.name, "pid": pid, "ts": ns_to_trace_us(time), "args": {"value": value}})
        for counter in run.counters
        for time, value in counter.samples
    ]
    # At equal times viewers keep the order of the file: an arrow must follow its slice.
    timed.sort(key=lambda entry: entry[:2])
    return metadata + [event for _, _, event in timed]


def _tracks(slices: Sequence[Slice]) -> list[tuple[tuple[int, int], list[int]]]:
    """Return the indices of the slices of each (device, stream), sorted."""
    tracks: dict[tuple[int, int], list[int]] = {}
    for index, piece in enumerate(slices):
        tracks.setdefault((piece.device, piece.stream), []).append(index)
    return sorted(tracks.items())


def _slice_event(piece: Slice, pid: int, tid: int, free_us: float) -> Event:
    return {
        "ph": "X",
        "cat": piece.category,
        "name": piece.name,
        "pid": pid,
        "tid": tid,
        # Sums of doubles round: 0.1 + 0.2 > 0.3. An adjacent slice starts at the rounded sum.
        "ts": max(ns_to_trace_us(piece.start_ns), free_us),
        "dur": ns_to_trace_us(piece.dur_ns),
        "args": {name: _exact(value) for name, value in piece.args.items()},
    }


def _flow_events(run: Run, placed: Mapping[int, Event], flows: Iterator[int]) -> Iterator[tuple[int, int, Event]]:
    """Yield an arrow per dependency, from the last ns of one slice to the start of the other."""
    for (before, after), number in zip(run.dependencies, flows, strict=False):
        source, target = run.slices[before], run.slices[after]
        # At its end time the slice is over, and the arrow would leave from the next slice on its track.
        leave_ns = max(source.start_ns, source.end_ns - 1)
        leave_us = max(placed[before]["ts"], ns_to_trace_us(leave_ns))
        yield leave_ns, 1, _flow(placed[before], "s", number, leave_us)
        yield target.start_ns, 1, _flow(placed[after], "f", number, placed[after]["ts"]) | {"bp": "e"}


def _flow(at: Event, phase: str, number: int, time_us: float) -> Event:
    event = {"ph": phase, "id": number, "pid": at["pid"], "tid": at["tid"], "ts": time_us}
    return event | {"cat": "dependency", "name": "dependency"}


def _metadata(name: str, pid: int, tid: int, /, **args: Any) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _exact(value: Any) -> Any:
    """Return a value, as text if it is an integer that viewers would round."""
    return str(value) if isinstance(value, int) and abs(value) >= MAX_EXACT_INT else value


def _joined(names: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(name for name in names if name))
