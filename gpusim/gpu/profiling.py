"""Durations and launch shapes of each op's kernels, from one session of torch's profiler.

Kernels are matched to ops in two steps: kernel -> launch call by `correlation`, launch call -> op by the annotated
range around it on the same thread. A spin kernel holds the GPU back at the start of every iteration, so that the
kernels run back to back as in a CUDA graph, not at the host's pace.
"""

from __future__ import annotations

import bisect
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gpusim.errors import CaptureError
from gpusim.formats.trace import Kernel, TaskKind
from gpusim.gpu.quiet import quiet
from gpusim.gpu.replay.execute import InitialState, Runner
from gpusim.io.scratch import scratch_folder
from gpusim.units import us_to_ns

ITERATIONS = 9
WARMUP_ITERATIONS = 3
#: Prefix of range names, which the profiler shows as user annotations.
RANGE = "gpusim::"
#: Clock rate assumed when converting time to spin cycles; too short only means less of a head start.
SPIN_CYCLES_PER_NS = 2.0
MIN_ATTRIBUTED_FRAC = 0.999

_KINDS: dict[str, TaskKind] = {"kernel": "kernel", "gpu_memset": "memset", "gpu_memcpy": "memcpy"}


@dataclass(frozen=True)
class ProfiledOps:
    """Kernels of each op, and the share of GPU time matched to an op."""

    kernels: list[tuple[Kernel, ...]]
    attributed_frac: float
    unattributed: tuple[str, ...]
    events: list[dict[str, Any]]
    """GPU events of one iteration, for export next to a simulated timeline."""


def profile_ops(
    runner: Runner,
    state: InitialState,
    releases: Sequence[Sequence[int]],
    host_ns: int,
    iterations: int = ITERATIONS,
) -> ProfiledOps:
    """Run the step `iterations` times in one profiler session. Raises `CaptureError` for lost kernels.

    `host_ns` is the host time of one iteration, and sets the head start.
    """
    for _ in range(WARMUP_ITERATIONS):
        runner.run_in_order(releases)
        runner.drop_temporaries()
    torch.cuda.synchronize()
    spin = int(host_ns * 1.5 * SPIN_CYCLES_PER_NS)
    with profiled() as session:
        for iteration in range(iterations + 1):
            state.restore()
            torch.cuda.synchronize()
            torch.cuda._sleep(spin)
            for op in range(len(runner.trace.ops)):
                runner.release(releases[op])
                with record_function(f"{RANGE}{iteration}:{op}"):
                    runner.run(op)
            torch.cuda.synchronize()
            runner.drop_temporaries()
    return attribute(exported_events(session), len(runner.trace.ops))


@contextmanager
def profiled() -> Iterator[Any]:
    """Run a session of torch's profiler for CPU and GPU; its warnings do not reach the terminal."""
    with quiet():
        session = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        session.__enter__()
    try:
        yield session
    finally:
        with quiet():
            session.__exit__(None, None, None)


def exported_events(session: Any) -> list[dict[str, Any]]:
    """Return the trace events of a finished profiler session."""
    with scratch_folder() as folder:
        path = folder / "trace.json"
        with quiet():
            session.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return events


def attribute(events: list[dict[str, Any]], n_ops: int) -> ProfiledOps:
    """Return the kernels of each op from the profiler's events, without iteration 0: a session can lose its first."""
    ranges = _Ranges(events)
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    by_op: dict[tuple[int, int], list[dict[str, Any]]] = {}
    lost: Counter[str] = Counter()
    total_us, lost_us = 0.0, 0.0
    for event in events:
        if event.get("cat") not in _KINDS or "spin_kernel" in event["name"]:
            continue
        launch = launches.get(event["args"].get("correlation"))
        owner = ranges.find(launch) if launch is not None else None
        if owner is None:
            if launch is None or ranges.within_iterations(launch):
                lost[event["name"]] += 1
                lost_us += event["dur"]
                total_us += event["dur"]
            continue
        total_us += event["dur"]
        by_op.setdefault(owner, []).append({**event, "launched": launch["ts"] if launch else 0})
    if not total_us:
        raise CaptureError("the profiler saw no kernel of this step; is another profiler attached to the GPU?")
    attributed = 1.0 - lost_us / total_us
    if attributed < MIN_ATTRIBUTED_FRAC:
        worst = ", ".join(name[:60] for name, _ in lost.most_common(3))
        raise CaptureError(f"only {attributed:.2%} of the GPU time could be tied to an op; left over: {worst}")
    iterations = sorted({iteration for iteration, _ in by_op} - {0}) or [0]
    kernels = [_merge([by_op.get((i, op), []) for i in iterations], op) for op in range(n_ops)]
    first = [event for op in range(n_ops) for event in by_op.get((iterations[0], op), [])]
    return ProfiledOps(kernels, attributed, tuple(lost), first)


class _Ranges:
    """The annotated ranges, searchable by thread and time."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        ranges_of: dict[Any, list[tuple[float, float, tuple[int, int]]]] = {}
        for event in events:
            name = event.get("name", "")
            if event.get("cat") == "user_annotation" and name.startswith(RANGE):
                iteration, _, op = name[len(RANGE) :].partition(":")
                key = (int(iteration), int(op))
                ranges_of.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"], key))
        self._by_thread = {thread: sorted(ranges) for thread, ranges in ranges_of.items()}
        self._starts = {thread: [r[0] for r in ranges] for thread, ranges in self._by_thread.items()}

    def find(self, launch: dict[str, Any]) -> tuple[int, int] | None:
        """Return (iteration, op) of the range around a launch call, or None."""
        starts = self._starts.get(launch["tid"], [])
        index = bisect.bisect_right(starts, launch["ts"]) - 1
        if index < 0:
            return None
        begin, end, key = self._by_thread[launch["tid"]][index]
        return key if begin <= launch["ts"] <= end else None

    def within_iterations(self, launch: dict[str, Any]) -> bool:
        """Whether the launch lies between two ops of one iteration, so that it should belong to an op."""
        starts = self._starts.get(launch["tid"], [])
        index = bisect.bisect_right(starts, launch["ts"]) - 1
        if index < 0 or index + 1 >= len(starts):
            return False
        ranges = self._by_thread[launch["tid"]]
        return ranges[index][2][0] == ranges[index + 1][2][0]


def _merge(runs: list[list[dict[str, Any]]], op: int) -> tuple[Kernel, ...]:
    """Merge several iterations into one list of kernels: the most frequent sequence, with median durations."""
    runs = [sorted(run, key=lambda event: event["launched"]) for run in runs]
    shapes = Counter(tuple(event["name"] for event in run) for run in runs)
    shape, seen = shapes.most_common(1)[0]
    if seen <= len(runs) / 2:
        raise CaptureError(f"op {op} launched different kernels in different iterations of the same step")
    same = [run for run in runs if tuple(event["name"] for event in run) == shape]
    return tuple(kernel_of([run[i] for run in same]) for i in range(len(shape)))


def kernel_of(events: list[dict[str, Any]]) -> Kernel:
    """Return one kernel from the profiler's events of several runs of it."""
    durations = sorted(us_to_ns(event["dur"]) for event in events)
    first, args = events[0], events[0]["args"]
    cut = len(durations) // 10
    common = {
        "name": first["name"],
        "kind": _KINDS[first["cat"]],
        "dur_ns": round(statistics.median(durations)),
        "lo_ns": durations[cut],
        "hi_ns": durations[-1 - cut],
        "samples": len(durations),
    }
    if first["cat"] != "kernel":
        return Kernel(**common, bytes=int(args.get("bytes", 0)))
    return Kernel(
        **common,
        grid=tuple(max(1, n) for n in args["grid"]),
        block=tuple(max(1, n) for n in args["block"]),
        regs_per_thread=int(args.get("registers per thread", 0)),
        smem_bytes=int(args.get("shared memory", 0)),
    )


def host_times(
    runner: Runner, state: InitialState, releases: Sequence[Sequence[int]], iterations: int = 7
) -> list[int]:
    """Return the host time of each op's call in ns, eager and unprofiled: medians over `iterations` after a warm-up."""
    samples: list[list[int]] = [[] for _ in runner.trace.ops]
    for iteration in range(iterations + 2):
        state.restore()
        torch.cuda.synchronize()
        for op in range(len(runner.trace.ops)):
            runner.release(releases[op])
            args, kwargs = runner.arguments(op)
            begin = perf_counter_ns()
            result = runner.call(op, args, kwargs)
            if iteration >= 2:
                samples[op].append(perf_counter_ns() - begin)
            runner.store(op, result)
        torch.cuda.synchronize()
        runner.drop_temporaries()
    return [round(statistics.median(times)) for times in samples]
