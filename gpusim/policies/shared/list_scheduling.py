"""List scheduling against a running simulation, so that the state of the GPU is known when the next op is chosen.

Whenever a stream is free, the ready op with the highest priority starts there, at the rate that one pool of SMs
(`gpusim.engine.pool`) gives it. With placement SM by SM (`gpusim.engine.placement`), or when successors of a fork take
turns, the engine's makespan differs: the makespan here is an estimate for placing ops, and the engine simulates every
schedule again. The loop is compiled (`gpusim.engine.compiled.lists`) and runs many schedules at a time on all cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpusim.engine import budget
from gpusim.engine.compiled.arrays import encode_hardware
from gpusim.engine.compiled.lists import ListRoom, schedule_lists
from gpusim.engine.compiled.op_graph import OpArrays
from gpusim.engine.threads import in_ranges
from gpusim.errors import PlanError
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import MAX_TIME_NS
from gpusim.policies.shared.base import spread_views

#: An op less urgent than a running one starts only if it gets at least this share of its possible resident blocks. With
#: less it would block the dispatcher for ops that become urgent meanwhile.
MIN_SHARE: Final = 0.05


@dataclass(frozen=True, slots=True)
class ListSchedule:
    """A list schedule and its makespan in the list scheduler's own simulation, in ns."""

    schedule: Schedule
    makespan_ns: float
    """Estimated makespan; with several streams, gaps are those of a graph with branches, used or not."""


class ListSchedules(NamedTuple):
    """Several list schedules, one per row."""

    makespan_ns: npt.NDArray[np.float64]
    """Estimated makespans, as of `ListSchedule`."""
    orders: npt.NDArray[np.int32]
    """Launch orders; ops without kernels come last."""
    streams: npt.NDArray[np.int32]
    """Stream of each op, by op index."""


class FastLists:
    """List scheduler of one op graph, which is encoded once; results are the same for any number of threads."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        budget.check_costs(graph.hardware)
        self._arrays = OpArrays.of(graph)
        self._record = encode_hardware(graph.hardware)

    def makespans(
        self,
        priorities: npt.ArrayLike,
        streams: npt.ArrayLike,
        min_shares: npt.ArrayLike = MIN_SHARE,
        *,
        threads: int | None = None,
    ) -> npt.NDArray[np.float64]:
        """Return the makespan of each list schedule, in ns.

        `priorities` has shape (schedules, ops); the others have one value per schedule or one for all. `threads`
        defaults to one per core. Raises `PlanError` for a stream count below 1.
        """
        priorities = np.require(priorities, np.float64, ("C", "W"))
        return self._run(priorities, streams, min_shares, threads, keep=False)[0]

    def schedules(
        self,
        priorities: npt.ArrayLike,
        streams: npt.ArrayLike,
        min_shares: npt.ArrayLike = MIN_SHARE,
        *,
        threads: int | None = None,
    ) -> ListSchedules:
        """Return each list schedule with its makespan; arguments as of `makespans`."""
        priorities = np.require(priorities, np.float64, ("C", "W"))
        makespan_ns, orders, placed = self._run(priorities, streams, min_shares, threads, keep=True)
        views = np.flatnonzero(self._arrays.ops["rows"] == 0).astype(np.int32)
        return ListSchedules(makespan_ns, np.hstack([orders, np.tile(views, (len(orders), 1))]), placed)

    def schedule(self, streams: int, priority: npt.ArrayLike, min_share: float = MIN_SHARE) -> ListSchedule:
        """Return the list schedule by descending `priority` (by op index). Raises `PlanError` for no streams."""
        priorities = np.require(np.atleast_2d(priority), np.float64, ("C", "W"))
        makespan_ns, orders, placed = self._run(priorities, streams, min_share, 1, keep=True)
        order = orders[0].tolist()
        stream_of = dict(zip(order, placed[0, orders[0]].tolist(), strict=True))
        return ListSchedule(spread_views(self.graph, order, stream_of), float(makespan_ns[0]))

    def _run(
        self,
        priorities: npt.NDArray[np.float64],
        streams: npt.ArrayLike,
        min_shares: npt.ArrayLike,
        threads: int | None,
        keep: bool,
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return makespans, orders and streams; without `keep`, orders and streams are those of one schedule only."""
        count, ops = priorities.shape
        if ops != len(self._arrays.ops):
            raise PlanError(f"{ops} priorities for {len(self._arrays.ops)} ops")
        lanes, shares = np.empty(count, np.int64), np.empty(count)
        lanes[:], shares[:] = streams, min_shares
        if count and lanes.min() < 1:
            raise PlanError(f"{lanes.min()} streams")
        events = budget.EVENTS * (len(self._arrays.tasks) + 1)
        work = int(np.count_nonzero(self._arrays.ops["rows"]))
        makespan_ns = np.zeros(count)
        orders = np.zeros((count if keep else 1, work), np.int32)
        placed = np.zeros((len(orders), ops), np.int32)

        def one_range(first: int, last: int) -> None:
            room = ListRoom.of_size(ops, int(lanes.max(initial=1)))
            order, place = (orders, placed) if keep else (orders.copy(), placed.copy())
            arrays = (self._arrays, priorities, lanes, shares, room, makespan_ns, order, place)
            schedule_lists(self._record, *arrays, first, last, events)

        in_ranges(count, threads, one_range)
        if count and makespan_ns.min() == -2.0:
            raise budget.too_many_events(events, None, None)
        if count and makespan_ns.min() < 0:
            raise AssertionError("ops left, but nothing runs")
        if count and makespan_ns.max() > MAX_TIME_NS:
            raise budget.too_long(makespan_ns.max())
        return makespan_ns, orders, placed
