"""Recording a schedule: streams and events inside one CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpusim.plan.sync import SyncPlan, plan_sync
from gpusim.runtime.execute import Runner


@dataclass
class RecordedGraph:
    """A CUDA graph of one schedule. `tensors` are its results' memory, valid until the next replay."""

    graph: torch.cuda.CUDAGraph
    sync: SyncPlan
    tensors: list[torch.Tensor | None]
    peak_bytes: int
    """Most memory that the step needs at once: its initial state and what recording it allocated at most."""

    def replay(self) -> None:
        self.graph.replay()


class GraphRecorder:
    """Records schedules of one trace; its streams are made once, so that libraries keep their workspaces for them."""

    def __init__(self, runner: Runner, preds: Sequence[Sequence[int]]) -> None:
        self.runner = runner
        self.preds = preds
        self._streams: list[torch.cuda.Stream] = []

    def record(self, order: Sequence[int], streams: Sequence[int], warm: bool = True) -> RecordedGraph:
        """Record a legal schedule. `warm` runs it once before, eagerly: libraries set up on first use of a stream."""
        sync = plan_sync(self.runner.trace, self.preds, order, streams)
        while len(self._streams) < max(streams) + 1:
            self._streams.append(torch.cuda.Stream())
        torch.cuda.synchronize()
        if warm:
            self._run(order, streams, sync)
            torch.cuda.synchronize()
            self.runner.drop_temporaries()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._streams[0], capture_error_mode="thread_local"):
            self._run(order, streams, sync)
        peak = torch.cuda.max_memory_allocated() - before + self.runner.initial_bytes
        recorded = RecordedGraph(graph, sync, list(self.runner.tensors), peak)
        self.runner.drop_temporaries()
        return recorded

    def _run(self, order: Sequence[int], streams: Sequence[int], sync: SyncPlan) -> None:
        """Issue the schedule; all of it is ordered after the start and before the end of the first stream."""
        events: dict[int, torch.cuda.Event] = {}
        first = self._streams[0]
        start = torch.cuda.Event()
        start.record(first)
        for stream in sync.roots:
            self._streams[stream].wait_event(start)
        for place, op in enumerate(order):
            stream = self._streams[streams[op]]
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
