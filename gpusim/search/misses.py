"""Task times with the losses of a schedule to L2 cache misses, so that the search sees them.

The batch engine leaves them out, since a cache takes longer to simulate than a schedule. The search adds them only for
the schedules of a batch that are best without them.
"""

from __future__ import annotations

from gpusim.engine.batch import BatchEngine, TaskTimes
from gpusim.plan.cache_misses import lost_times_ns, slower_by_misses
from gpusim.plan.graph import OpGraph
from gpusim.plan.partitions import in_partition
from gpusim.plan.schedule import Schedule


class MissTimes:
    """Task times of the schedules of one step, as rows of an engine's tasks."""

    def __init__(self, graph: OpGraph, engine: BatchEngine) -> None:
        arrays = engine.arrays
        self.graph, self.layout = graph, engine.layout
        self.times = TaskTimes.of(engine)
        self.rows_of_partition = arrays.rows_of_partition
        self.first_variant: list[int] = arrays.ops["first_variant"].tolist()
        self.first_row: list[int] = arrays.variants["first_row"].tolist()

    def times_of(self, schedule: Schedule) -> TaskTimes | None:
        """Return the times of all tasks, as in the plan of the schedule; None if it loses nothing."""
        graph, layout = self.graph.choosing(schedule.variants), self.layout
        lost_ns = lost_times_ns(graph, schedule)
        if not lost_ns:
            return None
        dur_ns, missed = (each.copy() for each in self.times)
        for op, times_ns in lost_ns.items():
            variant = schedule.variants[op] if schedule.variants else 0
            first = self.first_row[self.first_variant[op] + variant]
            partition = 0 if layout is None else layout.of_stream[schedule.streams[op]]
            for row, (task, missed_ns) in enumerate(zip(graph.tasks[op], times_ns, strict=True), first):
                slower = slower_by_misses(task, missed_ns)
                if layout is not None:
                    slower = in_partition(slower, partition, layout.sms[partition], graph.hardware)
                at = partition * self.rows_of_partition + row
                dur_ns[at], missed[at] = slower.dur_ns, slower.missed_ns
        return TaskTimes(dur_ns, missed)
