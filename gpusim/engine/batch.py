"""Many schedules of one op graph at once, on all cores: the fast engine without Python objects in between."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpusim.engine.compiled.arrays import Indices, Plans, Room, encode_hardware
from gpusim.engine.compiled.link import link_plans
from gpusim.engine.compiled.memory import find_peaks
from gpusim.engine.compiled.op_graph import LoweringRoom, OpArrays, lower_schedules
from gpusim.engine.compiled.simulate import simulate_plans
from gpusim.engine.threads import in_ranges
from gpusim.errors import PlanError
from gpusim.plan.graph import OpGraph
from gpusim.plan.partitions import Layout
from gpusim.plan.tasks import LaunchMode

#: Bytes of plans that one thread works on at a time, so that they stay in its core's cache.
CHUNK_BYTES = 1 << 19


@dataclass(frozen=True)
class Evaluated:
    """What became of each schedule of a batch."""

    makespan_ns: npt.NDArray[np.int64]
    peak_bytes: npt.NDArray[np.int64] | None
    """As `Timeline.peak_bytes`; None where it was not asked for."""


class BatchEngine:
    """Simulates schedules of one op graph, which is encoded once.

    What `evaluate` gives is what lowering each schedule and running an engine gives, whatever the number of threads.
    """

    def __init__(self, graph: OpGraph, layout: Layout | None = None) -> None:
        """`layout` splits the SMs into partitions (`gpusim.plan.partitions.lay_out`); streams are as it says."""
        self.arrays = OpArrays.of(graph, layout)
        self.layout = layout
        self.record = encode_hardware(graph.hardware, 1 if layout is None else len(layout.sms))
        self.hardware = graph.hardware
        self.queues = graph.hardware.stream.queues

    def with_times(self, factors: npt.NDArray[np.float64]) -> BatchEngine:
        """The same with the time of each task multiplied, captured kernels' and variants', in the arrays' order."""
        other = copy.copy(self)
        tasks = self.arrays.tasks.copy()
        tasks["dur_ns"] *= factors
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
        """Simulate each schedule: launch orders of op indices, and streams by op index, both schedules x ops.

        `variants`, of the same shape, has the number of each op's variant, counted from 1, or 0 for the captured
        kernels; it may be left out. `threads` is one for each core by default. Raises `PlanError` for a launch order
        that is not legal, a negative stream, a variant that an op does not have, and a schedule whose queues wait for
        each other.
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

    def encode(self, orders: npt.ArrayLike, streams: npt.ArrayLike, *, mode: LaunchMode = "graph") -> EncodedPlans:
        """The schedules as plans, to be simulated more than once."""
        orders, streams = self._checked(orders, streams)
        encoded = EncodedPlans(self, len(orders), int(streams.max(initial=0)) + 1, mode)
        encoded.lower(orders, streams, 0, len(orders))
        return encoded

    def eager_ns(self, steps: int) -> int:
        """The makespan of eager steps one after another: ops in recorded order, launched one by one on one stream."""
        order = np.arange(len(self.arrays.ops))
        one = self.encode([order], [np.zeros_like(order)], mode="stream").plans
        count = int(one.tasks[0])
        plans = Plans.of_size(1, steps * count, 0, stream_mode=True)
        for all_steps, step in ((plans.nodes, one.nodes), (plans.launches, one.launches)):
            # As bytes, it is not copied field by field.
            all_steps.view(np.uint8).reshape(steps, -1)[:] = step[0, :count].view(np.uint8)
        plans.nodes[0]["previous"] = np.arange(-1, steps * count - 1)
        del one
        room = Room.for_plans(plans, 1, 1, self.hardware)
        simulate_plans(self.record, self.arrays.tasks, plans, plans.launches, room, 0, 1, runs=steps)
        return int(plans.makespan_ns[0])

    def _checked(self, orders: npt.ArrayLike, streams: npt.ArrayLike) -> tuple[Indices, Indices]:
        """Both as arrays of the right shape; streams of any numbers become small ones."""
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
        """Variants as an array of the right shape, or None."""
        if variants is None:
            return None
        chosen = np.require(variants, np.int32, ("C", "W"))
        if chosen.shape != shape:
            raise PlanError(f"variants {chosen.shape} of launch orders {shape}")
        return chosen


class EncodedPlans:
    """Room for `size` plans of an op graph, and what one thread needs to simulate them."""

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
        """Memory of the plans."""
        return sum(array.nbytes for array in self.plans)

    def lower(self, orders: Indices, streams: Indices, first: int, last: int, variants: Indices | None = None) -> None:
        """Lower schedules `first` to `last` - 1. Raises `PlanError`, naming the schedule."""
        record, arrays = self.engine.record, self.engine.arrays
        self.first, self.count = first, last - first
        wrong = lower_schedules(record, arrays, orders, streams, variants, self.plans, self._lowering, first, last)
        if wrong >= 0:
            also = "" if variants is None else ", or an op has no such variant"
            raise PlanError(f"schedule {wrong}: its launch order is not legal, or a stream is negative{also}")
        if self.mode == "graph":
            link_plans(record, arrays.tasks, self.plans, 0, self.count)

    def simulate(self) -> npt.NDArray[np.int64]:
        """The makespan of each plan in ns. Raises `PlanError` for queues that wait for each other."""
        launches = self.plans.launches if self.mode == "stream" else None
        tasks = self.engine.arrays.tasks
        simulate_plans(self.engine.record, tasks, self.plans, launches, self._room, 0, self.count)
        stuck = np.flatnonzero(self.plans.ended[: self.count] < self.plans.tasks[: self.count])
        if len(stuck):
            raise PlanError(f"schedule {self.first + int(stuck[0])}: its queues wait for each other")
        return self.plans.makespan_ns[: self.count]

    def peaks(self) -> npt.NDArray[np.int64]:
        """The most memory of each plan, which has been simulated, in bytes."""
        peak_bytes = np.zeros(self.count, np.int64)
        find_peaks(self.engine.arrays, self.plans, self._buffers, peak_bytes)
        return peak_bytes
