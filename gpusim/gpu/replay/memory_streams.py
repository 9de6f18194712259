"""Issue of a memory plan's instructions on several streams, with the waits of `gpusim.memplan.waits`.

Memory is allocated on the stream of its instruction, and torch's allocator gives freed memory to that stream alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from gpusim.gpu.replay.memory_run import HostBuffers, MemoryRunner
from gpusim.memplan.program import Program
from gpusim.memplan.waits import Waits


class StreamLanes:
    """CUDA streams of a plan's queues; without `cuda`, everything runs at once in launch order."""

    def __init__(self, first: torch.cuda.Stream | None) -> None:
        self._streams: list[Any] = [first]
        self.cuda = first is not None
        self.events = 0

    def prepare(self, queues: int) -> None:
        """Create missing streams."""
        while len(self._streams) < queues:
            self._streams.append(torch.cuda.Stream() if self.cuda else None)

    @contextmanager
    def on(self, queue: int) -> Iterator[None]:
        """Run what follows on a queue's stream."""
        with torch.cuda.stream(self._streams[queue]) if self.cuda else nullcontext():
            yield

    def record(self, queue: int) -> Any:
        """Return an event of the queue's work so far."""
        self.events += 1
        return self._streams[queue].record_event() if self.cuda else None

    def wait(self, queue: int, event: Any) -> None:
        """Let the queue's following work wait for an event."""
        if self.cuda:
            self._streams[queue].wait_event(event)


def run_on_streams(
    program: Program, waits: Waits, runner: MemoryRunner, buffers: HostBuffers, lanes: StreamLanes
) -> None:
    """Issue a program once; all of it comes after the start and before the end of the first stream."""
    lanes.prepare(waits.queues)
    recorded = waits.recorded()
    events: dict[int, Any] = {}
    begin = lanes.record(0)
    begun = {0}
    for place, instruction in enumerate(program):
        queue, storage = waits.queue[place], instruction.storage
        if queue >= 0 and queue not in begun:
            begun.add(queue)
            lanes.wait(queue, begin)
        for before in waits.before[place]:
            lanes.wait(queue, events[before])
        if instruction.kind == "run":
            with lanes.on(instruction.stream):
                runner.run(instruction.op)
        elif instruction.kind == "again":
            with lanes.on(instruction.stream):
                runner.run_again(instruction.op, instruction.bring)
        elif instruction.kind == "free":
            runner.let_go(storage)
        elif instruction.kind == "out":
            _copy_out(storage, queue, runner, buffers, lanes)
        elif instruction.kind == "back":
            _copy_back(storage, instruction.stream, queue, runner, buffers, lanes)
        if place in recorded:
            events[place] = lanes.record(queue)
    for place in waits.ends:
        lanes.wait(0, events[place])


# A copy has a function of its own: a local variable of `run_on_streams` would keep the memory beyond its `free`.


def _copy_out(storage: int, queue: int, runner: MemoryRunner, buffers: HostBuffers, lanes: StreamLanes) -> None:
    memory = runner.memory(storage)
    with lanes.on(queue):
        buffers.of(storage, memory.numel()).copy_(memory, non_blocking=True)


def _copy_back(
    storage: int, owner: int, queue: int, runner: MemoryRunner, buffers: HostBuffers, lanes: StreamLanes
) -> None:
    with lanes.on(owner):
        memory = runner.allocate(storage)
    with lanes.on(queue):
        memory.copy_(buffers.of(storage, memory.numel()), non_blocking=True)
