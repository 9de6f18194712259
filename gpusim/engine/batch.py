"""Batches of schedules of one op graph, simulated on all cores by the fast engine without Python objects."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusim.engine.compiled.arrays import Indices, Plans, Room, encode_hardware
from gpusim.engine.compiled.events import FIRST_USED, EventsRoom, count_events
from gpusim.engine.compiled.link import link_plans
from gpusim.engine.compiled.memory import find_peaks
from gpusim.engine.compiled.op_graph import LoweringRoom, OpArrays, lower_schedules
from gpusim.engine.compiled.simulate import simulate_plans
from gpusim.engine.threads import in_ranges
from gpusim.errors import PlanError
from gpusim.plan.graph import OpGraph
from gpusim.plan.partitions import Layout
from gpusim.plan.tasks import LaunchMode

#: Bytes of plans that a thread simulates at a time, so that they stay in its core's cache.
CHUNK_BYTES = 1 << 19


@dataclass(frozen=True)
class Evaluated:
    """Results of a batch, one entry per schedule."""

    makespan_ns: npt.NDArray[np.int64]
    peak_bytes: npt.NDArray[np.int64] | None
    """As `Timeline.peak_bytes`; None if not requested."""


class TaskTimes(NamedTuple):
    """Times of tasks in ns, one per row of `OpArrays.tasks`, and the parts lost to L2 cache misses."""

    dur_ns: npt.NDArray[np.float64]
    missed_ns: npt.NDArray[np.float64]

    @classmethod
    def of(cls, engine: BatchEngine) -> TaskTimes:
        """Return copies of an engine's own times."""
        tasks = engine.arrays.tasks
        return cls(tasks["dur_ns"].copy(), tasks["missed_ns"].copy())

    def scaled(self, factors: npt.NDArray[np.float64]) -> TaskTimes:
        """Return the times multiplied by a factor each."""
        return TaskTimes(self.dur_ns * factors, self.missed_ns * factors)


class BatchEngine:
    """Simulator of schedules of one op graph, which is encoded once.

    `evaluate` returns the same numbers as lowering each schedule and running an engine, for any number of threads,
    except for losses to L2 cache misses (`gpusim.plan.cache_misses`): `Evaluator` counts them, and
    `gpusim.search.misses` adds them to task times.
    """

    def __init__(self, graph: OpGraph, layout: Layout | None = None) -> None:
        """Encode the graph; `layout` (`gpusim.plan.partitions`) assigns SMs and streams to partitions."""
        self.arrays = OpArrays.of(graph, layout)
        self.layout = layout
        self.record = encode_hardware(graph.hardware, 1 if layout is None else len(layout.sms))
        self.hardware = graph.hardware
        self.queues = graph.hardware.stream.queues

    def with_times(self, factors: npt.NDArray[np.float64]) -> BatchEngine:
        """Return a copy with task times multiplied by `factors`, one per row of `arrays.tasks`."""
        return self.with_durations(TaskTimes.of(self).scaled(factors))

    def with_durations(self, times: TaskTimes) -> BatchEngine:
        """Return a copy with other task times."""
        other = copy.copy(self)
        tasks = self.arrays.tasks.copy()
        tasks["dur_ns"], tasks["missed_ns"] = times
        other.arrays = self.arrays._replace(tasks=tasks)
        return other

    def evaluate(
        self,
        orders: npt.ArrayLike,
        streams: npt.ArrayLike,
        variants: npt.ArrayLike | None = None,
        *,
        mode: LaunchMode = "graph",
        peak: bool = False,
        threads: int | None = None,
    ) -> Evaluated:
        """Simulate schedules and return their makespans and, with `peak`, their peak memory.

        `orders` has op indices in launch order and `streams` the stream of each op, both of shape (schedules, ops).
        `variants`, of the same shape, has the number of each op's variant, from 1, or 0 for the captured kernels.
        `threads` defaults to one per core. Raises `PlanError` for an illegal launch order, a negative stream, an
        unknown variant, and a schedule whose queues deadlock.
        """
        orders, streams = self._checked(orders, streams)
        chosen = self._chosen(variants, orders.shape)
        makespan_ns = np.zeros(len(orders), np.int64)
        peaks = np.zeros(len(orders) if peak else 0, np.int64)
        n_streams = int(streams.max(initial=0)) + 1

        def work(first: int, last: int) -> None:
            size = max(1, min(last - first, CHUNK_BYTES // EncodedPlans(self, 1, n_streams, mode).nbytes))
            chunk = EncodedPlans(self, size, n_streams, mode)
            for begin in range(first, last, size):
                end = min(last, begin + size)
                chunk.lower(orders, streams, begin, end, chosen)
                makespan_ns[begin:end] = chunk.simulate()
                if peak:
                    peaks[begin:end] = chunk.peaks()

        in_ranges(len(orders), threads, work)
        return Evaluated(makespan_ns, peaks if peak else None)

    def events(
        self,
        orders: npt.ArrayLike,
        streams: npt.ArrayLike,
        variants: npt.ArrayLike | None = None,
        *,
        threads: int | None = None,
    ) -> npt.NDArray[np.int64]:
        """Return the number of events of each legal schedule, as the replay records them.

        Arguments as of `evaluate`. Without a layout, the stream of the first op counts as the first one. An op that
        writes without a kernel counts as a view.
        """
        orders, streams = self._checked(orders, streams)
        chosen = self._chosen(variants, orders.shape)
        events = np.zeros(len(orders), np.int64)
        joining = FIRST_USED if self.layout is None else 0
        first_pred = np.append(self.arrays.ops["first_pred"], np.int32(len(self.arrays.preds)))
        size = (len(self.arrays.ops), len(self.arrays.preds), int(streams.max(initial=0)) + 1)

        def work(first: int, last: int) -> None:
            room = EventsRoom.of_size(*size)
            count_events(self.arrays, first_pred, orders, streams, chosen, joining, room, events, first, last)

        in_ranges(len(orders), threads, work)
        return events

    def encode(self, orders: npt.ArrayLike, streams: npt.ArrayLike, *, mode: LaunchMode = "graph") -> EncodedPlans:
        """Lower schedules to plans that can be simulated repeatedly."""
        orders, streams = self._checked(orders, streams)
        encoded = EncodedPlans(self, len(orders), int(streams.max(initial=0)) + 1, mode)
        encoded.lower(orders, streams, 0, len(orders))
        return encoded

    def eager_ns(self, steps: int) -> int:
        """Return the makespan of consecutive eager steps, in ns: ops launched in recorded order on one stream."""
        order = np.arange(len(self.arrays.ops))
        one = self.encode([order], [np.zeros_like(order)], mode="stream").plans
        count = int(one.tasks[0])
        plans = Plans.of_size(1, steps * count, 0, stream_mode=True)
        for all_steps, step in ((plans.nodes, one.nodes), (plans.launches, one.launches)):
            # A copy of bytes is faster than one field by field.
            all_steps.view(np.uint8).reshape(steps, -1)[:] = step[0, :count].view(np.uint8)
        plans.nodes[0]["previous"] = np.arange(-1, steps * count - 1)
        del one
        room = Room.for_plans(plans, 1, 1, self.hardware)
        simulate_plans(self.record, self.arrays.tasks, plans, plans.launches, room, 0, 1, runs=steps)
        return int(plans.makespan_ns[0])

    def _checked(self, orders: npt.ArrayLike, streams: npt.ArrayLike) -> tuple[Indices, Indices]:
        """Return both as int32 arrays of shape (schedules, ops), with large stream numbers made consecutive."""
        orders = np.require(orders, np.int32, ("C", "W"))
        streams = np.require(streams, np.int32, ("C", "W"))
        if orders.ndim != 2 or orders.shape != streams.shape or orders.shape[1] != len(self.arrays.ops):
            raise PlanError(f"launch orders {orders.shape} and streams {streams.shape} of {len(self.arrays.ops)} ops")
        if self.layout is not None:
            if streams.size and streams.max() >= len(self.layout.of_stream):
                raise PlanError(f"stream {streams.max()}, of {len(self.layout.of_stream)} streams in partitions")
        elif streams.size and streams.max() >= streams.shape[1]:
            _, numbers = np.unique(streams, return_inverse=True)
            streams = np.where(streams < 0, streams, numbers.reshape(streams.shape)).astype(np.int32)
        return orders, streams

    def _chosen(self, variants: npt.ArrayLike | None, shape: tuple[int, ...]) -> Indices | None:
        """Return the variants as an int32 array of shape (schedules, ops), or None."""
        if variants is None:
            return None
        chosen = np.require(variants, np.int32, ("C", "W"))
        if chosen.shape != shape:
            raise PlanError(f"variants {chosen.shape} of launch orders {shape}")
        return chosen


class EncodedPlans:
    """Buffers for `size` plans of an op graph and their simulation by one thread."""

    def __init__(self, engine: BatchEngine, size: int, n_streams: int, mode: LaunchMode) -> None:
        self.engine = engine
        self.mode = mode
        self.count = self.first = 0
        arrays = engine.arrays
        self.plans = Plans.of_size(size, arrays.most_tasks, len(arrays.preds), mode == "stream")
        self._room = Room.for_plans(self.plans, 1, min(n_streams, engine.queues), engine.hardware)
        self._lowering = LoweringRoom.of_size(len(arrays.ops), n_streams)
        self._buffers = np.zeros(len(arrays.buffer_bytes), np.int32)

    @property
    def nbytes(self) -> int:
        """Size of the plans, in bytes."""
        return sum(array.nbytes for array in self.plans)

    def lower(self, orders: Indices, streams: Indices, first: int, last: int, variants: Indices | None = None) -> None:
        """Lower schedules `first` to `last` - 1. Raises `PlanError` with the number of the schedule."""
        record, arrays = self.engine.record, self.engine.arrays
        self.first, self.count = first, last - first
        wrong = lower_schedules(record, arrays, orders, streams, variants, self.plans, self._lowering, first, last)
        if wrong >= 0:
            also = "" if variants is None else ", or an op has no such variant"
            raise PlanError(f"schedule {wrong}: its launch order is not legal, or a stream is negative{also}")
        if self.mode == "graph":
            link_plans(record, arrays.tasks, self.plans, 0, self.count)

    def simulate(self) -> npt.NDArray[np.int64]:
        """Simulate the plans and return their makespans, in ns. Raises `PlanError` if queues deadlock."""
        launches = self.plans.launches if self.mode == "stream" else None
        tasks = self.engine.arrays.tasks
        simulate_plans(self.engine.record, tasks, self.plans, launches, self._room, 0, self.count)
        stuck = np.flatnonzero(self.plans.ended[: self.count] < self.plans.tasks[: self.count])
        if len(stuck):
            raise PlanError(f"schedule {self.first + int(stuck[0])}: its queues wait for each other")
        return self.plans.makespan_ns[: self.count]

    def peaks(self) -> npt.NDArray[np.int64]:
        """Return the peak memory of each simulated plan, in bytes."""
        peak_bytes = np.zeros(self.count, np.int64)
        find_peaks(self.engine.arrays, self.plans, self._buffers, peak_bytes)
        return peak_bytes
