"""Recording of a schedule as streams and events in one CUDA graph."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from gpusim.formats.schedule import Partition
from gpusim.gpu.replay.execute import Runner
from gpusim.gpu.replay.green_contexts import Partitions, sm_groups
from gpusim.plan.partitions import lay_out
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import SyncPlan, plan_sync
from gpusim.trace.fusion import covered_by, place_fused

#: torch's variable for cuBLAS's workspaces, and its setting for those of several streams: one of 4 MiB each. On Hopper
#: torch's own are 32 MiB. On eight streams 17 steps took 0.977 to 1.007 of their time with the smaller ones, and down
#: to a quarter of their memory. On one stream one took 1.14 times as long (research/2026-11-28-workspaces.md).
WORKSPACE_VARIABLE: Final = "CUBLAS_WORKSPACE_CONFIG"
SMALL_WORKSPACES: Final = ":4096:1"
#: Major compute capability of Hopper.
HOPPER: Final = 9


@contextmanager
def small_workspaces() -> Iterator[None]:
    """Within this context, cuBLAS's new workspaces are small, unless the user has set their size.

    torch reads the variable whenever it makes a workspace.
    """
    if WORKSPACE_VARIABLE in os.environ:
        yield
        return
    os.environ[WORKSPACE_VARIABLE] = SMALL_WORKSPACES
    try:
        yield
    finally:
        os.environ.pop(WORKSPACE_VARIABLE, None)


@contextmanager
def own_workspaces(streams: int) -> Iterator[None]:
    """Within this context, a CUDA graph recorded on so many streams takes cuBLAS's workspaces from its own memory.

    torch keeps one workspace per stream and hands it to every user of the stream; torch.compile frees them all when it
    records its own graphs. A graph recorded with such a workspace would then write to foreign memory. This context
    frees them, too: graphs that the user records by hand need the same care as with torch.compile.
    """
    small = streams > 1 and torch.cuda.get_device_capability()[0] >= HOPPER
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with small_workspaces() if small else nullcontext():
            yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class KernelsAround(Protocol):
    """Kernels of a graph before and after those of a schedule, whose arguments change between replays."""

    def begin(self) -> None:
        """Launch those before the schedule on the current stream."""

    def end(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Launch those after it on the current stream. `tensors` are the schedule's results, by id."""

    def bind(self, graph: torch.cuda.CUDAGraph) -> None:
        """Find them in the recorded graph."""


@dataclass
class RecordedGraph:
    """CUDA graph of one schedule, with the memory of its results (`tensors`), valid until the next replay."""

    graph: torch.cuda.CUDAGraph
    sync: SyncPlan
    tensors: list[torch.Tensor | None]
    peak_bytes: int
    """Peak memory of the step, in bytes: its initial state plus the peak allocation of the recording."""

    def replay(self) -> None:
        self.graph.replay()


class GraphRecorder:
    """Recorder of one trace's schedules; it reuses its streams, because libraries keep workspaces per stream.

    With `own_workspaces` each graph has cuBLAS's workspaces in its own memory, so nothing else in the process can
    invalidate it; `peak_bytes` then counts them.
    """

    def __init__(self, runner: Runner, preds: Sequence[Sequence[int]], *, own_workspaces: bool = False) -> None:
        self.runner = runner
        self.preds = preds
        self.own_workspaces = own_workspaces
        self._streams: list[torch.cuda.Stream] = []
        self._parted: dict[tuple[Partition, ...], tuple[Partitions, list[torch.cuda.Stream]]] = {}

    def record(
        self,
        schedule: Schedule,
        warm: bool = False,
        sync: SyncPlan | None = None,
        around: KernelsAround | None = None,
    ) -> RecordedGraph:
        """Record a legal schedule. `warm` runs it once before, eagerly: libraries initialize on first use of a stream.

        `sync` replaces the schedule's own events; `around` is recorded before and after it. Raises `GpuError` where
        this GPU or driver has no SM partitions.
        """
        trace = self.runner.trace
        covered = covered_by(trace, schedule.variants)
        order, streams = place_fused(schedule.order, schedule.streams, covered)
        if sync is None:
            sync = plan_sync(trace, self.preds, order, streams, covered)
        lanes = self._lanes(max(streams) + 1, schedule.partitions)
        torch.cuda.synchronize()
        self.runner.choose(schedule.variants)
        try:
            return self._record(order, streams, sync, lanes, warm, around)
        finally:
            self.runner.drop_temporaries()
            self.runner.choose(())

    def _lanes(self, count: int, partitions: tuple[Partition, ...]) -> list[torch.cuda.Stream]:
        """Return the streams of a schedule, creating missing ones."""
        if not partitions:
            while len(self._streams) < count:
                self._streams.append(torch.cuda.Stream())
            return self._streams
        if partitions not in self._parted:
            named = max(stream for partition in partitions for stream in partition.streams)
            layout = lay_out(partitions, max(count, named + 1), sm_groups().sms)
            parted = Partitions(layout.sms)
            self._parted[partitions] = (parted, [parted.stream(number) for number in layout.of_stream])
        return self._parted[partitions][1]

    def _record(
        self,
        order: Sequence[int],
        streams: Sequence[int],
        sync: SyncPlan,
        lanes: Sequence[torch.cuda.Stream],
        warm: bool,
        around: KernelsAround | None,
    ) -> RecordedGraph:
        if warm:
            self._run(order, streams, sync, lanes)
            torch.cuda.synchronize()
            self.runner.drop_temporaries()
        gc.collect()
        with own_workspaces(max(streams) + 1) if self.own_workspaces else nullcontext():
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            graph = torch.cuda.CUDAGraph() if around is None else torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph, stream=lanes[0], capture_error_mode="thread_local"):
                if around is not None:
                    around.begin()
                self._run(order, streams, sync, lanes)
                if around is not None:
                    around.end(self.runner.tensors)
            if around is not None:
                graph.instantiate()
                around.bind(graph)
        peak = torch.cuda.max_memory_allocated() - before + self.runner.initial_bytes
        return RecordedGraph(graph, sync, list(self.runner.tensors), peak)

    def _run(
        self, order: Sequence[int], streams: Sequence[int], sync: SyncPlan, lanes: Sequence[torch.cuda.Stream]
    ) -> None:
        """Issue the schedule; all of it is ordered after the start and before the end of the first stream."""
        events: dict[int, torch.cuda.Event] = {}
        first = lanes[0]
        with torch.cuda.stream(first):
            self.runner.reserve(sync.early)
        start = torch.cuda.Event()
        start.record(first)
        for stream in sync.roots:
            lanes[stream].wait_event(start)
        for place, op in enumerate(order):
            stream = lanes[streams[op]]
            for before in sync.waits[place]:
                stream.wait_event(events[before])
            with torch.cuda.stream(stream):
                self.runner.release(sync.releases[place])
                self.runner.run(op)
            if op in sync.records:
                events[op] = torch.cuda.Event()
                events[op].record(stream)
        for op in sync.ends:
            first.wait_event(events[op])
